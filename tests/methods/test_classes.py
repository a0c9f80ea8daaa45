"""Every class is a layer of its own, however it was made."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pylayer_jax import Function, PyLayer
from tests.kit.layers import Tanh

X = jnp.array([0.3, -0.7])

TRIPLE = {
    "forward": staticmethod(lambda ctx, x: 3 * x),
    "backward": staticmethod(lambda ctx, dy: 5 * dy),
}


def check_triple(layer):
    np.testing.assert_allclose(layer.apply(X), 3 * X)
    np.testing.assert_allclose(jax.jit(layer.apply)(X), 3 * X)
    np.testing.assert_allclose(jax.grad(lambda x: layer.apply(x).sum())(X), [5, 5])
    assert layer.apply is layer.apply


@pytest.mark.parametrize("base", [PyLayer, Function])
def test_a_class_made_from_the_members_of_another(base):
    first = type("First", (base,), dict(vars(Tanh)))
    first.apply(X)  # before its members are copied
    jax.grad(lambda x: first.apply(x).sum())(X)
    second = type("Second", (base,), {**vars(first), **TRIPLE})
    check_triple(second)
    np.testing.assert_allclose(first.apply(X), jnp.tanh(X))


def test_a_function_with_vjp_made_from_the_members_of_another():
    first = type("First", (Function,), {"forward": TRIPLE["forward"], "vjp": TRIPLE["backward"]})
    check_triple(type("Second", (Function,), dict(vars(first))))


def test_a_dataclass_with_slots():
    # The decorator makes a second class from the members of the first.
    @dataclasses.dataclass(slots=True)
    class Made(PyLayer):
        size: int = 1
        forward = TRIPLE["forward"]
        backward = TRIPLE["backward"]

    check_triple(Made)


def test_members_that_are_set_afterwards():
    first = type("First", (PyLayer,), dict(vars(Tanh)))
    first.apply(X)
    second = type("Second", (PyLayer,), {})
    for name, value in {**vars(first), **TRIPLE}.items():  # as cloudpickle does
        if name not in ("__dict__", "__weakref__", "__module__", "__doc__"):
            setattr(second, name, value)
    check_triple(second)
