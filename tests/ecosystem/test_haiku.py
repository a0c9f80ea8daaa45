"""Layers and blocks of hooks within haiku functions that keep state."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from tests.ecosystem.blocks import NO_BLOCK
from tests.ecosystem.layers import steep
from tests.ecosystem.libraries import library

pytestmark = pytest.mark.slow

hk = library("haiku")

X = jax.random.normal(jax.random.key(0), (16, 4))


def network(activation, block, remat):
    """Two layers with a norm, dropout and a counter; the block stands within the function that haiku transforms."""

    @block
    def layer(x):
        x = hk.BatchNorm(create_scale=True, create_offset=True, decay_rate=0.9)(hk.Linear(4)(x), is_training=True)
        count = hk.get_state("count", (), init=jnp.ones)
        hk.set_state("count", count + 1)
        return hk.dropout(hk.next_rng_key(), 0.5, activation(x)) * count

    def run(x):
        one = hk.remat(layer) if remat else layer
        return one(one(x))

    return hk.transform_with_state(run)


@pytest.mark.parametrize(
    ("transform", "remat"), [(lambda f: f, False), (jax.jit, False), (jax.jit, True)], ids=["eager", "jit", "remat"]
)
def test_state_and_random_numbers(transform, remat, block):
    params, state = network(steep, NO_BLOCK, remat).init(jax.random.key(1), X)

    def run(activation, block):
        def loss(params, state):
            y, state = network(activation, block, remat).apply(params, state, jax.random.key(2), X)
            return jnp.mean(y**2), state

        return transform(jax.value_and_grad(loss, has_aux=True))(params, state)

    block.compare(run)
