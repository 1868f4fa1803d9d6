"""Runs all stages of a step with every event in a random order: no clock, no politeness.

Kernels of one stage finish in launch order, as on a device. Everything else may happen
in any order: a bundle may overtake all others or be the very last to come, and may come
twice. What happens depends on the seed alone.
"""

import random

from support.cores import check_invariants

from rrfp_jax.dispatch.events import InputArrived, KernelFinished, StepStarted
from rrfp_jax.dispatch.instructions import Launch, Send
from rrfp_jax.task import Payload


class HaltedError(AssertionError):
    """Nothing more can happen though a stage has not finished."""


def run_in_random_order(cores, seed, *, duplicates=0.0):
    """Runs a step to its end.

    Returns:
      For each stage the tasks in launch order.
    """
    rng = random.Random(seed)
    launched = [[] for _ in cores]
    bundles = []
    now_ns = 0

    def handle(stage, event):
        for instruction in cores[stage].handle(event, now_ns):
            if isinstance(instruction, Launch):
                launched[stage].append(instruction.task)
            elif isinstance(instruction, Send):
                to = stage + 1 if instruction.payload is Payload.ACTIVATION else stage - 1
                arrival = InputArrived(
                    payload=instruction.payload, microbatch=instruction.microbatch
                )
                bundles.extend([(to, arrival)] * (2 if rng.random() < duplicates else 1))
        check_invariants(cores[stage])

    for stage in rng.sample(range(len(cores)), len(cores)):
        handle(stage, StepStarted())
    while True:
        now_ns += rng.randrange(3)
        busy = [stage for stage, core in enumerate(cores) if core.in_flight]
        choices = len(busy) + len(bundles)
        if not choices:
            break
        choice = rng.randrange(choices)
        if choice < len(busy):
            stage = busy[choice]
            handle(stage, KernelFinished(task=cores[stage].in_flight[0]))
        else:
            handle(*bundles.pop(choice - len(busy)))
    if not all(core.finished for core in cores):
        raise HaltedError("\n".join(core.describe(now_ns) for core in cores))
    return launched
