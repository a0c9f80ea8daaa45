"""A layer after Paddle that has no original here, against plain automatic differentiation."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from tests.kit.case import Case, W, X
from tests.kit.closed_forms import compare_gradients, compare_outputs
from tests.kit.transforms import assert_same, scalar

from .full_recompute import FullRecompute

KEY, NOTHING = jax.random.key(7), (None, None, None)


def block(x, pair, key, frozen, rate, text, *, gain=1.0, bent=True):
    """Several outputs, one of integers; a tuple of parameters, random state, a frozen tuple, and statics."""
    w, b = pair
    kept = jax.random.bernoulli(key, rate, x.shape).astype(x.dtype)
    h = kept * x @ w * gain + b[frozen[0]]
    y = jnp.tanh(h) if bent else h
    return y, jnp.argmax(h, -1), y * x + len(text)


def recomputed(run):
    def layer(x, w, b):
        y, _, z = run(x, (w, b), KEY, (jnp.array([2, 0, 1]),), 0.6, "text", gain=0.7)
        return y, z

    return layer


def recompute(*args, **kwargs):
    return FullRecompute.apply(block, False, *NOTHING, *args, **kwargs)


CASE = Case("P8", recomputed(recompute), recomputed(block), (X, W, W[0]))


def test_outputs():
    compare_outputs(CASE)


@pytest.mark.parametrize("way", ["grad", "vmap_of_grad", "second_order_in_scan"])
def test_gradients(way):
    compare_gradients(CASE, way)


def test_recompute_is_jax_checkpoint():
    args = X, W, W[0]

    def gradient(layer):
        return jax.jit(jax.grad(scalar(layer, linear=False), (0, 1, 2)))(*args)

    assert_same(gradient(recomputed(recompute)), gradient(jax.checkpoint(recomputed(block))))


def test_recompute_restores_the_state_that_it_is_told_of():
    states = []

    def run(x, pair):
        return x * pair[0] + pair[1]

    def loss(x, w, b):
        get, put = lambda: "state", states.append
        return FullRecompute.apply(run, True, None, get, put, x, (w, b)).sum()

    dx, dw, db = jax.grad(loss, (0, 1, 2))(X, X * 2, X * 3)
    assert states == ["state"]
    assert_same((dx, dw, db), (X * 2, X, jnp.ones_like(X)))


def test_recompute_without_a_differentiable_output():
    def loss(x):
        index = FullRecompute.apply(lambda x: jnp.argmax(x), False, *NOTHING, x)
        return x.sum() * index.astype(jnp.float32)

    # No gradient arrives, so that backward, which would refuse, is not asked.
    assert_same(jax.grad(loss)(X), jnp.full_like(X, jnp.argmax(X)))
