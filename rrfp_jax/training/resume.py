"""What a run goes on from: the newest checkpoint of its own, or of another run.

Beside the arrays a checkpoint of a run holds the position in the data, how many steps were
skipped, the config, and what in it decides the numbers (`RunConfig.identity`). A run that
would compute something else than the one that was saved is refused, with what differs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from rrfp_jax.checkpoint.checkpointer import Checkpointer
from rrfp_jax.checkpoint.saved import Saved
from rrfp_jax.config import RunConfig
from rrfp_jax.config.file import ConfigError
from rrfp_jax.training.trainer import SkipCount


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumption:
    """Where a run goes on.

    Attributes:
      saved: The checkpoint.
      data: The position in the data; None to begin with the data anew.
      skipped: Steps skipped so far.
      changes: What is accepted to be another than it was, in words.
    """

    saved: Saved
    data: dict[str, Any] | None
    skipped: SkipCount
    changes: tuple[str, ...]


def describe(config: RunConfig, data: Mapping[str, Any], skipped: SkipCount) -> dict[str, Any]:
    """What is saved beside the state."""
    return {
        "identity": config.identity(),
        "data": dict(data),
        "skipped": asdict(skipped),
        "config": config.model_dump(mode="json"),
    }


def describe_import(config: RunConfig, source: str) -> dict[str, Any]:
    """What is saved beside weights from elsewhere, which only have to be the model's."""
    identity = {key: v for key, v in config.identity().items() if key.startswith("model.")}
    return {"identity": identity, "skipped": asdict(SkipCount()), "imported_from": source}


def find(
    config: RunConfig, checkpointer: Checkpointer, position: Mapping[str, Any]
) -> Resumption | None:
    """What the run goes on from; None if it begins.

    Args:
      config: Of the run.
      checkpointer: Of its own folder.
      position: In the run's data, where nothing has been read yet.

    Raises:
      ConfigError: What is saved is of a run with other numbers, or
        `checkpoint.restore_from` has no checkpoint.
      CheckpointError: There are checkpoints, but none is intact.
    """
    saved, other = checkpointer.newest(), config.checkpoint.restore_from
    if saved is None and other is not None:
        saved = checkpointer.newest(other)
        if saved is None:
            raise ConfigError(
                f"checkpoint.restore_from={other} must be a run directory, a folder of "
                "checkpoints or one of them; there is no checkpoint."
            )
    if saved is None:
        return None
    if "identity" not in saved.extra:
        raise ConfigError(
            f"{saved.folder} was not saved by rrfp train, and says nothing of its data or config; "
            "restore it with rrfp_jax.Checkpointer."
        )
    was, own, data = saved.extra["identity"], config.identity(), saved.extra.get("data")
    if "imported_from" in saved.extra:
        own = {key: own.get(key) for key in was}
    changes = [
        f"{key} was {was.get(key)!r}, is {own.get(key)!r}"
        for key in dict.fromkeys([*was, *own])
        if was.get(key) != own.get(key)
    ]
    moved = {
        key: value
        for key, value in (data or {}).items()
        if key != "next_index" and value != position[key]
    }
    changes += [f"data: {key} was {value!r}, is {position[key]!r}" for key, value in moved.items()]
    if changes and not config.checkpoint.accept_changes:
        listed = "\n".join(f"  {each}" for each in changes)
        raise ConfigError(
            f"{saved.folder} was saved by a run with other numbers:\n{listed}\n"
            "go on with what was saved, begin anew in another run.dir, or accept the change with "
            "checkpoint.accept_changes=true."
        )
    return Resumption(
        saved=saved,
        data=None if moved else data,
        skipped=SkipCount(**saved.extra["skipped"]),
        changes=tuple(changes),
    )
