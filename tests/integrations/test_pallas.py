"""Layers whose forward and backward are Pallas kernels, beside the same functions in plain jax.numpy."""

from __future__ import annotations

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

X = jnp.linspace(-1.0, 1.0, 16)
LOGITS, LABELS = jnp.cos(jnp.arange(32 * 16.0)).reshape(32, 16) * 3, jnp.arange(32) * 7 % 16
ROWS = 16  # of the blocks into which a kernel cuts its arguments, a power of two and not less, as Triton needs


def run_kernel(kernel, like, *args):
    """Run a kernel over blocks of rows, with outputs like some arrays. Without a GPU, Pallas interprets the kernel."""

    def spec(x):
        return pl.BlockSpec((rows, *x.shape[1:]), lambda i: (i, *[0] * (x.ndim - 1)))

    rows = min(ROWS, len(args[0]))
    run = pl.pallas_call(
        kernel,
        grid=(len(args[0]) // rows,),
        in_specs=[spec(x) for x in args],
        out_specs=[spec(x) for x in like],
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in like],
        interpret=jax.default_backend() == "cpu",
    )
    return run(*args)


def tanh_kernel(x_ref, y_ref):
    y_ref[...] = jnp.tanh(x_ref[...])


def slope_kernel(y_ref, dy_ref, dx_ref):
    dx_ref[...] = dy_ref[...] * (1 - y_ref[...] ** 2)


def is_label(logits, labels):
    return jax.lax.broadcasted_iota(jnp.int32, logits.shape, 1) == labels[:, None]


def xent_forward_kernel(logits_ref, labels_ref, loss_ref, logsumexp_ref):
    logits = logits_ref[...]
    largest = jnp.max(logits, axis=1)
    logsumexp = largest + jnp.log(jnp.sum(jnp.exp(logits - largest[:, None]), axis=1))
    loss_ref[...] = logsumexp - jnp.sum(jnp.where(is_label(logits, labels_ref[...]), logits, 0.0), axis=1)
    logsumexp_ref[...] = logsumexp


def xent_backward_kernel(logits_ref, labels_ref, logsumexp_ref, dloss_ref, dlogits_ref):
    logits = logits_ref[...]
    softmax = jnp.exp(logits - logsumexp_ref[...][:, None])
    one_hot = jnp.where(is_label(logits, labels_ref[...]), 1.0, 0.0)
    dlogits_ref[...] = dloss_ref[...][:, None] * (softmax - one_hot)


def plain_cross_entropy(logits, labels):
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], axis=1)[:, 0]


def loss_of(function):
    """Return a loss that is not linear in the outputs, so that its second derivative needs every rule of the layer."""
    return lambda *args: jnp.sum(jnp.sin(function(*args)))


# -- layers without a second derivative -----------------------------------------------------------


class CrossEntropy(PyLayer):
    """Layer that computes the losses [N] of logits [N, V] and labels [N]."""

    saved_names = ("logits", "labels", "logsumexp")

    @staticmethod
    def forward(ctx, logits, labels):
        loss, logsumexp = run_kernel(xent_forward_kernel, [logits[:, 0]] * 2, logits, labels)
        ctx.save_for_backward(logits, labels, logsumexp)
        return loss

    @staticmethod
    def backward(ctx, dloss):
        saved = ctx.saved_tensor()
        return run_kernel(xent_backward_kernel, saved[:1], *saved, dloss)[0], None


# -- the way out: backward applies a layer whose forward is its kernel -----------------------------


TanhSlope = layer(
    lambda y, dy: run_kernel(slope_kernel, [y], y, dy)[0],
    lambda y, dy, cotangent: (-2 * y * dy * cotangent, cotangent * (1 - y**2)),
    plain=True,
)


def tanh_forward(ctx, x):
    (y,) = run_kernel(tanh_kernel, [x], x)
    ctx.save_for_backward(y)
    return y


Tanh = layer(tanh_forward, lambda ctx, dy: TanhSlope.apply(*ctx.saved_tensors, dy))
# JAX cannot transpose the kernel in `backward`, so forward mode needs a `jvp`.
TanhBothWays = layer(base=Tanh, jvp=lambda ctx, dx: TanhSlope.apply(*ctx.saved_tensors, dx))


# -- layers and transforms ------------------------------------------------------------------------

# Within shard_map, JAX asks each kernel over which axes its outputs vary.
FIRST, SECOND, MIXED = (
    {k: f for k, f in table.items() if k not in SLOW | COVERED and "shard_map" not in k}
    for table in (FIRST_ORDER, SECOND_ORDER, FORWARD_OVER_REVERSE)
)


@pytest.mark.parametrize("transform", FIRST.values(), ids=FIRST)
def test_first_derivatives(transform):
    ours, plain = (transform(loss_of(f), (LOGITS, LABELS)) for f in (CrossEntropy.apply, jax.jit(plain_cross_entropy)))
    assert_same(ours, plain)


@pytest.mark.parametrize("transform", SECOND.values(), ids=SECOND)
def test_second_derivatives(transform):
    f = loss_of(jnp.tanh)
    assert_same(transform(loss_of(Tanh.apply), (X,)), jax.jit(lambda x: transform(f, (x,)))(X))
    with pytest.raises((ValueError, TypeError)):  # a kernel without a rule
        transform(loss_of(CrossEntropy.apply), (LOGITS, LABELS))


@pytest.mark.parametrize("transform", MIXED.values(), ids=MIXED)
def test_forward_over_reverse_of_a_layer_with_a_jvp(transform):
    f = loss_of(jnp.tanh)
    assert_same(transform(loss_of(TanhBothWays.apply), (X,)), jax.jit(lambda x: transform(f, (x,)))(X))


@pytest.mark.parametrize(("layer", "args"), [(Tanh, (X,)), (CrossEntropy, (LOGITS, LABELS))])
def test_forward_over_reverse_is_refused(layer, args):
    with pytest.raises((ValueError, TypeError)):
        FORWARD_OVER_REVERSE["jit_of_hessian"](loss_of(layer.apply), args)


# -- hooks, policies and the report ---------------------------------------------------------------


@EAGER_AND_JIT
def test_hooks_see_what_the_kernels_keep(mode):
    expected = jax.grad(loss_of(plain_cross_entropy))(LOGITS, LABELS)

    def gradient(hooks):
        return mode(jax.grad(loss_of(hooks(CrossEntropy.apply))))(LOGITS, LABELS)

    spy = Spy()
    assert_same(gradient(spy.hooks), expected)
    assert spy.counts() == (3, 3)
    assert_same(gradient(save_on_cpu()), expected)
    assert 0 < jnp.max(jnp.abs(gradient(cast_saved()) - expected)) < 0.05 * jnp.max(jnp.abs(expected))


def test_a_policy_saves_what_the_kernel_returned():
    # What comes before the layer is computed again.
    loss = loss_of(lambda logits: CrossEntropy.apply(logits * 2, LABELS))
    expected = jax.grad(loss)(LOGITS)
    for policy, kept in ((jax.checkpoint_policies.save_only_these_names("logsumexp"), {"logsumexp"}), (None, set())):
        wrapped = jax.checkpoint(loss, policy=policy)
        assert_same(jax.jit(jax.grad(wrapped))(LOGITS), expected)
        names = {row.name for row in saved_tensors_report(wrapped, LOGITS).rows if row.layer}
        assert names - {"labels"} == kept  # these are an input
