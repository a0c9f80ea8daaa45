"""Layers whose forward and backward are Pallas kernels, beside the same functions in plain jax.numpy."""

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl

from pylayer_jax import PyLayer, saved_tensors_report
from pylayer_jax.packers import cast_saved, save_on_cpu
from tests.hooks.spy import Spy
from tests.kit.layers import layer
from tests.kit.modes import EAGER_AND_JIT
from tests.kit.transforms import COVERED, FIRST_ORDER, FORWARD_OVER_REVERSE, SECOND_ORDER, SLOW, assert_same

X = jnp.linspace(-1.0, 1.0, 64).reshape(32, 2)
ROWS = 16  # of the blocks into which a kernel cuts its arguments, a power of two and not less, as Triton needs


def run_kernel(kernel, x, *args):
    """Run a kernel over blocks of rows, with an output like `x`. Without a GPU, Pallas interprets the kernel."""
    spec = pl.BlockSpec((min(ROWS, len(x)), *x.shape[1:]), lambda i: (i, *[0] * (x.ndim - 1)))
    run = pl.pallas_call(
        kernel,
        grid=(len(x) // min(ROWS, len(x)),),
        in_specs=[spec] * (1 + len(args)),
        out_specs=spec,
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        interpret=jax.default_backend() == "cpu",
    )
    return run(x, *args)


def tanh_kernel(x_ref, y_ref):
    y_ref[...] = jnp.tanh(x_ref[...])


def slope_kernel(y_ref, dy_ref, dx_ref):
    dx_ref[...] = dy_ref[...] * (1 - y_ref[...] ** 2)


def loss_of(function):
    """Return a loss that is not linear in the outputs, so that its second derivative needs every rule of the layer."""
    return lambda *args: jnp.sum(jnp.sin(function(*args)))


class Tanh(PyLayer):
    """Layer without a second derivative, since kernels have no rules."""

    saved_names = ("y",)

    @staticmethod
    def forward(ctx, x):
        y = run_kernel(tanh_kernel, x)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, dy):
        return run_kernel(slope_kernel, *ctx.saved_tensors, dy)


# The way out: backward applies a layer whose forward is its kernel.
TanhSlope = layer(
    lambda y, dy: run_kernel(slope_kernel, y, dy),
    lambda y, dy, cotangent: (-2 * y * dy * cotangent, cotangent * (1 - y**2)),
    plain=True,
)
TanhTwice = layer(base=Tanh, backward=lambda ctx, dy: TanhSlope.apply(*ctx.saved_tensors, dy))
# JAX cannot transpose the kernel in `backward`, so forward mode needs a `jvp`.
TanhBothWays = layer(base=TanhTwice, jvp=lambda ctx, dx: TanhSlope.apply(*ctx.saved_tensors, dx))

# Within shard_map, JAX asks each kernel over which axes its outputs vary.
TRANSFORMS = [
    (made, table, name)
    for made, table in ((Tanh, FIRST_ORDER), (TanhTwice, SECOND_ORDER), (TanhBothWays, FORWARD_OVER_REVERSE))
    for name in table
    if name not in SLOW | COVERED and "shard_map" not in name
]


@pytest.mark.parametrize(("made", "table", "name"), TRANSFORMS, ids=[name for *_, name in TRANSFORMS])
def test_derivatives(made, table, name):
    f = loss_of(jnp.tanh)
    assert_same(table[name](loss_of(made.apply), (X,)), jax.jit(lambda x: table[name](f, (x,)))(X))


def test_a_derivative_of_a_kernel_without_a_rule_is_an_error():
    for made, derivative in ((Tanh, jax.jacrev), (Tanh, jax.jacfwd), (TanhTwice, jax.jacfwd)):
        with pytest.raises((ValueError, TypeError)):
            derivative(jax.grad(loss_of(made.apply)))(X)


@EAGER_AND_JIT
def test_hooks_see_what_the_kernels_keep(mode):
    expected = jax.grad(loss_of(jnp.tanh))(X)

    def gradient(hooks):
        return mode(jax.grad(loss_of(hooks(Tanh.apply))))(X)

    spy = Spy()
    assert_same(gradient(spy.hooks), expected)
    assert spy.counts() == (1, 1)
    assert_same(gradient(save_on_cpu()), expected)
    assert 0 < jnp.max(jnp.abs(gradient(cast_saved()) - expected)) < 0.05 * jnp.max(jnp.abs(expected))


def test_a_policy_saves_what_the_kernel_returned():
    # What comes before the layer is computed again.
    loss = loss_of(lambda x: Tanh.apply(x * 2))
    expected = jax.grad(loss)(X)
    for policy, kept in ((jax.checkpoint_policies.save_only_these_names("y"), {"y"}), (None, set())):
        wrapped = jax.checkpoint(loss, policy=policy)
        assert_same(jax.jit(jax.grad(wrapped))(X), expected)
        assert {row.name for row in saved_tensors_report(wrapped, X).rows if row.layer} == kept
