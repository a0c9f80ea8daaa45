"""What PyLayer costs next to other ways to write a custom gradient.

    python -m tests.tools.benchmarks [--quick] [--only ROW] [--json FILE]

Everything in a row is measured in one loop, in an order that is shuffled in each round, and compared round by round, so
that a machine that slows down for a while slows all contestants down. Where a goal of `results.py` is missed, the
command fails. notebooks/tools/packing.py measures packers.
"""

import argparse
import gc
import statistics
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from .contestants import Contestant, chain, gather
from .results import GOALS, Results
from .timing import Call, Effort, measure, python_calls, ratios


class Row(NamedTuple):
    name: str
    unit: str
    prepare: Callable[[Contestant, Effort], Call | None]  # None where the contestant takes no part
    layers: int = 1  # that one time stands for
    heavy: bool = False  # fewer rounds
    counts_calls: bool = False  # beside its times


def eager(kind: str) -> Row:
    def prepare(contestant: Contestant, effort: Effort) -> Call:
        x, call = contestant.array(8), getattr(contestant, kind)
        return lambda: call(x)

    return Row(f"eager {kind}, 8x8", "us", prepare)


def step(width: int, compiled: bool) -> Row:
    def prepare(contestant: Contestant, effort: Effort) -> Call | None:
        return contestant.step and contestant.step(max(8, width // effort.shrink), 50 // effort.shrink, compiled)

    name = f"{'jit' if compiled else 'eager'}, forward + backward, 50 layers of {width}x{width}"
    return Row(name, "us" if compiled else "ms", prepare, heavy=not compiled)


def traced(
    depth: int, lower: bool = False, per_layer: bool = False, once: bool = False, maps: int | None = None
) -> Row:
    """A gradient; or, with `maps`, a program without one, in a number of nested `jax.vmap`s."""

    def prepare(contestant: Contestant, effort: Effort) -> Call | None:
        layer = contestant.once_differentiable if once else contestant.layer
        if contestant.step is None or layer is None:
            return None
        x = contestant.array(8)
        for _ in range(maps or 0):
            x = jax.numpy.stack([x, x])

        def trace() -> Any:
            # A function object of its own each time, which jit's caches have not seen.
            f = chain(layer, depth // effort.shrink)
            for _ in range(maps or 0):
                f = jax.vmap(f)
            staged = jax.jit(jax.value_and_grad(f) if maps is None else f).trace(x)
            return staged.lower() if lower else staged

        return trace

    name = f"trace{' + lower' if lower else ''}, {depth} {'once-differentiable ' if once else ''}layers"
    name += (", per layer" if per_layer else "") + ("" if maps is None else f" without a gradient, in {maps} vmaps")
    return Row(name, "us" if per_layer else "ms", prepare, depth if per_layer else 1, True, counts_calls=not per_layer)


ROWS = [
    *(step(width, compiled) for compiled in (True, False) for width in (8, 512)),
    traced(50),
    traced(50, lower=True),
    traced(50, once=True),
    *(traced(50, lower, maps=maps) for maps in (0, 1, 2) for lower in (False, True)),
    eager("forward"),
    eager("gradient"),
    eager("second"),
    *(traced(depth, per_layer=True) for depth in (50, 200, 800)),
]


def main(arguments: list[str] | None = None) -> int:
    """Measure, print and compare; return 1 where a goal is missed, unless the run is a quick one."""
    parser = argparse.ArgumentParser(prog="python -m tests.tools.benchmarks", description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a few rounds of tiny cases: does it run at all")
    parser.add_argument("--only", metavar="NAME", default="", help="only rows with this in their name")
    parser.add_argument("--json", metavar="FILE", help="write the figures, with machine and versions")
    options = parser.parse_args(arguments)
    effort = Effort(3, 0.0, shrink=10) if options.quick else Effort(41, 0.02)
    results = Results()

    contest(effort, results, options.only)
    missed = results.missed(GOALS)
    if options.json:
        results.write(options.json)
    return int(bool(missed) and not options.quick)


def contest(effort: Effort, results: Results, only: str) -> None:
    present, absent = gather()
    base, *others = [contestant.name for contestant in present]
    gc.freeze()  # what the imports left is not for the measured code to walk through
    print(f"jax {jax.__version__} on {jax.default_backend()}. Time of {base}, and how many times that the others take:")
    print("median [quartiles]; above 1, PyLayer is faster." + (f" Absent: {', '.join(absent)}." if absent else ""))
    if effort.shrink > 1:
        print(f"Quick: every depth and width is {effort.shrink} times smaller than its label says.")
    print(f"{'':48}{base:>12}" + "".join(f"{name:>22}" for name in others))
    for row in ROWS:
        if only not in row.name:
            continue
        calls = {c.name: call for c in present if (call := row.prepare(c, effort)) is not None}
        times = measure(calls, effort._replace(rounds=max(3, effort.rounds // 2)) if row.heavy else effort)
        scale = {"us": 1e6, "ms": 1e3}[row.unit] / max(1, row.layers // effort.shrink)
        own = statistics.median(times[base])
        cells = [ratios(times[name], times[base]) if name in times else "-" for name in others]
        print(f"{row.name:48}{own * scale:9.1f} {row.unit}" + "".join(f"{cell:>22}" for cell in cells), flush=True)
        for name, each in times.items():
            ratio = statistics.median(a / b for a, b in zip(each, times[base], strict=True))
            results.add(row.name, name, own * scale * ratio, row.unit)
        if row.counts_calls:
            counts = {name: python_calls(call) for name, call in calls.items()}
            cells = [f"{counts[name] / counts[base]:.2f}" if name in counts else "-" for name in others]
            label = f"{row.name}: Python calls"
            print(f"{label:48}{counts[base]:>12}" + "".join(f"{cell:>22}" for cell in cells), flush=True)
            for name, count in counts.items():
                results.add(label, name, count, "calls")


if __name__ == "__main__":
    sys.exit(main())
