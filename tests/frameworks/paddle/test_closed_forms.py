"""Layers after Paddle against closed forms and plain automatic differentiation; Paddle is not needed."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import pytest

from tests.kit.case import Case, W, X, case_of, grid, once, ruled, stop
from tests.kit.closed_forms import compare_gradients, compare_outputs, with_ways
from tests.kit.modes import EAGER_AND_JIT as MODES
from tests.kit.transforms import assert_same, scalar

from .full_recompute import FullRecompute
from .layers import ported

CASES: list[Case] = []
case = functools.partial(case_of, CASES)

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


case("P8", recomputed(recompute), X, W, W[0])(recomputed(block))


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


COUNTS = jnp.array([3])
UNIQUE, REPEATED = jnp.array([3, 0, 2]), jnp.array([1, 3, 1])


def gathered(pos, size=4):
    return lambda buf: ported.MoEGather.apply(buf, pos, COUNTS, COUNTS, size, world_size=1)


case("P10-unique", gathered(UNIQUE), grid(3, 2))(lambda buf: jnp.zeros((4, 2)).at[UNIQUE].set(buf))


# Of rows that go to one place the last stays, yet backward gives each of them the gradient of that place.
@case("P10-repeated", gathered(REPEATED), grid(3, 2))
def _last_stays(buf):
    value = jnp.zeros((4, 2)).at[jnp.array([3, 1])].set(buf[1:])
    moved = jnp.zeros((4, 2)).at[REPEATED].add(buf)
    return stop(value - moved) + moved


def dispatched(x):
    """Each token to a row, and back: the two layers around an expert."""
    order = jnp.array([3, 0, 2, 1])
    rows = ported.MoEScatter.apply(x, order, COUNTS, COUNTS, 4, 1)
    return ported.MoEGather.apply(jnp.sin(rows), order, COUNTS, COUNTS, 4, 1)


case("P9-P10", dispatched, grid(4, 2))(jnp.sin)


@MODES
def test_no_rows_to_scatter(mode):
    nowhere = jnp.zeros(0, jnp.int32)
    layer = lambda x: ported.MoEScatter.apply(x, nowhere, COUNTS, COUNTS, 0, 1)  # noqa: E731
    assert mode(layer)(X).shape == (0, 3)
    assert_same(mode(jax.grad(lambda x: layer(x).sum()))(X), jnp.zeros_like(X))


WEIGHT = grid(3, 4, low=-2.3, high=2.6)
G = jnp.float32(0.25)


def lsq_plus(x, alpha, beta):
    return ported.LSQPlus.apply(x, alpha, beta, G, -2, 3)


def per_channel(w, alpha):
    return ported.LSQ.apply(w, alpha, G, -2, 3, per_channel=True, quant_axis=0)


CHANNELS = jnp.array([0.5, 0.6, 0.9])


def _step_rule(residuals, g):
    x, alpha, beta = residuals
    q = (x - beta) / alpha
    inside = (q >= -2) & (q <= 3)
    change = jnp.clip(ported.half_away(q), -2, 3) - jnp.where(inside, q, 0)
    return jnp.where(inside, g, 0), jnp.sum(change * g) / 4, jnp.sum(jnp.where(inside, 0, g)) / 4


_step = ruled(lambda x, a, b: jnp.clip(ported.half_away((x - b) / a), -2, 3) * a + b, _step_rule)
case("P14-rule", per_channel, WEIGHT, CHANNELS, linear_loss=True)(jax.vmap(lambda w, a: _step(w, a, jnp.zeros(()))))
case("P15-rule", lsq_plus, WEIGHT, 0.6, 0.2, linear_loss=True)(_step)


def auxiliary(x, loss):
    return ported.SavedAuxiliaryLoss.apply(jnp.sin(x), loss)


def with_auxiliary(x, loss):
    return ruled(lambda x, _: x, lambda _, g: (g, once(1.0, g).reshape(loss.shape)))(jnp.sin(x), loss)


case("P24-scalar", auxiliary, X, 0.7, linear_loss=True)(with_auxiliary)
case("P24-vector", auxiliary, X, [0.7], linear_loss=True)(with_auxiliary)


@pytest.mark.parametrize("layer", [ported.SavedAuxiliaryLoss, ported.AuxiliaryLoss], ids=["B", "A"])
@MODES
def test_auxiliary_loss_that_is_frozen(layer, mode):
    asked = []

    class Seen(layer):
        @staticmethod
        def backward(ctx, dy):
            asked.append(layer.backward(ctx, dy))
            return asked[-1]

    dx = mode(jax.grad(lambda x, loss: jnp.sum(jnp.sin(Seen.apply(x, loss)))))(X, jnp.float32(0.7))
    assert_same(dx, jnp.cos(X))
    ((_, dloss),) = asked
    assert dloss is None


case("P28-default", ported.ClippedReversal.apply, X, linear_loss=True)(
    ruled(lambda x: x, lambda _, g: (jnp.clip(-g, -0.5, 0.5),))
)
case("P28-tensor", lambda x: ported.ClippedReversal.apply(x, jnp.float32(0.3)), X, linear_loss=True)(
    ruled(lambda x: x, lambda _, g: (jnp.clip(-0.3 * g, -0.5, 0.5),))
)

EAGER_TWICE = {"P9-P10", "P15-rule", "P24-scalar", "P28-tensor"}
WAYS = with_ways(CASES, EAGER_TWICE)


@pytest.mark.parametrize("one", CASES, ids=lambda one: one.name)
def test_outputs(one):
    compare_outputs(one)


@pytest.mark.parametrize(("one", "way"), WAYS, ids=[f"{way}-{c.name}" for c, way in WAYS])
def test_gradients(one, way):
    compare_gradients(one, way)
