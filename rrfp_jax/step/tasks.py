"""Runs every task of a step on the stage groups of this process."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from rrfp_jax.dispatch.agreement import Agreement, Alone
from rrfp_jax.dispatch.core import StageCore
from rrfp_jax.dispatch.driver import StageJob, StepFailedError, run_step
from rrfp_jax.dispatch.execution import StageExecution
from rrfp_jax.dispatch.transport import Transport
from rrfp_jax.schedule import Schedule
from rrfp_jax.stages.arrays import group_view, wide_view
from rrfp_jax.stages.compile import GroupKernels, Programs
from rrfp_jax.stages.inputs import place_fields
from rrfp_jax.stages.plan import StagePlan
from rrfp_jax.step.meeting import Meeting
from rrfp_jax.step.values import GroupRecord, PipelineState
from rrfp_jax.topology import StageGroup, Topology
from rrfp_jax.variability.model import VariabilityModel

# The gradient accumulators of each stage of this process, over all its replicas.
Accumulators = dict[int, list[jax.Array]]


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskResults:
    """What the tasks of a step have left.

    Attributes:
      loss_sum: Over all microbatches of all replicas.
      weight: The same.
      accumulators: Of this process. Each replica has its own sums.
      groups: What the stage groups of this process did when.
      busy_ns: In which stage groups ran a kernel, all of them together.
      peak_held_bytes: For each stage, the most that was charged to its budget in a replica.
      peak_live_bytes: For each stage, the most that was really held, where it was measured.
    """

    loss_sum: float
    weight: float
    accumulators: Accumulators
    groups: tuple[GroupRecord, ...]
    busy_ns: int
    peak_held_bytes: tuple[int, ...]
    peak_live_bytes: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _GroupRun:
    """One stage group's part: its job, and the microbatches of its replica."""

    group: StageGroup
    job: StageJob
    numbers: range


class TaskRunner:
    """Runs steps on compiled programs.

    Args:
      plans: All stages, first to last.
      topology: Where they lie.
      programs: What this process has compiled.
      transport: Between the stages.
      meeting: Of the processes.
      stall_timeout_s: How long a launch may take.
      measure_memory: Whether to measure what is held.
    """

    def __init__(
        self,
        plans: Sequence[StagePlan],
        topology: Topology,
        programs: Programs,
        transport: Transport,
        meeting: Meeting,
        *,
        stall_timeout_s: float,
        measure_memory: bool,
    ) -> None:
        self._plans = plans
        self._topology = topology
        self._programs = programs
        self._transport = transport
        self._meeting = meeting
        self._stall_timeout_s = stall_timeout_s
        self._measure_memory = measure_memory

    def run(
        self,
        state: PipelineState,
        microbatches: Sequence[Any],
        buckets: Sequence[int],
        accumulators: Accumulators,
        *,
        schedule: Schedule,
        variability: VariabilityModel,
        training: bool,
    ) -> TaskResults:
        """Runs all tasks.

        Args:
          state: Its parameters are read.
          microbatches: Of all replicas.
          buckets: Of each microbatch.
          accumulators: Zeros, of this process; taken. Empty for an evaluation.
          schedule: In which order.
          variability: How late completions and arrivals are to be reported; an evaluation is
            run as it is.
          training: Whether with gradients.

        Raises:
          StepFailedError: A kernel failed or a stage stalled.
          JobError: Another process was lost, or gave the step up.
        """
        runs = []
        for replica, numbers in enumerate(_shares(len(microbatches), self._topology.num_replicas)):
            groups = [g for g in self._topology.local_groups if g.replica == replica]
            own_buckets = [buckets[number] for number in numbers]
            cores = self._cores(groups, own_buckets, schedule, training=training)
            runs += [
                _GroupRun(
                    group=group,
                    numbers=numbers,
                    job=StageJob(
                        replica=replica,
                        core=cores[group.stage],
                        execution=self._execution(
                            group,
                            state,
                            {number: microbatches[number] for number in numbers},
                            own_buckets,
                            accumulators.get(group.stage, []),
                            training=training,
                        ),
                    ),
                )
                for group in groups
                if own_buckets
            ]
        try:
            run_step(
                [run.job for run in runs],
                self._transport,
                variability if training else VariabilityModel(),
                step=state.step,
                stall_timeout_s=self._stall_timeout_s,
            )
        except StepFailedError as error:
            whole = self._meeting.give_up(error)
            raise whole from whole.__cause__
        return self._results(runs, accumulators)

    def _cores(
        self,
        groups: Sequence[StageGroup],
        buckets: Sequence[int],
        schedule: Schedule,
        *,
        training: bool,
    ) -> dict[int, StageCore]:
        if not buckets:
            return {}
        agreements = {group.stage: self._agreement(group, schedule) for group in groups}
        if training:
            held = [[plan.held_bytes(bucket) for bucket in buckets] for plan in self._plans]
            return schedule.cores(held, agreements)
        shapes = [plan.evaluation_shape for plan in self._plans]
        return schedule.evaluation_cores(shapes, len(buckets), agreements)

    def _agreement(self, group: StageGroup, schedule: Schedule) -> Agreement:
        kernels = self._programs.groups[group.replica, group.stage]
        if not kernels.crosses_processes:
            return Alone(num_members=len(group.processes))
        member = group.processes.index(self._meeting.process_index)
        return schedule.agreement(member, len(group.processes))

    def _execution(
        self,
        group: StageGroup,
        state: PipelineState,
        microbatches: Mapping[int, Any],
        buckets: Sequence[int],
        accumulators: Sequence[jax.Array],
        *,
        training: bool,
    ) -> StageExecution:
        kernels: GroupKernels = self._programs.groups[group.replica, group.stage]
        plan, own = self._plans[group.stage], state.stages[group.stage]
        params = [group_view(array, group) for array in own.params]
        return StageExecution(
            kernels=kernels.tasks if training else kernels.evaluate,
            buckets=buckets,
            params=params,
            prepared=kernels.prepare(*params),
            accumulators=[group_view(array, group) for array in accumulators],
            fields=place_fields(
                plan,
                group,
                group_view(own.rng, group),
                state.step,
                microbatches,
                buckets,
                training=training,
            ),
            is_last=group.stage == len(self._plans) - 1,
            measure_memory=self._measure_memory,
        )

    def _results(self, runs: Sequence[_GroupRun], accumulators: Accumulators) -> TaskResults:
        """Adds up what the groups of all processes have left."""
        leaders = [run for run in runs if self._leads(run.group)]
        told = self._meeting.gather(
            "the losses of a step",
            {
                "losses": [
                    [number, *pair]
                    for run in leaders
                    for number, pair in zip(run.numbers, _losses(run), strict=False)
                ],
                "busy_ns": sum(
                    when.finished_ns - when.started_ns
                    for run in leaders
                    for when in run.job.core.times.values()
                ),
                "held": [[run.group.stage, run.job.core.peak_held_bytes] for run in runs],
                "live": [[run.group.stage, run.job.execution.peak_live_bytes] for run in runs],
            },
        )
        losses = sorted(row for each in told for row in each["losses"])
        return TaskResults(
            loss_sum=math.fsum(loss for _, loss, _ in losses),
            weight=math.fsum(weight for *_, weight in losses),
            accumulators=self._wide(runs, accumulators),
            groups=tuple(map(self._record, runs)),
            busy_ns=sum(each["busy_ns"] for each in told),
            peak_held_bytes=self._peaks(told, "held"),
            peak_live_bytes=self._peaks(told, "live"),
        )

    def _record(self, run: _GroupRun) -> GroupRecord:
        core = run.job.core
        return GroupRecord(
            group=run.group,
            shape=core.shape,
            started_ns=core.started_ns,
            numbers=run.numbers,
            times=core.times,
            sent_ns=run.job.sent_ns,
            waits=core.waits,
            microbatch_bytes=core.microbatch_bytes,
            budget_bytes=core.view.budget_bytes,
            peak_held_bytes=core.peak_held_bytes,
        )

    def _leads(self, group: StageGroup) -> bool:
        """Whether this process speaks for the group: the first of those that share it."""
        return group.processes[0] == self._meeting.process_index

    def _wide(self, runs: Sequence[_GroupRun], accumulators: Accumulators) -> Accumulators:
        """What the groups have accumulated, in the form over all replicas."""
        wide: Accumulators = {}
        for stage, zeros in accumulators.items():
            mesh = self._topology.wide_meshes[stage]
            own = [r.job.execution.accumulators for r in runs if r.group.stage == stage]
            wide[stage] = [
                wide_view([copies[i] for copies in own], mesh) for i in range(len(zeros))
            ]
        return wide

    def _peaks(self, told: Sequence[Any], name: str) -> tuple[int, ...]:
        peaks = [0] * len(self._plans)
        for each in told:
            for stage, peak in each[name]:
                peaks[stage] = max(peaks[stage], peak)
        return tuple(peaks)


def _shares(num_microbatches: int, num_replicas: int) -> list[range]:
    """The microbatches of each replica: as even as they go, in their order."""
    bounds = [num_microbatches * i // num_replicas for i in range(num_replicas + 1)]
    return [range(a, b) for a, b in itertools.pairwise(bounds)]


def _losses(run: _GroupRun) -> list[list[float]]:
    """Loss sum and weight of each microbatch; nothing from a stage that has none."""
    pairs = run.job.execution.losses
    if not run.job.execution.is_last:
        return []
    rows: list[list[float]] = np.asarray(jax.device_get(pairs), np.float64).tolist()
    return rows
