"""Names and ``module:object`` become hints; anything else is told what is near."""

import sys

import pytest
from support.user_hints import Newest, newest

from rrfp_jax.hints import SHIPPED, Hint, load_hint


@pytest.mark.parametrize("name", ["bf", "bfw", "1f1b", "gpipe"])
def test_shipped_name_gives_the_hint_of_that_name(name):
    assert load_hint(name).name == name
    assert load_hint(name) is SHIPPED[name]


def test_shipped_hints_have_a_line_of_description():
    assert all(type(hint).__doc__.splitlines()[0].endswith(".") for hint in SHIPPED.values())


def test_hint_passes_through():
    assert load_hint(newest) is newest


def test_module_object_gives_the_instance():
    assert load_hint("support.user_hints:newest") is newest


def test_module_object_creates_the_class():
    assert isinstance(load_hint("support.user_hints:Newest"), Newest)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("1fb1", r"one of bfw, bf, 1f1b, gpipe or 'module:object', got '1fb1' \(nearest: '1f1b'\)"),
        ("nothing_like_it", "got 'nothing_like_it'\\.$"),
        ("no_such_module:x", "module 'no_such_module', which does not import"),
        (":x", "must name a module in front of the colon"),
        ("support.user_hints:newst", r"'newst', which .* not have \(nearest: 'newest'\)"),
        ("support.user_hints:", "names '', which module"),
        ("support.user_hints:not_a_hint", "must be an rrfp_jax.Hint, got object"),
        ("support.user_hints:NeedsArguments", "could not be created without arguments"),
        (7, "must be a name, 'module:object' or an instance of rrfp_jax.Hint, got 7"),
        (Newest, "create an instance of it"),
    ],
)
def test_what_is_no_hint_is_refused_with_the_remedy(source, message):
    with pytest.raises(ValueError, match=message):
        load_hint(source)


def test_module_that_raises_is_named_with_its_error(tmp_path, monkeypatch):
    (tmp_path / "broken_hints_module.py").write_text("1 / 0")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match="broken_hints_module.*ZeroDivisionError"):
        load_hint("broken_hints_module:x")
    assert "broken_hints_module" not in sys.modules


def test_hint_without_a_rank_cannot_be_created():
    class Nameless(Hint):
        pass

    with pytest.raises(TypeError, match="abstract"):
        Nameless()
