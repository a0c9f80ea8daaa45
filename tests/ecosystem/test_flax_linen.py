"""Layers and blocks of hooks within flax.linen modules: mutable collections, random numbers, scan, remat."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from tests.ecosystem.blocks import NO_BLOCK, assert_close
from tests.ecosystem.layers import Steep, steep
from tests.ecosystem.libraries import library

nn = library("flax.linen")

X = jax.random.normal(jax.random.key(0), (16, 8))
RNGS = {"params": jax.random.key(1), "dropout": jax.random.key(2)}
EAGER_AND_JIT = pytest.mark.parametrize("transform", [lambda f: f, jax.jit], ids=["eager", "jit"])


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
    remat: bool = True

    @nn.compact
    def __call__(self, x):
        layer = nn.remat(Module, prevent_cse=False) if self.remat else Module
        axes = {"params": 0, "batch_stats": 0}
        split = {"params": True, "dropout": True}
        return nn.scan(layer, variable_axes=axes, split_rngs=split, length=3)(self.activation, self.block)(x, None)


def differentiated(module, variables, transform=lambda f: f):
    """The loss with the batch statistics that the run left, and the gradient."""

    def loss(params, statistics, x):
        rngs = {"dropout": jax.random.key(2)}
        (y, _), state = module.apply(
            {"params": params, "batch_stats": statistics}, x, rngs=rngs, mutable=["batch_stats"]
        )
        return jnp.mean(y**2), state

    run = transform(jax.value_and_grad(loss, argnums=(0, 2), has_aux=True))
    return run(variables["params"], variables["batch_stats"], X)


def compare(make, block, transform=lambda f: f):
    plain = make(steep, NO_BLOCK)
    variables = plain.init(RNGS, X)
    want, want_gradient = differentiated(plain, variables, transform)
    got, gradient = differentiated(make(Steep.apply, block), variables, transform)
    assert_close(got, want)
    block.assert_close(gradient, want_gradient)


@EAGER_AND_JIT
def test_apply_with_state_and_random_numbers(block, transform):
    compare(Module, block, transform)


def test_remat(block):
    compare(nn.remat(Module), block, jax.jit)


def test_scan_over_layers(block):
    compare(lambda *args: Scanned(*args, remat=False), block, jax.jit)


def test_scan_of_remat_with_dropout_and_batch_statistics(block):
    compare(Scanned, block, jax.jit)


@pytest.mark.parametrize("block", ["spy", "cast"], indirect=True)
def test_a_block_around_the_whole_model(block):
    plain = Scanned(steep)
    variables = plain.init(RNGS, X)

    def run(*args):
        with block:
            return Scanned(Steep.apply).apply(*args, rngs={"dropout": jax.random.key(2)}, mutable=["batch_stats"])

    gradient = jax.grad(lambda params: jnp.mean(run(variables | {"params": params}, X)[0][0] ** 2))
    _, want = differentiated(plain, variables, jax.jit)
    block.assert_close(jax.jit(gradient)(variables["params"]), want[0])


def test_parameters_made_by_init_do_not_depend_on_the_layer():
    assert_close(Scanned(Steep.apply).init(RNGS, X), Scanned(steep).init(RNGS, X), 0)
