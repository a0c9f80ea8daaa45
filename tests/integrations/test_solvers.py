"""Layers in equations, differential equations and losses that other libraries solve and minimize."""

import jax
import jax.numpy as jnp
import pytest

from tests.integrations.blocks import NO_BLOCK, assert_close, library, steep
from tests.kit.layers import SteepBothWays, Tanh

slow = pytest.mark.slow
optx = library("optimistix")

W = 0.2 * jax.random.normal(jax.random.key(0), (3, 3))
START = jnp.array([0.1, -0.2, 0.3])
IMPLICIT, UNROLLED = optx.ImplicitAdjoint(), optx.RecursiveCheckpointAdjoint()
SOLVERS = {
    "newton": (optx.root_find, optx.Newton(1e-6, 1e-6)),
    "fixed-point": (optx.fixed_point, optx.FixedPointIteration(1e-6, 1e-6)),
    "levenberg-marquardt": (optx.least_squares, optx.LevenbergMarquardt(1e-6, 1e-6)),
}


def solution(activation, solver, adjoint=IMPLICIT, block=NO_BLOCK):
    """Return the solution y of y = activation(W y + b) / 2 for given parameters, with the block in the equation."""
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
@slow
def test_implicit_gradients(solver, block):
    block.compare(lambda f, block: value_and_gradient(solution(f, solver), block), SteepBothWays.apply)


@slow
def test_gradients_through_the_iterations_need_only_reverse_mode(block):
    block.compare(lambda f, block: value_and_gradient(solution(f, "fixed-point", UNROLLED, block)))


# -- diffrax: each way that it has to differentiate ------------------------------------------------


diffrax = library("diffrax")

FIELD = 0.5 * jax.random.normal(jax.random.key(0), (3, 3))
REVERSE = diffrax.RecursiveCheckpointAdjoint(checkpoints=3), diffrax.BacksolveAdjoint()


def end_of(activation, adjoint, block=NO_BLOCK):
    """Return y(1) for given parameters and a given start."""
    field = diffrax.ODETerm(block(lambda t, y, w: activation(y @ w) - t * y))

    def end(w, start):
        return diffrax.diffeqsolve(field, diffrax.Heun(), 0.0, 1.0, 0.25, start, w, adjoint=adjoint, max_steps=8).ys[-1]

    return end


@pytest.mark.parametrize("adjoint", REVERSE, ids=["recursive", "backsolve"])
@slow
def test_reverse_mode(adjoint, block):
    def run(activation, block):
        end = end_of(activation, adjoint, block)
        return jax.jit(jax.value_and_grad(lambda w, y: jnp.sum(end(w, y) ** 2), argnums=(0, 1)))(FIELD, START)

    block.compare(run)


@pytest.mark.parametrize("adjoint", [diffrax.DirectAdjoint(), diffrax.ForwardMode()], ids=["direct", "forward"])
@slow
def test_forward_mode(adjoint):
    def tangent(activation):
        return jax.jit(lambda w, y: jax.jvp(end_of(activation, adjoint), (w, y), (jnp.ones_like(w), y)))(FIELD, START)

    assert_close(tangent(SteepBothWays.apply), tangent(steep))


# -- optax: a line search asks for more gradients --------------------------------------------------


optax = library("optax")

INPUTS = jax.random.normal(jax.random.key(0), (12, 4))
OUTPUTS = jnp.tanh(INPUTS @ jnp.linspace(-1.0, 1.0, 4))
AT_FIRST = {"w": jnp.full(4, 0.1), "b": jnp.zeros(())}


def test_lbfgs_with_a_line_search(block):
    def minimized(activation, block):
        value = block(lambda params: jnp.mean((activation(INPUTS @ params["w"] + params["b"]) - OUTPUTS) ** 2))
        optimizer = optax.lbfgs(linesearch=optax.scale_by_zoom_linesearch(max_linesearch_steps=8))

        def step(carry, _):
            params, state = carry
            found, gradient = optax.value_and_grad_from_state(value)(params, state=state)
            updates, state = optimizer.update(gradient, state, params, value=found, grad=gradient, value_fn=value)
            return (optax.apply_updates(params, updates), state), found

        return jax.jit(lambda p: jax.lax.scan(step, (p, optimizer.init(p)), None, length=6))(AT_FIRST)

    # The line search needs true gradients.
    ((params, _), losses), ((want, _), want_losses) = minimized(Tanh.apply, block), minimized(jnp.tanh, NO_BLOCK)
    assert losses[-1] < 0.01 * losses[0]
    assert_close(losses, want_losses, 1e-4)
    assert_close(params, want, 1e-3)
