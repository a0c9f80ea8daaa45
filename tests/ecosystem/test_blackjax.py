"""A layer in the log density of NUTS: the same key gives the same chain as without the library."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from tests.ecosystem.blocks import NO_BLOCK, assert_close
from tests.ecosystem.libraries import library
from tests.kit.layers import Tanh

pytestmark = pytest.mark.slow

blackjax = library("blackjax")

X = jax.random.normal(jax.random.key(0), (8, 2))
TARGET = jnp.tanh(X @ jnp.array([0.5, -1.0]))


def test_a_chain(block):
    def chain(activation, block):
        @block
        def log_density(w):
            return -2 * jnp.sum((activation(X @ w) - TARGET) ** 2) - jnp.sum(w**2) / 2

        method = blackjax.nuts(log_density, 0.05, jnp.ones(2), max_num_doublings=3)

        def step(state, key):
            state, info = method.step(key, state)
            return state, (state.position, state.logdensity, state.logdensity_grad, info.acceptance_rate)

        keys = jax.random.split(jax.random.key(1), 5)
        _, found = jax.jit(lambda w: jax.lax.scan(step, method.init(w), keys))(jnp.zeros(2))
        return found

    got, want = chain(Tanh.apply, block), chain(jnp.tanh, NO_BLOCK)
    assert float(jnp.abs(jnp.diff(want[0], axis=0)).max()) > 0.01  # it moves
    for ours, plain in zip(got, want, strict=True):
        assert_close(ours, plain, max(block.tolerance, 1e-4))
