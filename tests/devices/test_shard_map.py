"""Layers and blocks of hooks under `jax.shard_map`, and within meshes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from pylayer_jax.packers import cast_saved, quantize_saved, recompute_saved, save_on_cpu
from pylayer_jax.testing import assert_equivalent
from tests.hooks.spy import noting
from tests.kit.case import grid
from tests.kit.layers import Matmul, Tanh, bits, layer
from tests.kit.transforms import assert_same

# Its output, and the cotangent of this, do not vary.
Total = layer(lambda x: lax.psum(x, "i"), lambda x, dy: lax.pcast(dy, "i", to="varying"), plain=True)


def network(x, a, b):
    return jnp.tanh(x @ a) @ b


def tensor_parallel(x, a, b):
    hidden = jnp.tanh(Matmul.apply(lax.pcast(x, "i", to="varying"), a))
    return Total.apply(Matmul.apply(hidden, b))


ROWS, COLUMNS, ALL = P("i"), P(None, "i"), P()
MLP = grid(4, 6), grid(6, 8, low=-0.8, high=0.9), grid(8, 4, low=-0.7, high=0.8)


def mapped(of_shard, in_specs=ROWS, out_specs=ROWS):
    mesh = jax.make_mesh((4,), ("i",), axis_types=(AxisType.Auto,))
    return jax.shard_map(of_shard, mesh=mesh, in_specs=in_specs, out_specs=out_specs)


def sharded(*split):
    # Jitted, because jax.checking_leaks, in assert_equivalent, refuses gradients of eager shard_maps in plain JAX too.
    return jax.jit(mapped(*split))


def test_derivatives_are_those_of_one_device():
    f = sharded(tensor_parallel, (ALL, COLUMNS, ROWS), ALL)
    assert_equivalent(f, network, MLP, orders=(0, 1, 2))

    def hessian_times_cosines(f):
        gradient = jax.grad(lambda *args: jnp.sum(jnp.sin(f(*args))), (0, 1, 2))
        return jax.jit(lambda *args: jax.jvp(gradient, args, tuple(map(jnp.cos, args)))[1])(*MLP)

    assert_same(hessian_times_cosines(f), hessian_times_cosines(network))


def test_an_invariant_argument_that_gets_a_varying_gradient_is_an_error():
    f = sharded(Matmul.apply, (ALL, COLUMNS), COLUMNS)
    with pytest.raises(ValueError, match=r"'x'.*psum"):
        jax.jit(jax.grad(lambda x, a, _: f(x, a).sum()))(*MLP)


def test_an_output_that_no_varying_argument_reaches_has_a_cotangent_on_each_device():
    def forward(ctx, x, w):
        y = w * w
        ctx.save_for_backward(3 * y)
        ctx.shape = x.shape
        return y

    ignores_x = layer(forward, lambda ctx, dy: ((dy * ctx.saved_tensors[0]).reshape(ctx.shape), None))
    f = lambda x, w, c: c * jnp.sin(ignores_x.apply(x, w))
    args = jnp.arange(1.0, 5), jnp.float32(0.5), jnp.asarray([1.0, 10, 100, 1000])

    def derivatives(f):
        gradient = jax.grad(lambda x, w, c: f(x, w, c).sum())
        return gradient(*args), jax.grad(lambda *args: (gradient(*args) ** 2).sum())(*args)

    assert_same(derivatives(sharded(f, (ROWS, ALL, ROWS))), derivatives(jax.vmap(f, (0, None, 0))))


def test_a_layer_within_the_shard_map_of_a_batched_layer_in_eager_mode():
    inner = layer(jnp.sin, lambda x, dy: dy * jnp.cos(x), plain=True)
    outer = layer(mapped(inner.apply), lambda x, dy: dy * jnp.cos(x), plain=True)
    xs = jnp.arange(8.0).reshape(2, 4)
    assert_same(jax.vmap(outer.apply)(xs), jnp.sin(xs))


# -- JAX finds the devices of a mesh within layers and within operations of a block ----------------


# The mesh is made within, where JAX has to find it.
Sine = layer(lambda x: mapped(jnp.sin)(x), lambda x, dy: dy * jnp.cos(x), plain=True, forward_mode=True)


WITHIN = {
    "an operation in a block": lambda: bits()(mapped(jnp.sin)),
    "a layer": lambda: Sine.apply,
    "a layer in a block": lambda: bits()(Sine.apply),
    "a scan": lambda: lambda x: jax.lax.scan(lambda c, _: (bits()(mapped(jnp.sin))(c), None), x, length=1)[0],
}


@pytest.mark.parametrize("within", WITHIN)
def test_a_shard_map_of_arrays_that_may_be_anywhere(within):
    x, f = jnp.linspace(0.0, 1.0, 8), WITHIN[within]()
    np.testing.assert_allclose(jax.jit(f)(x), np.sin(x), rtol=1e-6)
    np.testing.assert_allclose(jax.jit(jax.grad(lambda x: f(x).sum()))(x), np.cos(x), rtol=1e-2)
    np.testing.assert_allclose(jax.jit(lambda x: jax.jvp(f, (x,), (x,))[1])(x), x * np.cos(x), rtol=1e-5)


def test_a_sharding_constraint_in_a_block_is_obeyed():
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
    sharded = NamedSharding(mesh, P("data"))
    double = bits()(lambda x: jax.lax.with_sharding_constraint(x * jnp.sin(x), sharded))
    assert jax.jit(double)(jnp.ones(8)).sharding.device_set == sharded.device_set


def test_a_checkpointed_block_around_a_shard_map_in_eager_mode():
    x, f = jnp.linspace(0.0, 1.0, 8), jax.checkpoint(bits()(mapped(Tanh.apply)))
    np.testing.assert_allclose(jax.grad(lambda x: f(x).sum())(x), 1 - np.tanh(x) ** 2, rtol=1e-5)


def _times_total(x):
    h = jnp.sin(x)
    return lax.psum(jnp.sum(jnp.tanh(h * (lax.psum(h, "i") * 0.25))), "i")


def _around_mean(x):
    h = jnp.sin(x)
    centred = h - lax.pmean(h, "i") * jnp.cos(lax.pmean(x, "i"))
    return lax.psum(jnp.sum(centred / jnp.sqrt(lax.pmean(centred**2, "i") + 1)), "i")


@pytest.mark.parametrize("of_shard", [_times_total, _around_mean])
@pytest.mark.parametrize(
    ("hooks", "error"),
    [(recompute_saved(), 1e-5), (save_on_cpu(), 1e-5), (cast_saved(), 0.05), (quantize_saved(8), 0.05)],
)
def test_operations_on_a_value_that_does_not_vary_are_computed_again(hooks, error, of_shard):
    # jax 0.10 refuses an operation of which one operand varies over devices, and another does not.
    def derivatives(of_shard):
        f = mapped(of_shard, ROWS, ALL)
        return jax.jit(jax.grad(f))(x), jax.jit(jax.grad(lambda x: jnp.sum(jax.grad(f)(x) ** 2)))(x)

    x = grid(8, 3, low=-0.9, high=1.1)
    for got, plain in zip(derivatives(hooks(of_shard)), derivatives(of_shard), strict=True):
        np.testing.assert_allclose(got, plain, rtol=error, atol=error * jnp.max(jnp.abs(plain)))


# -- vmap of shard_map: each device along the axis has examples of its own -------------------------


X = jnp.sin(jnp.arange(72.0)).reshape(4, 3, 6)
W = jnp.cos(jnp.arange(36.0)).reshape(6, 6)


ByJvp = layer(base=Matmul, jvp=lambda ctx, dx, dw: dx @ ctx.saved_tensors[1] + ctx.saved_tensors[0] @ dw)
PRODUCTS = {
    "transposed": layer(base=Matmul, forward_mode=True).apply,
    "jvp": ByJvp.apply,
    "operation in a block": noting([], differentiable=True)(jnp.matmul),
}


@pytest.mark.parametrize("product", PRODUCTS.values(), ids=PRODUCTS)
def test_an_operand_that_all_examples_share(product):
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)

    def loss(f, x, w):
        replicated = jax.shard_map(lambda x, w: jnp.sin(f(x, w)), mesh=mesh, in_specs=ALL, out_specs=ALL)
        return jnp.sum(jax.vmap(replicated, in_axes=(0, None), spmd_axis_name="data")(x, w) ** 2)

    def of_gradient(f, x, w):
        return jnp.sum(jax.grad(loss, 2)(f, x, w) ** 2)

    for f in (loss, of_gradient):
        got, expected = (jax.jit(jax.grad(functools.partial(f, g), (0, 1)))(X, W) for g in (product, jnp.matmul))
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4), got, expected)


@pytest.mark.parametrize("forward_mode", [False, True], ids=["", "forward mode"])
def test_a_gradient_may_be_the_same_on_all_devices_though_the_argument_varies(forward_mode):
    zero = layer(lambda ctx, x: 3 * x, lambda ctx, dy: jnp.zeros(dy.shape), forward_mode=forward_mode)
    assert not jax.jit(jax.grad(lambda x: mapped(zero.apply)(x).sum()))(jnp.ones(8)).any()
