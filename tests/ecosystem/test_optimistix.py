"""Layers in equations that optimistix solves: implicit gradients, unrolled ones, and the error without forward mode."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from tests.ecosystem.blocks import NO_BLOCK, assert_close
from tests.ecosystem.layers import Steep, SteepBothWays
from tests.ecosystem.libraries import library
from tests.kit.layers import Square

pytestmark = pytest.mark.slow

optx = library("optimistix")

W = 0.2 * jax.random.normal(jax.random.key(0), (3, 3))
START = jnp.array([0.1, -0.2, 0.3])
IMPLICIT, UNROLLED = optx.ImplicitAdjoint(), optx.RecursiveCheckpointAdjoint()
SOLVERS = {
    "newton": (optx.root_find, optx.Newton(1e-6, 1e-6)),
    "chord": (optx.root_find, optx.Chord(1e-6, 1e-6)),
    "fixed-point": (optx.fixed_point, optx.FixedPointIteration(1e-6, 1e-6)),
    "levenberg-marquardt": (optx.least_squares, optx.LevenbergMarquardt(1e-6, 1e-6)),
}


def solution(activation, solver, adjoint=IMPLICIT, block=NO_BLOCK):
    """From the parameters to the y with y = activation(W y + b) / 2; the block stands within the equation."""
    solve, method = SOLVERS[solver]

    @block
    def equation(y, params):
        w, b = params
        image = activation(y @ w + b) / 2
        return image if solver == "fixed-point" else image - y

    return lambda w, b: solve(equation, method, START, (w, b), adjoint=adjoint, max_steps=32).value


def value_and_gradient(solved, block=NO_BLOCK):
    loss = block(lambda w, b: jnp.sum(solved(w, b) ** 2))
    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))(W, 2 * START)


@pytest.mark.parametrize("solver", SOLVERS)
def test_implicit_gradients(solver, block):
    block.compare(lambda f, block: value_and_gradient(solution(f, solver), block), SteepBothWays.apply)


def test_gradients_through_the_iterations_need_only_reverse_mode(block):
    block.compare(lambda f, block: value_and_gradient(solution(f, "fixed-point", UNROLLED, block)))


def test_a_layer_without_forward_mode_has_no_implicit_gradient():
    with pytest.raises(TypeError):
        value_and_gradient(solution(Steep.apply, "newton"))


def test_minimise(block):
    def found(activation, block):
        loss = block(lambda y, w: jnp.mean((activation(y @ w) - 0.1) ** 2) + 0.01 * jnp.sum(y**2))
        return jax.jit(lambda w: optx.minimise(loss, optx.BFGS(1e-4, 1e-4), START, w, max_steps=64).value)(W)

    assert_close(found(Square.apply, block), found(lambda x: x * x, NO_BLOCK), max(block.tolerance, 1e-3))
