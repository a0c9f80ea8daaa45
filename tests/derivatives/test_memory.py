"""What is kept for backward, under which name, and what is left behind: nothing that was not saved."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pylayer_jax import Function, PyLayer, PyLayerContext
from pylayer_jax.packers import cast_saved
from tests.kit.layers import Matmul, Tanh
from tests.kit.modes import DERIVATIVES, STAGED


class Twice(PyLayer):
    """Keeps an input and an intermediate, each in two ways."""

    @staticmethod
    def forward(ctx, x, w):
        scale = jnp.exp(w)
        ctx.save_for_backward(x, scale, x)
        ctx.also = {"scale": scale}
        return jnp.sin(x) * scale

    @staticmethod
    def backward(ctx, dy):
        x, scale, _ = ctx.saved_tensor()
        return dy * jnp.cos(x) * scale, dy * jnp.sin(x) * ctx.also["scale"]


class Nothing(PyLayer):
    """Computes much and keeps none of it."""

    forward = staticmethod(lambda ctx, x: jnp.sin(jnp.cos(x)) + jnp.exp(x))
    backward = staticmethod(lambda ctx, dy: 2 * dy)


X = jnp.linspace(-1.0, 1.0, 16).reshape(4, 4)
W = X / 2


# -- what is kept for backward --------------------------------------------------------------------

KEPT = {Tanh: 1, Matmul: 2, Twice: 2, Nothing: 0}  # in units of one input


def arguments_of(layer: type[PyLayer]) -> tuple[jax.Array, ...]:
    return (X,) if layer in (Tanh, Nothing) else (X, W)


def eager_bytes(function: Callable[..., Any], *arguments: jax.Array) -> int:
    _, pull = jax.vjp(function, *arguments)
    return sum({x.unsafe_buffer_pointer(): x.nbytes for x in jax.tree_util.tree_leaves(pull)}.values())


def traced_bytes(function: Callable[..., Any], *arguments: jax.Array) -> int:
    """Bytes of the distinct values that the vjp function of a traced call holds."""
    jaxpr = jax.make_jaxpr(lambda *xs: jax.vjp(function, *xs)[1])(*arguments).jaxpr
    return sum(v.aval.size * v.aval.dtype.itemsize for v in {id(v): v for v in jaxpr.outvars}.values())


@pytest.mark.parametrize("count", [eager_bytes, traced_bytes])
@pytest.mark.parametrize("layer", KEPT)
def test_keeps_what_was_saved_and_each_tensor_once(layer: type[PyLayer], count: Callable[..., int]) -> None:
    arguments = arguments_of(layer)
    assert count(layer.apply, *arguments) == KEPT[layer] * X.nbytes


def test_what_was_not_saved_is_freed() -> None:
    unsaved: list[weakref.ref[Any]] = []

    class Wasteful(PyLayer):
        @staticmethod
        def forward(ctx, x):
            large = jnp.exp(x)
            unsaved.append(weakref.ref(large))
            ctx.save_for_backward(x)
            return large.sum()

        @staticmethod
        def backward(ctx, dy):
            (x,) = ctx.saved_tensor()
            return dy * jnp.exp(x)

    _, pull = jax.vjp(Wasteful.apply, X)
    gc.collect()
    assert [ref() for ref in unsaved] == [None] * len(unsaved)
    np.testing.assert_allclose(pull(jnp.float32(1))[0], jnp.exp(X), rtol=1e-6)


def test_the_vjp_function_alone_holds_the_residuals() -> None:
    x = X + 1
    saved = weakref.ref(x)
    _, pull = jax.vjp(lambda x: Matmul.apply(x, W), x)
    del x
    gc.collect()
    assert saved() is not None, "the vjp function still needs it"
    del pull
    gc.collect()
    assert saved() is None


# -- what is left behind --------------------------------------------------------------------------


class Scale(PyLayer):
    """Takes a live Python object and carries it to backward."""

    @staticmethod
    def forward(ctx, x, model):
        y = jnp.tanh(x) * model.factor
        ctx.save_for_backward(x, y, jnp.sin(x))
        ctx.model = model
        return y

    @staticmethod
    def backward(ctx, dy):
        x, _, _ = ctx.saved_tensor()
        return dy * ctx.model.factor * (1 - jnp.tanh(x) ** 2), None


class ScaleWithForwardMode(Scale):
    forward_mode = True


class Model:
    """A static that can be watched, and that cannot be hashed or compared."""

    factor = 2.0
    __hash__ = None

    def __eq__(self, other: object) -> bool:
        raise AssertionError("a static must not be compared")


@pytest.mark.parametrize("layer", [Scale, ScaleWithForwardMode])
@pytest.mark.parametrize("way", DERIVATIVES)
def test_a_static_argument_dies_with_the_program(layer, way):
    models = []
    for _ in range(3):
        model = Model()
        models.append(weakref.ref(model))
        jax.block_until_ready(DERIVATIVES[way](lambda x, model=model: layer.apply(x, model).sum())(X))
        del model
    gc.collect()
    assert [model() for model in models] == [None, None, None]


@pytest.mark.clears_caches
@pytest.mark.parametrize("layer", [Scale, ScaleWithForwardMode])
def test_a_static_argument_in_an_eager_loop_dies_with_the_caches_of_jax(layer):
    # JAX remembers the body of a loop that it ran in eager mode, and with it the static arguments of a custom_vjp
    # function, of JAX's own or of ours.
    model = Model()
    found = weakref.ref(model)
    jax.grad(lambda x, model=model: STAGED["scan"](lambda x: layer.apply(x, model))(x).sum())(X)
    del model
    jax.clear_caches()
    gc.collect()
    assert found() is None


@pytest.mark.parametrize("way", ["eager", "grad", "grad of grad"])
def test_a_training_loop_does_not_grow(way):
    def left(steps: int) -> tuple[int, int]:
        x = X
        for _ in range(steps):
            x = x - 0.01 * DERIVATIVES[way](lambda x, model: Scale.apply(x, model).sum())(x, Model())
        del x
        gc.collect()
        objects = sum(type(x) in (PyLayerContext, Model) for x in gc.get_objects())
        return objects, len(jax.live_arrays())

    objects, arrays = left(3)
    more_objects, more_arrays = left(20)
    assert more_objects <= objects
    assert more_arrays <= arrays


# -- names, by which the policies of jax.checkpoint find what is saved -----------------------------


THREE = jnp.array([0.3, 0.7, 1.1])

policies = jax.checkpoint_policies


class Wave(PyLayer):
    """Saves an intermediate in a pytree, its output, an input, and a static."""

    saved_names = True

    @staticmethod
    def forward(ctx, x):
        y = jnp.sin(jnp.exp(x))
        ctx.save_for_backward({"slope": jnp.cos(jnp.exp(x))}, y, x, 3)
        return y

    @staticmethod
    def backward(ctx, dy):
        saved, y, x, _ = ctx.saved_tensor()
        return dy * saved["slope"] * jnp.exp(x) + 0 * y


ForwardWave = type("ForwardWave", (Wave,), {"forward_mode": True})
NamedWave = type("NamedWave", (Wave,), {"saved_names": ("slope", "wave", None, None)})


class FunctionWave(Function):
    saved_names = True

    @staticmethod
    def forward(x):
        return jnp.sin(jnp.exp(x)), jnp.cos(jnp.exp(x))

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(output[1], output[0], *inputs)

    @staticmethod
    def backward(ctx, dy, _):
        slope, y, x = ctx.saved_tensors
        return dy * slope * jnp.exp(x) + 0 * y


NAMES = {
    Wave: ["Wave.saved[0]['slope']", "Wave.saved[1]"],
    ForwardWave: ["ForwardWave.saved[0]['slope']", "ForwardWave.saved[1]"],
    NamedWave: ["slope['slope']", "wave"],
    FunctionWave: ["FunctionWave.saved[0]", "FunctionWave.saved[1]"],
}


def loss(layer):
    def total(x):
        y = layer.apply(x)
        return jnp.sum(jnp.tanh(y[0] if isinstance(y, tuple) else y))

    return total


layers = pytest.mark.parametrize("layer", NAMES)


def sines(f, x, policy):
    text = jax.jit(jax.value_and_grad(jax.checkpoint(f, policy=policy))).lower(x).as_text()
    return text.count("stablehlo.sine "), text.count("stablehlo.cosine ")


@pytest.mark.parametrize("batch", [False, True], ids=["", "batch"])
@layers
def test_named_tensors_are_not_computed_again(layer, batch):
    f, x = (lambda x: jnp.sum(jax.vmap(loss(layer))(x)), jnp.stack([THREE, THREE])) if batch else (loss(layer), THREE)
    # Once on the way forward, and again where nothing is saved.
    assert sines(f, x, policies.nothing_saveable)[0] == 2
    assert sines(f, x, policies.save_only_these_names(*NAMES[layer])) == (1, 1)
    assert sines(f, x, policies.save_only_these_names("another name"))[0] == 2


@layers
def test_offloading_by_name(layer):
    saved, offloaded = NAMES[layer]
    policy = policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[saved],
        names_which_can_be_offloaded=[offloaded],
        offload_src="device",
        offload_dst="pinned_host",
    )
    run = jax.grad(jax.checkpoint(loss(layer), policy=policy))
    np.testing.assert_allclose(jax.jit(run)(THREE), jax.grad(loss(layer))(THREE), rtol=1e-5)
    assert "<host>" in str(jax.make_jaxpr(run)(THREE))


@layers
def test_gradients_are_the_same_where_names_are_saved(layer):
    kept = jax.checkpoint(loss(layer), policy=policies.save_only_these_names(*NAMES[layer]))
    expected = jax.grad(loss(layer))(THREE)
    for run in (jax.grad(kept), jax.jit(jax.grad(kept)), jax.grad(jax.jit(kept))):
        np.testing.assert_allclose(run(THREE), expected, rtol=1e-5)

    def slope(f):
        return jax.jit(jax.grad(lambda x: jnp.sum(jax.grad(f)(x) * jnp.cos(x))))(THREE)

    np.testing.assert_allclose(slope(kept), slope(loss(layer)), rtol=1e-4)


def names(layer):
    """The names in the gradient of the layer, in order."""
    equations = jax.make_jaxpr(jax.grad(loss(layer)))(THREE).jaxpr.eqns
    return [e.params["name"] for e in equations if e.primitive.name == "name"]


def test_what_hooks_packed_has_the_name_of_the_tensor():
    assert {*names(Wave)} == {*NAMES[Wave], "Wave.saved[2]"}
    with cast_saved():
        assert {*names(Wave)} == {*NAMES[Wave], "Wave.saved[2]"}


def test_values_without_a_name():
    # Nor has any where nothing is differentiated.
    assert "saved[" not in str(jax.make_jaxpr(Wave.apply)(THREE))
    assert names(type("Unnamed", (Wave,), {"saved_names": ()})) == []
    assert names(type("OnlyWave", (Wave,), {"saved_names": (None, "wave", None, None)})) == ["wave"]


def test_one_tensor_under_two_names_has_the_first():
    class Twice(PyLayer):
        saved_names = (None, "first", "second")

        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x * 2, x, x)
            return jnp.sin(x)

        @staticmethod
        def backward(ctx, dy):
            _, x, same = ctx.saved_tensor()
            return dy * jnp.cos(x) * same / x

    assert names(Twice) == ["first"]
    np.testing.assert_allclose(jax.jit(jax.grad(lambda x: Twice.apply(x).sum()))(THREE), jnp.cos(THREE), rtol=1e-6)


@pytest.mark.parametrize("names", ["wave", ["wave"], ("wave", 1), False])
def test_saved_names_must_be_a_tuple_of_strings(names):
    with pytest.raises(TypeError, match=r"Wrong\.saved_names"):

        class Wrong(Wave):
            saved_names = names
