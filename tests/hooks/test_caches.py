"""saved_tensors_hooks and jit: when a function is traced again, and what is compiled."""

from __future__ import annotations

import functools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

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


# -- when two pairs are one -----------------------------------------------------------------------
#
# A recipe says what a hook reads; `made` follows it, and makes every function, tuple and partial anew.

FACTORS = [2.0, 4.0, -0.0, 0.0, 2, True, 8.0]
SCALE = 2.0


def recipes():
    numbers = st.tuples(st.just("number"), st.sampled_from(FACTORS))
    kinds = st.sampled_from(["function", "default", "keyword", "partial", "method", "tuple", "attribute", "inner"])
    return st.recursive(numbers, lambda inner: st.tuples(kinds, inner), max_leaves=4)


class Reads:
    factor = 3.0

    def read(self, factor):
        return factor


READS = Reads()


def made(recipe):
    """A value that can be called without arguments, or a number."""
    kind, inner = recipe
    if kind == "number":
        return inner
    held = made(inner)
    if kind == "function":
        return lambda: value_of(held)
    if kind == "default":
        return lambda held=held: value_of(held)
    if kind == "keyword":
        return lambda *, held=held: value_of(held)
    if kind == "partial":
        return functools.partial(lambda held: value_of(held), held)
    if kind == "method":
        return functools.partial(READS.read, held)
    if kind == "tuple":
        both = (held, (held,))
        return lambda: value_of(both[0]) + value_of(both[1][0])
    if kind == "attribute":

        def function():
            return value_of(function.held)

        function.held = held
        return function
    return lambda: sum(value_of(held) for _ in range(1))


def value_of(held):
    return value_of(held()) if callable(held) else held


def pair(recipe):
    factor = made(recipe)
    return saved_tensors_hooks(lambda x: x * value_of(factor), lambda x: x)._pair


@hypothesis.settings(deadline=None, max_examples=200)
@hypothesis.given(recipes(), recipes())
def test_pairs_of_one_recipe_are_one_and_of_two_recipes_two(first, second):
    assert pair(first) == pair(first)
    assert hash(pair(first)) == hash(pair(first))
    assert (pair(first) == pair(second)) == (repr(first) == repr(second))


def scaled(x):
    return x * SCALE


def closing_over(change):
    """A hook, and a function that changes what it reads."""
    factor = 2.0

    def local():
        return factor

    def rebind():
        nonlocal factor
        factor = 4.0

    def set_default():
        by_default.__defaults__ = (4.0,)

    def set_keyword():
        by_keyword.__kwdefaults__ = {"f": 4.0}

    def set_attribute():
        by_attribute.f = 4.0

    def set_global():
        global SCALE
        SCALE = 4.0

    def by_default(x, f=2.0):
        return x * f

    def by_keyword(x, *, f=2.0):
        return x * f

    def by_attribute(x):
        return x * by_attribute.f

    by_attribute.f = 2.0
    return {
        "closure": (lambda x: x * factor, rebind),
        "local function": (lambda x: x * local(), rebind),
        "default": (by_default, set_default),
        "keyword": (by_keyword, set_keyword),
        "attribute": (by_attribute, set_attribute),
        "global": (lambda x: x * SCALE, set_global),
        "global of a global function": (lambda x: scaled(x), set_global),
        "global in an inner function": (lambda x: sum(x * SCALE for _ in "1"), set_global),
    }[change]


@pytest.mark.parametrize(
    "change",
    [
        "closure",
        "local function",
        "default",
        "keyword",
        "attribute",
        "global",
        "global of a global function",
        "global in an inner function",
    ],
)
def test_a_hook_that_reads_another_value_is_another_hook(change, monkeypatch):
    monkeypatch.setattr("tests.hooks.test_caches.SCALE", 2.0)
    pack, make_change = closing_over(change)
    hooks = saved_tensors_hooks(pack, lambda x: x)

    @jax.jit
    @jax.grad
    def step(x):
        return Tanh.apply(x).sum()

    def expected(factor):
        return 1 - (factor * jnp.tanh(X)) ** 2

    with hooks:
        np.testing.assert_allclose(step(X), expected(2.0), rtol=1e-5)
    make_change()
    with hooks:
        np.testing.assert_allclose(step(X), expected(4.0), rtol=1e-5)


def test_a_hook_that_closes_over_itself():
    def made():
        def pack(x, depth=2):
            return pack(x, depth - 1) if depth else x

        return saved_tensors_hooks(pack, lambda x: x)._pair

    assert made() == made()


@pytest.mark.parametrize("wrap", [lambda f: functools.partial(f, 1), lambda f: lambda x: f(1, x)])
def test_a_hook_made_anew_at_each_step_is_traced_once(wrap):
    traced = []

    @jax.jit
    @jax.grad
    def step(x):
        traced.append(1)
        return Tanh.apply(x).sum()

    for _ in range(3):
        sizes = (1, (2, "name"))

        def change(one, x, sizes=sizes):
            return x * sizes[0] * one

        with saved_tensors_hooks(wrap(change), lambda x: x):
            step(X)
    assert len(traced) == 1
