"""What a step has to do, how it is run, and what comes of it.

Replicas share nothing until all their tasks are done, so each is simulated by itself, with
its own durations and its own order, and the step is over when the last one is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from rrfp_jax.budget import ActivationBudget
from rrfp_jax.hints import Hint
from rrfp_jax.sim.bounds import shortest_ns
from rrfp_jax.sim.clock import Durations, Hosts, Simulation, Transfers, simulate
from rrfp_jax.sim.group import TensorGroup
from rrfp_jax.sim.link import Link
from rrfp_jax.sim.orders import fixed_orders, stage_budgets
from rrfp_jax.task import Kind, StageShape, Task

_Orders: TypeAlias = Sequence[Sequence[Task]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What one replica does in a step.

    Attributes:
      shapes: First stage to last.
      durations: How long a task runs, in ns.
      hosts: How long the host is at it to launch a task, in ns.
      transfers: How long a bundle is on its way, in ns.
      microbatch_bytes: For each stage, what each microbatch holds there.
      largest_bytes: For each stage, what budgets are multiples of.
    """

    shapes: tuple[StageShape, ...]
    durations: Durations
    hosts: Hosts
    transfers: Transfers
    microbatch_bytes: Sequence[Sequence[int]]
    largest_bytes: Sequence[int]

    @property
    def num_microbatches(self) -> int:
        """Of the replica."""
        return len(self.microbatch_bytes[0])

    @property
    def shortest_ns(self) -> int:
        """No order takes less time."""
        return shortest_ns(self.shapes, self.num_microbatches, self.durations, self.transfers)

    def unsplit(self) -> Work:
        """The same with each stage's W inside its B, as schedules were published.

        A stage then sends its gradient when that of its weights is done, too. The first
        stage has no B, and nobody waits for its W.
        """
        shapes = tuple(
            replace(shape, kinds=tuple(k for k in shape.kinds if k is not Kind.W))
            if Kind.B in shape.kinds
            else shape
            for shape in self.shapes
        )

        def durations(task: Task) -> int:
            own_ns = self.durations(task)
            if task.kind is Kind.B and Kind.W in self.shapes[task.stage].kinds:
                own_ns += self.durations(Task(Kind.W, task.stage, task.microbatch))
            return own_ns

        return replace(self, shapes=shapes, durations=durations)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """How a step is run.

    Attributes:
      hint: What ranks tasks.
      mode: ``readiness``, or ``fixed`` to keep the hint's own order.
      budget: For readiness; None for no limit. A fixed order bounds memory by itself.
      launch_ahead: Kernels queued behind the running one.
      deterministic: Run W by microbatch.
      link: Between neighbours.
      group: What every stage group is like.
    """

    hint: Hint
    mode: str = "readiness"
    budget: ActivationBudget | None = None
    launch_ahead: int = 1
    deterministic: bool = True
    link: Link = field(default_factory=Link)
    group: TensorGroup = field(default_factory=TensorGroup)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a simulated step was like.

    Attributes:
      step_ns: When the last replica was done.
      busy_share: Share of the stages' time in which they ran kernels.
      peak_bytes: The most that a stage of a replica held.
      num_tasks: Of all replicas.
    """

    step_ns: int
    busy_share: float
    peak_bytes: int
    num_tasks: int


def run_all(samples: Sequence[Sequence[Work]], setting: Setting) -> list[Outcome]:
    """Simulates several steps.

    Args:
      samples: For each step its work on each replica.
      setting: How all of them run.

    Raises:
      SimulationError: The stages of a replica came to a halt.
      HintError: The hint raised, or gave no rank or no order.
    """
    orders: dict[tuple[tuple[StageShape, ...], int], _Orders] = {}

    def policy(work: Work) -> Hint | _Orders:
        if setting.mode == "readiness":
            return setting.hint
        key = work.shapes, work.num_microbatches
        if key not in orders:
            orders[key] = fixed_orders(setting.hint, *key, deterministic=setting.deterministic)
        return orders[key]

    return [_outcome([_run(work, setting, policy(work)) for work in works]) for works in samples]


def _outcome(replicas: Sequence[Simulation]) -> Outcome:
    step_ns = max(each.makespan_ns for each in replicas)
    busy_ns = sum(sum(each.busy_ns) for each in replicas)
    num_groups = sum(len(each.busy_ns) for each in replicas)
    return Outcome(
        step_ns=step_ns,
        busy_share=busy_ns / (num_groups * step_ns) if step_ns else 0.0,
        peak_bytes=max(max(each.peak_held_bytes) for each in replicas),
        num_tasks=sum(len(each.times) for each in replicas),
    )


def _run(work: Work, setting: Setting, policy: Hint | _Orders) -> Simulation:
    budgets, group = None, setting.group
    if setting.mode == "fixed":  # of which members need not tell each other anything
        group = replace(group, note_ns=0, agreement=None)
    if setting.budget is not None:
        budgets = stage_budgets(
            setting.budget, work.shapes, work.num_microbatches, work.largest_bytes
        )
    return simulate(
        shapes=work.shapes,
        policy=policy,
        microbatch_bytes=work.microbatch_bytes,
        durations=work.durations,
        transfers=work.transfers,
        budgets=budgets,
        launch_ahead=setting.launch_ahead,
        deterministic=setting.deterministic,
        hosts=work.hosts,
        link=setting.link,
        group=group,
    )
