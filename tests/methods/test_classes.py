"""Every class is a layer of its own, however it was made."""

import dataclasses
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pylayer_jax import Function, PyLayer, once_differentiable
from tests.kit.layers import Tanh

from .made import loss

X = jnp.array([0.3, -0.7])

TRIPLE = {
    "forward": staticmethod(lambda ctx, x: 3 * x),
    "backward": staticmethod(lambda ctx, dy: 5 * dy),
}


def check_triple(layer):
    np.testing.assert_allclose(layer.apply(X), 3 * X)
    np.testing.assert_allclose(jax.jit(layer.apply)(X), 3 * X)
    np.testing.assert_allclose(jax.grad(loss(layer))(X), [5, 5])
    assert layer.apply is layer.apply
    assert layer.apply.__self__ is layer


def test_a_dataclass_with_slots():
    # The decorator makes a second class from the members of the first.
    @dataclasses.dataclass(slots=True)
    class Made(PyLayer):
        size: int = 1
        forward = TRIPLE["forward"]
        backward = TRIPLE["backward"]

    check_triple(Made)


SPLIT = {
    "forward": staticmethod(lambda x: 3 * x),
    "setup_context": staticmethod(lambda ctx, inputs, output: None),
    "vjp": TRIPLE["backward"],
}


@pytest.mark.parametrize(
    ("base", "old", "new"), [(PyLayer, vars(Tanh), TRIPLE), (Function, vars(Tanh), TRIPLE), (Function, SPLIT, SPLIT)]
)
def test_members_of_another_class(base, old, new):
    first = type("First", (base,), dict(old))
    value = jax.grad(loss(first))(X)  # before its members are copied
    members = {**vars(first), **new}
    check_triple(type("Second", (base,), members))
    afterwards = type("Third", (base,), {})
    for name in members.keys() - {"__dict__", "__weakref__", "__module__", "__doc__"}:  # as cloudpickle does
        setattr(afterwards, name, members[name])
    check_triple(afterwards)
    np.testing.assert_allclose(jax.grad(loss(first))(X), value)


# -- names ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "meant", "value"),
    [
        ("forward_modes", "forward_mode", True),
        ("saved_name", "saved_names", ("y",)),
        ("complex_conventions", "complex_convention", "paddle"),
    ],
)
def test_a_name_one_letter_off(name, meant, value):
    with pytest.raises(TypeError, match=rf"Layer\.{name}(?s:.*)\b{meant}\b"):
        type("Layer", (Function,), {name: value})


@pytest.mark.parametrize("name", ["complex_convention", "_forward", "forward2", "forward_of_a_block"])
def test_a_name_that_is_further_off(name):
    assert getattr(type("Layer", (Function,), {name: "jax"}), name) == "jax"


def test_a_helper_whose_name_is_near_that_of_a_flag_or_of_a_method_beside_it():
    for name in ("forward_model", "forward_node", "saved_games"):
        check_triple(type("Layer", (PyLayer,), {**TRIPLE, name: staticmethod(len)}))
    layer = type("Layer", (PyLayer,), {**TRIPLE, "forwards": 1})
    check_triple(layer)
    check_triple(type("Child", (layer,), {"backwards": 2}))


@pytest.mark.parametrize("outer", [staticmethod, classmethod])
@pytest.mark.parametrize("decorator_first", [True, False])
def test_once_differentiable_beside_static_and_class_methods(outer, decorator_first):
    def backward(*args):
        assert len(args) == 2 + (outer is classmethod)
        return 5 * args[-1]

    guarded = once_differentiable(outer(backward)) if decorator_first else outer(once_differentiable(backward))
    layer = type("Layer", (PyLayer,), {"forward": staticmethod(lambda ctx, x: x * x), "backward": guarded})
    np.testing.assert_allclose(jax.grad(loss(layer))(X), [5, 5])
    with pytest.raises(RuntimeError, match="once_differentiable"):
        jax.grad(lambda x: jax.grad(lambda x: (layer.apply(x) ** 2).sum())(x).sum())(X)


# -- cloudpickle ----------------------------------------------------------------------------------

DEFINED_IN_MAIN = """
    import sys, jax, jax.numpy as jnp, cloudpickle
    from pylayer_jax import PyLayer, once_differentiable

    class Sine(PyLayer):
        scale = 3.0
        forward_mode = True

        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return jnp.sin(x)

        @staticmethod
        def backward(ctx, dy):
            (x,) = ctx.saved_tensor()
            return Sine.scale * dy * jnp.cos(x)

    class Once(PyLayer):
        @classmethod
        def forward(cls, ctx, x):
            ctx.save_for_backward(x)
            return x * x

        @classmethod
        @once_differentiable
        def backward(cls, ctx, dy):
            return dy * ctx.saved_tensor()[0]

    def model(x):
        return Sine.apply(x) + Once.apply(x)

    jax.grad(model)(1.0)  # before the classes are pickled
    with open(sys.argv[1], "wb") as file:
        cloudpickle.dump((Sine, Once, model), file)
"""

LOADED = """
    import pickle, sys, jax, pylayer_jax
    with open(sys.argv[1], "rb") as file:
        Sine, Once, model = pickle.load(file)
    first = [jax.grad(model)(1.0), jax.jit(jax.grad(model))(1.0), jax.jvp(Sine.apply, (1.0,), (1.0,))[1]]
    Sine.scale = 0.0  # the methods of the loaded class read the loaded class
    runs_code_of_this_process = Sine.apply.__code__ is pylayer_jax.PyLayer.apply.__code__
    print(*first, jax.grad(model)(1.0), Sine.apply is Sine.apply and runs_code_of_this_process)
    try:
        jax.grad(jax.grad(Once.apply))(1.0)
    except RuntimeError as error:
        print(error)
"""


def test_classes_defined_in_main_are_pickled_by_value(tmp_path):
    def run(code):
        command = [sys.executable, "-c", textwrap.dedent(code), str(tmp_path / "layers.pickle")]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    run(DEFINED_IN_MAIN)
    numbers, error = run(LOADED).splitlines()
    *numbers, is_one = numbers.split()
    sine = 3 * np.cos(1.0)
    np.testing.assert_allclose(list(map(float, numbers)), [sine + 1, sine + 1, sine, 1], rtol=1e-5)
    assert is_one == "True"
    assert "once_differentiable" in error
