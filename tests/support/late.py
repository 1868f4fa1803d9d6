"""Runs all stages of a step under a driver that is late: what it does takes it time.

As in the real one, each stage has a dispatcher that takes one event after the other, those
that have been posted meanwhile wait, and every instruction takes a while to carry out.
"""

import heapq
import itertools

from rrfp_jax.dispatch.events import InputArrived, KernelFinished, StepStarted
from rrfp_jax.dispatch.instructions import Launch, Send
from rrfp_jax.task import Payload


def run_late(cores, *, durations, transfers, lags):
    """Runs a step to its end.

    Args:
      cores: First stage to last.
      durations: From a task to how long it runs.
      transfers: Gives how long the next bundle is on its way.
      lags: Gives how long the next instruction, or the start of a stage, takes.
    """
    posted, order = [], itertools.count()
    host_ns, device_ns = [lags() for _ in cores], [0] * len(cores)

    def post(at_ns, stage, event):
        heapq.heappush(posted, (at_ns, next(order), stage, event))

    for stage in range(len(cores)):
        post(0, stage, StepStarted())
    while posted:
        at_ns, _, stage, event = heapq.heappop(posted)
        host_ns[stage] = max(host_ns[stage], at_ns)
        for instruction in cores[stage].handle(event, host_ns[stage], at_ns):
            host_ns[stage] += lags()
            match instruction:
                case Launch(task=task):
                    launched_ns = host_ns[stage]
                    device_ns[stage] = max(device_ns[stage], launched_ns) + durations(task)
                    finished = KernelFinished(task=task, launched_ns=launched_ns)
                    post(device_ns[stage], stage, finished)
                case Send(payload=payload, microbatch=microbatch):
                    to = stage + 1 if payload is Payload.ACTIVATION else stage - 1
                    arrival = InputArrived(payload=payload, microbatch=microbatch)
                    post(host_ns[stage] + transfers(), to, arrival)
    assert all(core.finished for core in cores)
