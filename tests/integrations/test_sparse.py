"""Sparse matrices of `jax.experimental.sparse` as arguments, outputs, saved tensors and gradients."""

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import sparse

from tests.integrations.blocks import assert_close
from tests.kit.layers import layer
from tests.kit.modes import EAGER_AND_JIT

X = jnp.array([[0.5, -1.0], [2.0, 0.3], [1.5, -0.7]])
DATA = jnp.array([1.0, 2.0, 3.0, 4.0])
INDICES = jnp.array([[0, 0], [0, 2], [1, 1], [2, 0]])


def matrix(data, indices=INDICES, sure=True):
    return sparse.BCOO((data, indices), shape=(3, 3), indices_sorted=sure, unique_indices=sure)


def gradients_of_product(m, x, dy):
    data = 2 * jnp.sum(dy[m.indices[:, 0]] * x[m.indices[:, 1]], axis=1)
    return matrix(data, m.indices), 2 * m.T @ dy


# Has twice the true gradient, which is as sparse as the matrix.
SparseProduct = layer(lambda m, x: m @ x, gradients_of_product, plain=True)


# Returns a sparse matrix, and gets its cotangent as one.
Scaled = layer(
    lambda m, factor: m * factor,
    lambda m, factor, dm: (matrix(2 * dm.data * factor, m.indices), 2 * jnp.sum(dm.data * m.data)),
    plain=True,
)


def twice(y):
    """Return a value, and twice its gradient."""
    return 2 * y - jax.lax.stop_gradient(y)


def loss(data, x):
    return jnp.sum(jnp.sin(SparseProduct.apply(matrix(data), x)))


def plain_loss(data, x):
    return jnp.sum(jnp.sin(twice(matrix(data) @ x)))


def scaled(data, factor):
    return jnp.sum(jnp.cos(Scaled.apply(matrix(data), factor[0]).todense() @ X))


def plain_scaled(data, factor):
    return jnp.sum(jnp.cos(matrix(twice(data * factor[0])).todense() @ X))


@pytest.mark.parametrize(
    ("ours", "plain", "x"), [(loss, plain_loss, X), (scaled, plain_scaled, [1.5])], ids=["argument", "output"]
)
@EAGER_AND_JIT
def test_an_argument_and_an_output(ours, plain, x, mode, block):
    block.compare(lambda f, block: mode(jax.value_and_grad(block(f), argnums=(0, 1)))(DATA, x), ours, plain)


def test_vmap_over_the_entries_and_second_derivatives():
    batch = jnp.stack([DATA, 2 * DATA, -DATA])
    for transform, data in ((lambda f: jax.vmap(f, (0, None)), batch), (jax.jacrev, DATA)):
        ours, plain = (jax.jit(transform(jax.grad(f)))(data, X) for f in (loss, plain_loss))
        assert_close(ours, plain, 1e-4)
