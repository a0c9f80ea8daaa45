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


# -- names ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("forward_modes", "forward_mode"),
        ("saved_name", "saved_names"),
        ("generate_vmaprule", "generate_vmap_rule"),
        ("complex_convention", None),
        ("foward", "forward"),
        ("backwrad", "backward"),
        ("setup_contex", "setup_context"),
        ("_forward", None),
        ("forward2", None),
        ("forward_of_a_block", None),
    ],
)
def test_a_name_one_letter_off(name, meant):
    members = {name: "jax"}
    if meant is None:
        assert getattr(type("Layer", (Function,), members), name) == "jax"
        return
    with pytest.raises(TypeError, match=rf"Layer.{name}: a layer has no such attribute.*Did you mean {meant}\?"):
        type("Layer", (Function,), members)


def test_a_helper_beside_the_method_of_the_right_name():
    layer = type("Layer", (PyLayer,), {**TRIPLE, "forwards": 1})
    check_triple(layer)
    check_triple(type("Child", (layer,), {"backwards": 2}))


@dataclasses.dataclass
class Times:
    factor: float

    def __call__(self, ctx, x):
        return self.factor * x


def test_methods_that_are_objects_without_a_hash():
    layer = type("Layer", (PyLayer,), {"forward": Times(3.0), "backward": Times(5.0)})
    with pytest.raises(TypeError):
        hash(layer.forward)
    check_triple(layer)
    with pytest.raises(TypeError, match=r"Layer.apply: .*\(x\)"):
        jax.jit(layer.apply)(X, X)
