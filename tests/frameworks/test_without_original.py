"""Ports that call compiled code or other packages, so that no original stands beside them: against closed forms."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import pytest

from tests.kit.case import Case, W, X, case_of, grid, straight_through
from tests.kit.transforms import FIRST_ORDER, SECOND_ORDER, assert_same, scalar
from tests.registry.after_torch import entmax15, sparsemax

from .paddle.full_recompute import FullRecompute
from .torch import without_original as layers

CASES: list[Case] = []
case = functools.partial(case_of, CASES)

# Supports of one, two and four entries, of which two are searched at first.
ROWS = jnp.array([[3.0, 0.1, 0.4, -0.2], [0.9, 1.1, -2, -3], [0.1, 0.2, 0.05, 0.15]])
case("T13", lambda x: layers.SparsemaxTopK.apply(x, -1, 2), ROWS)(sparsemax)
case("T13-default", layers.SparsemaxTopK.apply, ROWS.T)(lambda x: sparsemax(x.T).T)
case("T15", lambda x: layers.Entmax15TopK.apply(x, 1, 2), ROWS)(entmax15)
SCALE, ZERO = jnp.float32(7.5), jnp.float32(1.0)
case("T38-dequantized", lambda x: layers.LinearQuantize.apply(x, SCALE, ZERO, True, False), X)(
    straight_through(lambda x: (jnp.round(7.5 * x - 1) + 1) / 7.5)
)
case("T38-inplace", lambda x: layers.LinearQuantize.apply(x, SCALE, ZERO, False, True), X)(
    straight_through(lambda x: jnp.round(7.5 * x - 1))
)
MATRIX, RIGHT = W + 2 * jnp.eye(3), X[0]
case("T69", lambda a, b: layers.FactorAndSolve.apply(a, b)[1], MATRIX, RIGHT)(jnp.linalg.solve)
case("T70", layers.MyLinear.apply, X, grid(4, 3), grid(4))(lambda x, w, b: x @ w.T + b)


def block(x, pair, key, frozen, rate, text, *, gain=1.0, bent=True):
    """Several outputs, one of integers; a tuple of parameters, random state, a frozen tuple, and statics."""
    w, b = pair
    kept = jax.random.bernoulli(key, rate, x.shape).astype(x.dtype)
    h = kept * x @ w * gain + b[frozen[0]]
    y = jnp.tanh(h) if bent else h
    return y, jnp.argmax(h, -1), y * x + len(text)


def recomputed(run):
    def layer(x, w, b):
        y, _, z = run(x, (w, b), jax.random.key(7), (jnp.array([2, 0, 1]),), 0.6, "text", gain=0.7)
        return y, z

    return layer


case("P8", recomputed(functools.partial(FullRecompute.apply, block)), X, W, W[0])(recomputed(block))


@pytest.mark.parametrize("one", CASES, ids=lambda one: one.name)
def test_outputs(one):
    expected = jax.jit(one.reference)(*one.args)
    assert_same(one.layer(*one.args), expected)
    assert_same(jax.jit(one.layer)(*one.args), expected)


@pytest.mark.parametrize("one", CASES, ids=lambda one: one.name)
@pytest.mark.parametrize("way", ["grad", "vmap_of_grad", "second_order_in_scan"])
def test_gradients(one, way):
    # Each way of the second order has the first on its way.
    transform = {**FIRST_ORDER, **SECOND_ORDER}[way]
    ours, plain = scalar(one.layer, linear=False), scalar(one.reference, linear=False)
    assert_same(transform(ours, one.args), jax.jit(lambda *args: transform(plain, args))(*one.args))
