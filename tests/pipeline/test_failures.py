"""A step that cannot go on ends with an error that says what everyone waited for."""

import threading

import jax
import numpy as np
import optax
import pytest
from support.toys import Toy, largest_difference, microbatches, reference

from rrfp_jax import Pipeline
from rrfp_jax.dispatch.driver import StepFailedError
from rrfp_jax.dispatch.inprocess import InprocessTransport
from rrfp_jax.dispatch.transport import Transport
from rrfp_jax.task import Payload

RNG = jax.random.key(5)


class Unreliable(Transport):
    """The in-process transport with a fault: `tamper` decides what becomes of a bundle."""

    def __init__(self, layout, tamper):
        self._inner = InprocessTransport(layout)
        self._tamper = tamper

    def open(self, step, mailbox, variability):
        self._fail = mailbox.lose
        self._inner.open(step, mailbox, variability)

    def send(self, bundle):
        self._tamper(bundle, self._inner.send, self._fail)

    def tell(self, replica, stage, note):
        self._inner.tell(replica, stage, note)

    def close(self):
        self._inner.close()


def build(tamper, transport_type=Unreliable, **options):
    toy = Toy(num_stages=3)
    pipeline = Pipeline(
        toy.loss_fn,
        toy.init_fn,
        optax.adam(1e-2),
        buckets=microbatches(1),
        evaluation=False,
        transport=lambda layout: transport_type(layout, tamper),
        **options,
    )
    return toy, pipeline, pipeline.init(RNG)


def is_gradient(bundle, microbatch):
    return bundle.payload is Payload.GRADIENT and bundle.microbatch == microbatch


def test_dropped_gradient_stalls_with_a_report_that_names_it():
    def drop(bundle, send, fail):
        if not (is_gradient(bundle, 2) and bundle.source == 1):
            send(bundle)

    _, pipeline, state = build(drop, stall_timeout_s=1.0)
    with pytest.raises(StepFailedError) as caught:
        pipeline.step(state, microbatches(4))
    message = str(caught.value)
    assert "stage 0 stalled" in message
    assert "the gradient of microbatch 2, owed by stage 1" in message
    assert "stage 1: " in message
    assert not [t.name for t in threading.enumerate() if t.name.startswith("rrfp-")]


def test_repeated_gradient_is_counted_once():
    def repeat(bundle, send, fail):
        send(bundle)
        if bundle.payload is Payload.GRADIENT:
            send(bundle)

    toy, pipeline, state = build(repeat)
    batches = microbatches(4)
    _, expected = reference(toy.loss_fn, toy.init_fn(RNG), batches, RNG)
    assert largest_difference(pipeline.gradients(state, batches).tree, expected) <= 1e-5


def test_shuffled_deliveries_give_the_same_bits():
    num_microbatches = 4
    held = {0: [], 1: []}

    def reverse(bundle, send, fail):
        # All activations of a stage wait for the last one and leave in reverse.
        if bundle.payload is Payload.GRADIENT:
            send(bundle)
            return
        held[bundle.source].append(bundle)
        if len(held[bundle.source]) == num_microbatches:
            while held[bundle.source]:
                send(held[bundle.source].pop())

    results = []
    for tamper in (lambda bundle, send, fail: send(bundle), reverse):
        _, pipeline, state = build(tamper, activation_budget="8.0x")
        results.append(pipeline.gradients(state, microbatches(num_microbatches)).tree)
    jax.tree.map(np.testing.assert_array_equal, *results)


def test_lost_transfer_ends_the_step_and_the_next_step_is_clean():
    faults = [True]

    def lose(bundle, send, fail):
        if faults and is_gradient(bundle, 1):
            faults.pop()
            fail(bundle, "the cable was cut")
        else:
            send(bundle)

    toy, pipeline, state = build(lose)
    batches = microbatches(3)
    with pytest.raises(StepFailedError, match="gradient of microbatch 1 was lost.*cable was cut"):
        pipeline.step(state, batches)
    _, expected = reference(toy.loss_fn, toy.init_fn(RNG), batches, RNG)
    assert largest_difference(pipeline.gradients(state, batches).tree, expected) <= 1e-5


def test_what_a_stage_sends_after_its_step_has_failed_reaches_no_other_step():
    """The step fails while a dispatcher sends, and is closed before it has sent."""
    faults, closed = [True], threading.Event()

    class Late(Unreliable):
        def close(self):
            super().close()
            closed.set()

    def tamper(bundle, send, fail):
        if faults and is_gradient(bundle, 0):
            faults.pop()
            fail(bundle, "the cable was cut")
            assert closed.wait(10)
        send(bundle)

    toy, pipeline, state = build(tamper, transport_type=Late)
    batches = microbatches(3)
    with pytest.raises(StepFailedError, match="cable was cut"):
        pipeline.step(state, batches)
    _, expected = reference(toy.loss_fn, toy.init_fn(RNG), batches, RNG)
    assert largest_difference(pipeline.gradients(state, batches).tree, expected) <= 1e-5


def test_transfer_that_raises_is_reported_with_its_error():
    def spoil(bundle, send, fail):
        if is_gradient(bundle, 0):
            bundle.arrays[0].delete()
        send(bundle)

    _, pipeline, state = build(spoil)
    with pytest.raises(StepFailedError, match="gradient of microbatch 0 was lost.*deleted"):
        pipeline.step(state, microbatches(2))
