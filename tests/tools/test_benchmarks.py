"""The benchmark runs, and fails where a goal is missed; its numbers are not for tests."""

import json

import pytest

from .benchmarks import __main__ as benchmarks
from .benchmarks.results import GOALS, Results

pytestmark = pytest.mark.slow


def test_a_quick_run_measures_every_goal(tmp_path, capsys):
    file = tmp_path / "figures.json"
    assert benchmarks.main(["--quick", "--json", str(file)]) == 0
    written = json.loads(file.read_text())
    assert {"jax", "python", "device", "cores"} <= written["machine"].keys()
    found = Results()
    for figure in written["figures"]:
        found.add(**figure)
    assert all(found.ratio(goal) is not None for goal in GOALS)
    assert all(figure["value"] > 0 for figure in written["figures"] if figure["unit"] in ("us", "ms", "s", "calls"))


def test_only_chooses_rows(capsys):
    benchmarks.main(["--quick", "--only", "eager forward"])
    assert "eager forward" in (out := capsys.readouterr().out)
    assert "eager gradient" not in out.split("Goals:")[0]


@pytest.mark.parametrize(("time", "status"), [(1.0, 0), (3.0, 1)])
def test_the_command_fails_where_a_goal_is_missed(time, status, monkeypatch, capsys):
    def contest(effort, results, only):
        results.add("trace, 50 layers", "PyLayer", time, "ms")
        results.add("trace, 50 layers", "custom_vjp", 1.0, "ms")

    monkeypatch.setattr(benchmarks, "contest", contest)
    assert benchmarks.main([]) == status
    assert ("✗" in capsys.readouterr().out) == bool(status)
