"""Ports without an original against closed forms and plain automatic differentiation."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import pytest

from tests.kit.case import Case, W, X, case_of, grid, stop, straight_through
from tests.kit.closed_forms import compare_gradients, compare_outputs, with_ways
from tests.kit.transforms import scalar
from tests.registry.after_torch import sparsemax

from . import without_original as layers

CASES: list[Case] = []
case = functools.partial(case_of, CASES)

# Supports of one, two and four entries, of which two are searched at first.
ROWS = jnp.array([[3.0, 0.1, 0.4, -0.2], [0.9, 1.1, -2, -3], [0.1, 0.2, 0.05, 0.15]])


def entmax15(x):
    """The threshold by bisection, and its derivatives by Newton's method."""

    def total(z, tau):
        return (jnp.maximum(z - tau, 0) ** 2).sum(-1, keepdims=True)

    def halve(_, ends):
        middle = sum(ends) / 2
        above = total(stop(z), middle) > 1
        return jnp.where(above, middle, ends[0]), jnp.where(above, ends[1], middle)

    z = x / 2
    top = stop(z.max(-1, keepdims=True))
    tau, _ = jax.lax.fori_loop(0, 20, halve, (top - 1, top))
    for _ in range(2):  # as many as there are derivatives
        tau = tau + (total(z, tau) - 1) / (2 * jnp.maximum(z - tau, 0).sum(-1, keepdims=True))
    return jnp.maximum(z - tau, 0) ** 2


case("T13", lambda x: layers.SparsemaxTopK.apply(x, -1, 2), ROWS)(sparsemax)
case("T13-default", layers.SparsemaxTopK.apply, ROWS.T)(lambda x: sparsemax(x.T).T)
case("T14", lambda x: layers.Entmax15.apply(x, dim=1), ROWS)(entmax15)
case("T15", lambda x: layers.Entmax15TopK.apply(x, 1, 2), ROWS)(entmax15)
SCALE, ZERO = jnp.float32(7.5), jnp.float32(1.0)

for dequantize in (True, False):
    value = lambda x, d=dequantize: (jnp.round(7.5 * x - 1) + (1 if d else 0)) / (7.5 if d else 1)  # noqa: E731
    case(
        f"T38-{'dequantized' if dequantize else 'inplace'}",
        lambda x, d=dequantize: layers.LinearQuantize.apply(x, SCALE, ZERO, d, not d),
        X,
    )(straight_through(value))
MATRIX, RIGHT = W + 2 * jnp.eye(3), X[0]
case("T69", lambda a, b: layers.FactorAndSolve.apply(a, b)[1], MATRIX, RIGHT)(jnp.linalg.solve)


def reused(a, b):
    solver, x = layers.FactorOnceAndSolve.apply(a, b)
    return x, solver.solve(jnp.sin(b))


case("T69-reused", reused, MATRIX, RIGHT, second_order=False)(
    lambda a, b: (jnp.linalg.solve(a, b), jnp.linalg.solve(stop(a), jnp.sin(b)))
)


def test_solver_comes_out_as_it_is():
    solvers = []

    def made():
        solvers.append(layers.DenseSolver())
        return solvers[-1]

    def loss(a, b):
        solver, x = layers.FactorAndSolve.apply(a, b, made)
        assert solver is solvers[-1]
        return x.sum()

    for f in (loss, jax.grad(loss), jax.jit(jax.grad(loss))):
        solvers.clear()
        f(MATRIX, RIGHT)
        assert len(solvers) == 1


def test_second_derivative_through_a_solver_that_is_reused():
    f = scalar(reused, linear=False)
    with pytest.raises(RuntimeError, match="FactorOnceAndSolve"):
        jax.grad(lambda a: jax.grad(f)(a, RIGHT).sum())(MATRIX)


case("T70", layers.MyLinear.apply, X, grid(4, 3), grid(4))(lambda x, w, b: x @ w.T + b)

EAGER_TWICE = {"T15", "T38-dequantized", "T70"}
WAYS = with_ways(CASES, EAGER_TWICE)


@pytest.mark.parametrize("one", CASES, ids=lambda one: one.name)
def test_outputs(one):
    compare_outputs(one)


@pytest.mark.parametrize(("one", "way"), WAYS, ids=[f"{way}-{c.name}" for c, way in WAYS])
def test_gradients(one, way):
    compare_gradients(one, way)
