"""Each layer of the registry has the derivatives of its reference under each transform, also with forward mode."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.kit.layers import Tanh
from tests.kit.modes import STAGED
from tests.kit.transforms import (
    FIRST_ORDER,
    FORWARD,
    FORWARD_OVER_REVERSE,
    SECOND_ORDER,
    assert_same,
    compare,
    is_tested,
    marks,
    pushed,
    scalar,
)
from tests.layers import CASES


def each_pair(transforms, where=is_tested):
    """Run a test for each of the transforms and each layer, if `where(transform, name of the layer)` is True."""
    params = [
        pytest.param(name, case, id=f"{name}-{case.name}", marks=marks(name, case.name))
        for name in transforms
        for case in CASES
        if where(name, case.name)
    ]
    return pytest.mark.parametrize(("transform", "case"), params)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_outputs(case):
    ours, plain = case.layer(*case.args), jax.jit(case.reference)(*case.args)
    assert_same(jax.tree_util.tree_leaves(ours), jax.tree_util.tree_leaves(plain))


@each_pair(FIRST_ORDER | SECOND_ORDER | FORWARD_OVER_REVERSE)
def test_as_the_reference(transform, case):
    compare(case, transform)


LINEAR = {case.name for case in CASES if case.is_linear}


@each_pair(FORWARD, where=lambda transform, case: case in LINEAR and is_tested(transform, case))
def test_forward_mode_is_reverse_mode(transform, case, monkeypatch):
    compare(case.in_forward_mode(monkeypatch), transform)


@pytest.mark.parametrize("case", [case for case in CASES if not case.is_linear], ids=lambda case: case.name)
def test_a_backward_that_is_not_linear_is_refused(case, monkeypatch):
    ours = case.in_forward_mode(monkeypatch)
    with pytest.raises(TypeError, match=case.forward_over_reverse):
        pushed(scalar(ours.layer, case.linear_loss), case.args)(*case.args)


NINE = jnp.arange(9.0).reshape(3, 3) / 9


def mapped(apply, staged=lambda f: f):
    """Return two derivatives of a map along axis 1 of a square, which an exchange of axes would not make an error."""
    w = jnp.array([[0.3, -0.7, 0.2], [0.5, 0.1, -0.4], [-0.6, 0.8, 0.9]])

    def total(xs):
        return jnp.sum(jax.vmap(staged(lambda x: apply(w @ x)), in_axes=1, out_axes=1)(xs) * xs**2)

    return jax.grad(total), jax.grad(lambda xs: jnp.sum(jax.grad(total)(xs) * xs))


@pytest.mark.parametrize("within", STAGED)
def test_staged_code_mapped_along_another_axis(within):
    layer = type("SavesOutput", (Tanh,), {})  # which no other test has staged
    (first, second), (plain_first, plain_second) = mapped(layer.apply, STAGED[within]), mapped(jnp.tanh)
    for run, plain in ((first, plain_first), (jax.jit(first), plain_first), (jax.jit(second), plain_second)):
        np.testing.assert_allclose(run(NINE), jax.jit(plain)(NINE), rtol=1e-4, atol=1e-5)
