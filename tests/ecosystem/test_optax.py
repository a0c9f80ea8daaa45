"""A layer in a loss that optax minimizes, with a line search that asks for more gradients."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from tests.ecosystem.blocks import NO_BLOCK, assert_close
from tests.ecosystem.libraries import library
from tests.kit.layers import Tanh

optax = library("optax")

X = jax.random.normal(jax.random.key(0), (12, 4))
TARGET = jnp.tanh(X @ jnp.linspace(-1.0, 1.0, 4))
START = {"w": jnp.full(4, 0.1), "b": jnp.zeros(())}


def test_lbfgs_with_a_line_search(block):
    def minimized(activation, block):
        value = block(lambda params: jnp.mean((activation(X @ params["w"] + params["b"]) - TARGET) ** 2))
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
