"""Sparse matrices of `jax.experimental.sparse` as arguments, outputs, saved tensors and gradients."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import sparse

from pylayer_jax import PyLayer
from tests.ecosystem.blocks import assert_close

DENSE = jnp.array([[1.0, 0.0, 2.0], [0.0, 3.0, 0.0], [4.0, 0.0, 0.0]])
X = jnp.array([[0.5, -1.0], [2.0, 0.3], [1.5, -0.7]])
EAGER_AND_JIT = pytest.mark.parametrize("transform", [lambda f: f, jax.jit], ids=["eager", "jit"])


DATA = jnp.array([1.0, 2.0, 3.0, 4.0])
INDICES = jnp.array([[0, 0], [0, 2], [1, 1], [2, 0]])  # of DENSE


def matrix(data):
    return sparse.BCOO((data, INDICES), shape=DENSE.shape, indices_sorted=True, unique_indices=True)


class SparseProduct(PyLayer):
    """Its gradient is twice the true one, and as sparse as the matrix."""

    @staticmethod
    def forward(ctx, m, x):
        ctx.save_for_backward(m, x)
        return m @ x

    @staticmethod
    def backward(ctx, dy):
        m, x = ctx.saved_tensor()
        data = 2 * jnp.sum(dy[m.indices[:, 0]] * x[m.indices[:, 1]], axis=1)
        return sparse.BCOO((data, m.indices), shape=m.shape, indices_sorted=True, unique_indices=True), 2 * m.T @ dy


def doubled(data, x):
    y = jax.lax.stop_gradient(matrix(data) @ x)
    return y + 2 * (matrix(data) @ x - y)


@EAGER_AND_JIT
def test_an_argument(transform, block):
    def loss(data, x):
        with block:
            return jnp.sum(jnp.sin(SparseProduct.apply(matrix(data), x)))

    got = transform(jax.value_and_grad(loss, argnums=(0, 1)))(DATA, X)
    want = jax.value_and_grad(lambda *args: jnp.sum(jnp.sin(doubled(*args))), argnums=(0, 1))(DATA, X)
    assert_close(got[0], want[0])
    block.assert_close(got[1], want[1])


@EAGER_AND_JIT
def test_the_gradient_of_a_matrix(transform):
    found = transform(sparse.grad(lambda m: jnp.sum(jnp.sin(SparseProduct.apply(m, X)))))(matrix(DATA))
    want = jax.grad(lambda data: jnp.sum(jnp.sin(doubled(data, X))))(DATA)
    assert isinstance(found, sparse.BCOO)
    assert_close(found.data, want)


def test_vmap_over_the_entries_and_second_derivatives():
    batch = jnp.stack([DATA, 2 * DATA, -DATA])

    def loss(product):
        return lambda data: jnp.sum(jnp.sin(product(data, X)))

    layer, plain = loss(lambda data, x: SparseProduct.apply(matrix(data), x)), loss(doubled)
    assert_close(jax.vmap(jax.grad(layer))(batch), jax.vmap(jax.grad(plain))(batch))
    assert_close(jax.jacrev(jax.grad(layer))(DATA), jax.jacrev(jax.grad(plain))(DATA), 1e-4)


class Scaled(PyLayer):
    """Returns a sparse matrix, and gets its cotangent as one."""

    @staticmethod
    def forward(ctx, m, factor):
        ctx.save_for_backward(m, factor)
        return m * factor

    @staticmethod
    def backward(ctx, dm):
        m, factor = ctx.saved_tensor()
        gradient = sparse.BCOO((2 * dm.data * factor, m.indices), shape=m.shape, **_flags(m))
        return gradient, 2 * jnp.sum(dm.data * m.data)


def _flags(m):
    return {"indices_sorted": m.indices_sorted, "unique_indices": m.unique_indices}


@EAGER_AND_JIT
def test_an_output(transform):
    def loss(data, factor):
        return jnp.sum(jnp.cos(Scaled.apply(matrix(data), factor).todense() @ X))

    def plain(data, factor):
        y = jax.lax.stop_gradient(data * factor)
        return jnp.sum(jnp.cos(matrix(y + 2 * (data * factor - y)).todense() @ X))

    got, want = (transform(jax.grad(f, argnums=(0, 1)))(DATA, jnp.float32(1.5)) for f in (loss, plain))
    assert_close(got, want)


def test_a_gradient_with_other_flags_is_an_error_that_shows_them():
    class Unsorted(SparseProduct):
        @staticmethod
        def backward(ctx, dy):
            gradient, dx = SparseProduct.backward(ctx, dy)
            return sparse.BCOO((gradient.data, gradient.indices), shape=gradient.shape), dx

    with pytest.raises(ValueError, match=r"Unsorted.backward, gradient of 'm'") as raised:
        jax.grad(lambda data: jnp.sum(Unsorted.apply(matrix(data), X)))(DATA)
    message = str(raised.value)
    assert "invalid" not in message
    expected, got = message.split("; got", maxsplit=1)
    for flag in ("indices_sorted", "unique_indices"):
        assert f"{flag!r}: True" in expected
        assert f"{flag!r}: False" in got


def test_a_gradient_without_the_matrix_is_an_error_that_shows_the_structure():
    class Dense(SparseProduct):
        @staticmethod
        def forward(ctx, m, x):
            return SparseProduct.forward(ctx, m["m"], x)

        @staticmethod
        def backward(ctx, dy):
            return DENSE, None

    with pytest.raises(ValueError, match=r"expected the structure of the argument, \{'m': BCOO\(\*, \*\)\}, or None"):
        jax.grad(lambda data: jnp.sum(Dense.apply({"m": matrix(data)}, X)))(DATA)
