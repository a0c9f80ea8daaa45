"""What PyLayer costs next to other ways to write a custom gradient.

    python -m tests.benchmarks [--quick] [--only NAME]

Everything in a row is measured in one loop, in an order that is shuffled in each round, and compared
round by round, so that a machine that slows down for a while slows all contestants down.
"""

from __future__ import annotations

import argparse
import gc
import statistics
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from . import saved
from .contestants import Contestant, gather
from .timing import Call, Effort, measure, ratios


class Row(NamedTuple):
    name: str
    unit: str
    prepare: Callable[[Contestant, Effort], Call | None]  # None where the contestant takes no part
    layers: int = 1  # that one time stands for
    heavy: bool = False  # fewer rounds


def chain(layer: Callable[[Any], Any], depth: int) -> Callable[[Any], Any]:
    def loss(x: Any) -> Any:
        for _ in range(depth):
            x = layer(x)
        return x.sum()

    return loss


def eager(kind: str) -> Row:
    def prepare(contestant: Contestant, effort: Effort) -> Call:
        x, call = contestant.array(8), getattr(contestant, kind)
        return lambda: call(x)

    return Row(f"eager {kind}, 8x8", "us", prepare)


def compiled(width: int, depth: int = 50) -> Row:
    def prepare(contestant: Contestant, effort: Effort) -> Call | None:
        if not contestant.traced:
            return None
        x = contestant.array(max(8, width // effort.shrink))
        run = jax.jit(jax.value_and_grad(chain(contestant.layer, depth // effort.shrink))).lower(x).compile()
        return lambda: jax.block_until_ready(run(x))

    return Row(f"jit, forward + backward, {depth} layers of {width}x{width}", "us", prepare)


def traced(depth: int, lower: bool = False, per_layer: bool = False) -> Row:
    def prepare(contestant: Contestant, effort: Effort) -> Call | None:
        if not contestant.traced:
            return None
        x = contestant.array(8)

        def trace() -> Any:
            # A function object of its own each time, which jit's caches have not seen.
            staged = jax.jit(jax.value_and_grad(chain(contestant.layer, depth // effort.shrink))).trace(x)
            return staged.lower() if lower else staged

        return trace

    name = f"trace{' + lower' if lower else ''}, {depth} layers{', per layer' if per_layer else ''}"
    return Row(name, "us" if per_layer else "ms", prepare, depth if per_layer else 1, heavy=True)


ROWS = [
    compiled(8),
    compiled(512),
    traced(50),
    traced(50, lower=True),
    eager("forward"),
    eager("gradient"),
    eager("second"),
    *(traced(depth, per_layer=True) for depth in (50, 200, 800)),
]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks", description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a few rounds of tiny cases: does it run at all")
    parser.add_argument("--only", metavar="NAME", default="", help=f"rows whose name contains NAME, or {saved.NAME!r}")
    options = parser.parse_args(arguments)
    effort = Effort(3, 0.0, shrink=10) if options.quick else Effort(41, 0.02)

    if options.only != saved.NAME:
        contest(options, effort)
    if options.only in ("", saved.NAME):
        saved.report(effort)


def contest(options: argparse.Namespace, effort: Effort) -> None:
    present, absent = gather()
    base, *others = [contestant.name for contestant in present]
    gc.freeze()  # what the imports left is not for the measured code to walk through
    print(f"jax {jax.__version__} on {jax.default_backend()}. Time of {base}, and how many times that the others take:")
    print("median [quartiles]; above 1, PyLayer is faster." + (f" Absent: {', '.join(absent)}." if absent else ""))
    if options.quick:
        print(f"Quick: every depth and width is {effort.shrink} times smaller than its label says.")
    print(f"{'':44}{base:>12}" + "".join(f"{name:>22}" for name in others))
    for row in ROWS:
        if options.only not in row.name:
            continue
        calls = {c.name: call for c in present if (call := row.prepare(c, effort)) is not None}
        times = measure(calls, effort._replace(rounds=max(3, effort.rounds // 2)) if row.heavy else effort)
        own = statistics.median(times[base]) * {"us": 1e6, "ms": 1e3}[row.unit] / max(1, row.layers // effort.shrink)
        cells = [ratios(times[name], times[base]) if name in times else "-" for name in others]
        print(f"{row.name:44}{own:9.1f} {row.unit}" + "".join(f"{cell:>22}" for cell in cells), flush=True)


if __name__ == "__main__":
    main()
