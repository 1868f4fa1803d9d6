"""A small language for what happens between stages, run against real cores.

A scenario is a text file of commands, each followed by ``----`` and what came of it:

    stages num_stages=2 microbatches=2      builds the cores; first command of a file
    start                                   StepStarted on all, last stage first
    finish STAGE [COUNT]                    the kernel in front of the stage's queue is done
    deliver STAGE PAYLOAD MICROBATCH        a bundle on its way arrives; STAGE is its target
    repeat STAGE PAYLOAD MICROBATCH         it arrives, and is still on its way
    drop STAGE PAYLOAD MICROBATCH           it vanishes without a word
    lose STAGE PAYLOAD MICROBATCH           it vanishes and the transport says so
    forge STAGE PAYLOAD MICROBATCH          arrives though nobody sent it
    claim STAGE TASK                        the driver says that a task is done
    wait MS                                 time passes; every stage gets a Tick
    settle                                  finish and deliver whatever there is, until quiet
    describe STAGE                          the stage's report

Each command takes one millisecond. Options of ``stages`` are those of `_build`.
"""

from collections import deque

from support.cores import check_invariants, evaluation_shapes, make_core, tasks, training_shapes

from rrfp_jax.dispatch.errors import ProtocolError
from rrfp_jax.dispatch.events import (
    InputArrived,
    KernelFinished,
    StepStarted,
    Tick,
    TransferFailed,
)
from rrfp_jax.dispatch.instructions import Send
from rrfp_jax.task import Payload, Task

MS = 10**6
SEPARATOR = "----"


def rerun(text):
    """Runs a scenario; gives it back with the output that came of it."""
    runner = _Runner()
    blocks = []
    for block in text.strip().split("\n\n"):
        lines = block.splitlines()
        until = lines.index(SEPARATOR) if SEPARATOR in lines else len(lines)
        commands = lines[:until]
        if all(line.startswith("#") for line in commands):
            blocks.append(block)
            continue
        output = [line for c in commands if not c.startswith("#") for line in runner.run(c)]
        blocks.append("\n".join([*commands, SEPARATOR, *(output or ["nothing"])]))
    return "\n\n".join(blocks) + "\n"


def _build(num_stages, microbatches, *, hint="bfw", sizes="", budget="", order="", **options):
    """Cores from the words of ``stages``.

    ``sizes=5,9,4`` is per microbatch; ``order=F0.0,W0.0/F1.0,B1.0,W1.0`` has one order for
    each stage.
    """
    num_stages, num_microbatches = int(num_stages), int(microbatches)
    trains = options.get("training", "yes") == "yes"
    shapes = (training_shapes if trains else evaluation_shapes)(num_stages)
    microbatch_bytes = list(map(int, sizes.split(","))) if sizes else [1] * num_microbatches
    orders = order.split("/") if order else [""] * num_stages
    return [
        make_core(
            shape,
            tasks(own.replace(",", " ")) if own else hint,
            microbatch_bytes=microbatch_bytes,
            budget_bytes=int(budget) if budget else None,
            launch_ahead=int(options.get("launch_ahead", 0)),
            deterministic=options.get("deterministic", "yes") == "yes",
            stall_timeout_ns=100 * MS,
        )
        for shape, own in zip(shapes, orders, strict=True)
    ]


class _Runner:
    def __init__(self):
        self._cores = []
        self._now_ns = 0
        self._on_the_way = deque()

    def run(self, line):
        name, *words = line.split()
        self._now_ns += MS
        return list(getattr(self, f"_{name}")(*words))

    def _stages(self, *words):
        self._cores = _build(**dict(word.split("=", 1) for word in words))
        return ["ok"]

    def _start(self):
        for stage in reversed(range(len(self._cores))):
            yield from self._handle(stage, StepStarted())

    def _finish(self, stage, count=1):
        for _ in range(int(count)):
            task = self._cores[int(stage)].in_flight[0]
            yield from self._handle(int(stage), KernelFinished(task=task))

    def _deliver(self, *bundle):
        self._drop(*bundle)
        return self._forge(*bundle)

    def _repeat(self, *bundle):
        assert self._parse(*bundle) in self._on_the_way, f"{bundle} is not on its way"
        return self._forge(*bundle)

    def _drop(self, *bundle):
        self._on_the_way.remove(self._parse(*bundle))
        return []

    def _lose(self, *bundle):
        self._drop(*bundle)
        stage, payload, microbatch = self._parse(*bundle)
        event = TransferFailed(payload=payload, microbatch=microbatch, reason="no route")
        return self._handle(stage, event)

    def _forge(self, *bundle):
        stage, payload, microbatch = self._parse(*bundle)
        before = self._cores[stage].duplicates
        yield from self._handle(stage, InputArrived(payload=payload, microbatch=microbatch))
        if self._cores[stage].duplicates > before:
            yield f"{stage}: duplicates {self._cores[stage].duplicates}"

    def _claim(self, stage, task):
        return self._handle(int(stage), KernelFinished(task=Task.parse(task)))

    def _wait(self, ms):
        self._now_ns += int(ms) * MS
        for stage in range(len(self._cores)):
            yield from self._handle(stage, Tick())

    def _settle(self):
        moved = True
        while moved:
            moved = False
            for stage, core in enumerate(self._cores):
                if core.in_flight and not core.failed:
                    moved = True
                    yield from self._handle(stage, KernelFinished(task=core.in_flight[0]))
            for _ in range(len(self._on_the_way)):
                moved = True
                stage, payload, microbatch = self._on_the_way.popleft()
                yield from self._handle(stage, InputArrived(payload=payload, microbatch=microbatch))

    def _describe(self, stage):
        return self._cores[int(stage)].describe(self._now_ns).splitlines()

    def _handle(self, stage, event):
        core = self._cores[stage]
        try:
            instructions = core.handle(event, self._now_ns)
        except ProtocolError as error:
            instructions = []
            yield f"{stage}: {type(error).__name__}: {error}"
        check_invariants(core)
        for instruction in instructions:
            yield from f"{stage}: {instruction}".splitlines()
            if isinstance(instruction, Send):
                to = stage + 1 if instruction.payload is Payload.ACTIVATION else stage - 1
                self._on_the_way.append((to, instruction.payload, instruction.microbatch))

    def _parse(self, stage, payload, microbatch):
        return int(stage), Payload(payload), int(microbatch)
