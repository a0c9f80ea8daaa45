"""When saved_tensors_hooks run, how often, and how long the objects that they make live."""

from __future__ import annotations

import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pylayer_jax import PyLayer, saved_tensors_hooks
from tests.kit.layers import Multiply, Tanh

from .spy import A, B, Spy, X


def test_nothing_happens_without_differentiation():
    spy = Spy()

    def f(a, b):
        with spy.hooks:
            return Multiply.apply(a, b) * a

    for run in (f, jax.jit(f), jax.vmap(f), jax.jit(jax.vmap(f))):
        np.testing.assert_allclose(run(A, B), A * B * A, rtol=1e-6)
    assert spy.log == []


def test_unpack_waits_for_backward_to_ask():
    class Constant(PyLayer):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x * 1)
            return 2 * x

        @staticmethod
        def backward(ctx, dy):
            return 2 * dy

    spy = Spy()
    with spy.hooks:
        np.testing.assert_array_equal(jax.grad(lambda x: Constant.apply(x).sum())(X), [2, 2, 2])
    assert spy.counts() == (1, 0)


def test_asking_twice_unpacks_once():
    class Twice(PyLayer):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x**2

        @staticmethod
        def backward(ctx, dy):
            assert ctx.saved_tensor()[0] is ctx.saved_tensors[0]
            return 2 * ctx.saved_tensors[0] * dy

    spy = Spy()
    with spy.hooks:
        np.testing.assert_allclose(jax.grad(lambda x: Twice.apply(x).sum())(X), 2 * X)
    assert spy.counts() == (1, 1)


@pytest.mark.parametrize("forward_mode", [False, True])
def test_an_output_that_a_layer_and_the_next_operation_keep_is_packed_once(forward_mode, monkeypatch):
    monkeypatch.setattr(Tanh, "forward_mode", forward_mode)
    spy = Spy()

    def f(x):
        with spy.hooks:
            return (Tanh.apply(x) * (2 * x)).sum()

    for run in (jax.grad(f), jax.jit(jax.grad(f))):
        before = spy.counts()[0]
        np.testing.assert_allclose(run(X), 2 * jnp.tanh(X) + 2 * X * (1 - jnp.tanh(X) ** 2), rtol=1e-6)
        assert spy.counts()[0] - before == 2  # the output, and 2 x


def test_vjp_called_twice():
    spy = Spy()

    def f(x):
        with spy.hooks:
            return jnp.sin(Tanh.apply(x))

    y, pullback = jax.vjp(f, X)
    first, second = pullback(jnp.ones_like(y)), pullback(jnp.ones_like(y))
    np.testing.assert_array_equal(first[0], second[0])
    packs, unpacks = spy.counts()
    assert unpacks == 2 * packs


def test_the_pair_at_the_call_counts_not_the_one_at_the_differentiation():
    inner, outer = Spy(), Spy()

    @jax.jit
    def f(x):
        with inner.hooks:
            return jnp.sum(Tanh.apply(x))

    with outer.hooks:
        jax.grad(f)(X)
    assert inner.counts() == (1, 1)
    assert outer.counts() == (0, 0)


def test_objects_die_with_the_vjp_function():
    class Held:
        def __init__(self, x):
            self.x = np.asarray(x)

    alive = weakref.WeakSet()

    def pack(x):
        held = Held(x)
        alive.add(held)
        return held

    def f(a, b):
        with saved_tensors_hooks(pack, lambda held: jnp.asarray(held.x)):
            return jnp.sum(Multiply.apply(a, b) * jnp.sin(a))

    value, pullback = jax.vjp(f, A, B)
    assert len(alive) == 5  # a, b, and of the product and the sine a * b, sin(a), cos(a)
    pullback(value)
    assert len(alive) == 5
    del pullback
    gc.collect()
    assert len(alive) == 0


def test_many_fresh_eager_tensors_leave_nothing_with_the_hooks_object():
    spy = Spy()
    for i in range(50):
        x = X + i
        _, pullback = jax.vjp(spy.hooks(lambda x: Tanh.apply(jnp.sin(x)).sum()), x)
        pullback(jnp.ones(()))
        del x, pullback
    gc.collect()
    assert len(spy.hooks._pair.cache._entries) == 0
