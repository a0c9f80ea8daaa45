"""Layers within `jax.linear_transpose` and `jax.lax.custom_linear_solve`."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pylayer_jax import PyLayer
from tests.kit.layers import Multiply, Square
from tests.kit.modes import EAGER_AND_JIT

X = jnp.array([0.3, -0.7])


class Sums(PyLayer):
    """Linear; its rule, which plays no part here, is not its transpose."""

    forward = staticmethod(lambda ctx, x, times: (jnp.cumsum(x) * times, x.sum()))
    backward = staticmethod(lambda ctx, *_: pytest.fail("it is not differentiated"))


ForwardSums, ForwardMultiply = (
    type(f"Forward{layer.__name__}", (layer,), {"forward_mode": True}) for layer in (Sums, Multiply)
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
    with pytest.raises(TypeError, match=r"(?s)Squared.*mul"):
        jax.linear_transpose(layer.apply, X)(X)


@EAGER_AND_JIT
def test_a_layer_within_a_linear_solve(mode):
    diagonal = jnp.array([2.0, 4.0])

    def solved(b):
        def solve(matvec, b):
            return b / matvec(jnp.ones(2))

        return jax.lax.custom_linear_solve(lambda v: ForwardMultiply.apply(diagonal, v), b, solve, solve)

    np.testing.assert_allclose(mode(jax.jacrev(solved))(X), jnp.diag(1 / diagonal))
