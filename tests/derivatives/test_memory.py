"""A vjp function holds only what was saved, under the names of `saved_names`; nothing stays alive after it."""

import contextlib
import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pylayer_jax.packers import cast_saved
from tests.kit.jaxprs import equations
from tests.kit.layers import Matmul, Tanh, layer, loss
from tests.kit.modes import DERIVATIVES

X = jnp.linspace(-1.0, 1.0, 16).reshape(4, 4)


def keep_twice(ctx, x, w):
    scale = jnp.exp(w)
    ctx.save_for_backward(x, scale, x)
    ctx.also = {"scale": scale}
    return jnp.sin(x) * scale


# Layers, arguments, and how many tensors they keep.
KEPT = {
    "output": (Tanh, [X], 1),
    "inputs": (Matmul, [X, X / 2], 2),
    "an input and an intermediate, each twice": (layer(keep_twice), [X, X / 2], 2),
    "nothing": (layer(lambda ctx, x: jnp.sin(jnp.cos(x)) + jnp.exp(x)), [X], 0),
}


def eager_bytes(function, *arguments):
    _, pull = jax.vjp(function, *arguments)
    return sum({x.unsafe_buffer_pointer(): x.nbytes for x in jax.tree.leaves(pull)}.values())


def traced_bytes(function, *arguments):
    jaxpr = jax.make_jaxpr(lambda *xs: jax.vjp(function, *xs)[1])(*arguments).jaxpr
    return sum(v.aval.size * v.aval.dtype.itemsize for v in {id(v): v for v in jaxpr.outvars}.values())


@pytest.mark.parametrize("bytes_of", [eager_bytes, traced_bytes])
@pytest.mark.parametrize("name", KEPT)
def test_keeps_what_was_saved_and_each_tensor_once(name, bytes_of):
    made, arguments, count = KEPT[name]
    assert bytes_of(made.apply, *arguments) == count * X.nbytes


def test_the_vjp_function_alone_holds_what_was_saved_and_nothing_else():
    x, unsaved = X + 1, []
    saved = weakref.ref(x)

    def forward(ctx, x):
        large = jnp.exp(x)
        unsaved.append(weakref.ref(large))
        ctx.save_for_backward(x)
        return large.sum()

    _, pull = jax.vjp(layer(forward, lambda ctx, dy: dy * jnp.exp(ctx.saved_tensor()[0])).apply, x)
    del x
    gc.collect()
    assert [ref() for ref in unsaved] == [None]
    assert saved() is not None, "the vjp function still needs it"
    del pull
    gc.collect()
    assert saved() is None


def scale(ctx, x, model):
    y = jnp.tanh(x) * model.factor
    ctx.save_for_backward(x, y, jnp.sin(x))
    ctx.model = model
    return y


Scale = layer(scale, lambda ctx, dy: (dy * ctx.model.factor * (1 - jnp.tanh(ctx.saved_tensor()[0]) ** 2), None))


class Model:
    """A static that has weak references, and that cannot be hashed or compared."""

    factor = 2.0
    __hash__ = None

    def __eq__(self, other):
        raise AssertionError("a static must not be compared")


ForwardScale = layer(base=Scale, forward_mode=True)
WAYS = [(Scale, way) for way in DERIVATIVES] + [(ForwardScale, way) for way in ("eager", "grad", "jit of grad of grad")]


@pytest.mark.parametrize(("made", "way"), WAYS)
def test_a_static_argument_dies_with_the_program(made, way):
    models = []
    for _ in range(3):
        model = Model()
        models.append(weakref.ref(model))
        jax.block_until_ready(DERIVATIVES[way](loss(made, model))(X))
        del model
    gc.collect()
    assert [model() for model in models] == [None, None, None]


# -- names, by which the policies of jax.checkpoint find what is saved -----------------------------


THREE = jnp.array([0.3, 0.7, 1.1])


def save_wave(ctx, x):
    y = jnp.sin(jnp.exp(x))
    ctx.save_for_backward({"slope": jnp.cos(jnp.exp(x))}, y, x, 3)
    return y


def slope_of_wave(ctx, dy):
    saved, y, x, _ = ctx.saved_tensor()
    return dy * saved["slope"] * jnp.exp(x) + 0 * y


Wave = layer(save_wave, slope_of_wave, name="Wave", saved_names=True)


def names(made):
    bent = lambda x: jnp.sum(jnp.tanh(jax.tree.leaves(made.apply(x))[0]))
    jaxpr = jax.make_jaxpr(jax.grad(bent))(THREE).jaxpr
    return [e.params["name"] for e in equations(jaxpr) if e.primitive.name == "name"]


def test_what_hooks_packed_has_the_name_of_the_tensor():
    for block in (contextlib.nullcontext(), cast_saved()):
        with block:
            assert {*names(Wave)} == {"Wave.saved[0]['slope']", "Wave.saved[1]", "Wave.saved[2]"}


def keep(*tensors):
    """Return a layer of sin that saves these functions of its input."""

    def forward(ctx, x):
        ctx.save_for_backward(*(each and jax.tree.map(lambda f: f(x), each) for each in tensors))
        return jnp.sin(x)

    return layer(forward, lambda ctx, dy: dy * jax.tree.leaves(ctx.saved_tensors)[0])


# What a layer saves, and the names of it that arrive.
ARRIVE = [
    (Wave, (), []),
    (Wave, (None, "wave", None, None), ["wave"]),
    (Wave, ("slope", "wave", None, None), ["slope['slope']", "wave"]),
    (keep(jnp.cos, lambda x: x, lambda x: x), (None, "first", "second"), ["first"]),  # one tensor under two names
    (keep({"cos": jnp.cos, "sin": jnp.sin}, None), ("parts", None), ["parts['cos']", "parts['sin']"]),
]


@pytest.mark.parametrize(("made", "given", "arrive"), ARRIVE)
def test_each_saved_value_has_a_name_or_none(made, given, arrive):
    named = layer(base=made, saved_names=given)
    assert sorted(names(named)) == arrive
    np.testing.assert_allclose(jax.jit(jax.grad(loss(named)))(THREE), jax.grad(loss(made))(THREE), rtol=1e-6)
    assert "name[" not in str(jax.make_jaxpr(named.apply)(THREE))  # where nothing is differentiated
