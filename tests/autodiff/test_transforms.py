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
    IMPLIED,
    MAIN_CASES,
    SECOND_ORDER,
    SLOW,
    assert_same,
    expected,
    gradient,
    marks,
    meet,
    scalar,
)
from tests.registry import CASES


def crossed(table):
    """Every transform of a table with every case, or with the main ones where it is slow."""
    return [
        pytest.param(name, case, id=f"{name}-{case.name}", marks=marks(name, case.name))
        for name in table
        for case in CASES
        if meet(name, case.name)
    ]


by_name = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


@by_name
def test_outputs(case):
    ours, plain = case.layer(*case.args), jax.jit(case.reference)(*case.args)
    assert_same(jax.tree_util.tree_leaves(ours), jax.tree_util.tree_leaves(plain))


@pytest.mark.parametrize(("transform", "case"), crossed(FIRST_ORDER))
def test_first_order(case, transform):
    _compare(case, FIRST_ORDER, transform)


@pytest.mark.parametrize(("transform", "case"), crossed(SECOND_ORDER))
def test_second_order(case, transform):
    _compare(case, SECOND_ORDER, transform)


@pytest.mark.parametrize(("transform", "case"), crossed(FORWARD_OVER_REVERSE))
def test_forward_over_reverse(case, transform):
    if case.forward_over_reverse:
        with pytest.raises(TypeError, match=case.forward_over_reverse):
            FORWARD_OVER_REVERSE[transform](scalar(case.layer, linear=False), case.args)
    else:
        _compare(case, FORWARD_OVER_REVERSE, transform)


@pytest.mark.parametrize("name", sorted(MAIN_CASES))
def test_remat_that_saves_everything(name):
    # Apart from the other policies, as JAX itself cannot save a complex residual under this one.
    (case,) = (case for case in CASES if case.name == name)
    ours = jax.checkpoint(scalar(case.layer, case.linear_loss), policy=jax.checkpoint_policies.everything_saveable)
    assert_same(jax.jit(gradient(ours, case.args))(*case.args), expected(case, FIRST_ORDER, "jit_of_grad"))


@pytest.mark.parametrize("place", ["inside", "around"])
@pytest.mark.parametrize(
    ("table", "transform", "case"),
    [
        pytest.param(table, name, case, id=f"{name}-{case.name}", marks=marks(name, case.name))
        for table in (FIRST_ORDER, SECOND_ORDER, FORWARD_OVER_REVERSE)
        for name in table
        for case in CASES
        if name not in SLOW | IMPLIED and case.name in {"DoubledTanh", "SavedIntermediate", "Trees"}
    ],
)
def test_under_hooks(table, case, transform, place):
    # The pair loses nothing but its own derivative, which no gradient may depend on.
    hooks = bits()
    try:
        if place == "inside":
            _compare(case, table, transform, hooks)
        else:
            with hooks:
                _compare(case, table, transform)
    except TypeError as error:
        # A second derivative of staged code with the block inside is refused, and never wrong.
        if not re.search(r"a second derivative goes through .* put the hooks block", str(error), re.I):
            raise
        assert re.search(r"(second_order|hessian).*(scan|cond|remat)", transform)


def _compare(case, table, transform, around=lambda f: f):
    known = expected(case, table, transform)
    assert_same(table[transform](around(scalar(case.layer, case.linear_loss)), case.args), known)


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
    second = lambda apply: jax.grad(lambda xs: jnp.sum(first(apply)(xs) * xs))  # noqa: E731
    for order, run in ((first, lambda f: f), (first, jax.jit), (second, jax.jit)):
        found = run(order(SavesOutput.apply))(xs)
        np.testing.assert_allclose(found, jax.jit(order(jnp.tanh))(xs), rtol=1e-4, atol=1e-5)
