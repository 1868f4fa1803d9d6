"""The threads of a step: whatever fails inside them ends the step, and none outlives it."""

import _thread
import threading

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support.toys import Toy, microbatches

from rrfp_jax import Hint, Pipeline
from rrfp_jax.dispatch import driver
from rrfp_jax.dispatch.core import StageCore
from rrfp_jax.dispatch.driver import StageJob, StepFailedError
from rrfp_jax.dispatch.inprocess import InprocessTransport
from rrfp_jax.dispatch.transport import Mailbox, Transport
from rrfp_jax.hints import load_hint
from rrfp_jax.task import Kind, StageShape
from rrfp_jax.variability.model import VariabilityModel

RNG = jax.random.key(5)
LIMIT_S = 30.0  # of every wait in this file, none of which is ever used up


def left_over_threads():
    return [t.name for t in threading.enumerate() if t.name.startswith("rrfp-")]


@pytest.fixture(autouse=True)
def no_thread_outlives_its_step():
    yield
    assert not left_over_threads()


def build(**options):
    toy = Toy(num_stages=2)
    pipeline = Pipeline(
        toy.loss_fn,
        toy.init_fn,
        optax.adam(1e-2),
        buckets=microbatches(1),
        **{"evaluation": False, **options},
    )
    return pipeline, pipeline.init(RNG)


class Leaves(Hint):
    """Ends its thread, once it is told to, in a way that is no `Exception`."""

    name = "leaves"

    def __init__(self):
        self.leave = False

    def rank(self, task, view):
        if self.leave and str(task) == "B1.2":
            raise SystemExit("the hint has left")
        return (task.microbatch,)


class Broken(dict):
    """Of slow stages; raises when one is looked for."""

    def __contains__(self, stage):
        raise ZeroDivisionError("no such delay")


class Interrupting(Transport):
    """Instead of carrying a bundle, interrupts the main thread as Ctrl-C does, when told to."""

    def __init__(self, layout):
        self._inner = InprocessTransport(layout)
        self.interrupts = False

    def open(self, step, mailbox, variability):
        self._inner.open(step, mailbox, variability)

    def tell(self, replica, stage, note):
        self._inner.tell(replica, stage, note)

    def send(self, bundle):
        if self.interrupts:
            _thread.interrupt_main()
        else:
            self._inner.send(bundle)

    def close(self):
        self._inner.close()


def test_hint_that_ends_its_thread_fails_the_step_and_the_next_one_is_whole():
    hint = Leaves()
    pipeline, state = build(hint=hint)
    expected = pipeline.gradients(state, microbatches(4)).tree
    hint.leave = True
    with pytest.raises(StepFailedError, match="stage 1: the hint has left"):
        pipeline.step(state, microbatches(4))
    hint.leave = False
    again = pipeline.gradients(state, microbatches(4)).tree
    jax.tree.map(np.testing.assert_array_equal, expected, again)


def test_waiter_that_fails_is_told_and_not_taken_for_a_stall():
    pipeline, state = build(variability=VariabilityModel(slow_stages=Broken()))
    with pytest.raises(StepFailedError, match="stage 0: no such delay"):
        pipeline.step(state, microbatches(3))


def test_interrupt_during_a_step_leaves_no_thread_and_a_good_state():
    transports = []

    def make(layout):
        transports.append(Interrupting(layout))
        return transports[0]

    pipeline, state = build(transport=make)
    expected = pipeline.gradients(state, microbatches(2)).tree
    transports[0].interrupts = True
    with pytest.raises(KeyboardInterrupt):
        pipeline.step(state, microbatches(2))
    assert not left_over_threads()
    transports[0].interrupts = False
    again = pipeline.gradients(state, microbatches(2)).tree
    jax.tree.map(np.testing.assert_array_equal, expected, again)


class Held:
    """Stands in for a stage's execution: its launches do not return until they may."""

    def __init__(self):
        self.may_return = threading.Event()
        self.buckets = [0]

    def launch(self, task):
        assert self.may_return.wait(LIMIT_S)
        return jnp.zeros(())


def test_launch_that_does_not_return_is_a_stall_of_that_task(monkeypatch):
    # The thread is inside the launch when the step ends; the test lets it go afterwards.
    monkeypatch.setattr(driver, "_JOIN_TIMEOUT_S", 0.01)
    monkeypatch.setattr(driver, "_TICK_S", 0.02)
    core = StageCore(
        shape=StageShape(stage=0, num_stages=1, kinds=(Kind.F,)),
        policy=load_hint("bfw"),
        microbatch_bytes=[1],
        budget_bytes=None,
        launch_ahead=0,
        deterministic=True,
        stall_timeout_ns=10**12,
    )
    held = Held()
    with pytest.raises(StepFailedError, match=r"stage 0 stalled: the launch of F0\.0 has not"):
        driver.run_step(
            [StageJob(core=core, execution=held)],
            InprocessTransport(lambda *place: None),
            VariabilityModel(),
            step=0,
            stall_timeout_s=0.05,
        )
    threads = [t for t in threading.enumerate() if t.name.startswith("rrfp-")]
    held.may_return.set()
    for thread in threads:
        thread.join(LIMIT_S)


def test_second_step_at_the_same_time_is_refused():
    transport = InprocessTransport(lambda *place: None)
    mailbox = Mailbox(deliver=print, lose=print, hear=print, abort=print)
    transport.open(0, mailbox, VariabilityModel())
    with pytest.raises(RuntimeError, match="one after another"):
        transport.open(1, mailbox, VariabilityModel())
    transport.close()


def test_state_that_a_step_has_used_is_refused_with_the_remedy():
    pipeline, state = build()
    after, _ = pipeline.step(state, microbatches(2))
    with pytest.raises(ValueError, match=r"state of step 0 is used up.*`state, metrics = "):
        pipeline.step(state, microbatches(2))
    assert pipeline.step(after, microbatches(2))[1].skipped is None
