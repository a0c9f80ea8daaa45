"""The benchmark runs; its numbers are not for tests."""

import re

import pytest

from . import __main__ as benchmarks

pytestmark = pytest.mark.slow


def test_quick_run_fills_every_row(capsys):
    benchmarks.main(["--quick"])
    lines = capsys.readouterr().out.splitlines()
    assert sum(bool(re.search(r"\d (us|ms) ", line)) for line in lines) == len(benchmarks.ROWS)
    ratios = [float(r) for line in lines for r in re.findall(r"([\d.]+) \[", line)]
    assert len(ratios) >= 2 * len(benchmarks.ROWS)
    assert min(ratios) >= 0


def test_only_chooses_rows(capsys):
    benchmarks.main(["--quick", "--only", "eager forward"])
    assert sum("eager" in line for line in capsys.readouterr().out.splitlines()) == 1
