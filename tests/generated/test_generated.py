"""Compares layers that are drawn at random, with arbitrary rules, with nested `jax.custom_vjp` functions.

PYLAYER_JAX_EXAMPLES=5000 python -m pytest tests/generated
"""

import os
import warnings

import jax
import numpy as np
import pytest

import pylayer_jax

from .cases import Case
from .draw import draw
from .programs import failure
from .reference import run_package, run_reference


def outcome(case: Case) -> tuple[str, str]:
    """Return "agreed", "refused" or "differs", and the error or the difference."""
    with jax.enable_x64(case.dtype == "float64"):
        expected = run_reference(case)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                got = run_package(case, pylayer_jax)
        except Exception as error:
            return "refused", f"{type(error).__name__}: {error}"
        if jax.tree.structure(got) != jax.tree.structure(expected):
            return "differs", f"got structure {jax.tree.structure(got)}\nnot {jax.tree.structure(expected)}"
        pairs = list(zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True))
        assert all(np.all(np.isfinite(e)) for _, e in pairs), f"{case}\nthe reference is not finite"
        scale = max(1.0, *(float(np.max(np.abs(e))) for _, e in pairs))
        tolerance = scale * (1e-9 if case.dtype == "float64" else 2e-4)
        for g, e in pairs:
            if g.shape != e.shape or g.dtype != e.dtype or not np.allclose(g, e, rtol=0, atol=tolerance):
                return "differs", f"got      {jax.tree.leaves(got)}\nexpected {jax.tree.leaves(expected)}"
    return "agreed", ""


EXAMPLES = int(os.environ.get("PYLAYER_JAX_EXAMPLES", "120"))
CHUNK = 10
ON_BOTH_VERSIONS = 60  # the first chunk runs in a bare `python -m pytest`, the next ones with both versions of JAX


def _marked(first):
    return pytest.param(first, marks=pytest.mark.generated if first < ON_BOTH_VERSIONS else pytest.mark.slow)


@pytest.mark.parametrize("first", [0, *map(_marked, range(CHUNK, EXAMPLES, CHUNK))])
def test_generated_layers(first):
    refused = []
    for case in map(draw, range(first, first + CHUNK)):
        kind, message = outcome(case)
        if kind == "agreed":
            continue
        assert kind == "refused", f"{case}\n{message}"
        # What hooks that are not `differentiable` packed in staged code has no second derivative and no forward mode.
        assert message.startswith("TypeError"), f"{case}\n{message}"
        assert not all(block.differentiable for block in case.blocks.values()), f"{case}\n{message}"
        refused.append(case.seed)
    assert len(refused) <= CHUNK // 2, f"refused: {refused}"


@pytest.mark.generated
@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5000, 5026))
def test_a_program_under_a_pair(seed):
    """A random program under a pair of hooks has the gradient that it has without: see programs.py."""
    assert failure(seed, in_block=seed % 7 == 0) is None
