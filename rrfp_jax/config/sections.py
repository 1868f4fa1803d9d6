"""The sections of a config: every key, its type, its default, its limits."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    model_validator,
)

from rrfp_jax.budget import ActivationBudget
from rrfp_jax.variability.model import LONG_TASKS
from rrfp_jax.variability.slowdown import Slowdown

Count = Annotated[int, Field(ge=1)]
Index = Annotated[int, Field(ge=0)]
Seed = Annotated[int, Field(ge=0, lt=2**32)]  # the words that jax makes a key of have 32 bits
Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Sigma = Annotated[float, Field(ge=0, le=5)]


def _as_tuple(value: Any) -> Any:
    """YAML has lists only; a config is frozen and has tuples."""
    return tuple(value) if isinstance(value, list) else value


def _as_path(value: Any) -> Any:
    if value is None or isinstance(value, Path):
        return value
    if not isinstance(value, str) or not value:
        raise ValueError("must be the path of a folder")
    return Path(value)


def _as_file(value: Any) -> Any:
    if value is None or isinstance(value, Path):
        return value
    if not isinstance(value, str) or not value:
        raise ValueError("must be the path of a file")
    return Path(value)


def _as_slowdowns(value: Any) -> Any:
    """Whole numbers as keys; a config that is written as JSON has them as text."""
    if not isinstance(value, Mapping):
        raise ValueError("must be slowdowns by number, such as {0: 1.5x, 3: 10ms}")
    found = {}
    for key, slowdown in value.items():
        if isinstance(key, bool) or not str(key).isdecimal():
            raise ValueError(f"must have numbers from 0 as keys, got {key!r}")
        found[int(key)] = Slowdown.parse(slowdown)
    return found


Counts = Annotated[tuple[Count, ...], BeforeValidator(_as_tuple)]
Budget = Annotated[
    ActivationBudget,
    BeforeValidator(ActivationBudget.parse),
    PlainSerializer(lambda budget: budget.limit_bytes or str(budget)),
]
TableFile = Annotated[
    Path | None, BeforeValidator(_as_file), PlainSerializer(lambda p: p and str(p))
]
Slow = Annotated[Slowdown, BeforeValidator(Slowdown.parse), PlainSerializer(str)]
SlowOnes = Annotated[
    Mapping[int, Slowdown],
    BeforeValidator(_as_slowdowns),
    PlainSerializer(lambda slow: {index: str(each) for index, each in slow.items()}),
]


class Section(BaseModel):
    """A frozen, strict part of a config."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        use_attribute_docstrings=True,
        arbitrary_types_allowed=True,
    )


class RunSection(Section):
    """Where a run goes and what it records."""

    dir: Annotated[
        Path | None, BeforeValidator(_as_path), PlainSerializer(lambda p: p and str(p))
    ] = None
    """The run directory, relative to where the command is started. A run that is there
    already goes on from its newest checkpoint. By default
    runs/<name of the config>-<date and time>."""

    trace_every: Index = 10
    """Trace one step in so many; 0 for none."""

    compilation_cache: bool = True
    """Keep compiled programs in ~/.cache/rrfp_jax, so that the next run starts at once."""

    eval_every: Index = 0
    """Evaluate the held-out microbatches after so many steps; 0 for after the last alone."""


class ModelConfig(Section):
    """A decoder-only transformer, or stages that are emulated."""

    kind: Literal["gpt", "emulated"] = "gpt"
    """Which model. Emulated stages have one small matrix each, and their tasks take as long as
    a table says; of the keys below table, workload, unit_s, seed and d_model count alone."""

    table: TableFile = None
    """Of emulated stages: a file that says how long every task takes, see docs/variability.md."""

    workload: Literal["uniform", "jitter", "lm", "multimodal"] | None = None
    """Of emulated stages, instead of a file: what the table is drawn for."""

    unit_s: Positive = 0.01
    """Of a workload: what F, B and W take each, on average."""

    seed: Index = 0
    """Of a workload: which table is drawn."""

    vocab_size: Count = 256
    """Tokens; 256 for bytes."""

    d_model: Count = 128
    """Width."""

    num_layers: Count = 4
    """Blocks of attention and feed-forward."""

    num_heads: Count = 4
    """Query heads of a block."""

    num_kv_heads: Count = 2
    """Key and value heads; each is shared by num_heads / num_kv_heads query heads."""

    d_ff: Count = 384
    """Width of the feed-forward."""

    tie_embeddings: bool = True
    """Whether the output uses the table of the input embedding."""

    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of activations that are zeroed in training."""

    dtype: Literal["float32", "bfloat16"] = "float32"
    """Compute dtype; parameters, gradients and optimizer state are float32 always."""

    rope_theta: Positive = 10_000.0
    """Base of the rotary frequencies."""

    norm_eps: Positive = 1e-6
    """Added to the mean square in a norm."""

    layers_per_stage: Counts | None = None
    """Blocks of each stage; by default as even as can be, the first stages taking more."""

    remat: Literal[
        "dots_and_weight_operands_saveable",
        "dots_with_no_batch_dims_saveable",
        "nothing_saveable",
        "everything_saveable",
    ] = "dots_and_weight_operands_saveable"
    """What a forward keeps for its backward, as a jax.checkpoint policy, by default with the
    operands of weight gradients beside it; the rest is computed again."""

    @model_validator(mode="after")
    def _check(self) -> ModelConfig:
        given = [name for name in ("table", "workload") if getattr(self, name) is not None]
        if self.kind == "emulated":
            if len(given) != 1:
                raise ValueError(
                    "kind=emulated must have a table or a workload, one of them, got "
                    f"{' and '.join(given) or 'none'}; give for example workload=jitter"
                )
            return self
        if given:
            raise ValueError(f"{given[0]} goes with kind=emulated, got kind={self.kind}")
        if self.d_model % self.num_heads or self.d_model // self.num_heads % 2:
            raise ValueError(
                f"d_model={self.d_model} must split over num_heads={self.num_heads} into heads of "
                "an even width (rotary positions turn pairs)"
            )
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads={self.num_heads} must be a multiple of num_kv_heads={self.num_kv_heads}"
            )
        return self


class DataConfig(Section):
    """What is read, and how it becomes microbatches."""

    kind: Literal["stdlib_text"] = "stdlib_text"
    """Which data: the source of Python's standard library, byte by byte."""

    buckets: Counts = (32, 64, 128)
    """Padded lengths, ascending. One program is compiled per task, stage and bucket."""

    rows_per_microbatch: Count = 8
    """Rows of every microbatch."""

    max_bytes: Count = 4_000_000
    """Most bytes of the corpus, both sides together."""

    held_out_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.05
    """Share of the files, and of max_bytes, that is never trained on."""

    held_out_microbatches: Index = 16
    """How many held-out microbatches an evaluation takes; 0 for no evaluation."""

    @model_validator(mode="after")
    def _check(self) -> DataConfig:
        if not self.buckets or list(self.buckets) != sorted(set(self.buckets)):
            raise ValueError(
                f"buckets must be ascending lengths without repeats, got {list(self.buckets)}"
            )
        return self


class MeshConfig(Section):
    """How devices are used: replicas x stages x data x tensor of them, over all processes."""

    stages: Count = 4
    """Stages of a pipeline."""

    replicas: Count = 1
    """Copies of the pipeline, each with its own microbatches and its own order; their
    gradients are summed once a step."""

    data: Count = 1
    """Devices of a stage that share out the rows of a microbatch."""

    tensor: Count = 1
    """Devices of a stage that share out its parameters."""

    @property
    def num_devices(self) -> int:
        """Devices of the job."""
        return self.stages * self.replicas * self.data * self.tensor


class ScheduleConfig(Section):
    """In which order a stage runs what is ready."""

    hint: Annotated[str, Field(min_length=1)] = "bfw"
    """What ranks ready tasks: see `rrfp hints`; or a hint of your own as module:object."""

    mode: Literal["readiness", "fixed"] = "readiness"
    """Run the best-ranked ready task, or wait for the hint's own order."""

    microbatches: Count = 8
    """Microbatches of a step, for each replica."""

    activation_budget: Budget = ActivationBudget(multiple=2.0)
    """What admitted microbatches may hold on each stage: a multiple of what 1F1B holds on the
    stage that it fills most (2.0x), or bytes (512MiB)."""

    launch_ahead: Index = 1
    """Kernels queued behind the running one."""

    deterministic: bool = True
    """Accumulate gradients in microbatch order: bitwise the same whatever the timing."""

    agreement: Literal["leader", "allgather"] = "leader"
    """How processes that share a stage choose its next task, where its kernels hold
    collectives between them: one of them leads, or all propose until they agree."""

    stall_timeout_s: Positive = 120.0
    """A stage that hears nothing for so long fails with a report; above what a kernel takes."""


class OptimizerConfig(Section):
    """How parameters are updated."""

    name: Literal["adamw", "adam", "sgd", "lion"] = "adamw"
    """The update rule."""

    learning_rate: Positive = 1e-3
    """Peak of the schedule."""

    schedule: Literal["constant", "cosine", "linear"] = "cosine"
    """What follows the warm-up."""

    warmup_steps: Index = 0
    """Optimizer steps from zero to the peak, in a straight line."""

    final_fraction: Fraction = 0.1
    """Share of the peak that is left at the last step of cosine and linear."""

    weight_decay: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    """Decoupled; on matrices alone."""

    b1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Decay of the first moment."""

    b2: Annotated[float, Field(ge=0, lt=1)] = 0.95
    """Decay of the second moment."""

    eps: Positive = 1e-8
    """Added to the root of the second moment."""

    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Of sgd."""

    max_grad_norm: Positive | None = 1.0
    """Clip the whole gradient, over all stages, to this 2-norm; null for no clipping."""

    shard_over_replicas: bool = False
    """Keep a part of the optimizer's state on each replica instead of all of it on every
    one (ZeRO stage 1); the updates are the same."""

    @model_validator(mode="after")
    def _check(self) -> OptimizerConfig:
        if self.name == "adam" and self.weight_decay:
            raise ValueError(
                f"weight_decay={self.weight_decay} does not go with name=adam; use adamw"
            )
        return self


class TrainConfig(Section):
    """How long, and from which seed."""

    steps: Count = 300
    """Steps of the run."""

    seed: Seed = 0
    """Of parameters, dropout and the order of the data."""

    max_skipped: Index = 5
    """Stop after more skipped steps in a row than this."""


class CheckpointConfig(Section):
    """When a run is saved, what is kept, and where it goes on from."""

    enabled: bool = True
    """Save in run.dir/checkpoints, at the end of the run and when it is stopped too; false for
    never."""

    every_steps: Index = 0
    """Save after so many steps; 0 for not by steps."""

    every_minutes: Seconds = 10.0
    """Save after so many minutes; 0 for not by time."""

    keep_last: Count = 2
    """How many of the newest are kept."""

    keep_every: Index = 0
    """Keep those whose step is a multiple of this besides; 0 for none."""

    restore_from: Annotated[
        Path | None, BeforeValidator(_as_path), PlainSerializer(lambda p: p and str(p))
    ] = None
    """Begin with the newest checkpoint of this run directory, where run.dir has none itself."""

    accept_changes: bool = False
    """Go on although the model, the data, the batch, the seed or the optimizer is another one
    than that of the run that was saved."""

    timeout_s: Positive = 600.0
    """How long writing a checkpoint may take."""

    preempt_grace_s: Positive = 60.0
    """How long a run that is stopped (SIGTERM, Ctrl-C) may take to finish its step and to save."""

    @model_validator(mode="after")
    def _check(self) -> CheckpointConfig:
        if self.restore_from is not None and not self.enabled:
            raise ValueError(
                f"restore_from={self.restore_from} needs enabled=true: a run that goes on is saved"
            )
        return self


class TransportConfig(Section):
    """How the processes of a job talk."""

    security: Literal["curve", "none"] = "curve"
    """Encrypt and authenticate messages between processes, with keys made for each job; none
    is faster, for a network on which nobody else is."""

    peer_timeout_s: Positive = 20.0
    """A process that is not heard of for so long is given up, and the job with it."""

    start_timeout_s: Positive = 120.0
    """How long processes wait for each other to start."""

    compile_timeout_s: Positive = 1800.0
    """How long processes wait for each other to compile."""


class VariabilityConfig(Section):
    """What varies beside the kernels themselves, so as to see what a hint makes of it.

    Completions and arrivals are told late; no kernel is slowed down. By default nothing is late.
    """

    table: TableFile = None
    """A file that says how long every task takes; kernels that take longer keep their time."""

    jitter_sigma: Sigma = 0.0
    """Sigma of a log-normal factor with mean 1 on the time of every task; kernels are not made
    faster, so that below 1 it only shortens times of a table."""

    long_share: Fraction = 0.0
    """Share of tasks that take longer."""

    long_tasks: Slow = LONG_TASKS
    """How much longer these take: a factor (3x) or a time (50ms)."""

    slow_stages: SlowOnes = Field(default_factory=dict)
    """How much longer each task of some stages takes, such as {2: 1.5x, 3: 10ms}."""

    slow_processes: SlowOnes = Field(default_factory=dict)
    """The same for all stages of some processes: slow hosts."""

    compute_delay_s: Seconds = 0.0
    """Mean of a time that every task takes longer."""

    transfer_latency_s: Seconds = 0.0
    """By how much every arrival is late."""

    transfer_delay_s: Seconds = 0.0
    """Mean of what arrivals are late beside that."""

    delay_sigma: Sigma = 1.0
    """Sigma of both delays, which are log-normal; 0 for always their means."""

    seed: Index = 0
    """Of all that is drawn."""
