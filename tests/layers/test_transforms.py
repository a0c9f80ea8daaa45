"""Each layer of the registry has the derivatives of its reference under each transform, also with forward mode."""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.hooks.spy import IDLE
from tests.kit.layers import Tanh, bits
from tests.kit.modes import STAGED
from tests.kit.transforms import (
    COVERED,
    FIRST_ORDER,
    FORWARD,
    FORWARD_OVER_REVERSE,
    SECOND_ORDER,
    SLOW,
    assert_same,
    expected,
    is_tested,
    marks,
    pushed,
    scalar,
)
from tests.layers import CASES

REVERSE = (FIRST_ORDER, SECOND_ORDER, FORWARD_OVER_REVERSE)


def each_pair(*tables, where=is_tested):
    """Run a test for each transform of the tables and each layer, if `where(transform, name of the layer)` is True."""
    params = [
        pytest.param(table, name, case, id=f"{name}-{case.name}", marks=marks(name, case.name))
        for table in tables
        for name in table
        for case in CASES
        if where(name, case.name)
    ]
    return pytest.mark.parametrize(("table", "transform", "case"), params)


def compare(case, table, transform, around=lambda f: f):
    if table is FORWARD_OVER_REVERSE and case.forward_over_reverse:
        with pytest.raises(TypeError, match=case.forward_over_reverse):
            table[transform](around(scalar(case.layer, linear=False)), case.args)
        return
    right, slope = expected(case, table, transform), [pushed] if table is FORWARD else []
    assert_same(table[transform](around(scalar(case.layer, case.linear_loss)), case.args, *slope), right)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_outputs(case):
    ours, plain = case.layer(*case.args), jax.jit(case.reference)(*case.args)
    assert_same(jax.tree_util.tree_leaves(ours), jax.tree_util.tree_leaves(plain))


@each_pair(*REVERSE)
def test_as_the_reference(table, transform, case):
    compare(case, table, transform)


# -- with forward_mode = True -------------------------------------------------------------------------


LINEAR = {case.name for case in CASES if case.is_linear}


@each_pair(FORWARD, where=lambda transform, case: case in LINEAR and is_tested(transform, case))
def test_forward_mode_is_reverse_mode(table, transform, case, monkeypatch):
    compare(case.in_forward_mode(monkeypatch), table, transform)


@pytest.mark.parametrize("case", [case for case in CASES if not case.is_linear], ids=lambda case: case.name)
def test_a_backward_that_is_not_linear_is_refused(case, monkeypatch):
    ours = case.in_forward_mode(monkeypatch)
    with pytest.raises(TypeError, match=case.forward_over_reverse):
        pushed(scalar(ours.layer, case.linear_loss), case.args)(*case.args)


def some_with_forward_mode(transform, case):
    if case == "Trees":
        return True
    return transform not in SLOW | COVERED and case in {"AskedLinear", "RouterLoss", "BackwardApplies"}


@each_pair(*REVERSE, where=some_with_forward_mode)
def test_everything_else_is_as_without_it(table, transform, case, monkeypatch):
    compare(case.in_forward_mode(monkeypatch), table, transform)


# -- hooks that lose nothing but their own derivative, which no gradient may depend on ----------------


def without_what_is_slow(*names):
    return lambda transform, case: transform not in SLOW | COVERED and case in names


@IDLE
@pytest.mark.parametrize("place", ["inside", "around"])
@each_pair(*REVERSE, where=without_what_is_slow("SavedIntermediate", "Trees"))
def test_under_hooks(table, transform, case, place):
    hooks = bits()
    try:
        if place == "inside":
            compare(case, table, transform, hooks)
        else:
            with hooks:
                compare(case, table, transform)
    except TypeError as error:
        # A second derivative of staged code with the block inside is refused, and never wrong.
        if "differentiable=True" not in str(error):
            raise
        assert re.search(r"(second_order|hessian).*(scan|cond|remat)", transform)


@IDLE
@each_pair(FIRST_ORDER, FORWARD, where=without_what_is_slow("DoubledTanh"))
def test_forward_mode_under_hooks(table, transform, case, monkeypatch):
    ours, hooks = case.in_forward_mode(monkeypatch), bits()
    with hooks:
        compare(ours, table, transform)
    if table is FIRST_ORDER:  # packing within the function is for reverse mode
        compare(ours, table, transform, hooks)


# -- staged code in a batch ---------------------------------------------------------------------------


NINE = jnp.arange(9.0).reshape(3, 3) / 9


def mapped(apply, axis, staged=lambda f: f):
    w = jnp.array([[0.3, -0.7, 0.2], [0.5, 0.1, -0.4], [-0.6, 0.8, 0.9]])

    def total(xs):
        return jnp.sum(jax.vmap(staged(lambda x: apply(w @ x)), in_axes=axis, out_axes=axis)(xs) * xs**2)

    return jax.grad(total), jax.grad(lambda xs: jnp.sum(jax.grad(total)(xs) * xs))


@functools.cache
def mapped_tanh(axis):
    return [jax.jit(derivative)(NINE) for derivative in mapped(jnp.tanh, axis)]


@pytest.mark.parametrize("within", STAGED)
@pytest.mark.parametrize("axis", [0, 1])
def test_staged_code_mapped_along_any_axis(within, axis):
    layer = type("SavesOutput", (Tanh,), {})  # which no other test has staged
    first, second = mapped(layer.apply, axis, STAGED[within])
    expected = mapped_tanh(axis)
    for run, order in ((first, 0), (jax.jit(first), 0), (jax.jit(second), 1)):
        np.testing.assert_allclose(run(NINE), expected[order], rtol=1e-4, atol=1e-5)
