"""Every key of a config as Markdown: what ``rrfp config`` prints and the documents hold."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pydantic.fields import FieldInfo

from rrfp_jax.config import RunConfig, Section


def as_markdown() -> str:
    """One table per section: key, default, meaning."""
    return "\n".join(_lines()) + "\n"


def _lines() -> Iterator[str]:
    yield "# Configuration"
    yield ""
    yield "A config is a YAML 1.2 file with these sections; every key has a default. On the"
    yield "command line, `section.key=value` overrides a key: `rrfp train CONFIG train.steps=40`."
    yield "Unknown keys are refused, with the nearest one that exists. This page is what"
    yield "`rrfp config` prints."
    defaults = RunConfig().model_dump(mode="json")
    for name, field in RunConfig.model_fields.items():
        section = field.annotation
        assert isinstance(section, type)
        assert issubclass(section, Section)
        yield ""
        yield f"## {name}"
        yield ""
        yield _text(field)
        yield ""
        yield "| key | default | meaning |"
        yield "| --- | --- | --- |"
        for key, inner in section.model_fields.items():
            yield f"| `{name}.{key}` | `{_yaml(defaults[name][key])}` | {_text(inner)} |"


def _text(field: FieldInfo) -> str:
    return " ".join((field.description or "").split())


def _yaml(value: Any) -> str:
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)
