"""Layers within `jax.linear_transpose`, `jax.lax.custom_linear_solve` and `jax.experimental.jet`."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.jet import jet

from pylayer_jax import PyLayer
from tests.kit.layers import Multiply, Square, Tanh
from tests.kit.modes import EAGER_AND_JIT
from tests.kit.transforms import assert_same

X = jnp.array([0.3, -0.7])
SERIES = (X, 2 * X, X**2)


class Sums(PyLayer):
    """Linear; its rule, which plays no part here, is not its transpose."""

    forward = staticmethod(lambda ctx, x, times: (jnp.cumsum(x) * times, x.sum()))
    backward = staticmethod(lambda ctx, *_: pytest.fail("it is not differentiated"))


ForwardSums, ForwardTanh, ForwardMultiply = (
    type(f"Forward{layer.__name__}", (layer,), {"forward_mode": True}) for layer in (Sums, Tanh, Multiply)
)


@pytest.mark.parametrize("layer", [Sums, ForwardSums])
@pytest.mark.parametrize(
    "way",
    [
        lambda f: jax.linear_transpose(f, X)(f(X))[0],
        lambda f: jax.jit(lambda c: jax.linear_transpose(f, X)(c)[0])(f(X)),
        lambda f: jax.vmap(lambda c: jax.linear_transpose(f, X)(c)[0], axis_size=2, in_axes=None)(f(X)),
        lambda f: jax.linear_transpose(jax.vmap(f), X[None])(jax.vmap(f)(X[None]))[0],
    ],
    ids=["eager", "jit of", "vmap of", "of vmap"],
)
def test_linear_transpose_is_that_of_forward(layer, way):
    np.testing.assert_allclose(
        way(lambda x: layer.apply(x, 3.0)), way(lambda x: (jnp.cumsum(x) * 3.0, x.sum())), rtol=1e-6
    )


def test_linear_transpose_of_jit():
    f = jax.jit(lambda x: ForwardSums.apply(x, 3.0))
    assert jax.linear_transpose(f, X)((X, X[0]))[0].tolist() == pytest.approx([-0.9, -1.8])


@pytest.mark.parametrize("flag", [False, True])
def test_linear_transpose_needs_a_linear_forward(flag):
    layer = type("Squared", (Square,), {"forward_mode": flag})
    with pytest.raises(TypeError, match=r"Squared\.forward cannot be transposed: it is not linear, as it has a p"):
        jax.linear_transpose(layer.apply, X)(X)


@pytest.mark.parametrize("layer", [Multiply, ForwardMultiply])
@EAGER_AND_JIT
def test_a_layer_within_a_linear_solve(layer, mode):
    diagonal = jnp.array([2.0, 4.0])

    def solved(b):
        def solve(matvec, b):
            return b / matvec(jnp.ones(2))

        return jax.lax.custom_linear_solve(lambda v: layer.apply(diagonal, v), b, solve, solve)

    np.testing.assert_allclose(mode(jax.jacrev(solved))(X), jnp.diag(1 / diagonal))


def twice(f):
    return lambda x: jnp.sin(f(f(x) * 2) * x)


@pytest.mark.parametrize("around", [lambda f: f, jax.jit, jax.vmap], ids=["eager", "jit", "vmap"])
def test_taylor_series(around):
    found = jet(around(twice(ForwardTanh.apply)), (X,), (SERIES,))
    assert_same(found, jet(around(twice(jnp.tanh)), (X,), (SERIES,)))


@pytest.mark.parametrize("layer", [Tanh, ForwardTanh])
def test_taylor_series_of_a_gradient(layer):
    def gradient(f):
        return jax.grad(lambda x: twice(f)(x).sum())

    assert_same(jet(gradient(layer.apply), (X,), (SERIES,)), jet(gradient(jnp.tanh), (X,), (SERIES,)))


def test_taylor_series_of_integers():
    class Scale(PyLayer):
        forward_mode = True

        @staticmethod
        def forward(ctx, x, times):
            ctx.save_for_backward(times)
            return x * times.astype(x.dtype), times + 1

        @staticmethod
        def backward(ctx, dy, _):
            return dy * ctx.saved_tensor()[0].astype(dy.dtype), None

    with jax.numpy_dtype_promotion("standard"):  # jet multiplies integers by floats
        primals, (of_y, of_times) = jet(lambda x: Scale.apply(x, jnp.int32(3)), (X,), (SERIES,))
    assert_same((primals, of_y), ((3 * X, jnp.int32(4)), [3 * s for s in SERIES]))
    assert not any(map(np.any, of_times))


def test_taylor_series_without_forward_mode():
    with pytest.raises(TypeError, match="Tanh has no rule for forward-mode differentiation"):
        jet(Tanh.apply, (X,), (SERIES,))
