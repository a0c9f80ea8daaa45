"""Layers drawn at random, with rules that are not their gradients, against nested `jax.custom_vjp` functions.

PYLAYER_JAX_EXAMPLES=5000 python -m pytest tests/autodiff/test_generated_layers.py
"""

from __future__ import annotations

import os
import re
import warnings

import jax
import numpy as np
import pytest

import pylayer_jax
from tests.kit.generated.draw import draw
from tests.kit.generated.reference import computed, expected, reference_of
from tests.kit.generated.text import Case, Layer, Statement, Term


def is_allowed(case: Case, kind: str) -> bool:
    """Whether a refusal is right: packed in staged code, a tensor has no second derivative and no other mode."""
    return kind.startswith("TypeError") and bool(case.hooks) and not case.hooks_differentiable


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
        assert all(np.all(np.isfinite(w)) for _, w in pairs), shown(case, "the reference is not finite")
        scale = max(1.0, *(float(np.max(np.abs(w))) for _, w in pairs))
        tolerance = scale * (1e-9 if case.dtype == "float64" else 2e-4)
        for g, w in pairs:
            if g.shape != w.shape or g.dtype != w.dtype or not np.allclose(g, w, rtol=0, atol=tolerance):
                return "differs", f"got      {jax.tree.leaves(got)}\nexpected {jax.tree.leaves(wanted)}"
    return "agreed", ""


def kind_of(error: Exception) -> str:
    words = re.sub(r"\bL\d\b|\b[a-z]\d*\b|\d[\d.]*|['\"`]", "", str(error)).split()
    return f"{type(error).__name__}: {' '.join(words[:12])}"


def shown(case: Case, message: str) -> str:
    return f"seed {case.seed}\n{case.text()}\n\n# {case.asked()}\n{message}"


# -- tests ---------------------------------------------------------------------------------------------

EXAMPLES = int(os.environ.get("PYLAYER_JAX_EXAMPLES", "120"))
CHUNK = 10


# The first ones run with every version and flag, the next ones with both versions.
ON_BOTH_VERSIONS = 60


def _marked(first):
    return pytest.param(first, marks=pytest.mark.generated if first < ON_BOTH_VERSIONS else pytest.mark.slow)


@pytest.mark.parametrize("first", [0, *map(_marked, range(CHUNK, EXAMPLES, CHUNK))])
def test_generated_layers(first):
    refused = []
    for case in map(draw, range(first, first + CHUNK)):
        kind, message = outcome(case)
        if kind == "agreed":
            continue
        assert is_allowed(case, kind), shown(case, message)
        refused.append(case.seed)
    assert len(refused) <= CHUNK // 2, f"refused: {refused}"


@pytest.mark.parametrize(("saved", "expected"), [("u0", 0.0), ("u1", 2.0)])
def test_the_reference_takes_a_marked_output_for_a_constant_and_what_is_computed_from_it_for_code(saved, expected):
    # Such layers are rare among those that are drawn.
    layer = Layer(
        name="l0",
        dialect="PyLayer",
        arguments=["a"],
        body=[Statement("u0", "jnp.sin(a)"), Statement("u1", "2.0 * u0")],
        returned=("a", "u0"),
        later=[],
        saved=[(saved, "save")],
        marked=["u0"],
        dirty=[],
        materialize=True,
        gradients=[[Term(0, "s0 * {d}"), Term(1, "9.0 * {d}")]],
        per_slot=False,
        asks=False,
        forward_mode=False,
    )
    second = jax.grad(jax.grad(lambda x: reference_of(layer, {}, order=2)(x)[0]))
    np.testing.assert_allclose(second(0.3), expected * np.cos(0.3), rtol=1e-6)
