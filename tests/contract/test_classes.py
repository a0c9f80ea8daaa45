"""Every class is a layer of its own, however it was made; and `apply` as users look at it."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import multiprocessing
import pickle
import pydoc
from concurrent.futures import ProcessPoolExecutor

import cloudpickle
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pylayer_jax import Function, PyLayer, once_differentiable, saved_tensors_hooks
from pylayer_jax.packers import cast_saved
from tests.kit.layers import Tanh, layer, loss

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
    "backward": TRIPLE["backward"],
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


def test_a_helper_whose_name_is_near_that_of_a_flag():
    for name in ("forward_model", "forward_node", "saved_games"):
        check_triple(type("Layer", (PyLayer,), {**TRIPLE, name: staticmethod(len)}))


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


def used(layer, once):
    """Numbers of classes that this process knows by value alone; one of them refuses a second derivative."""
    layer, once = cloudpickle.loads(layer), cloudpickle.loads(once)
    first = [jax.grad(loss(layer))(X), jax.jit(jax.grad(loss(layer)))(X), jax.jvp(layer.apply, (X,), (X,))[1]]
    layer.scale = 0.0  # the methods of the loaded class read the loaded class
    first.append(jax.grad(loss(layer))(X))
    assert layer.apply is layer.apply
    assert layer.apply.__code__ is PyLayer.apply.__code__
    with pytest.raises(RuntimeError, match="once_differentiable"):
        jax.grad(jax.grad(once.apply))(1.0)
    return [np.asarray(x) for x in first]


def test_classes_that_are_pickled_by_value_into_another_process():
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

    jax.grad(loss(Sine))(X)  # before the classes are pickled
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        numbers = pool.submit(used, cloudpickle.dumps(Sine), cloudpickle.dumps(Once)).result(timeout=300)
    expected = [3 * np.cos(X), 3 * np.cos(X), 3 * X * np.cos(X), 0 * X]
    np.testing.assert_allclose(numbers, expected, rtol=1e-5)


# -- apply: its signature, its docstring, and which object it is -----------------------------------


X = jnp.array([0.3, -0.7])


class Scaled(PyLayer):
    @staticmethod
    def forward(ctx, x: jax.Array, scale: float = 2.0, *, mode: str = "same") -> jax.Array:
        """Multiply `x` by `scale`."""
        return scale * x


class OwnBackward(Scaled):
    @staticmethod
    def backward(ctx, dy):
        return dy * 3


OwnForward = type("OwnForward", (Scaled,), {"forward": staticmethod(lambda ctx, z: z)})


class OfClass(PyLayer):
    @classmethod
    def forward(cls, ctx, x, n=1):
        """Of a class."""
        return x


class Split(Function):
    @staticmethod
    def forward(x, n=2):
        """Raise `x` to the power `n`."""
        return x**n

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass


class Joined(Function):
    @staticmethod
    def forward(ctx, x, n=2):
        """Raise `x` to the power `n`."""
        return x**n


@dataclasses.dataclass
class Multiplied:
    """A method that is an object, and has no hash."""

    factor: float

    def __call__(self, ctx, x, by=2):
        return by * self.factor * x


OF_MODULE = [Scaled, OwnBackward, OfClass, Split, Joined]
SIGNATURES = {
    PyLayer: "(*args, **kwargs)",
    Function: "(*args, **kwargs)",
    Scaled: "(x, scale=2.0, *, mode='same')",
    OwnBackward: "(x, scale=2.0, *, mode='same')",
    OwnForward: "(z)",
    OfClass: "(x, n=1)",
    Split: "(x, n=2)",
    Joined: "(x, n=2)",
    layer(lambda ctx, *xs, **sizes: xs[0]): "(*xs, **sizes)",
    layer(lambda *args: args[1]): "(*args)",
    type("OfALambda", (PyLayer,), {"forward": staticmethod(lambda ctx, x, y: x)}): "(x, y)",
    type("OfAnObject", (PyLayer,), {"forward": Multiplied(3.0)}): "(x, by=2)",
    type("OfAPart", (PyLayer,), {"forward": functools.partial(lambda k, ctx, x: k * x, 2.0)}): "(x)",
}


def signature_of(function):
    signature = inspect.signature(function)
    parameters = [p.replace(annotation=p.empty) for p in signature.parameters.values()]
    return str(signature.replace(parameters=parameters, return_annotation=signature.empty))


@pytest.mark.parametrize("made", SIGNATURES)
def test_the_signature_is_that_of_forward_without_the_context(made):
    for function in (made.apply, made().apply, jax.jit(made.apply), jax.vmap(made.apply)):
        assert signature_of(function) == SIGNATURES[made]


def test_a_method_that_is_an_object():
    made = type("Made", (PyLayer,), {"forward": Multiplied(3.0), "backward": Multiplied(5.0)})
    np.testing.assert_allclose(jax.jit(made.apply)(X), 6 * X)
    np.testing.assert_allclose(jax.jit(jax.grad(loss(made)))(X), [10, 10])
    with pytest.raises(TypeError, match=r"Made.apply: .*\(x, by=2\)"):
        made.apply(X, 1, 2)


def test_annotations_stay():
    signature = inspect.signature(Scaled.apply, eval_str=True)
    assert [p.annotation for p in signature.parameters.values()] == [jax.Array, float, str]
    assert signature.return_annotation is jax.Array


def test_the_docstring_is_that_of_forward():
    assert Scaled.apply.__doc__ == OwnBackward.apply.__doc__ == "Multiply `x` by `scale`."
    assert OfClass.apply.__doc__ == "Of a class."
    assert Split.apply.__doc__ == Joined.apply.__doc__ == "Raise `x` to the power `n`."
    for without in (PyLayer, Tanh, OwnForward, Function):
        assert without.apply.__doc__.startswith("Run the ")


def test_help_shows_both():
    signature = "apply(x: 'jax.Array', scale: 'float' = 2.0, *, mode: 'str' = 'same')"
    text = pydoc.render_doc(Scaled.apply, renderer=pydoc.plaintext)
    for part in (signature, "Multiply `x` by `scale`.", "method of"):
        assert part in text
    assert signature in pydoc.render_doc(Scaled, renderer=pydoc.plaintext)


def test_its_repr_names_the_class_and_a_program_its_arguments():
    assert "Scaled.apply" in repr(Scaled.apply)
    assert 'loc("x")' in jax.jit(Scaled.apply).lower(X).as_text(debug_info=True)


# -- one object -----------------------------------------------------------------------------------


@pytest.mark.parametrize("made", SIGNATURES)
def test_it_is_one_object_for_each_class(made):
    assert made.apply is made.apply
    assert made().apply is made.apply
    assert made.apply.__self__ is made
    assert made.apply not in [other.apply for other in SIGNATURES if other is not made]


@pytest.mark.parametrize("base", [PyLayer, Function])
def test_jit_compiles_it_once(base):
    traced = []
    made = layer(lambda ctx, x: traced.append(x) or x * 2, base=base)
    for _ in range(3):
        jax.jit(made.apply)(X)
        jax.jit(made().apply)(X)
    assert len(traced) == 1


@pytest.mark.parametrize("made", OF_MODULE)
def test_it_is_pickled_by_its_name(made):
    assert pickle.loads(pickle.dumps(made.apply)) is made.apply
    np.testing.assert_array_equal(cloudpickle.loads(cloudpickle.dumps(made.apply))(X), made.apply(X))


def test_a_method_of_the_same_name_that_calls_it():
    class Shifted(Scaled):
        @classmethod
        def apply(cls, x, by):
            """Shifted."""
            return super().apply(x) + by

    Tripled = layer(forward=lambda ctx, x: x * 3, base=Shifted)

    assert signature_of(Shifted.apply) == "(x, by)"
    assert Shifted.apply.__doc__ == "Shifted."
    np.testing.assert_allclose(Shifted.apply(X, 1.0), 2 * X + 1)
    np.testing.assert_allclose(Tripled.apply(X, 1.0), 3 * X + 1)


# -- decorators of the package --------------------------------------------------------------------


@pytest.mark.parametrize("decorator", [cast_saved(), saved_tensors_hooks(lambda x: x, lambda x: x)])
def test_a_function_that_is_decorated_with_hooks(decorator):
    @decorator
    def total(x: jax.Array, power: int = 2) -> jax.Array:
        """The total."""
        return jnp.sum(x**power)

    assert signature_of(total) == signature_of(jax.grad(total)) == "(x, power=2)"
    assert (total.__name__, total.__doc__) == ("total", "The total.")


def test_a_backward_that_is_once_differentiable():
    @once_differentiable
    def backward(ctx, dy, dz=None):
        """The rule."""

    assert signature_of(backward) == "(ctx, dy, dz=None)"
    assert backward.__doc__ == "The rule."
