"""Each class is a layer of its own, however it was made; `apply` has the signature and docstring of its `forward`."""

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

TRIPLE = {"forward": staticmethod(lambda ctx, x: 3 * x), "backward": staticmethod(lambda ctx, dy: 5 * dy)}


def check_triple(layer):
    np.testing.assert_allclose(layer.apply(X), 3 * X)
    np.testing.assert_allclose(jax.jit(layer.apply)(X), 3 * X)
    np.testing.assert_allclose(jax.grad(loss(layer))(X), [5, 5])
    assert layer.apply is layer.apply
    assert layer.apply.__self__ is layer


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


@pytest.mark.parametrize(
    ("name", "value", "meant"),
    [
        ("forward_modes", True, "forward_mode"),
        ("complex_convention", "torch", "paddle"),
        ("forward_mode", "yes", "True"),
        ("saved_names", "y", "tuple"),
        ("saved_names", ["y"], "tuple"),
        ("saved_names", ("y", 1), "tuple"),
        ("Host", True, "host"),
        ("hst", "forward", "host"),
        ("host_vamp", "broadcast", "host_vmap"),
        ("host", "backward", "forward"),
        ("host", 1, "True"),
        ("host_vmap", "broadcast_all", "broadcast"),
    ],
)
def test_a_flag_of_another_name_or_kind(name, value, meant):
    with pytest.raises((TypeError, ValueError), match=rf"Layer\.{name}(?s:.*)\b{meant}\b"):
        type("Layer", (Function,), {name: value})


def test_a_helper_whose_name_is_near_that_of_a_flag():
    helpers = dict.fromkeys(("forward_model", "forward_node", "saved_games"), staticmethod(len))
    for name, value in (helpers | {"hosts": ["a", "b"], "post": True, "ghost": "no", "_host": True}).items():
        check_triple(type("Layer", (PyLayer,), {**TRIPLE, name: value}))


@pytest.mark.parametrize("outer", [staticmethod, classmethod])
@pytest.mark.parametrize("decorator_first", [True, False])
def test_once_differentiable_beside_static_and_class_methods(outer, decorator_first):
    def backward(*args):
        assert len(args) == 2 + (outer is classmethod)
        return 5 * args[-1]

    guarded = once_differentiable(outer(backward)) if decorator_first else outer(once_differentiable(backward))
    layer = type("Layer", (PyLayer,), {"forward": staticmethod(lambda ctx, x: x * x), "backward": guarded})
    np.testing.assert_allclose(jax.grad(loss(layer))(X), [5, 5])
    assert layer.backward("a test's own context", 3) == 15
    with pytest.raises(RuntimeError, match="once_differentiable"):
        jax.grad(lambda x: jax.grad(lambda x: (layer.apply(x) ** 2).sum())(x).sum())(X)


def used(layer, once):
    """Return numbers of unpickled classes, which no module defines; one of them has no second derivative."""
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
    # The methods refer to the class.
    rule = lambda x, dy: Sine.scale * dy * jnp.cos(x)
    Sine = layer(jnp.sin, rule, name="Sine", plain=True, scale=3.0, forward_mode=True)
    Once = layer(
        classmethod(lambda cls, ctx, x: ctx.save_for_backward(x) or x * x),
        classmethod(once_differentiable(lambda cls, ctx, dy: dy * ctx.saved_tensor()[0])),
    )
    jax.grad(loss(Sine))(X)  # before the classes are pickled
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        numbers = pool.submit(used, cloudpickle.dumps(Sine), cloudpickle.dumps(Once)).result(timeout=300)
    expected = [3 * np.cos(X), 3 * np.cos(X), 3 * X * np.cos(X), 0 * X]
    np.testing.assert_allclose(numbers, expected, rtol=1e-5)


# -- apply: its signature, its docstring, and which object it is -----------------------------------


class Scaled(PyLayer):
    @staticmethod
    def forward(ctx, x: jax.Array, scale: float = 2.0, *, mode: str = "same") -> jax.Array:
        """Multiply `x` by `scale`."""
        return scale * x


OwnBackward = layer(base=Scaled, name="OwnBackward", backward=lambda ctx, dy: dy * 3, __module__=__name__)
OwnForward = layer(lambda ctx, z: z, base=Scaled)


class OfClass(PyLayer):
    @classmethod
    def forward(cls, ctx, x, n=1):
        """Multiply by an attribute of the class."""
        return x


def power(x, n=2):
    """Raise `x` to the power `n`."""
    return x**n


Split = layer(power, None, Function, "Split", setup_context=lambda ctx, inputs, output: None, __module__=__name__)


@dataclasses.dataclass
class Multiplied:
    """A callable object without a hash, used as a method."""

    factor: float

    def __call__(self, ctx, x, by=2):
        return by * self.factor * x


SIGNATURES = {
    PyLayer: "(*args, **kwargs)",
    Function: "(*args, **kwargs)",
    Scaled: "(x, scale=2.0, *, mode='same')",
    OwnBackward: "(x, scale=2.0, *, mode='same')",
    OwnForward: "(z)",
    OfClass: "(x, n=1)",
    Split: "(x, n=2)",
    layer(lambda ctx, x, y: x, base=Function): "(x, y)",
    layer(lambda ctx, *xs, **sizes: xs[0]): "(*xs, **sizes)",
    layer(lambda *args: args[1]): "(*args)",
    layer(Multiplied(3.0)): "(x, by=2)",
    layer(functools.partial(lambda k, ctx, x: k * x, 2.0)): "(x)",
}


def signature_of(function):
    signature = inspect.signature(function)
    parameters = [p.replace(annotation=p.empty) for p in signature.parameters.values()]
    return str(signature.replace(parameters=parameters, return_annotation=signature.empty))


@pytest.mark.parametrize("made", SIGNATURES)
def test_apply_is_one_object_with_the_signature_of_forward_but_the_context(made):
    for function in (made.apply, jax.jit(made.apply), jax.vmap(made.apply)):
        assert signature_of(function) == SIGNATURES[made]
    assert made().apply is made.apply is made.apply
    assert made.apply.__self__ is made
    assert made.apply not in [other.apply for other in SIGNATURES if other is not made]


def test_the_docstring_is_that_of_forward():
    assert Scaled.apply.__doc__ == OwnBackward.apply.__doc__ == "Multiply `x` by `scale`."
    assert OfClass.apply.__doc__ == "Multiply by an attribute of the class."
    assert Split.apply.__doc__ == "Raise `x` to the power `n`."
    for without in (PyLayer, Tanh, OwnForward, Function):
        assert without.apply.__doc__.startswith("Run the ")


def test_help_and_programs_show_the_names_of_the_layer():
    signature = "apply(x: 'jax.Array', scale: 'float' = 2.0, *, mode: 'str' = 'same')"
    text = pydoc.render_doc(Scaled.apply, renderer=pydoc.plaintext)
    for part in (signature, "Multiply `x` by `scale`.", "method of"):
        assert part in text
    assert signature in pydoc.render_doc(Scaled, renderer=pydoc.plaintext)
    assert "Scaled.apply" in repr(Scaled.apply)
    assert 'loc("x")' in jax.jit(Scaled.apply).lower(X).as_text(debug_info=True)


@pytest.mark.parametrize("base", [PyLayer, Function])
def test_jit_compiles_it_once(base):
    traced = []
    made = layer(lambda ctx, x: traced.append(x) or x * 2, base=base)
    for _ in range(3):
        jax.jit(made.apply)(X)
        jax.jit(made().apply)(X)
    assert len(traced) == 1


@pytest.mark.parametrize("made", [Scaled, OwnBackward, OfClass, Split])
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


@pytest.mark.parametrize("decorator", [cast_saved(), saved_tensors_hooks(abs, abs), once_differentiable])
def test_a_decorated_function_keeps_its_signature_and_docstring(decorator):
    @decorator
    def total(x: jax.Array, power: int = 2) -> jax.Array:
        """The total."""
        return jnp.sum(x**power)

    assert signature_of(total) == signature_of(jax.grad(total)) == "(x, power=2)"
    assert (total.__name__, total.__doc__) == ("total", "The total.")
