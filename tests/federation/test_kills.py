"""`python benchmarks/kills.py` in small: a killed run goes on as if nothing had been."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_a_killed_run_ends_as_the_run_that_nobody_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = importlib.util.spec_from_file_location("kills", Path(__file__).parents[2] / "benchmarks" / "kills.py")
    assert spec is not None and spec.loader is not None  # noqa: PT018
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "kills", module)
    spec.loader.exec_module(module)
    result = module.kills(["scaffold"], ["client_fit", "snapshot", "checkpoint"], 1)
    assert result["wrong"] == []
    assert (result["kills"], result["equal"]) == (3, 3)
    assert result["steps_done_again"] <= 3  # the one that each lands in
