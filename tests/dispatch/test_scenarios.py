"""Runs the scenarios beside this file; see `support.scenario` for their language.

To accept new output, run with RRFP_REWRITE_SCENARIOS=1 and review the diff.
"""

import os
from pathlib import Path

import pytest
from support.scenario import rerun

SCENARIOS = sorted((Path(__file__).parent / "scenarios").glob("*.txt"))


@pytest.mark.parametrize("path", SCENARIOS, ids=lambda path: path.stem)
def test_scenario_gives_the_reviewed_output(path):
    expected = path.read_text(encoding="utf-8")
    actual = rerun(expected)
    if os.environ.get("RRFP_REWRITE_SCENARIOS") == "1":
        path.write_text(actual, encoding="utf-8")
    else:
        assert actual == expected


def test_scenarios_are_there():
    assert len(SCENARIOS) >= 8
