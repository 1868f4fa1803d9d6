"""The schedules of `torch.distributed.pipelining`, and what a duration table is to each.

Some run one stage in each process, some two. A table of P stages over P processes is the
same work for all: where a process runs two stages, each takes half of the time that the
table says for its process. These stages are numbered by the way of a microbatch through
them: in a *loop* process p has stages p and P + p, in a *V* it has p and 2 P - 1 - p, so
that process 0 has the first and the last.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from rrfp_jax.task import Kind
from rrfp_jax.variability.tables import DurationTable


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerSchedule:
    """One of torch's schedules.

    Attributes:
      name: What it is called here.
      torch_name: Its class in `torch.distributed.pipelining`.
      stages_per_process: 1 or 2.
      is_v: Whether two stages lie in a V; if not, in a loop.
      splits_backward: Whether input gradients and weight gradients are tasks of their own.
    """

    name: str
    torch_name: str
    stages_per_process: int = 1
    is_v: bool = False
    splits_backward: bool = False

    def stages_of(self, process_index: int, num_processes: int) -> tuple[int, ...]:
        """The stages of a process."""
        if self.stages_per_process == 1:
            return (process_index,)
        last = 2 * num_processes - 1
        return (process_index, last - process_index if self.is_v else num_processes + process_index)

    def refusal(self, num_processes: int, num_microbatches: int) -> str | None:
        """Why torch does not run it with these numbers, if it does not."""
        if num_processes < 2:
            return f"a pipeline between processes needs 2 stages or more, got {num_processes}"
        if self.name == "1f1b" and num_microbatches < num_processes:
            return (
                f"torch's 1F1B needs a microbatch for each of {num_processes} stages, got "
                f"{num_microbatches}"
            )
        rounds = max(1, num_microbatches // num_processes)
        if self.name in _BY_ROUNDS and num_microbatches % rounds:
            return (
                f"torch's {self.torch_name} needs microbatches that divide into {rounds} rounds of "
                f"at least one for each of {num_processes} stages, got {num_microbatches}; give a "
                "multiple of the stages"
            )
        return None


_BY_ROUNDS = ("interleaved_1f1b", "interleaved_zb")

PEER_SCHEDULES: Mapping[str, PeerSchedule] = MappingProxyType(
    {
        each.name: each
        for each in (
            PeerSchedule(name="1f1b", torch_name="Schedule1F1B"),
            PeerSchedule(name="gpipe", torch_name="ScheduleGPipe"),
            PeerSchedule(
                name="interleaved_1f1b",
                torch_name="ScheduleInterleaved1F1B",
                stages_per_process=2,
            ),
            PeerSchedule(
                name="interleaved_zb",
                torch_name="ScheduleInterleavedZeroBubble",
                stages_per_process=2,
                splits_backward=True,
            ),
            PeerSchedule(
                name="zbv",
                torch_name="ScheduleZBVZeroBubble",
                stages_per_process=2,
                is_v=True,
                splits_backward=True,
            ),
        )
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageDurations:
    """How long the three parts of a stage's work take, in seconds, by microbatch.

    Attributes:
      forward_s: The output.
      input_s: The gradient of the input.
      weight_s: The gradient of the weights.
    """

    forward_s: tuple[float, ...]
    input_s: tuple[float, ...]
    weight_s: tuple[float, ...]

    @property
    def total_s(self) -> float:
        """Of all microbatches."""
        return sum(self.forward_s) + sum(self.input_s) + sum(self.weight_s)


def stage_durations(
    schedule: PeerSchedule, table: DurationTable, process_index: int
) -> tuple[StageDurations, ...]:
    """What each stage of a process takes; together, what the table says for the process.

    torch runs a first stage without an input to differentiate as the table does: all of
    its backward, B and W, where its W is due.
    """
    share = 1.0 / schedule.stages_per_process

    def row(kind: Kind) -> tuple[float, ...]:
        return tuple(share * each for each in table.durations_s[kind][process_index])

    own = StageDurations(forward_s=row(Kind.F), input_s=row(Kind.B), weight_s=row(Kind.W))
    return (own,) * schedule.stages_per_process
