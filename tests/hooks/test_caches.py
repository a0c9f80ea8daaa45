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

from .spy import Spy, X, counted_step, tanh_slope, tanh_sum


def test_jit_traces_again_for_other_hooks_and_not_for_the_same():
    step, traced = counted_step()
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
    step, traced = counted_step()

    def run(factor):
        with saved_tensors_hooks(lambda x: x * factor, lambda x: x / factor):
            return step(X)

    for _ in range(3):
        np.testing.assert_allclose(run(2.0), tanh_slope(X), rtol=1e-6)
    assert len(traced) == 1
    run(4.0)
    assert len(traced) == 2


def test_hooks_that_cannot_be_hashed():
    class Unhashable:
        __hash__ = None

        def __call__(self, x):
            return x

    with saved_tensors_hooks(Unhashable(), Unhashable()):
        np.testing.assert_allclose(jax.jit(jax.grad(tanh_sum))(X), tanh_slope(X), rtol=1e-6)


def sines(x):
    return jnp.sum(jnp.sin(Tanh.apply(x)) * x)


def test_without_hooks_nothing_is_left_of_a_block():
    def after(x):
        with bits():
            pass
        return sines(x)

    programs = [jax.jit(jax.grad(f)).lower(X).as_text() for f in (sines, after)]
    assert programs[0] == programs[1].replace("jit_after", "jit_sines")


def test_compiled_forward_is_that_without_hooks():
    plain, hooked = (jax.jit(f).lower(X).compile() for f in (sines, bits()(sines)))
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
    both = held, (held,)

    def with_attribute():
        return value_of(with_attribute.held)

    with_attribute.held = held
    return {
        "function": lambda: value_of(held),
        "default": lambda held=held: value_of(held),
        "keyword": lambda *, held=held: value_of(held),
        "partial": functools.partial(lambda held: value_of(held), held),
        "method": functools.partial(READS.read, held),
        "tuple": lambda: value_of(both[0]) + value_of(both[1][0]),
        "attribute": with_attribute,
        "inner": lambda: sum(value_of(held) for _ in range(1)),
    }[kind]


def value_of(held):
    return value_of(held()) if callable(held) else held


def pair(recipe):
    factor = made(recipe)
    return saved_tensors_hooks(lambda x: x * value_of(factor), lambda x: x)._pair


@hypothesis.settings(deadline=None, max_examples=200)
@hypothesis.given(recipes(), recipes())
@hypothesis.example(("number", 0.0), ("number", -0.0))
@hypothesis.example(("default", ("number", 2)), ("default", ("number", 2.0)))
def test_pairs_of_one_recipe_are_one_and_of_two_recipes_two(first, second):
    assert pair(first) == pair(first)
    assert hash(pair(first)) == hash(pair(first))
    assert (pair(first) == pair(second)) == (repr(first) == repr(second))


def scaled(x):
    return x * SCALE


def closing_over():
    """Hooks, each with a function that changes what it reads."""
    factor = 2.0

    def local():
        return factor

    def rebind():
        nonlocal factor
        factor = 4.0

    def rebind_global():
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
        "default": (by_default, lambda: setattr(by_default, "__defaults__", (4.0,))),
        "keyword": (by_keyword, lambda: setattr(by_keyword, "__kwdefaults__", {"f": 4.0})),
        "attribute": (by_attribute, lambda: setattr(by_attribute, "f", 4.0)),
        "global": (lambda x: x * SCALE, rebind_global),
        "global of a global function": (lambda x: scaled(x), rebind_global),
        "global in an inner function": (lambda x: sum(x * SCALE for _ in "1"), rebind_global),
    }


@pytest.mark.parametrize("name", closing_over())
def test_a_hook_that_reads_another_value_is_another_hook(name, monkeypatch):
    monkeypatch.setattr("tests.hooks.test_caches.SCALE", 2.0)
    pack, change = closing_over()[name]
    hooks, (step, traced) = saved_tensors_hooks(pack, lambda x: x), counted_step()
    for factor in (2.0, 4.0):
        with hooks:
            np.testing.assert_allclose(step(X), 1 - (factor * jnp.tanh(X)) ** 2, rtol=1e-5)
        change()
    assert len(traced) == 2


def test_a_hook_that_closes_over_itself():
    def made():
        def pack(x, depth=2):
            return pack(x, depth - 1) if depth else x

        return saved_tensors_hooks(pack, lambda x: x)._pair

    assert made() == made()
