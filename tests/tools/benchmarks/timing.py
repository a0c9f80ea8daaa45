"""Times that are compared round by round, since a machine may slow down for a while."""

import gc
import random
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

Call = Callable[[], Any]


class Effort(NamedTuple):
    """How long to measure."""

    rounds: int
    seconds: float  # per contestant and round
    shrink: int = 1  # divides depths and widths


def measure(calls: dict[str, Call], effort: Effort) -> dict[str, list[float]]:
    """Seconds per call, one entry per round, of all contestants in turn."""
    for call in calls.values():
        call()
    repeats = {name: max(1, round(effort.seconds / once(call, 1))) for name, call in calls.items()}
    times: dict[str, list[float]] = {name: [] for name in calls}
    order, shuffle = list(calls), random.Random(0).shuffle
    for _ in range(effort.rounds):
        shuffle(order)
        for name in order:
            times[name].append(once(calls[name], repeats[name]))
    return times


def once(call: Call, repeats: int) -> float:
    gc.collect(0)
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    return (time.perf_counter() - start) / repeats


def python_calls(call: Call) -> int:
    """How many Python functions a call runs, JAX's included: the same in each run, unlike its time."""
    count = 0

    def profile(_frame: Any, event: str, _argument: Any) -> None:
        nonlocal count
        count += event == "call"

    call()
    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(None)
    return count


def ratios(times: list[float], base: list[float]) -> str:
    """Median and quartiles of the ratio within each round."""
    each = [a / b for a, b in zip(times, base, strict=True)]
    low, middle, high = statistics.quantiles(each, n=4, method="inclusive")
    return f"{middle:.2f} [{low:.2f}, {high:.2f}]"
