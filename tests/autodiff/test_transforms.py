"""Every layer of the registry under every transform, against its reference."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.kit.layers import Tanh, bits
from tests.kit.transforms import (
    FIRST_ORDER,
    FORWARD_OVER_REVERSE,
    MAIN_CASES,
    SECOND_ORDER,
    SLOW,
    assert_same,
    gradient,
    marks,
    scalar,
)
from tests.registry import CASES


def crossed(table):
    """Every transform of a table with every case, or with the main ones where it is slow."""
    return [
        pytest.param(name, case, id=f"{name}-{case.name}", marks=marks(name, case.name))
        for name in table
        for case in CASES
        if name not in SLOW or case.name in MAIN_CASES
    ]


by_name = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


@by_name
def test_outputs(case):
    ours, expected = case.layer(*case.args), case.reference(*case.args)
    assert_same(jax.tree_util.tree_leaves(ours), jax.tree_util.tree_leaves(expected))


@pytest.mark.parametrize(("transform", "case"), crossed(FIRST_ORDER))
def test_first_order(case, transform):
    _compare(case, FIRST_ORDER[transform])


@pytest.mark.parametrize(("transform", "case"), crossed(SECOND_ORDER))
def test_second_order(case, transform):
    _compare(case, SECOND_ORDER[transform])


@pytest.mark.parametrize(("transform", "case"), crossed(FORWARD_OVER_REVERSE))
def test_forward_over_reverse(case, transform):
    if case.forward_over_reverse:
        with pytest.raises(TypeError, match=case.forward_over_reverse):
            FORWARD_OVER_REVERSE[transform](scalar(case.layer, linear=False), case.args)
    else:
        _compare(case, FORWARD_OVER_REVERSE[transform])


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=case.name, marks=marks("remat_that_saves_everything", case.name))
        for case in CASES
        if case.name in MAIN_CASES
    ],
)
def test_remat_that_saves_everything(case):
    # Apart from the other policies, as JAX itself cannot save a complex residual under this one.
    everything = jax.checkpoint_policies.everything_saveable
    _compare(case, lambda f, args: jax.jit(gradient(jax.checkpoint(f, policy=everything), args))(*args))


@pytest.mark.parametrize("place", ["inside", "around"])
@pytest.mark.parametrize(
    ("transform", "case"),
    [
        pytest.param(transform, case, id=f"{name}-{case.name}", marks=marks(name, case.name))
        for name, transform in (FIRST_ORDER | SECOND_ORDER | FORWARD_OVER_REVERSE).items()
        for case in CASES
        if name not in SLOW and case.name in {"DoubledTanh", "SavedIntermediate", "Trees", "AskedLinear"}
        if not (name in FORWARD_OVER_REVERSE and case.forward_over_reverse)
    ],
)
def test_under_hooks(case, transform, place):
    # The pair loses nothing but its own derivative, which no gradient may depend on.
    hooks = bits()
    try:
        if place == "inside":
            _compare(case, transform, hooks)
        else:
            with hooks:
                _compare(case, transform)
    except TypeError as error:
        # A second derivative of staged code with the block inside is refused, and never wrong.
        if not re.search(r"a second derivative goes through .* put the hooks block", str(error), re.I):
            raise
        assert re.search(r"(second_order|hessian).*(scan|cond|remat)", transform.__name__)


def _compare(case, transform, around=lambda f: f):
    ours = transform(around(scalar(case.layer, case.linear_loss)), case.args)
    assert_same(ours, transform(scalar(case.reference, case.linear_loss), case.args))


@pytest.mark.parametrize("within", ["jit", "scan", "fori_loop", "cond", "checkpoint"])
@pytest.mark.parametrize("axis", [0, 1])
def test_staged_code_mapped_along_any_axis(within, axis):
    staged = {
        "jit": jax.jit,
        "scan": lambda f: lambda x: jax.lax.scan(lambda c, _: (f(c), None), x, None, length=2)[0],
        "fori_loop": lambda f: lambda x: jax.lax.fori_loop(0, 2, lambda _, c: f(c), x),
        "cond": lambda f: lambda x: jax.lax.cond(x.sum() > -9, f, f, x),
        "checkpoint": jax.checkpoint,
    }[within]

    class SavesOutput(Tanh):
        """A class of its own, which no other test has staged."""

    w = jnp.array([[0.3, -0.7, 0.2], [0.5, 0.1, -0.4], [-0.6, 0.8, 0.9]])

    def first(apply):
        return jax.grad(
            lambda xs: jnp.sum(jax.vmap(staged(lambda x: apply(w @ x)), in_axes=axis, out_axes=axis)(xs) * xs**2)
        )

    xs = jnp.arange(9.0).reshape(3, 3) / 9
    for order in (first, lambda apply: jax.grad(lambda xs: jnp.sum(first(apply)(xs) * xs))):
        for run in (lambda f: f, jax.jit):
            np.testing.assert_allclose(run(order(SavesOutput.apply))(xs), order(jnp.tanh)(xs), rtol=1e-4, atol=1e-5)
