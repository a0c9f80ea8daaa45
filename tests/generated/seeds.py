"""The command line of the modules that compare random programs: `python -m tests.generated.programs 200 [seed]`."""

from __future__ import annotations

import sys
from collections.abc import Callable

import jax


def print_differences(difference: Callable[[int], str | None], cleared_after: int) -> None:
    """Print what `difference` returns for each seed, and how many differ; JAX's caches are cleared now and then."""
    count, start = [*(int(word) for word in sys.argv[1:] if word.isdigit()), 0][:2]
    n_different = 0
    for seed in range(start, start + count):
        if (text := difference(seed)) is not None:
            n_different += 1
            print(text, flush=True)
        if seed % cleared_after == cleared_after - 1:
            jax.clear_caches()
    print(f"{n_different} of {count} differ")
