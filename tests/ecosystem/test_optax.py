"""Layers in losses that optax minimizes: gradients over several steps, and a line search that asks for more of them."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from tests.ecosystem.blocks import NO_BLOCK, assert_close
from tests.ecosystem.layers import Steep, steep
from tests.ecosystem.libraries import library
from tests.kit.layers import Tanh

optax = library("optax")

X = jax.random.normal(jax.random.key(0), (12, 4))
TARGET = jnp.tanh(X @ jnp.linspace(-1.0, 1.0, 4))
START = {"w": jnp.full(4, 0.1), "b": jnp.zeros(())}


def loss_of(activation, block):
    return block(lambda params, x, target: jnp.mean((activation(x @ params["w"] + params["b"]) - target) ** 2))


def test_multi_steps(block):
    def trained(activation, block):
        optimizer = optax.MultiSteps(optax.adam(0.1), every_k_schedule=3)
        loss = loss_of(activation, block)

        def step(carry, batch):
            params, state = carry
            value, gradient = jax.value_and_grad(loss)(params, *batch)
            updates, state = optimizer.update(gradient, state, params)
            return (optax.apply_updates(params, updates), state), value

        @jax.jit
        def run(params):
            batches = X.reshape(6, 2, 4), TARGET.reshape(6, 2)
            (params, state), losses = jax.lax.scan(step, (params, optimizer.init(params)), batches)
            return params, losses, state.gradient_step

        return run(START)

    (params, losses, steps), (want, want_losses, _) = trained(Steep.apply, block), trained(steep, NO_BLOCK)
    assert steps == 2
    assert_close(losses, want_losses, block.tolerance)
    assert_close(params, want, block.tolerance)


def test_lbfgs_with_a_line_search(block):
    def minimized(activation, block):
        value = functools.partial(loss_of(activation, block), x=X, target=TARGET)
        optimizer = optax.lbfgs(linesearch=optax.scale_by_zoom_linesearch(max_linesearch_steps=8))

        def step(carry, _):
            params, state = carry
            found, gradient = optax.value_and_grad_from_state(value)(params, state=state)
            updates, state = optimizer.update(gradient, state, params, value=found, grad=gradient, value_fn=value)
            return (optax.apply_updates(params, updates), state), found

        return jax.jit(lambda p: jax.lax.scan(step, (p, optimizer.init(p)), None, length=6))(START)

    # The line search needs true gradients.
    ((params, _), losses), ((want, _), want_losses) = minimized(Tanh.apply, block), minimized(jnp.tanh, NO_BLOCK)
    assert losses[-1] < 0.01 * losses[0]
    assert_close(losses, want_losses, max(block.tolerance, 1e-4))
    assert_close(params, want, max(block.tolerance, 1e-3))
