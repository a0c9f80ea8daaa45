"""When saved_tensors_hooks run, how often, and how long the objects that they make live."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.kit.layers import Multiply, Tanh, layer

from .spy import IDLE, A, B, Spy, X, in_block, tanh_sum


@IDLE
def test_nothing_happens_without_differentiation():
    spy = Spy()
    f = in_block(spy.hooks, lambda a, b: Multiply.apply(a, b) * a)
    for run in (f, jax.jit(f), jax.jit(jax.vmap(f))):
        np.testing.assert_allclose(run(A, B), A * B * A, rtol=1e-6)
    assert spy.log == []


@pytest.mark.parametrize("forward_mode", [False, True])
@pytest.mark.parametrize("asked", [0, 1, 2])
def test_unpack_waits_for_backward_to_ask_and_asking_twice_unpacks_once(asked, forward_mode):
    def asks(ctx, dy):
        seen = [ctx.saved_tensor()[0] for _ in range(asked)]
        assert all(x is seen[0] for x in seen)
        return dy, dy

    apply = layer(base=Multiply, backward=asks, forward_mode=forward_mode).apply
    spy = Spy()
    with spy.hooks:
        np.testing.assert_array_equal(jax.grad(lambda x: apply(x, x).sum())(X), [2, 2, 2])
    assert spy.counts() == (1, min(asked, 1))  # one tensor in two places


@pytest.mark.parametrize("forward_mode", [False, True])
def test_an_output_that_a_layer_and_the_next_operation_keep_is_packed_once(forward_mode, monkeypatch):
    monkeypatch.setattr(Tanh, "forward_mode", forward_mode)
    for jit in (lambda f: f, jax.jit):
        spy = Spy()
        run = jit(jax.grad(in_block(spy.hooks, lambda x: (Tanh.apply(x) * (2 * x)).sum())))
        np.testing.assert_allclose(run(X), 2 * jnp.tanh(X) + 2 * X * (1 - jnp.tanh(X) ** 2), rtol=1e-6)
        assert spy.counts()[0] == 2  # the output, and 2 x


@IDLE
def test_the_pair_at_the_call_counts_not_the_one_at_the_differentiation():
    inner, outer = Spy(), Spy()
    f = jax.jit(in_block(inner.hooks, tanh_sum))
    with outer.hooks:
        jax.grad(f)(X)
    assert inner.counts() == (1, 1)
    assert outer.counts() == (0, 0)
