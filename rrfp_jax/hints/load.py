"""From what a config or a caller gives to a hint."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Iterable
from types import ModuleType

from rrfp_jax.hints.hint import Hint
from rrfp_jax.hints.shipped import SHIPPED


def load_hint(source: str | Hint) -> Hint:
    """Finds a hint.

    Args:
      source: The name of a shipped hint, ``module:object`` for your own (an instance of
        `Hint`, or a subclass that takes no arguments), or a hint.

    Raises:
      ValueError: There is no such hint, or what is there is not one.
    """
    if isinstance(source, Hint):
        return source
    if not isinstance(source, str):
        raise ValueError(
            "a hint must be a name, 'module:object' or an instance of rrfp_jax.Hint, got "
            f"{source!r}{_create_it(source)}."
        )
    module_name, colon, object_name = source.partition(":")
    if not colon:
        if source not in SHIPPED:
            raise ValueError(
                f"expected a hint, one of {', '.join(SHIPPED)} or 'module:object', got "
                f"{source!r}{_nearest(source, SHIPPED)}."
            )
        return SHIPPED[source]
    return _as_hint(_attribute(_module(module_name, source), object_name, source), source)


def _module(name: str, source: str) -> ModuleType:
    if not name or name.startswith("."):
        raise ValueError(
            f"hint {source!r} must name a module in front of the colon, as in "
            "'my_package.my_hints:MyHint'."
        )
    try:
        return importlib.import_module(name)
    except Exception as error:  # a user's module may raise anything
        raise ValueError(
            f"hint {source!r} is to come from module {name!r}, which does not import "
            f"({type(error).__name__}: {error}); install it or put its folder on PYTHONPATH."
        ) from error


def _attribute(module: ModuleType, name: str, source: str) -> object:
    try:
        return getattr(module, name)
    except AttributeError:
        raise ValueError(
            f"hint {source!r} names {name!r}, which module {module.__name__!r} does not have"
            f"{_nearest(name, vars(module))}."
        ) from None


def _as_hint(found: object, source: str) -> Hint:
    if isinstance(found, type) and issubclass(found, Hint):
        try:
            found = found()
        except TypeError as error:
            raise ValueError(
                f"hint {source!r} is a class that could not be created without arguments "
                f"({error}); name an instance instead."
            ) from error
    if not isinstance(found, Hint):
        raise ValueError(
            f"hint {source!r} must be an rrfp_jax.Hint, got {type(found).__name__}; derive a "
            "class from rrfp_jax.Hint and define `name` and `rank`."
        )
    return found


def _create_it(source: object) -> str:
    is_class = isinstance(source, type) and issubclass(source, Hint)
    return "; create an instance of it" if is_class else ""


def _nearest(name: str, names: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, names, n=1)
    return f" (nearest: {near[0]!r})" if near else ""
