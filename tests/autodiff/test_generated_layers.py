"""Layers drawn at random, with rules that are not their gradients, against nested `jax.custom_vjp` functions.

PYLAYER_JAX_EXAMPLES=5000 python -m pytest tests/autodiff/test_generated_layers.py
"""

from __future__ import annotations

import math
import os
import re
import warnings
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest

import pylayer_jax
from tests.kit.generated.draw import draw
from tests.kit.generated.reference import FORWARD_MODE, computed, expected
from tests.kit.generated.text import Call, Case, Layer, Statement, Term

pytestmark = pytest.mark.slow

# Refusals that are right: the first words, what the case has, and why.
ALLOWED: list[tuple[str, Callable[[Case], bool], str]] = [
    (
        "TypeError: second derivative goes through , saved tensor , which pack hook packed",
        lambda case: bool(case.hooks) and not case.hooks_differentiable,
        "what was packed within staged code has no second derivative, unless the hooks are differentiable",
    ),
    (
        "TypeError: second derivative goes through the operation",
        lambda case: bool(case.hooks) and not case.hooks_differentiable,
        "the same for a plain operation",
    ),
    (
        "TypeError: can apply forward-mode autodiff (jvp) to custom_vjp function.",
        lambda case: case.hooks == "inside" and any(name in FORWARD_MODE for name, _ in case.steps),
        "packing is for reverse mode; JAX's own words",
    ),
    (
        "NotImplementedError: Differentiation rule for custom_lin not implemented",
        lambda case: case.hooks == "inside" and any(name in ("jvp", "linearize") for name, _ in case.steps[:-1]),
        "the same where that derivative is differentiated: JAX's own words, for any custom_vjp",
    ),
]


def is_allowed(case: Case, kind: str) -> bool:
    return any(kind.startswith(words) and applies(case) for words, applies, _ in ALLOWED)


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


@pytest.mark.parametrize("first", range(0, EXAMPLES, CHUNK))
def test_generated_layers(first):
    refused = []
    for case in map(draw, range(first, first + CHUNK)):
        kind, message = outcome(case)
        if kind == "agreed":
            continue
        assert is_allowed(case, kind), shown(case, message)
        refused.append(case.seed)
    assert len(refused) <= CHUNK // 2, f"refused: {refused}"


def fixed(**changes: Any) -> Case:
    """The second derivative of one layer at 0.3: `forward` returns its input, `backward` s·dy, unless changed."""
    layer = Layer(
        name="l0",
        dialect=changes.pop("dialect", "PyLayer"),
        arguments=changes.pop("arguments", ["a"]),
        body=[Statement(*s) for s in changes.pop("body", [])],
        returned=changes.pop("returned", "a"),
        later=[Statement(*s) for s in changes.pop("later", [])],
        saved=[(name, "save") for name in changes.pop("saved", ["a"])],
        marked=changes.pop("marked", []),
        dirty=[],
        materialize=True,
        gradients=[
            terms and [Term(*term) for term in terms] for terms in changes.pop("gradients", [[(0, "s0 * {d}")]])
        ],
        per_slot=False,
        asks=False,
        forward_mode=False,
    )
    passed = changes.pop("passed", ["x0"] * len(layer.inputs))
    calls = [Call([f"y{j}" for j in range(len(layer.outputs))], "l0", passed)]
    calls += [Call(["y0"], "l0", ["y0"])] * (changes.pop("times", 1) - 1)
    calls += [Call(["z"], None, [changes.pop("result", "y0")], changes.pop("then", "{}"))]
    steps = changes.pop("steps", [("slope", (0,))] * 2)
    assert not changes
    values = {"x0": 0.3, "x1": 0.3, "C0": 0.7, "C1": 0.4}
    return Case(0, "float64", (), len(set(passed)), [layer], calls, ["z"], "", False, steps, values)


x = 0.3
doubled_tanh: dict[str, Any] = {
    "body": [("u0", "jnp.tanh(a)")],
    "returned": "u0",
    "saved": ["u0"],
    "gradients": [[(0, "2.0 * {d} * (1.0 - s0 * s0)")]],
}
sine: dict[str, Any] = {"body": [("u0", "jnp.sin(a)")], "returned": "u0"}
KNOWN = {
    # the contract, section 7
    "straight-through round": (
        {
            "body": [("u0", "jnp.round(a + 0.7)")],
            "returned": "u0",
            "gradients": [[(0, "{d}")]],
            "then": "{0} * {0} * {0}",
        },
        6.0,
    ),
    "doubled tanh": (doubled_tanh, -8 * math.tanh(x) * (1 - math.tanh(x) ** 2)),
    "doubled tanh twice": ({**doubled_tanh, "times": 2}, -10.9068),
    "doubled tanh twice, third order": ({**doubled_tanh, "times": 2, "steps": [("slope", (0,))] * 3}, -64.157),
    # what a saved object counts as, where `backward` is s·dy unless it is given
    "intermediate": ({"body": [("u0", "a * a")], "saved": ["u0"]}, 2 * x),
    "input": ({**sine, "saved": ["a"]}, 1.0),
    "output": ({**sine, "saved": ["u0"]}, math.sin(x)),
    "input and output": ({"gradients": [[(0, "3.0 * {d} * s0")]]}, 3.0),
    "input and output, in setup_context": (
        {
            "dialect": "setup_context",
            "later": [("o0", "output", "a")],
            "saved": ["o0"],
            "gradients": [[(0, "3.0 * {d} * s0")]],
        },
        3.0,
    ),
    "nothing done to an output": (
        {**sine, "body": [*sine["body"], ("u1", "u0.astype(u0.dtype)", "u0")], "saved": ["u1"]},
        math.sin(x),
    ),
    "nothing done to an input": ({"body": [("u0", "a.astype(a.dtype)", "a")], "saved": ["u0"]}, 1.0),
    "of an output and an input": (
        {**sine, "body": [*sine["body"], ("u1", "u0 * a")], "saved": ["u1"]},
        math.sin(x) + x * (x * math.sin(x)),
    ),
    "returned twice": (
        {**sine, "returned": ("u0", "u0"), "saved": ["u0"], "gradients": [[(0, "s0 * {d}"), (1, "5.0 * {d}")]]},
        5.0,
    ),
    "of an output that is marked": (
        {
            "body": [("u0", "jnp.sin(a)"), ("u1", "2.0 * u0")],
            "returned": ("a", "u0"),
            "marked": ["u0"],
            "saved": ["u1"],
            "gradients": [[(0, "s0 * {d}"), (1, "9.0 * {d}")]],
        },
        2 * math.cos(x),
    ),
    "an output that is marked": (
        {
            **sine,
            "returned": ("a", "u0"),
            "marked": ["u0"],
            "saved": ["u0"],
            "gradients": [[(0, "s0 * {d}"), (1, "9.0 * {d}")]],
        },
        math.cos(x),
    ),
    "a marked output": ({**sine, "marked": ["u0"], "steps": [("slope", (0,))], "then": "{} + 0"}, 0.0),
    "one array in two arguments, one of them marked": (
        {
            "arguments": ["a", "b"],
            "returned": ("a", "b"),
            "marked": ["a"],
            "gradients": [[(0, "{d}")], [(1, "4.0 * {d}")]],
            "result": "y1",
            "steps": [("slope", (0,))],
        },
        4.0,
    ),
    "an output that no mapped argument reaches": (
        {
            "arguments": ["a", "b"],
            "passed": ["x0", "x1"],
            "body": [("u0", "jnp.sin(b)"), ("u1", "u0 * u0")],
            "returned": "u0",
            "saved": ["u1"],
            "gradients": [None, [(0, "s0 * {d}")]],
            "steps": [("slope", (1,)), ("vmap_first", None), ("slope", (1,))],
        },
        4 * math.sin(x) ** 3,
    ),
    "a constant that is returned": (
        {"returned": ("a", "C0"), "saved": ["C0"], "gradients": [[(0, "s0 * {d}"), (1, "5.0 * {d}")]]},
        5.0,
    ),
    "of a constant that is returned": (
        {
            "body": [("u0", "C0 * a")],
            "returned": ("a", "C0"),
            "saved": ["u0"],
            "gradients": [[(0, "s0 * {d}"), (1, "{d}")]],
        },
        0.7,
    ),
}


@pytest.mark.parametrize("name", KNOWN)
def test_the_reference_agrees_with_closed_forms(name):
    changes, known = KNOWN[name]
    case = fixed(**changes)
    with jax.enable_x64(True):
        np.testing.assert_allclose(expected(case)[0], known, rtol=1e-4)
    kind, message = outcome(case)
    assert kind == "agreed", shown(case, message)
