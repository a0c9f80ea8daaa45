"""Layers and blocks of hooks within flax.linen modules that keep state."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from tests.around.blocks import NO_BLOCK, assert_close, library, steep
from tests.kit.layers import Steep

pytestmark = pytest.mark.slow

nn = library("flax.linen")

X = jax.random.normal(jax.random.key(0), (16, 8))
RNGS = {"params": jax.random.key(1), "dropout": jax.random.key(2)}


class Module(nn.Module):
    activation: Any
    block: Any = NO_BLOCK

    @nn.compact
    def __call__(self, x, _=None):
        with self.block:
            x = nn.Dense(8)(x)
            x = nn.BatchNorm(use_running_average=False)(x)
            x = self.activation(x)
            return nn.Dropout(0.5, deterministic=False)(x), None


class Scanned(nn.Module):
    activation: Any
    block: Any = NO_BLOCK
    layer: Any = nn.remat(Module, prevent_cse=False)

    @nn.compact
    def __call__(self, x):
        axes = {"params": 0, "batch_stats": 0}
        split = {"params": True, "dropout": True}
        layers = nn.scan(self.layer, variable_axes=axes, split_rngs=split, length=3)
        return layers(self.activation, self.block)(x, None)


WAYS = {
    "eager": (Module, lambda f: f),
    "jit": (Module, jax.jit),
    "remat": (nn.remat(Module), jax.jit),
    "scan": (lambda *args: Scanned(*args, layer=Module), jax.jit),
    "scan-remat": (Scanned, jax.jit),
}


def applied(module, variables):
    (y, _), state = module.apply(variables, X, rngs={"dropout": jax.random.key(2)}, mutable=["batch_stats"])
    return jnp.mean(y**2), state


@pytest.mark.parametrize("way", WAYS)
def test_state_and_random_numbers(way, block):
    make, transform = WAYS[way]
    variables = make(steep).init(RNGS, X)

    def run(activation, block):
        """The loss with the batch statistics that the run left, and the gradient."""
        loss = lambda variables: applied(make(activation, block), variables)  # noqa: E731
        return transform(jax.value_and_grad(loss, has_aux=True))(variables)

    block.compare(run)


@pytest.mark.parametrize("block", ["spy", "cast"], indirect=True)
def test_a_block_around_the_whole_model(block):
    variables = Scanned(steep).init(RNGS, X)

    def run(activation, block):
        loss = block(lambda variables: applied(Scanned(activation), variables)[0])
        return jax.jit(jax.value_and_grad(loss))(variables)

    block.compare(run)


def test_parameters_made_by_init_do_not_depend_on_the_layer():
    assert_close(Scanned(Steep.apply).init(RNGS, X), Scanned(steep).init(RNGS, X), 0)
