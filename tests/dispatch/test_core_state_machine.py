"""The core against a stage written as plainly as possible: lists, and looking at everything.

Hypothesis draws a stage and then any sequence of events that its neighbours and its
device may produce, with repeats and impossible ones among them. After each, both must
have said the same.
"""

import itertools

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from support.cores import B, F, PriorityHint, W, check_invariants, make_core

from rrfp_jax.dispatch.errors import ProtocolError
from rrfp_jax.dispatch.events import InputArrived, KernelFinished, StepStarted, Tick
from rrfp_jax.dispatch.instructions import Fail, Finish, Launch, Release, Send
from rrfp_jax.task import Payload, StageShape, Task

TIMEOUT_NS = 50


class NaiveStage:
    """What the core does, without any of its data structures."""

    def __init__(self, shape, sizes, budget, launch_ahead, deterministic, priority, order):
        self.shape, self.sizes, self.budget = shape, sizes, budget
        self.places, self.deterministic = 1 + launch_ahead, deterministic
        self.priority, self.order = priority, order
        self.started = False
        self.here, self.launched, self.finished = [], [], []

    def task(self, kind, microbatch):
        return Task(kind, self.shape.stage, microbatch)

    def fill(self):
        launches = []
        while len(self.launched) - len(self.finished) < self.places:
            candidates = [task for task in self.priority if self.may_launch(task)]
            if not candidates:
                break
            self.launched.append(candidates[0])
            launches.append(Launch(task=candidates[0]))
        return launches

    def may_launch(self, task):
        if not self.started or task in self.launched or not self.has_inputs(task):
            return False
        if self.order is not None:
            return task == self.order[len(self.launched)]
        if task.kind is F and self.budget is not None:
            released = [m for m in range(len(self.sizes)) if self.is_released(m)]
            oldest = min(m for m in range(len(self.sizes)) if m not in released)
            held = sum(
                self.sizes[t.microbatch]
                for t in self.launched
                if t.kind is F and t.microbatch not in released
            )
            return task.microbatch == oldest or held + self.sizes[task.microbatch] <= self.budget
        if task.kind is W and self.deterministic:
            return task.microbatch == sum(t.kind is W for t in self.launched)
        return True

    def has_inputs(self, task):
        shape, m = self.shape, task.microbatch
        activation = (Payload.ACTIVATION, m) in self.here or shape.stage == 0
        gradient = (Payload.GRADIENT, m) in self.here or shape.is_last
        forward_launched = self.task(F, m) in self.launched
        if task.kind is F:
            return activation
        if task.kind is B or B not in shape.kinds:
            return forward_launched and gradient
        return self.task(B, m) in self.launched

    def is_released(self, microbatch):
        return self.task(self.shape.kinds[-1], microbatch) in self.finished

    def start(self):
        self.started = True
        return self.fill()

    def arrive(self, payload, microbatch):
        if (payload, microbatch) in self.here:
            return []
        self.here.append((payload, microbatch))
        return self.fill()

    def finish(self):
        task = self.launched[len(self.finished)]
        self.finished.append(task)
        instructions = []
        if task.kind is F and not self.shape.is_last:
            instructions.append(Send(payload=Payload.ACTIVATION, microbatch=task.microbatch))
        if task.kind is B:
            instructions.append(Send(payload=Payload.GRADIENT, microbatch=task.microbatch))
        if task.kind is self.shape.kinds[-1]:
            instructions.append(Release(microbatch=task.microbatch))
        instructions += self.fill()
        if len(self.finished) == len(self.priority):
            instructions.append(Finish())
        return instructions


@st.composite
def stages(draw):
    """A stage, its options, and an arbitrary ranking of its tasks or an order to keep."""
    num_stages = draw(st.integers(1, 3))
    stage = draw(st.integers(0, num_stages - 1))
    backward = st.sampled_from([(W,), ()] if stage == 0 else [(B, W), (B,), (W,), ()])
    shape = StageShape(stage=stage, num_stages=num_stages, kinds=(F, *draw(backward)))
    sizes = draw(st.lists(st.integers(0, 3), min_size=1, max_size=5))
    chains = [[Task(kind, stage, m) for kind in shape.kinds] for m in range(len(sizes))]
    priority = draw(st.permutations(list(itertools.chain(*chains))))
    deterministic = draw(st.booleans())
    order = None
    if draw(st.booleans()):
        order, next_weight = [], 0
        while any(chains):
            heads = [chain[0] for chain in chains if chain]
            heads = [t for t in heads if t.kind is not W or t.microbatch == next_weight]
            task = draw(st.sampled_from(heads))
            next_weight += task.kind is W
            chains[task.microbatch].remove(task)
            order.append(task)
    budget = draw(st.none() | st.integers(0, 6))
    return shape, sizes, budget, draw(st.integers(0, 3)), deterministic, priority, order


class CoreMachine(RuleBasedStateMachine):
    """Feeds core and naive stage alike."""

    @initialize(drawn=stages())
    def build(self, drawn):
        shape, sizes, budget, launch_ahead, deterministic, priority, order = drawn
        self.naive = NaiveStage(*drawn)
        self.core = make_core(
            shape,
            PriorityHint(priority) if order is None else order,
            microbatch_bytes=sizes,
            budget_bytes=budget,
            launch_ahead=launch_ahead,
            deterministic=deterministic,
            stall_timeout_ns=TIMEOUT_NS,
        )
        self.now_ns = self.heard_ns = 0
        self.repeats = 0
        self.failed = False

    def handle(self, event):
        self.now_ns += 1
        return self.core.handle(event, self.now_ns)

    def heard(self):
        self.heard_ns = self.now_ns

    def running(self):
        return self.naive.started and not self.failed

    def refused(self, event):
        before = self.core.describe(self.now_ns + 1)
        with pytest.raises(ProtocolError):
            self.handle(event)
        self.now_ns -= 1
        assert self.core.describe(self.now_ns + 1) == before

    @precondition(lambda self: not self.naive.started)
    @rule()
    def start(self):
        assert self.handle(StepStarted()) == self.naive.start()
        self.heard()

    @precondition(lambda self: self.running())
    @rule(payload=st.sampled_from(Payload), microbatch=st.integers(-1, 5))
    def arrive(self, payload, microbatch):
        naive = self.naive
        event = InputArrived(payload=payload, microbatch=microbatch)
        known = 0 <= microbatch < len(naive.sizes) and naive.shape.needs(payload)
        forward = naive.task(F, microbatch)
        if not known or (payload is Payload.GRADIENT and forward not in naive.finished):
            self.refused(event)
            return
        repeated = (payload, microbatch) in naive.here
        self.repeats += repeated
        assert self.handle(event) == naive.arrive(payload, microbatch)
        assert self.core.duplicates == self.repeats
        if not repeated:
            self.heard()

    @precondition(lambda self: self.running() and self.core.in_flight)
    @rule()
    def finish(self):
        assert self.handle(KernelFinished(task=self.core.in_flight[0])) == self.naive.finish()
        self.heard()

    @precondition(lambda self: self.running())
    @rule(kind=st.sampled_from([F, B, W]), microbatch=st.integers(0, 5))
    def finish_another(self, kind, microbatch):
        task = self.naive.task(kind, microbatch)
        if self.core.in_flight[:1] != (task,):
            self.refused(KernelFinished(task=task))

    @precondition(lambda self: self.running())
    @rule()
    def start_again(self):
        self.refused(StepStarted())

    @precondition(lambda self: not self.failed)
    @rule(elapsed_ns=st.integers(1, 2 * TIMEOUT_NS))
    def tick(self, elapsed_ns):
        self.now_ns += elapsed_ns - 1
        instructions = self.handle(Tick())
        running = self.naive.started and not self.core.finished
        self.failed = running and self.now_ns - self.heard_ns >= TIMEOUT_NS
        assert [type(instruction) for instruction in instructions] == [Fail] * self.failed

    @precondition(lambda self: self.failed)
    @rule()
    def speak_to_a_failed_core(self):
        assert self.handle(StepStarted()) == []

    @invariant()
    def core_is_sound(self):
        check_invariants(self.core)
        assert self.core.failed == self.failed
        assert [*self.core.times, *self.core.in_flight] == self.naive.launched


TestCoreMachine = CoreMachine.TestCase
TestCoreMachine.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
