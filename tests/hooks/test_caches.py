"""saved_tensors_hooks and jit: when a function is traced again, and what is compiled."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from pylayer_jax import saved_tensors_hooks
from tests.kit.layers import Tanh, bits

from .spy import Spy, X


def test_jit_traces_again_for_other_hooks_and_not_for_the_same():
    traced = []

    @jax.jit
    @jax.grad
    def step(x):
        traced.append(1)
        return Tanh.apply(x).sum()

    one, two = Spy(), Spy()
    step(X)
    assert (len(traced), one.counts()) == (1, (0, 0))  # compiled without hooks
    for _ in range(3):
        with one.hooks:
            step(X)
    assert (len(traced), one.counts()) == (2, (1, 1))
    with saved_tensors_hooks(one.pack, one.unpack):  # an equal pair
        step(X)
    assert len(traced) == 2
    with two.hooks:
        step(X)
    assert (len(traced), two.counts()) == (3, (1, 1))
    step(X)
    assert len(traced) == 3


def test_a_lambda_in_a_function_is_one_pair_however_often_it_runs():
    traced = []

    @jax.jit
    @jax.grad
    def step(x):
        traced.append(1)
        return Tanh.apply(x).sum()

    def run(factor):
        with saved_tensors_hooks(lambda x: x * factor, lambda x: x / factor):
            return step(X)

    for _ in range(3):
        np.testing.assert_allclose(run(2.0), 1 - jnp.tanh(X) ** 2, rtol=1e-6)
    assert len(traced) == 1
    run(4.0)
    assert len(traced) == 2


def test_a_variable_that_a_hook_closes_over_may_change():
    factor = 1.0
    hooks = saved_tensors_hooks(lambda x: x, lambda x: x * factor)
    step = jax.jit(jax.grad(lambda x: Tanh.apply(x).sum()))
    for factor in (1.0, 0.0, 1.0):
        with hooks:
            np.testing.assert_allclose(step(X), 1 - (factor * jnp.tanh(X)) ** 2, rtol=1e-6)


def test_hooks_that_cannot_be_hashed():
    class Unhashable:
        __hash__ = None

        def __call__(self, x):
            return x

    with saved_tensors_hooks(Unhashable(), Unhashable()):
        np.testing.assert_allclose(jax.jit(jax.grad(lambda x: Tanh.apply(x).sum()))(X), 1 - jnp.tanh(X) ** 2, rtol=1e-6)


def test_without_hooks_nothing_is_left_of_a_block():
    def f(x):
        return jnp.sum(jnp.sin(Tanh.apply(x)) * x)

    def after(x):
        with bits():
            pass
        return f(x)

    programs = [jax.jit(jax.grad(g)).lower(X).as_text() for g in (f, after)]
    assert programs[0] == programs[1].replace("jit_after", "jit_f")


def test_compiled_forward_is_that_without_hooks():
    def f(x):
        return jnp.sum(jnp.sin(Tanh.apply(x)) * x)

    plain, hooked = (jax.jit(g).lower(X).compile() for g in (f, bits()(f)))
    assert plain.cost_analysis() == hooked.cost_analysis()
