"""What was measured: printed as it comes, compared with the goals at the end, and written to a file if asked for."""

import json
import os
import platform
from typing import Any, NamedTuple

import jax


class Figure(NamedTuple):
    """One measured figure."""

    row: str
    contestant: str
    value: float
    unit: str  # "x" for a ratio


class Goal(NamedTuple):
    """A bound on the figure of a contestant divided by that of the rule that is written by hand."""

    row: str
    contestant: str
    at_most: float


PYLAYER, BY_HAND = "PyLayer", "custom_vjp"
GOALS = [
    Goal("jit, forward + backward, 50 layers of 512x512", PYLAYER, 1.05),
    Goal("trace, 50 layers", PYLAYER, 1.5),
    Goal("trace + lower, 50 layers", PYLAYER, 1.45),
    Goal("trace, 50 layers: Python calls", PYLAYER, 1.4),
    Goal("trace, 50 once-differentiable layers: Python calls", PYLAYER, 1.5),
    *(Goal(f"trace, 50 layers without a gradient, in {maps} vmaps: Python calls", PYLAYER, 1.45) for maps in range(3)),
    Goal("trace, 50 layers", "jit(PyLayer)", 0.75),
    Goal("trace, 50 once-differentiable layers", PYLAYER, 1.6),
    Goal("eager forward, 8x8", PYLAYER, 0.2),
    Goal("eager gradient, 8x8", PYLAYER, 1.1),
]


class Results:
    """Figures in the order in which they were measured."""

    def __init__(self) -> None:
        self.figures: list[Figure] = []

    def add(self, row: str, contestant: str, value: float, unit: str) -> None:
        self.figures.append(Figure(row, contestant, value, unit))

    def value(self, row: str, contestant: str) -> float | None:
        return next((f.value for f in self.figures if f[:2] == (row, contestant)), None)

    def ratio(self, goal: Goal) -> float | None:
        value = self.value(goal.row, goal.contestant)
        other = self.value(goal.row, BY_HAND)
        return None if value is None or not other else value / other

    def missed(self, goals: list[Goal]) -> list[Goal]:
        """Print one line for each goal whose figures were measured; return those that were missed."""
        print(f"\nGoals: what PyLayer takes, relative to {BY_HAND}")
        measured = {goal: ratio for goal in goals if (ratio := self.ratio(goal)) is not None}
        for goal, ratio in measured.items():
            name = f"{goal.row}, {goal.contestant}"
            print(f"{'✓' if ratio <= goal.at_most else '✗'} {name:88}{ratio:8.3f}   at most {goal.at_most}")
        return [goal for goal, ratio in measured.items() if ratio > goal.at_most]

    def write(self, file: str) -> None:
        with open(file, "w", encoding="utf-8") as stream:
            json.dump({"machine": machine(), "figures": [f._asdict() for f in self.figures]}, stream, indent=1)


def machine() -> dict[str, Any]:
    return {
        "jax": jax.__version__,
        "python": platform.python_version(),
        "device": jax.devices()[0].device_kind,
        "cores": os.cpu_count(),
    }
