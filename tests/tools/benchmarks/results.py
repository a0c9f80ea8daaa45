"""What was measured: printed as it comes, compared with the goals at the end, and written to a file if asked for."""

from __future__ import annotations

import json
import os
import platform
from typing import Any, NamedTuple

import jax


class Figure(NamedTuple):
    """One measured figure."""

    table: str
    row: str
    contestant: str
    value: float
    unit: str  # "x" for a ratio


class Goal(NamedTuple):
    """A bound on the figure of one contestant divided by that of another, or on the figure itself."""

    table: str
    row: str
    contestant: str
    against: str | None  # None: the bound is on the figure itself
    at_most: float

    @property
    def name(self) -> str:
        of = f"{self.contestant} of {self.against}" if self.against else self.contestant
        return f"{self.table}: {self.row}, {of}"


PYLAYER, BY_HAND = "PyLayer", "custom_vjp"
ONE_LAYER, MODELS, TRAINING, SAVED = "layer", "models", "training", "saved"
GOALS = [
    Goal(ONE_LAYER, "jit, forward + backward, 50 layers of 512x512", PYLAYER, BY_HAND, 1.05),
    Goal(ONE_LAYER, "trace, 50 layers", PYLAYER, BY_HAND, 1.5),
    Goal(ONE_LAYER, "trace + lower, 50 layers", PYLAYER, BY_HAND, 1.45),
    Goal(ONE_LAYER, "trace, 50 layers: Python calls", PYLAYER, BY_HAND, 1.4),
    Goal(ONE_LAYER, "trace, 50 once-differentiable layers: Python calls", PYLAYER, BY_HAND, 1.5),
    Goal(ONE_LAYER, "trace, 50 layers", "jit(PyLayer)", BY_HAND, 0.75),
    Goal(ONE_LAYER, "trace, 50 once-differentiable layers", PYLAYER, BY_HAND, 1.6),
    Goal(ONE_LAYER, "eager forward, 8x8", PYLAYER, BY_HAND, 0.2),
    Goal(ONE_LAYER, "eager gradient, 8x8", PYLAYER, BY_HAND, 1.1),
    *(
        Goal(MODELS, f"{model}, {loop}: {row}", PYLAYER, BY_HAND, bound)
        for model in ("12-layer transformer", "50-layer MLP")
        for loop in ("Python loop", "scan")
        for row, bound in (("step", 1.05), ("memory", 1.0), ("first step", 1.05))
    ),
    Goal(TRAINING, "Python loop: memory", "quantize_saved(8)", "plain", 0.32),
    Goal(TRAINING, "scan: memory", "quantize_saved(8)", "plain", 0.35),
    Goal(TRAINING, "Python loop: compile", "quantize_saved(8)", "plain", 2.0),
    Goal(TRAINING, "Python loop: loss above plain", "quantize_saved(8)", None, 0.005),
]


class Results:
    """Figures in the order in which they were measured."""

    def __init__(self) -> None:
        self.figures: list[Figure] = []

    def add(self, table: str, row: str, contestant: str, value: float, unit: str) -> None:
        self.figures.append(Figure(table, row, contestant, value, unit))

    def value(self, table: str, row: str, contestant: str) -> float | None:
        return next((f.value for f in self.figures if f[:3] == (table, row, contestant)), None)

    def ratio(self, goal: Goal) -> float | None:
        value = self.value(goal.table, goal.row, goal.contestant)
        other = 1.0 if goal.against is None else self.value(goal.table, goal.row, goal.against)
        return None if value is None or not other else value / other

    def missed(self, goals: list[Goal]) -> list[Goal]:
        """Print one line for each goal whose figures were measured; return those that were missed."""
        print("\nGoals: what PyLayer takes, relative to the other contestant")
        measured = {goal: ratio for goal in goals if (ratio := self.ratio(goal)) is not None}
        for goal, ratio in measured.items():
            print(f"{'✓' if ratio <= goal.at_most else '✗'} {goal.name:88}{ratio:8.3f}   at most {goal.at_most}")
        return [goal for goal, ratio in measured.items() if ratio > goal.at_most]

    def write(self, file: str) -> None:
        with open(file, "w", encoding="utf-8") as stream:
            json.dump({"machine": machine(), "figures": [f._asdict() for f in self.figures]}, stream, indent=1)

    def plot(self, file: str) -> None:
        """Two charts (matplotlib): time relative to the hand-written rule, and memory and time of compression."""
        import matplotlib as mpl
        from matplotlib.figure import Figure as Canvas

        mpl.rcParams["svg.fonttype"] = "none"  # text as text
        canvas = Canvas(figsize=(11, 4.6), layout="constrained")
        left, right = canvas.subplots(1, 2)
        rows = [g for g in GOALS if g.contestant == PYLAYER and g.against == BY_HAND and self.ratio(g) is not None]
        ratios = [self.ratio(g) or 0.0 for g in rows]
        left.barh([g.row for g in rows], ratios, color="tab:blue")
        left.axvline(1.0, color="black", linewidth=0.8)
        left.invert_yaxis()
        left.set_title("PyLayer, relative to a hand-written custom_vjp", fontsize=10)
        left.tick_params(labelsize=7)
        names = list(dict.fromkeys(f.contestant for f in self.figures if f.table == TRAINING))
        for loop, shift, color in (("Python loop", -0.2, "tab:blue"), ("scan", 0.2, "tab:cyan")):
            memory, step = (
                [self.value(TRAINING, f"{loop}: {row}", n) or 0.0 for n in names] for row in ("memory", "step")
            )
            places = [i + shift for i in range(len(names))]
            right.barh(places, memory, height=0.38, color=color, label=loop)
            for place, size, time in zip(places, memory, step, strict=True):
                right.text(size + 1, place, f"{time:.0f} ms", va="center", fontsize=6)
        right.set_yticks(range(len(names)), names)
        right.invert_yaxis()
        right.tick_params(labelsize=7)
        right.margins(x=0.12)
        right.legend(fontsize=7)
        right.set_title("4-layer transformer: MiB, ms of a step", fontsize=10)
        canvas.savefig(file)


def machine() -> dict[str, Any]:
    return {
        "jax": jax.__version__,
        "python": platform.python_version(),
        "device": jax.devices()[0].device_kind,
        "devices": jax.device_count(),
        "cores": os.cpu_count(),
        "system": platform.platform(terse=True),
    }
