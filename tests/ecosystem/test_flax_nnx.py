"""Layers and blocks of hooks within flax.nnx modules: state, transformations, optimizer, modules as arguments."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax
import pytest

from pylayer_jax import PyLayer
from pylayer_jax.packers import cast_saved, quantize_saved
from tests.ecosystem.blocks import NO_BLOCK, assert_close
from tests.ecosystem.layers import Steep, steep
from tests.ecosystem.libraries import library

nnx = library("flax.nnx")

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:flax")

X = jax.random.normal(jax.random.key(0), (16, 8))
EAGER_AND_JIT = pytest.mark.parametrize("transform", [lambda f: f, nnx.jit], ids=["eager", "jit"])


class Module(nnx.Module):
    def __init__(self, activation, rngs):
        self.linear = nnx.Linear(8, 8, rngs=rngs)
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.activation = activation

    def __call__(self, x):
        return self.dropout(self.activation(self.norm(self.linear(x))))


def pure(tree):
    """Arrays only, with the data of random keys in place of the keys."""
    leaves = jax.tree.leaves(tree)
    return [jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x for x in leaves]


def differentiated(run, model, transform=lambda f: f):
    """The loss of `run(model)`, its gradient, and the state that the run left."""
    value, gradient = transform(nnx.value_and_grad(lambda model: jnp.mean(run(model) ** 2)))(model)
    return value, pure(nnx.state(gradient)), pure(nnx.state(model, nnx.Not(nnx.Param)))


def compare(got, want, block):
    assert_close(got[0], want[0])
    block.assert_close(got[1], want[1])
    assert_close(got[2], want[2])


@EAGER_AND_JIT
def test_dropout_and_batch_norm_in_a_block(block, transform):
    def run(model):
        with block:
            return model(model(X))

    want = differentiated(lambda model: model(model(X)), Module(steep, nnx.Rngs(0)), transform)
    compare(differentiated(run, Module(Steep.apply, nnx.Rngs(0)), transform), want, block)


@pytest.mark.parametrize("packer", [cast_saved, quantize_saved])
def test_a_decorated_module(packer):
    want = differentiated(lambda model: model(X), Module(steep, nnx.Rngs(0)), nnx.jit)
    got = differentiated(packer()(lambda model: model(X)), Module(Steep.apply, nnx.Rngs(0)), nnx.jit)
    assert_close(got[0], want[0])
    assert_close(got[1], want[1], 0.03)
    assert_close(got[2], want[2])


@pytest.mark.parametrize("block", ["none", "spy", "cast"], indirect=True)
def test_optimizer(block):
    def trained(activation, block):
        model = Module(activation, nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, optax.sgd(0.1, momentum=0.9), wrt=nnx.Param)

        @nnx.jit
        def step(model, optimizer):
            def loss(model):
                with block:
                    return jnp.mean((model(X) - 1) ** 2)

            value, gradient = nnx.value_and_grad(loss)(model)
            optimizer.update(model, gradient)
            return value

        losses = [step(model, optimizer) for _ in range(4)]
        return losses, pure(nnx.state(model, nnx.Param)), pure(nnx.state(model, nnx.BatchStat))

    losses, weights, statistics = trained(Steep.apply, block)
    plain = trained(steep, NO_BLOCK)
    assert_close(losses, plain[0], block.tolerance)
    block.assert_close(weights, plain[1])
    assert_close(statistics, plain[2], block.tolerance)


def stacked(activation):
    @nnx.split_rngs(splits=3)
    @nnx.vmap(in_axes=(0,), out_axes=0)
    def create(rngs):
        return Module(activation, rngs)

    return create(nnx.Rngs(0))


@pytest.mark.parametrize("remat", [False, True], ids=["scan", "scan-remat"])
def test_scan_over_layers(block, remat):
    def run_with(block):
        def layer(x, model):
            with block:
                return model(x)

        layer = nnx.remat(layer) if remat else layer
        scanned = nnx.scan(layer, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        return lambda model: scanned(X, model)

    want = differentiated(run_with(NO_BLOCK), stacked(steep), nnx.jit)
    compare(differentiated(run_with(block), stacked(Steep.apply), nnx.jit), want, block)


def test_vmap_over_an_ensemble(block):
    def run_with(block):
        def one(model):
            with block:
                return model(X)

        return nnx.vmap(one, in_axes=0)

    want = differentiated(run_with(NO_BLOCK), stacked(steep), nnx.jit)
    compare(differentiated(run_with(block), stacked(Steep.apply), nnx.jit), want, block)


def test_remat(block):
    def run_with(block):
        @nnx.remat
        def run(model):
            with block:
                return model(X)

        return run

    want = differentiated(run_with(NO_BLOCK), Module(steep, nnx.Rngs(0)), nnx.jit)
    compare(differentiated(run_with(block), Module(Steep.apply, nnx.Rngs(0)), nnx.jit), want, block)


def test_a_part_of_the_parameters():
    def gradient(activation):
        kernels = nnx.DiffState(0, nnx.PathContains("kernel"))
        return nnx.grad(lambda model: jnp.mean(model(X) ** 2), argnums=kernels)(Module(activation, nnx.Rngs(0)))

    got, want = (pure(nnx.state(gradient(f))) for f in (Steep.apply, steep))
    assert len(got) == 1
    assert_close(got, want)


class Applied(PyLayer):
    """Takes a whole module; its gradient is twice the true one."""

    @staticmethod
    def forward(ctx, linear, x):
        ctx.save_for_backward(linear, x)
        return linear(x)

    @staticmethod
    def backward(ctx, dy):
        linear, x = ctx.saved_tensor()
        _, pull = jax.vjp(lambda linear, x: linear(x), linear, x)
        return jax.tree.map(lambda g: 2 * g, pull(dy))


@EAGER_AND_JIT
def test_a_module_as_an_argument(transform, block):
    def run(model):
        with block:
            return jnp.tanh(Applied.apply(model, X))

    def expected(model):
        y = jax.lax.stop_gradient(model(X))
        return jnp.tanh(y + 2 * (model(X) - y))

    want, got = (differentiated(f, nnx.Linear(8, 8, rngs=nnx.Rngs(0)), transform) for f in (expected, run))
    assert_close(got[0], want[0])
    block.assert_close(got[1], want[1])


def test_a_state_change_that_would_be_lost_is_an_error():
    class Normed(Applied):
        pass

    with pytest.raises(ValueError, match=r"Normed.forward changed its argument linear.* in place"):
        differentiated(lambda model: Normed.apply(model, X), nnx.BatchNorm(8, rngs=nnx.Rngs(0)))
