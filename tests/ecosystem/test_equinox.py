"""Layers and blocks of hooks with equinox: modules as arguments, filtered transformations, State, loops."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import pytest

from pylayer_jax import PyLayer
from tests.ecosystem.blocks import NO_BLOCK, assert_close
from tests.ecosystem.layers import Steep, steep
from tests.ecosystem.libraries import library

eqx = library("equinox")

X = jax.random.normal(jax.random.key(0), (6, 4))
EAGER_AND_JIT = pytest.mark.parametrize("transform", [lambda f: f, eqx.filter_jit], ids=["eager", "jit"])


def mlp(activation, key=1):
    # An activation that is an array leaf, or a lambda that equinox wraps, would hide how a layer is carried.
    return eqx.nn.MLP(4, 4, 8, 2, activation=activation, key=jax.random.key(key))


def loss_in(block):
    def loss(model, x):
        with block:
            return jnp.mean(jax.vmap(model)(x) ** 2)

    return loss


def arrays(tree):
    return jax.tree.leaves(eqx.filter(tree, eqx.is_array))


@EAGER_AND_JIT
def test_an_activation_of_a_module(block, transform):
    def run(activation, block):
        return transform(eqx.filter_value_and_grad(loss_in(block)))(mlp(activation), X)

    (got, gradient), (want, want_gradient) = run(Steep.apply, block), run(steep, NO_BLOCK)
    assert_close(got, want)
    block.assert_close(arrays(gradient), arrays(want_gradient))


class Applied(PyLayer):
    """Takes a whole module, statics included; its gradient is twice the true one."""

    @staticmethod
    def forward(ctx, model, x):
        ctx.save_for_backward(model, x)
        return model(x)

    @staticmethod
    def backward(ctx, dy):
        model, x = ctx.saved_tensor()
        _, pull = eqx.filter_vjp(lambda model, x: model(x), model, x)
        return jax.tree.map(lambda g: 2 * g, pull(dy))


def doubled(model, x):
    y = jax.lax.stop_gradient(model(x))
    return y + 2 * (model(x) - y)


def module_loss(applied, block):
    def loss(model, x):
        with block:
            return jnp.mean(jnp.tanh(applied(model, x)))

    return loss


@EAGER_AND_JIT
def test_a_module_as_an_argument(block, transform):
    def run(applied, block):
        return transform(eqx.filter_value_and_grad(module_loss(applied, block)))(mlp(jax.nn.softplus), X[0])

    (got, gradient), (want, want_gradient) = run(Applied.apply, block), run(doubled, NO_BLOCK)
    assert_close(got, want)
    assert jax.tree.structure(gradient) == jax.tree.structure(want_gradient)
    block.assert_close(arrays(gradient), arrays(want_gradient))


def test_vmap_over_an_ensemble(block):
    def run(applied, block):
        make = eqx.filter_vmap(lambda key: eqx.nn.MLP(4, 4, 8, 1, activation=jax.nn.softplus, key=key))
        models = make(jax.random.split(jax.random.key(1), 3))
        one = eqx.filter_vmap(module_loss(applied, block), in_axes=(eqx.if_array(0), None))
        return eqx.filter_jit(eqx.filter_grad(lambda models: one(models, X[0]).sum()))(models)

    block.assert_close(arrays(run(Applied.apply, block)), arrays(run(doubled, NO_BLOCK)))


def test_filter_checkpoint(block):
    def run(activation, block):
        loss = eqx.filter_checkpoint(loss_in(block))
        return eqx.filter_jit(eqx.filter_grad(loss))(mlp(activation), X)

    block.assert_close(arrays(run(Steep.apply, block)), arrays(run(steep, NO_BLOCK)))


class Stateful(eqx.Module):
    """A norm and a counter, which both keep state."""

    linear: eqx.nn.Linear
    norm: eqx.nn.BatchNorm
    count: eqx.nn.StateIndex
    activation: Callable = eqx.field(static=True)

    def __init__(self, activation):
        self.linear = eqx.nn.Linear(4, 4, key=jax.random.key(1))
        self.norm = eqx.nn.BatchNorm(4, "batch", mode="batch")
        self.count = eqx.nn.StateIndex(jnp.array(1.0))
        self.activation = activation

    def __call__(self, x, state):
        x, state = self.norm(self.linear(x), state)
        state = state.set(self.count, state.get(self.count) + 1)
        return self.activation(x), state


@EAGER_AND_JIT
def test_state(block, transform):
    def run(activation, block):
        model, state = eqx.nn.make_with_state(Stateful)(activation)

        def loss(model, state):
            with block:
                y, state = jax.vmap(model, axis_name="batch", in_axes=(0, None), out_axes=(0, None))(X, state)
            return jnp.mean((y - 1) ** 2), state

        (value, state), gradient = transform(eqx.filter_value_and_grad(loss, has_aux=True))(model, state)
        return (value, jax.tree.leaves(state)), arrays(gradient)

    (got, gradient), (want, want_gradient) = run(Steep.apply, block), run(steep, NO_BLOCK)
    assert_close(got, want)
    block.assert_close(gradient, want_gradient)


class Counted(PyLayer):
    """Takes a module and its state, and returns the new state as an output."""

    @staticmethod
    def forward(ctx, count, x, state):
        number = state.get(count)
        ctx.save_for_backward(number)
        return x * number, state.set(count, number + 1)

    @staticmethod
    def backward(ctx, dy, dstate):
        (number,) = ctx.saved_tensor()
        return None, 2 * dy * number, None


@EAGER_AND_JIT
def test_state_as_an_argument_and_an_output(transform):
    class Count(eqx.Module):
        index: eqx.nn.StateIndex

        def __init__(self):
            self.index = eqx.nn.StateIndex(jnp.array(3.0))

    model, state = eqx.nn.make_with_state(Count)()

    def loss(x, state):
        y, state = Counted.apply(model.index, x, state)
        y, state = Counted.apply(model.index, y, state)
        return y.sum(), state

    gradient, state = transform(jax.grad(loss, has_aux=True))(X, state)
    assert_close(gradient, jnp.full_like(X, 2 * 3 * 2 * 4))
    assert_close(state.get(model.index), 5.0)


@pytest.mark.parametrize("kind", ["checkpointed", "bounded"])
def test_while_loops(kind, block):
    def run(activation, block):
        def loss(w, x):
            def step(carry):
                i, x = carry
                with block:
                    return i + 1, activation(x @ w) + x

            more = lambda carry: (carry[0] < 5) & (jnp.abs(carry[1]).sum() < 1e3)  # noqa: E731
            options = {"checkpoints": 3} if kind == "checkpointed" else {}
            loop = eqx.internal.while_loop(more, step, (0, x), max_steps=8, kind=kind, **options)
            return jnp.sum(loop[1] ** 2)

        return jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))(0.3 * jnp.eye(4) + 0.1, X)

    (got, gradient), (want, want_gradient) = run(Steep.apply, block), run(steep, NO_BLOCK)
    assert_close(got, want)
    block.assert_close(gradient, want_gradient)
