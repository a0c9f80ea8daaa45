"""A block inside a function that changes the state of flax.nnx modules works as without it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pylayer_jax.packers import cast_saved, quantize_saved

nnx = pytest.importorskip("flax.nnx", reason="flax is not installed")


def trained(hooks, transform):
    """The loss, its gradient, and the state that one step has left."""

    class Model(nnx.Module):
        def __init__(self, rngs):
            self.linear = nnx.Linear(8, 8, rngs=rngs)
            self.norm = nnx.BatchNorm(8, rngs=rngs)
            self.dropout = nnx.Dropout(0.5, rngs=rngs)

        def __call__(self, x):
            return self.dropout(jnp.tanh(self.norm(self.linear(x))))

    model, x = Model(nnx.Rngs(0)), jax.random.normal(jax.random.key(0), (64, 8))

    def loss(model):
        if hooks is None:
            return jnp.mean(model(x) ** 2)
        with hooks:
            return jnp.mean(model(x) ** 2)

    value, gradient = transform(nnx.value_and_grad(loss))(model)
    return value, jax.tree.leaves(nnx.state(gradient)), jax.tree.leaves(nnx.state(model, nnx.BatchStat))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("jitted", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize("packer", [cast_saved, quantize_saved])
def test_dropout_and_batch_norm_in_a_block(packer, jitted):
    transform = nnx.jit if jitted else lambda f: f
    value, gradient, state = trained(None, transform)
    got, packed_gradient, packed_state = trained(packer(), transform)
    np.testing.assert_allclose(got, value, rtol=1e-6)
    largest = max(float(jnp.abs(x).max()) for x in gradient)  # that of a bias before the norm is zero
    for a, b in zip(packed_gradient, gradient, strict=True):
        np.testing.assert_allclose(a, b, atol=0.03 * largest)
    for a, b in zip(packed_state, state, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5)
