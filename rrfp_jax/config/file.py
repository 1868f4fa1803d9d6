"""Reads configs: YAML 1.2 and overrides in, a `RunConfig` or one complete error out."""

from __future__ import annotations

import difflib
import io
import reprlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError
from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.nodes import MappingNode, Node

from rrfp_jax.config import RunConfig

# Where each key was given, for messages: ("train", "steps") -> "run.yaml:3".
Places = dict[tuple[str, ...], str]

_short = reprlib.Repr()  # a value in a message takes a line at most
_short.maxstring = _short.maxother = 80


class ConfigError(ValueError):
    """A config that cannot be used; the message lists everything that is wrong with it."""


def load_config(path: str | Path | None, overrides: Sequence[str] = ()) -> RunConfig:
    """Reads a config.

    Args:
      path: A YAML 1.2 file; None for the defaults.
      overrides: ``section.key=value`` each; later ones win, and all win over the file.

    Raises:
      ConfigError: There is no such file, it is no YAML, or values are not as they must
        be. The message names each key, where it was given, the value, what was expected
        and, for a key that does not exist, the nearest one that does.
    """
    tree, places = ({}, {}) if path is None else _read(Path(path))
    for override in overrides:
        _apply(tree, places, override)
    try:
        return RunConfig.model_validate(tree)
    except ValidationError as error:
        problems = "\n".join(f"  {_problem(each, places)}" for each in error.errors())
        raise ConfigError(f"{path or 'the config'} cannot be used:\n{problems}") from None


def dump_config(config: RunConfig) -> str:
    """The config as YAML, every key written out; `load_config` reads it back equal."""
    out = io.StringIO()
    yaml = YAML(typ="safe", pure=True)
    for name in ("default_flow_style", "sort_base_mapping_type_on_output"):
        setattr(yaml, name, False)  # the library types both as None
    yaml.dump(config.model_dump(mode="json"), out)
    return out.getvalue()


def _read(path: Path) -> tuple[dict[str, Any], Places]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(f"{path} cannot be read as a config: {reason}.") from None
    tree = _parse(text, str(path))
    if tree is None:
        return {}, {}
    if not isinstance(tree, dict):
        raise ConfigError(f"{path} must hold sections such as `train:`, got {type(tree).__name__}.")
    # A section whose keys are all commented out is an empty one.
    sections = {name: {} if section is None else section for name, section in tree.items()}
    return sections, _places(text, path.name)


def _places(text: str, file_name: str) -> Places:
    places: Places = {}
    for section, inner in _entries(YAML(typ="safe", pure=True).compose(text)):
        name = str(section.value)
        places[name,] = f"{file_name}:{section.start_mark.line + 1}"
        for key, _ in _entries(inner):
            places[name, str(key.value)] = f"{file_name}:{key.start_mark.line + 1}"
    return places


def _entries(node: Node) -> list[tuple[Node, Node]]:
    return node.value if isinstance(node, MappingNode) else []


def _parse(text: str, where: str) -> Any:
    # Safe and pure: no tag makes an object, and a key that comes twice is an error.
    yaml = YAML(typ="safe", pure=True)
    try:
        return yaml.load(text)
    except MarkedYAMLError as error:
        mark = error.problem_mark
        # An override is one line, of which the number says nothing.
        line = f":{mark.line + 1}" if mark is not None and "\n" in text else ""
        first = (error.problem or "no YAML").strip().splitlines()[0]
        raise ConfigError(f"{where}{line} is not valid: {first}.") from None
    except YAMLError as error:
        raise ConfigError(f"{where} is not valid YAML: {error}.") from None


def _apply(tree: dict[str, Any], places: Places, override: str) -> None:
    key, equals, text = override.partition("=")
    path = tuple(key.split("."))
    if not equals or not all(path):
        raise ConfigError(
            f"an override must be section.key=value, such as train.steps=40, got {override!r}."
        )
    place = tree
    for section in path[:-1]:
        inner = place.setdefault(section, {})
        if not isinstance(inner, dict):
            raise ConfigError(f"override {override!r}: {section} is not a section.")
        place = inner
    place[path[-1]] = _parse(text, f"override {override!r}")
    for replaced in [each for each in places if each[: len(path)] == path]:
        del places[replaced]
    places[path] = "on the command line"


def _problem(error: Mapping[str, Any], places: Places) -> str:
    path = tuple(str(part) for part in error["loc"])
    given = (places[path[:end]] for end in range(len(path), 0, -1) if path[:end] in places)
    where = next((f" ({place})" for place in given), "")
    subject = f"{'.'.join(path)}{where}: " if path else ""
    value = error.get("input")
    got = _short.repr(value)
    if error["type"] == "extra_forbidden":
        return f"{subject}there is no such key (value {got}){_nearest(path)}"
    if error["type"] == "model_type":
        example = next(key[-1] for key in _known_keys(RunConfig) if key[:-1] == path)
        return f"{subject}must be a section, with keys such as `{example}:`, got {got}"
    message = error["msg"].removeprefix("Value error, ").replace("Input should", "must", 1)
    message = message[0].lower() + message[1:].removesuffix(".")
    # What concerns several keys names their values itself.
    if isinstance(value, Mapping | BaseModel) or message.endswith(f"got {value!r}"):
        return f"{subject}{message}"
    return f"{subject}{message}, got {got}"


def _nearest(path: Sequence[str]) -> str:
    """The key that was probably meant: beside the unknown one, or in another section."""
    known = _known_keys(RunConfig)
    beside = [key for key in known if key[:-1] == tuple(path[:-1])]
    for names in (
        {key[-1]: key for key in beside},
        {key[-1]: key for key in known},
    ):
        near = difflib.get_close_matches(path[-1], names, n=1)
        if near:
            return f"; did you mean {'.'.join(names[near[0]])}?"
    return f"; expected one of {', '.join('.'.join(key) for key in beside)}"


def _known_keys(model: type[BaseModel], prefix: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    keys = []
    for name, field in model.model_fields.items():
        keys.append((*prefix, name))
        inner = field.annotation
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            keys.extend(_known_keys(inner, (*prefix, name)))
    return keys
