"""A layer in the log density of NUTS and HMC: the same key gives the same chain as without the library."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from tests.ecosystem.blocks import NO_BLOCK, assert_close
from tests.ecosystem.libraries import library
from tests.kit.layers import Tanh

blackjax = library("blackjax")

X = jax.random.normal(jax.random.key(0), (8, 2))
TARGET = jnp.tanh(X @ jnp.array([0.5, -1.0]))
SAMPLERS = {
    "nuts": lambda density: blackjax.nuts(density, 0.05, jnp.ones(2), max_num_doublings=3),
    "hmc": lambda density: blackjax.hmc(density, 0.05, jnp.ones(2), num_integration_steps=4),
}


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_a_chain(sampler, block):
    def chain(activation, block):
        def log_density(w):
            with block:
                return -2 * jnp.sum((activation(X @ w) - TARGET) ** 2) - jnp.sum(w**2) / 2

        method = SAMPLERS[sampler](log_density)

        def step(state, key):
            state, info = method.step(key, state)
            return state, (state, info.acceptance_rate)

        keys = jax.random.split(jax.random.key(1), 5)
        _, found = jax.jit(lambda w: jax.lax.scan(step, method.init(w), keys))(jnp.zeros(2))
        return found

    (states, rates), (want, want_rates) = chain(Tanh.apply, block), chain(jnp.tanh, NO_BLOCK)
    assert float(jnp.abs(jnp.diff(want.position, axis=0)).max()) > 0.01  # it moves
    tolerance = max(block.tolerance, 1e-4)
    for name in ("position", "logdensity", "logdensity_grad"):
        assert_close(getattr(states, name), getattr(want, name), tolerance)
    assert_close(rates, want_rates, tolerance)
