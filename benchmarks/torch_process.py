"""One process of a pipeline of torch's: builds schedules over emulated stages, runs steps."""

from __future__ import annotations

import datetime
import logging
import os
import socket
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed
from torch.distributed import pipelining

from benchmarks.emulated_module import Clock, EmulatedStage
from benchmarks.peer_schedules import PEER_SCHEDULES, PeerSchedule, StageDurations
from benchmarks.process_pool import Ran
from benchmarks.torch_pool import TorchOrder


def serve(
    process_index: int,
    num_processes: int,
    width: int,
    store_path: str,
    timeout_s: float,
    orders: Any,
) -> None:
    """Runs in each process of a `ProcessPool`.

    Args:
      process_index: Which one this is.
      num_processes: How many there are.
      width: Of an activation, which is one row in float32.
      store_path: A file where the processes find each other.
      timeout_s: How long any of them waits for another.
      orders: Where a `TorchOrder` comes and `Ran` goes.
    """
    # Without this gloo listens on the address of the machine's name.
    os.environ["GLOO_SOCKET_IFNAME"] = _loopback()
    # torch logs every action of a schedule that failed; the error says which it was.
    logging.getLogger("torch.distributed.pipelining").setLevel(logging.CRITICAL)
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo",
        init_method=f"file://{store_path}",
        rank=process_index,
        world_size=num_processes,
        timeout=datetime.timedelta(seconds=timeout_s),
    )
    process = _Process(process_index, num_processes, width)
    orders.send(None)
    while True:
        orders.send(process.run(orders.recv()))


class _Process:
    """The schedules that this process has built, by name and number of microbatches."""

    def __init__(self, index: int, count: int, width: int) -> None:
        self._index, self._count, self._width = index, count, width
        self._clock = Clock()
        self._built: dict[tuple[str, int], _Built] = {}

    def run(self, order: TorchOrder) -> Ran:
        key = (order.schedule, order.num_microbatches)
        if key not in self._built:
            self._built[key] = _Built(
                PEER_SCHEDULES[order.schedule],
                order.num_microbatches,
                self._index,
                self._count,
                self._width,
                self._clock,
            )
        return self._built[key].run(order.durations)


class _Built:
    """A schedule and its stages, here."""

    def __init__(
        self,
        peer: PeerSchedule,
        num_microbatches: int,
        index: int,
        count: int,
        width: int,
        clock: Clock,
    ) -> None:
        num_stages = peer.stages_per_process * count
        numbers = peer.stages_of(index, count)
        self._modules = [EmulatedStage(width, clock) for _ in numbers]
        stages = [
            _stage(module, number, num_stages, width)
            for module, number in zip(self._modules, numbers, strict=True)
        ]
        self._num_microbatches = num_microbatches
        # Each element of a microbatch is its number; the loss is 0 if it comes through.
        numbered = torch.arange(num_microbatches, dtype=torch.float32)
        batch = numbered[:, None].expand(num_microbatches, width).clone()
        self._arguments = (batch,) if 0 in numbers else ()
        self._losses: list[Any] = []
        self._targets = (
            {"target": batch, "losses": self._losses} if num_stages - 1 in numbers else {}
        )
        self._schedule = getattr(pipelining, peer.torch_name)(
            stages[0] if peer.stages_per_process == 1 else stages,
            num_microbatches,
            loss_fn=lambda output, target: (output - target).sum(),
            scale_grads=False,
        )

    def run(self, durations: Sequence[StageDurations]) -> Ran:
        for module, own in zip(self._modules, durations, strict=True):
            module.durations = own
            module.weight.grad = None
        torch.distributed.barrier()
        begun_s = time.monotonic()
        self._schedule.step(*self._arguments, **self._targets)
        ended_s = time.monotonic()
        self._check()
        return Ran(begun_s=begun_s, ended_s=ended_s)

    def _check(self) -> None:
        """Every microbatch came through, and added to every weight's gradient once."""
        for module in self._modules:
            found = module.weight.grad
            if found is None or not bool((found == self._num_microbatches).all()):
                raise RuntimeError(
                    f"expected a weight's gradient of {self._num_microbatches}, one for each "
                    f"microbatch, got {found}."
                )
        if any(loss.item() != 0 for loss in self._losses):
            raise RuntimeError(
                f"expected each microbatch to come out as it went in, got losses {self._losses}."
            )


def _stage(module: EmulatedStage, number: int, num_stages: int, width: int) -> Any:
    """Shapes are given, so that nothing is run to find them out."""
    return pipelining.PipelineStage(
        module,
        number,
        num_stages,
        torch.device("cpu"),
        input_args=torch.zeros(1, width, requires_grad=number > 0),
        output_args=torch.zeros(1, width, requires_grad=True),
    )


def _loopback() -> str:
    names = [name for _, name in socket.if_nameindex()]
    for name in names:
        if name.startswith("lo"):
            return name
    raise RuntimeError(f"expected a loopback interface, such as lo, got {', '.join(names)}.")
