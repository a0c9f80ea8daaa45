"""Values that stand for the one array that they hold, as parameters of flax.nnx do: arguments and gradients."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pylayer_jax import Function
from tests.kit.modes import EAGER_AND_JIT, X

from .made import layer


@jax.tree_util.register_pytree_node_class
class Box:
    def __init__(self, value, label=""):
        self.value, self.label = value, label

    def __jax_array__(self):
        return self.value

    def tree_flatten(self):
        return (self.value,), self.label

    @classmethod
    def tree_unflatten(cls, label, children):
        return cls(*children, label)


def multiply(give):
    def forward(ctx, x, w):
        w = w["w"] if isinstance(w, dict) else w
        w = w if isinstance(w, jax.Array) else w.__jax_array__()
        ctx.save_for_backward(x, w)
        return x * w

    def backward(ctx, dy):
        x, w = ctx.saved_tensor()
        return dy * w, give(dy * x)

    return layer(forward, backward)


GIVEN = {"array": lambda g: g, "box": Box, "box of another kind": lambda g: Box(g, "other")}


@EAGER_AND_JIT
@pytest.mark.parametrize("give", GIVEN.values(), ids=GIVEN)
def test_an_array_or_a_box_as_the_gradient_of_either(mode, give):
    total = lambda x, w: multiply(give).apply(x, w).sum()  # noqa: E731
    for w, array_of in ((Box(2 * X), lambda g: g.value), (2 * X, lambda g: g)):
        dx, dw = mode(jax.grad(total, (0, 1)))(X, w)
        np.testing.assert_allclose(dx, 2 * X)
        np.testing.assert_allclose(array_of(dw), X)


@pytest.mark.parametrize("give", GIVEN.values(), ids=GIVEN)
def test_a_box_within_a_container(give):
    total = lambda w: multiply(lambda g: {"w": give(g)}).apply(X, w).sum()  # noqa: E731
    np.testing.assert_allclose(jax.grad(total)({"w": Box(2 * X)})["w"].value, X)


def test_a_box_of_the_wrong_shape_is_refused():
    total = lambda w: multiply(lambda g: Box(jnp.ones(2))).apply(X, w).sum()  # noqa: E731
    for w in (2 * X, Box(2 * X)):
        with pytest.raises(ValueError, match=r"Made\.backward.*w.*\(3,\).*\(2,\)"):
            jax.grad(total)(w)


def test_a_box_as_the_tangent_of_an_output():
    double = layer(jvp=staticmethod(lambda ctx, dx: Box(2 * dx)))
    np.testing.assert_allclose(jax.jvp(double.apply, (X,), (X,))[1], 2 * X)


def test_function_saves_the_array_of_a_box():
    saves = layer(lambda ctx, x, w: ctx.save_for_backward(w), base=Function)
    with pytest.raises(TypeError, match="Box"):
        saves.apply(X, Box(X))


@EAGER_AND_JIT
def test_parameters_of_flax(mode):
    nnx = pytest.importorskip("flax.nnx", reason="flax is not installed")
    for give in (lambda g: g, nnx.Param):
        total = lambda x, w, give=give: multiply(give).apply(x, w).sum()  # noqa: E731
        for w in (nnx.Param(2 * X), nnx.Param(2 * X)[...]):
            _, dw = mode(jax.grad(total, (0, 1)))(X, w)
            np.testing.assert_allclose(jnp.asarray(dw), X)
