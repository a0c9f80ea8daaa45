"""What is saved has a name, by which the policies of jax.checkpoint find it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pylayer_jax import Function, PyLayer
from pylayer_jax.packers import cast_saved
from tests.kit.layers import Multiply

X = jnp.array([0.3, 0.7, 1.1])

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
    f, x = (lambda x: jnp.sum(jax.vmap(loss(layer))(x)), jnp.stack([X, X])) if batch else (loss(layer), X)
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
    np.testing.assert_allclose(jax.jit(run)(X), jax.grad(loss(layer))(X), rtol=1e-5)
    assert "<host>" in str(jax.make_jaxpr(run)(X))


@layers
def test_gradients_are_the_same_where_names_are_saved(layer):
    kept = jax.checkpoint(loss(layer), policy=policies.save_only_these_names(*NAMES[layer]))
    expected = jax.grad(loss(layer))(X)
    for run in (jax.grad(kept), jax.jit(jax.grad(kept)), jax.grad(jax.jit(kept))):
        np.testing.assert_allclose(run(X), expected, rtol=1e-5)

    def slope(f):
        return jax.jit(jax.grad(lambda x: jnp.sum(jax.grad(f)(x) * jnp.cos(x))))(X)

    np.testing.assert_allclose(slope(kept), slope(loss(layer)), rtol=1e-4)


def names(layer):
    """The names in the gradient of the layer, in order."""
    equations = jax.make_jaxpr(jax.grad(loss(layer)))(X).jaxpr.eqns
    return [e.params["name"] for e in equations if e.primitive.name == "name"]


def test_what_hooks_packed_has_the_name_of_the_tensor():
    assert {*names(Wave)} == {*NAMES[Wave], "Wave.saved[2]"}
    with cast_saved():
        assert {*names(Wave)} == {*NAMES[Wave], "Wave.saved[2]"}


def test_values_without_a_name():
    # Nor has any where nothing is differentiated.
    assert "saved[" not in str(jax.make_jaxpr(Wave.apply)(X))
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
    np.testing.assert_allclose(jax.jit(jax.grad(lambda x: Twice.apply(x).sum()))(X), jnp.cos(X), rtol=1e-6)


@pytest.mark.parametrize("names", ["wave", ["wave"], ("wave", 1), False])
def test_saved_names_must_be_a_tuple_of_strings(names):
    with pytest.raises(TypeError, match=r"Wrong\.saved_names"):

        class Wrong(Wave):
            saved_names = names


def test_needs_input_grad_under_remat_leaves_no_gradient_out():
    seen = []

    class Asked(Multiply):
        @staticmethod
        def backward(ctx, dy):
            seen.append(ctx.needs_input_grad)
            return tuple(g if needed else None for g, needed in zip(Multiply.backward(ctx, dy), seen[-1], strict=True))

    for run in (lambda f: f, jax.jit):
        gradient = run(jax.grad(jax.checkpoint(lambda a: Asked.apply(a, X).sum() + Asked.apply(X, a).sum())))
        np.testing.assert_allclose(gradient(X * 2), 2 * X, rtol=1e-5)
    assert {*seen} == {(True, False), (False, True)}


def test_a_checkpoint_applies_a_layer_again():
    """Where backward is not linear, a second derivative is that of two applications, as with a plain custom_vjp."""

    class Doubled(PyLayer):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x * 1.0

        @staticmethod
        def backward(ctx, dy):
            (x,) = ctx.saved_tensor()
            return jnp.sin(dy) * x * 2.0

    @jax.custom_vjp
    def doubled(x):
        return x * 1.0

    doubled.defvjp(lambda x: (doubled(x), x), lambda x, dy: (jnp.sin(dy) * x * 2.0,))
    x = jnp.float32(0.7)
    for around in (jax.checkpoint, lambda f: f):
        ours, plain = (
            jax.grad(jax.grad(lambda x, f=f, around=around: jnp.sin(around(lambda x: jnp.tanh(f(x)) * 1.4)(x))))(x)
            for f in (Doubled.apply, doubled)
        )
        assert jnp.allclose(ours, plain, rtol=1e-5)
