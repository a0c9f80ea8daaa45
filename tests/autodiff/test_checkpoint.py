"""What is saved has a name, by which the policies of jax.checkpoint find it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pylayer_jax import Function, PyLayer
from pylayer_jax.packers import cast_saved

pytestmark = pytest.mark.checkpoint

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


class ForwardWave(Wave):
    forward_mode = True


class NamedWave(Wave):
    saved_names = ("slope", "wave", None, None)


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

# JAX's coming remat reads the names in a fwd rule of a custom_vjp function if that is the coming one too, and
# never those in the derivative of a primitive.
REMAT3 = getattr(jax.config, "jax_remat3", False)
READS_NAMES = {
    layer: not REMAT3 or (getattr(jax.config, "jax_custom_vjp3", False) and layer is not ForwardWave) for layer in NAMES
}


def loss(layer):
    def total(x):
        y = layer.apply(x)
        return jnp.sum(jnp.tanh(y[0] if isinstance(y, tuple) else y))

    return total


def sines(layer, policy):
    text = jax.jit(jax.value_and_grad(jax.checkpoint(loss(layer), policy=policy))).lower(X).as_text()
    return text.count("stablehlo.sine "), text.count("stablehlo.cosine ")


@pytest.mark.parametrize("layer", NAMES)
def test_named_tensors_are_not_computed_again(layer):
    # Once on the way forward, and again where nothing is saved.
    assert sines(layer, policies.nothing_saveable)[0] == 2
    if READS_NAMES[layer]:
        assert sines(layer, policies.save_only_these_names(*NAMES[layer])) == (1, 1)
        assert sines(layer, policies.save_only_these_names("another name"))[0] == 2


@pytest.mark.parametrize("layer", NAMES)
def test_names_hold_in_a_batch(layer):
    if not READS_NAMES[layer]:
        pytest.skip("JAX_REMAT3 does not read them here")

    def found(*names):
        mapped = jax.checkpoint(
            lambda x: jnp.sum(jax.vmap(loss(layer))(x)), policy=policies.save_only_these_names(*names)
        )
        return jax.jit(jax.value_and_grad(mapped)).lower(jnp.stack([X, X])).as_text().count("stablehlo.sine ")

    assert (found(*NAMES[layer]), found("another name")) == (1, 2)


@pytest.mark.parametrize("layer", NAMES)
def test_offloading_by_name(layer):
    saved, offloaded = NAMES[layer][0], NAMES[layer][1]
    policy = policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[saved],
        names_which_can_be_offloaded=[offloaded],
        offload_src="device",
        offload_dst="pinned_host",
    )
    run = jax.grad(jax.checkpoint(loss(layer), policy=policy))
    np.testing.assert_allclose(jax.jit(run)(X), jax.grad(loss(layer))(X), rtol=1e-5)
    if not REMAT3:
        assert "<host>" in str(jax.make_jaxpr(run)(X))


@pytest.mark.parametrize("layer", NAMES)
@pytest.mark.parametrize("name", ["named", "nothing", "everything"])
def test_gradients_are_the_same_under_any_policy(layer, name):
    policy = {
        "named": policies.save_only_these_names(*NAMES[layer]),
        "nothing": policies.nothing_saveable,
        "everything": policies.everything_saveable,
    }[name]
    kept = jax.checkpoint(loss(layer), policy=policy)
    expected = jax.grad(loss(layer))(X)
    for run in (jax.grad(kept), jax.jit(jax.grad(kept)), jax.grad(jax.jit(kept))):
        np.testing.assert_allclose(run(X), expected, rtol=1e-5)

    def slope(f):
        return jax.jit(jax.grad(lambda x: jnp.sum(jax.grad(f)(x) * jnp.cos(x))))(X)

    np.testing.assert_allclose(slope(kept), slope(loss(layer)), rtol=1e-4)


def test_what_hooks_packed_has_the_name_of_the_tensor():
    def names(function):
        jaxpr = jax.make_jaxpr(jax.grad(function))(X).jaxpr
        return {e.params["name"] for e in jaxpr.eqns if e.primitive.name == "name"}

    if not REMAT3:
        assert names(loss(Wave)) == {*NAMES[Wave], "Wave.saved[2]"}
        with cast_saved():
            assert names(loss(Wave)) == {*NAMES[Wave], "Wave.saved[2]"}


def test_eager_mode_names_nothing():
    assert jax.vjp(Wave.apply, X)[0].shape == (3,)
    jaxpr = str(jax.make_jaxpr(Wave.apply)(X))
    assert "saved[" not in jaxpr


@pytest.mark.parametrize("layer", [NamedWave, Wave])
def test_values_without_a_name(layer):
    class Unnamed(layer):
        saved_names = ()

    class OnlyWave(layer):
        saved_names = (None, "wave", None, None)

    assert "name[" not in str(jax.make_jaxpr(jax.grad(loss(Unnamed)))(X))
    assert str(jax.make_jaxpr(jax.grad(loss(OnlyWave)))(X)).count("name[name=wave]") == (0 if REMAT3 else 1)


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

    text = str(jax.make_jaxpr(jax.grad(lambda x: Twice.apply(x).sum()))(X))
    if not REMAT3:
        assert (text.count("name=first"), text.count("name=second")) == (1, 0)
    np.testing.assert_allclose(jax.jit(jax.grad(lambda x: Twice.apply(x).sum()))(X), jnp.cos(X), rtol=1e-6)


@pytest.mark.parametrize("names", ["wave", ["wave"], ("wave", 1), False])
def test_saved_names_must_be_a_tuple_of_strings(names):
    with pytest.raises(TypeError, match=r"Wrong.saved_names: expected a tuple of strings .*, or True; got"):

        class Wrong(Wave):
            saved_names = names


class Asked(PyLayer):
    """Saves and computes what is asked for alone."""

    told: list = []

    @staticmethod
    def forward(ctx, a, b):
        Asked.told.append(ctx.needs_input_grad)
        ctx.save_for_backward(a, b)
        return a * b

    @staticmethod
    def backward(ctx, dy):
        a, b = ctx.saved_tensor()
        return dy * b if ctx.needs_input_grad[0] else None, dy * a if ctx.needs_input_grad[1] else None


def test_needs_input_grad_under_remat_leaves_no_gradient_out():
    for run in (lambda f: f, jax.jit):
        gradient = run(jax.grad(jax.checkpoint(lambda a: Asked.apply(a, X).sum() + Asked.apply(X, a).sum())))
        np.testing.assert_allclose(gradient(X * 2), 2 * X, rtol=1e-5)
    needs = {needs for needs in Asked.told if any(needs)}
    # With JAX_REMAT3 and JAX_CUSTOM_VJP3 JAX reports every input as perturbed.
    assert needs == {(True, False), (False, True)} or (REMAT3 and needs == {(True, True)})
