"""``rrfp checkpoint``: what is saved, whether it is intact, and how it gets out and in."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import SingleDeviceSharding
from rich.console import Console
from rich.table import Table

from rrfp_jax.checkpoint import arrays, saved
from rrfp_jax.checkpoint.errors import CheckpointError
from rrfp_jax.checkpoint.folder import CHECKPOINTS, CheckpointFolder, measure, problems, size_bytes
from rrfp_jax.checkpoint.folder import find as find_folder
from rrfp_jax.checkpoint.saved import OPTIMIZER, PARAMETERS, Saved
from rrfp_jax.checkpoint.weights import load_weights, save_weights
from rrfp_jax.commands.verdict import Verdict
from rrfp_jax.config import RunConfig
from rrfp_jax.models import gpt
from rrfp_jax.stages.state import leaf_paths
from rrfp_jax.step.named import NamedArray
from rrfp_jax.training import optimizer, resume


def ls(path: Path, console: Console) -> Verdict:
    """Lists the checkpoints of a run; of each, whether all its files have their length."""
    folder, steps = _steps(path)
    table = Table("step", "size", "saved", "health", box=None, header_style="bold")
    rows = []
    for step in steps:
        wrong = [*problems(folder.at(step), lengths_only=True)]
        size, when = size_bytes(folder.at(step)), folder.at(step).stat().st_mtime
        rows.append({"step": step, "size_bytes": size, "problems": wrong})
        health = "; ".join(wrong) or "complete"
        table.add_row(
            str(step),
            f"{size / 1e6:.2f} MB",
            time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(when)),
            health,
        )
    console.print(table)
    bad = sum(bool(row["problems"]) for row in rows)
    return Verdict(
        passed=not bad,
        text=f"{len(rows) - bad} of {len(rows)} checkpoints in {folder.path} are complete; "
        "rrfp checkpoint verify reads every byte",
        figures={"checkpoints": rows},
    )


def verify(path: Path, console: Console) -> Verdict:
    """Reads every file of every checkpoint, and compares it with its checksum."""
    folder, steps = _steps(path)
    rows = []
    for step in steps:
        wrong = [*problems(folder.at(step))]
        rows.append({"step": step, "problems": wrong})
        words = "; ".join(wrong) or "intact"
        console.print(f"step {step}: {words}", style="red" if wrong else None)
    bad = sum(bool(row["problems"]) for row in rows)
    return Verdict(
        passed=not bad,
        text=f"{len(rows) - bad} of {len(rows)} checkpoints in {folder.path} are intact",
        figures={"checkpoints": rows},
    )


def export(path: Path, target: Path, *, form: str, console: Console) -> None:
    """Writes the parameters of the newest intact checkpoint for use without a pipeline.

    Args:
      path: A run, a folder of checkpoints, or one of them.
      target: New: a folder for ``orbax``, a file for ``safetensors``.
      form: ``orbax`` or ``safetensors``.
      console: Where to say what was written.

    Raises:
      CheckpointError: Nothing is intact, or the target is there already.
    """
    if target.exists():
        raise CheckpointError(f"{target} is there already; give a new name.")
    found = _newest_intact(path, console)
    values = arrays.read_whole(found.folder / PARAMETERS, found.parameters)
    target.parent.mkdir(parents=True, exist_ok=True)
    if form == "safetensors":
        save_weights(target, values)
    else:
        tree: dict[str, Any] = {}
        for name, facts in found.parameters.items():
            node = tree
            for key in facts.path[:-1]:
                node = node.setdefault(key, {})
            node[facts.path[-1]] = values[name]
        with ocp.PyTreeCheckpointer() as writer:
            writer.save(target.absolute(), tree)
    count = sum(value.size for value in values.values())
    console.print(f"{count:,} parameters of step {found.step} written to {target} as {form}")


def import_weights(weights: Path, config: RunConfig, folder: Path, console: Console) -> None:
    """Makes a checkpoint of step 0 from public weights, for a run to go on from.

    Args:
      weights: A safetensors file or a folder of them.
      config: Of the run; its model has to be that of the weights.
      folder: The run directory; may not hold checkpoints.
      console: Where to say what was written.

    Raises:
      CheckpointError: The weights are not the model's, or there are checkpoints already.
    """
    if config.model.kind != "gpt":
        raise CheckpointError(
            f"public weights are a transformer's (model.kind=gpt), got model.kind="
            f"{config.model.kind}; give the config of the model that they are of."
        )
    target = CheckpointFolder(folder / CHECKPOINTS)
    if target.steps():
        raise CheckpointError(f"{target.path} has checkpoints already; give another run.dir.")
    init_fn, _ = gpt.build(config.model, [config.model.num_layers])
    shapes = jax.eval_shape(init_fn, jax.random.key(0))
    wanted = {
        ".".join(path): leaf.shape
        for path, leaf in zip(leaf_paths(shapes), jax.tree.leaves(shapes), strict=True)
    }
    values = load_weights(weights, wanted)
    params = jax.tree.unflatten(
        jax.tree.structure(shapes), [jnp.asarray(values[name]) for name in wanted]
    )
    opt_state = optimizer.build(config.optimizer, config.train.steps).init(params)
    items = {PARAMETERS: _named(params), OPTIMIZER: _named(opt_state)}
    step, token = 0, "import"
    written = target.temporary(step, token)
    target.discard(step, token)
    for item, named in items.items():
        arrays.write(written / item, 0, arrays.snapshot(named))
        arrays.finish(written / item, arrays.facts_of(named).values())
    saved.write(
        written,
        saved.metadata(
            step=step,
            updates=0,
            key=jax.random.key(config.train.seed),
            parameters=arrays.facts_of(items[PARAMETERS]),
            optimizer=arrays.facts_of(items[OPTIMIZER]),
            extra=resume.describe_import(config, str(weights)),
        ),
    )
    target.commit(step, token, measure(written))
    count = sum(value.size for value in values.values())
    console.print(
        f"{count:,} parameters from {weights} written to {target.at(step)}; train them with\n"
        f"  rrfp train CONFIG run.dir={folder}"
    )


def _named(tree: Any) -> list[NamedArray]:
    place = SingleDeviceSharding(jax.devices()[0])
    return [
        NamedArray(
            path=path,
            aval=jax.ShapeDtypeStruct(np.shape(leaf), leaf.dtype),
            sharding=place,
            stage=0,
            value=leaf,
        )
        for path, leaf in zip(leaf_paths(tree), jax.tree.leaves(tree), strict=True)
    ]


def _steps(path: Path) -> tuple[CheckpointFolder, list[int]]:
    folder, one = find_folder(path)
    steps = one or folder.steps()
    if not steps:
        raise CheckpointError(
            f"{path} must be a run directory, a folder of checkpoints or one of them; there is no "
            "checkpoint."
        )
    return folder, steps


def _newest_intact(path: Path, console: Console) -> Saved:
    folder, steps = _steps(path)
    for step in reversed(steps):
        wrong = [*problems(folder.at(step))]
        if not wrong:
            return saved.read(folder.at(step))
        console.print(f"step {step} is passed over: {'; '.join(wrong)}", style="yellow")
    raise CheckpointError(f"no checkpoint in {folder.path} is intact.")
