"""The benchmark runs; its numbers are not for tests."""

import json
import re

import pytest

from .benchmarks import __main__ as benchmarks
from .benchmarks import results

# torch's own: what it imports to compile uses what it calls deprecated.
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")]


def test_quick_run_fills_every_row(capsys, tmp_path):
    file = tmp_path / "figures.json"
    benchmarks.main(["--quick", "--json", str(file)])
    text = capsys.readouterr().out
    before, summary = text.split("Goals:")
    layers = before.split("Models whose")[0].splitlines()
    assert sum(bool(re.search(r"\d (us|ms) ", line)) for line in layers) == len(benchmarks.ROWS)
    ratios = [float(r) for line in layers for r in re.findall(r"([\d.]+) \[", line)]
    assert len(ratios) >= 2 * len(benchmarks.ROWS)
    assert min(ratios) >= 0
    # Every goal is measured, and every table is in the file.
    assert len(re.findall(r"^[✓✗] ", summary, re.MULTILINE)) == len(results.GOALS)
    written = json.loads(file.read_text())
    assert {"jax", "python", "device", "cores"} <= written["machine"].keys()
    assert {figure["table"] for figure in written["figures"]} == {benchmarks.ONE_LAYER, *benchmarks.TABLES}


def test_only_chooses_rows(capsys):
    benchmarks.main(["--quick", "--only", "eager forward"])
    lines = capsys.readouterr().out.split("Goals:")[0].splitlines()
    assert sum("eager" in line for line in lines) == 1


def test_goals_compare_figures():
    found = results.Results()
    found.add("layer", "trace", "PyLayer", 3.0, "ms")
    found.add("layer", "trace", "custom_vjp", 2.0, "ms")
    assert found.ratio(results.Goal("layer", "trace", "PyLayer", "custom_vjp", 1.0)) == 1.5
    assert found.ratio(results.Goal("layer", "trace", "PyLayer", None, 1.0)) == 3.0
    assert found.ratio(results.Goal("layer", "another", "PyLayer", None, 1.0)) is None
