"""Layers drawn at random, with rules that are not their gradients, against nested `jax.custom_vjp` functions.

    python tests/autodiff/test_generated_layers.py 500           # cases 0 to 499, as a table
    python tests/autodiff/test_generated_layers.py 1 1234        # one case, as text
    python tests/autodiff/test_generated_layers.py 500 0 --shrink
    PYLAYER_JAX_EXAMPLES=5000 python -m pytest tests/autodiff/test_generated_layers.py
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

if __name__ == "__main__":  # the package of the current directory, with the tests of this file
    os.environ["XLA_FLAGS"] = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
    sys.path.insert(0, os.getcwd())
    import pylayer_jax

    sys.path.insert(0, str(Path(__file__).parents[2]))

import collections
import re
import time
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pylayer_jax
from tests.kit.generated import Case, draw
from tests.kit.generated_reference import computed, expected
from tests.kit.generated_shrink import shrink

pytestmark = pytest.mark.slow

ALLOWED: dict[str, str] = {}


def outcome(case: Case) -> tuple[str, str]:
    """("agreed" or "differs" or the kind of a refusal, and a text about it)."""
    with jax.enable_x64(case.dtype == "float64"):
        wanted = expected(case)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                got = computed(case, pylayer_jax)
        except Exception as error:
            return kind_of(error), f"{type(error).__name__}: {error}"
        if jax.tree.structure(got) != jax.tree.structure(wanted):
            return "differs", f"got structure {jax.tree.structure(got)}\nnot {jax.tree.structure(wanted)}"
        pairs = list(zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True))
        scale = max(1.0, *(float(np.max(np.abs(w))) for _, w in pairs))
        tolerance = scale * (1e-9 if case.dtype == "float64" else 2e-4)
        for g, w in pairs:
            if g.shape != w.shape or g.dtype != w.dtype or not np.allclose(g, w, rtol=0, atol=tolerance):
                return "differs", f"got      {jax.tree.leaves(got)}\nexpected {jax.tree.leaves(wanted)}"
    return "agreed", ""


def kind_of(error: Exception) -> str:
    words = re.sub(r"\bL\d\b|\b[a-z]\d*\b|[\d.]+|['\"`]", "", str(error)).split()
    return f"{type(error).__name__}: {' '.join(words[:12])}"


def shown(case: Case, message: str) -> str:
    return f"seed {case.seed}\n{case.text()}\n\n# {case.asked()}\n{message}"


def smallest(case: Case, kind: str) -> Case:
    def fails(smaller: Case) -> bool:
        try:
            return outcome(smaller)[0] == kind
        except Exception:  # not a case at all
            return False

    return shrink(case, fails)


def table(number: int, first: int, shrinks: bool) -> None:
    found: dict[str, list[int]] = collections.defaultdict(list)
    start = time.time()
    for seed in range(first, first + number):
        case = draw(seed)
        kind, message = outcome(case)
        found[kind].append(seed)
        if number == 1 or kind != "agreed":
            if shrinks and kind != "agreed":
                case = smallest(case, kind)
                kind, message = outcome(case)
            print(shown(case, f"-> {kind}\n{message[:1500]}"), "\n" + "-" * 100, flush=True)
    print(f"{number} cases from {first}, {(time.time() - start) / number:.2f} s each, jax {jax.__version__}")
    for kind, seeds in sorted(found.items(), key=lambda item: -len(item[1])):
        print(f"{len(seeds):5} {kind}: {seeds[:12] if kind != 'agreed' else ''}")


if __name__ == "__main__":
    options = [int(word) for word in sys.argv[1:] if word != "--shrink"]
    table(options[0], options[1] if len(options) > 1 else 0, "--shrink" in sys.argv)
