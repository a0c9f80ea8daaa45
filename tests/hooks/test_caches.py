"""saved_tensors_hooks and jit: when a function is traced again, and what is compiled."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

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
