"""Layers drawn at random, with rules that are not their gradients, against nested `jax.custom_vjp` functions.

PYLAYER_JAX_EXAMPLES=5000 python -m pytest tests/generated
"""

from __future__ import annotations

import os
import warnings

import jax
import numpy as np
import pytest

import pylayer_jax

from .cases import Case, Layer, Statement, Term
from .draw import draw
from .reference import computed, expected, reference_of


def is_allowed(case: Case, error: str) -> bool:
    """Whether a refusal is right: packed in staged code, a tensor has no second derivative and no other mode."""
    return error.startswith("TypeError") and any(not block.differentiable for block in case.blocks.values())


def outcome(case: Case) -> tuple[str, str]:
    """("agreed", "refused" or "differs", and a text about it)."""
    with jax.enable_x64(case.dtype == "float64"):
        wanted = expected(case)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                got = computed(case, pylayer_jax)
        except Exception as error:
            return "refused", f"{type(error).__name__}: {error}"
        if jax.tree.structure(got) != jax.tree.structure(wanted):
            return "differs", f"got structure {jax.tree.structure(got)}\nnot {jax.tree.structure(wanted)}"
        pairs = list(zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True))
        assert all(np.all(np.isfinite(w)) for _, w in pairs), f"{case}\nthe reference is not finite"
        scale = max(1.0, *(float(np.max(np.abs(w))) for _, w in pairs))
        tolerance = scale * (1e-9 if case.dtype == "float64" else 2e-4)
        for g, w in pairs:
            if g.shape != w.shape or g.dtype != w.dtype or not np.allclose(g, w, rtol=0, atol=tolerance):
                return "differs", f"got      {jax.tree.leaves(got)}\nexpected {jax.tree.leaves(wanted)}"
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
        assert is_allowed(case, message), f"{case}\n{message}"
        refused.append(case.seed)
    assert len(refused) <= CHUNK // 2, f"refused: {refused}"


@pytest.mark.parametrize(("saved", "expected"), [("u0", 0.0), ("u1", 2.0)])
def test_the_reference_takes_a_marked_output_for_a_constant_and_what_is_computed_from_it_for_code(saved, expected):
    # Such layers are rare among those that are drawn.
    layer = Layer(
        name="l0",
        dialect="PyLayer",
        arguments=["a"],
        kinds=["positional"],
        shapes={"a": ()},
        body=[Statement("u0", "sin", ("a",)), Statement("u1", "plus", ("u0", "u0"))],
        returned=("a", "u0"),
        saved=[(saved, "save")],
        gradients=[[Term(0, "times", "one", (0, 0)), Term(1, "half", "one", (0, 0))]],
        marked=["u0"],
    )
    second = jax.grad(jax.grad(lambda x: reference_of(layer, {}, order=2)(x)[0]))
    np.testing.assert_allclose(second(0.3), expected * np.cos(0.3), rtol=1e-6)
