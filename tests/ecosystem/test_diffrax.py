"""A layer in the vector field of a differential equation, under each way that diffrax has to differentiate it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from tests.ecosystem.blocks import NO_BLOCK, assert_close
from tests.ecosystem.layers import SteepBothWays, steep
from tests.ecosystem.libraries import library

pytestmark = pytest.mark.slow

diffrax = library("diffrax")

W = 0.5 * jax.random.normal(jax.random.key(0), (3, 3))
START = jnp.array([0.1, -0.2, 0.3])
REVERSE = diffrax.RecursiveCheckpointAdjoint(checkpoints=3), diffrax.BacksolveAdjoint(), diffrax.DirectAdjoint()


def end_of(activation, adjoint, block=NO_BLOCK):
    """From the parameters and the start to y(1)."""
    field = diffrax.ODETerm(block(lambda t, y, w: activation(y @ w) - t * y))

    def end(w, start):
        return diffrax.diffeqsolve(field, diffrax.Heun(), 0.0, 1.0, 0.25, start, w, adjoint=adjoint, max_steps=8).ys[-1]

    return end


@pytest.mark.parametrize("adjoint", REVERSE, ids=["recursive", "backsolve", "direct"])
def test_reverse_mode(adjoint, block):
    def run(activation, block):
        end = end_of(activation, adjoint, block)
        return jax.jit(jax.value_and_grad(lambda w, y: jnp.sum(end(w, y) ** 2), argnums=(0, 1)))(W, START)

    block.compare(run)


@pytest.mark.parametrize("adjoint", [diffrax.DirectAdjoint(), diffrax.ForwardMode()], ids=["direct", "forward"])
def test_forward_mode(adjoint):
    def tangent(activation):
        return jax.jit(lambda w, y: jax.jvp(end_of(activation, adjoint), (w, y), (jnp.ones_like(w), y)))(W, START)

    assert_close(tangent(SteepBothWays.apply), tangent(steep))
