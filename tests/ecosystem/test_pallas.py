"""Layers whose forward and backward are Pallas kernels, beside the same functions in plain jax.numpy."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl

from pylayer_jax import PyLayer, once_differentiable, saved_tensors_report
from pylayer_jax.packers import cast_saved, save_on_cpu
from tests.ecosystem.kernels import (
    CrossEntropy,
    FlashAttention,
    attention_arguments,
    cross_entropy_arguments,
    plain_attention,
    plain_cross_entropy,
    xent_backward,
)
from tests.hooks.spy import Spy
from tests.kit.transforms import FIRST_ORDER, FORWARD_OVER_REVERSE, IMPLIED, SECOND_ORDER, SLOW, assert_same, floats

LAYERS = {
    "cross_entropy": (CrossEntropy, plain_cross_entropy, cross_entropy_arguments()),
    "attention": (FlashAttention, plain_attention, attention_arguments()),
}
X = jnp.linspace(-1.0, 1.0, 16)

by_layer = pytest.mark.parametrize(("layer", "reference", "args"), LAYERS.values(), ids=LAYERS)
by_layer_in_time = pytest.mark.parametrize(
    ("layer", "reference", "args"),
    [pytest.param(*LAYERS[name], id=name, marks=[pytest.mark.slow] * (name == "attention")) for name in LAYERS],
)


def crossed(*tables):
    # Within shard_map, JAX asks each kernel over which axes its outputs vary.
    return pytest.mark.parametrize(
        "transform",
        [
            pytest.param(transform, id=name)
            for table in tables
            for name, transform in table.items()
            if name not in SLOW | IMPLIED and "shard_map" not in name
        ],
    )


def loss_of(function):
    """A scalar that is not linear in the outputs, so that a second derivative needs every rule of the layer."""
    return lambda *args: jnp.sum(jnp.sin(function(*args)))


# -- first derivatives ----------------------------------------------------------------------------


@by_layer_in_time
@crossed(FIRST_ORDER)
def test_first_order(layer, reference, args, transform):
    ours, expected = transform(loss_of(layer.apply), args), transform(loss_of(reference), args)
    assert_same(ours, expected)


@by_layer
def test_value_and_grad_under_jit(layer, reference, args):
    def both(function):
        return jax.jit(jax.value_and_grad(loss_of(function), floats(args)))(*args)

    assert_same(jax.tree_util.tree_leaves(both(layer.apply)), jax.tree_util.tree_leaves(both(reference)))


def test_a_policy_saves_what_the_kernel_returned():
    args = attention_arguments()
    # What comes before the layer is computed again.
    loss = loss_of(lambda q, k, v: FlashAttention.apply(q * 2, k * 2, v * 2))
    named = jax.checkpoint_policies.save_only_these_names("out", "logsumexp")
    expected = jax.grad(loss, (0, 1, 2))(*args)
    for policy, kept in ((named, {"out", "logsumexp"}), (None, set())):
        wrapped = jax.checkpoint(loss, policy=policy)
        assert_same(jax.jit(jax.grad(wrapped, (0, 1, 2)))(*args), expected)
        assert {row.name for row in saved_tensors_report(wrapped, *args).rows if row.layer} == kept


# -- hooks and the report -------------------------------------------------------------------------


@pytest.mark.parametrize("run", [lambda f: f, jax.jit], ids=["eager", "jit"])
@by_layer
def test_hooks_see_what_the_kernels_keep(layer, reference, args, run):
    spy = Spy()
    gradient = run(jax.grad(loss_of(spy.hooks(layer.apply)), floats(args)))
    assert_same(gradient(*args), jax.grad(loss_of(reference), floats(args))(*args))
    count = {CrossEntropy: 3, FlashAttention: 5}[layer]
    assert spy.counts() == (count, count)


@pytest.mark.parametrize("run", [lambda f: f, jax.jit], ids=["eager", "jit"])
@by_layer
def test_packers(layer, reference, args, run):
    expected = jax.grad(loss_of(reference), floats(args))(*args)

    def gradient(hooks):
        return run(jax.grad(loss_of(hooks(layer.apply)), floats(args)))(*args)

    assert_same(gradient(save_on_cpu()), expected)
    for rounded, exact in zip(gradient(cast_saved()), expected, strict=True):
        assert 0 < jnp.max(jnp.abs(rounded - exact)) < 0.05 * jnp.max(jnp.abs(exact))


def test_report():
    q, k, v = attention_arguments()
    matrix, rows = q.nbytes, q.nbytes // q.shape[1]
    for function, times in ((FlashAttention.apply, 1), (jax.vmap(FlashAttention.apply), 3)):
        args = (q, k, v) if times == 1 else [jnp.stack([x] * 3) for x in (q, k, v)]
        report = saved_tensors_report(function, *args)
        assert [(row.name, row.bytes) for row in report.rows] == [
            *((name, times * matrix) for name in ("q", "k", "v", "out")),
            ("logsumexp", times * rows),
        ]
    with cast_saved():
        report = saved_tensors_report(FlashAttention, q, k, v)
    assert report.total_bytes * 2 == report.total_unpacked_bytes == 4 * matrix + rows
    assert "logsumexp  float32[32]" in str(report)


# -- second derivatives ---------------------------------------------------------------------------


@by_layer_in_time
@crossed(SECOND_ORDER, FORWARD_OVER_REVERSE)
def test_a_kernel_in_backward_has_no_derivative(layer, reference, args, transform):
    with pytest.raises((ValueError, TypeError)):
        transform(loss_of(layer.apply), args)


@pytest.mark.parametrize("name", ["grad_of_grad", "jit_of_grad_of_grad", "vmap_of_grad_of_grad"])
def test_the_error_of_jax_says_where(name):
    for layer, args, method in (
        (CrossEntropy, cross_entropy_arguments(), "backward"),
        (SavedSlope, (X,), "forward"),
        (InPlace, (X,), "forward"),
    ):
        with pytest.raises((ValueError, NotImplementedError)) as caught:
            SECOND_ORDER[name](loss_of(layer.apply), args)
        assert f"This happened in {layer.__name__}.{method}." in caught.value.__notes__


@crossed(SECOND_ORDER, FORWARD_OVER_REVERSE)
def test_once_differentiable_comes_first(transform):
    class Once(CrossEntropy):
        backward = staticmethod(once_differentiable(CrossEntropy.backward))

    with pytest.raises(RuntimeError, match="is marked @once_differentiable"):
        transform(loss_of(Once.apply), cross_entropy_arguments())


def test_a_kernel_within_a_jitted_function():
    class Jitted(FlashAttention):
        @staticmethod
        def backward(ctx, dout):
            return jax.jit(lambda tensors, dout: FlashAttention.backward(Tensors(tensors), dout))(
                ctx.saved_tensor(), dout
            )

    class Tensors:
        def __init__(self, tensors):
            self.saved_tensor = lambda: tensors

    args = attention_arguments()
    assert_same(jax.grad(loss_of(Jitted.apply))(*args), jax.grad(loss_of(plain_attention))(*args))


def run_kernel(kernel, *args, outputs=1, **params):
    shapes = [jax.ShapeDtypeStruct(args[0].shape, args[0].dtype)] * outputs
    return pl.pallas_call(kernel, out_shape=shapes, interpret=jax.default_backend() == "cpu", **params)(*args)


def tanh_kernel(x_ref, y_ref):
    y_ref[...] = jnp.tanh(x_ref[...])


def slope_kernel(y_ref, dy_ref, dx_ref):
    dx_ref[...] = dy_ref[...] * (1 - y_ref[...] ** 2)


class TanhSlope(PyLayer):
    """The way out: the kernel of a backward as a layer of its own."""

    @staticmethod
    def forward(ctx, y, dy):
        ctx.save_for_backward(y, dy)
        return run_kernel(slope_kernel, y, dy)[0]

    @staticmethod
    def backward(ctx, cotangent):
        y, dy = ctx.saved_tensor()
        return -2 * y * dy * cotangent, cotangent * (1 - y**2)


class Tanh(PyLayer):
    @staticmethod
    def forward(ctx, x):
        y = run_kernel(tanh_kernel, x)[0]
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, dy):
        (y,) = ctx.saved_tensor()
        return TanhSlope.apply(y, dy)


@crossed(SECOND_ORDER)
def test_the_way_out_has_second_derivatives(transform):
    assert_same(transform(loss_of(Tanh.apply), (X,)), transform(loss_of(jnp.tanh), (X,)))


class CrossEntropyGradient(PyLayer):
    """The same for a kernel that reads a tensor which another kernel computed."""

    @staticmethod
    def forward(ctx, logits, labels, logsumexp, dloss):
        ctx.save_for_backward(logits, labels, dloss)
        return xent_backward(logits, labels, logsumexp, dloss)

    @staticmethod
    def backward(ctx, cotangent):
        logits, labels, dloss = ctx.saved_tensor()
        softmax = jax.nn.softmax(logits)
        along = jnp.sum(softmax * cotangent, axis=1)
        of_label = jnp.take_along_axis(cotangent, labels[:, None], axis=1)[:, 0]
        # All that depends on the logits is in their gradient, so that the logsumexp has none.
        return dloss[:, None] * softmax * (cotangent - along[:, None]), None, None, along - of_label


class TwiceCrossEntropy(CrossEntropy):
    @staticmethod
    def backward(ctx, dloss):
        return CrossEntropyGradient.apply(*ctx.saved_tensor(), dloss), None


# A scan makes its missing cotangents zeros, so that the kernel of forward would be differentiated there.
@crossed({name: f for name, f in SECOND_ORDER.items() if name != "second_order_in_scan"})
def test_the_way_out_where_a_kernel_computed_what_is_saved(transform):
    args = cross_entropy_arguments()
    ours, expected = (transform(loss_of(f), args) for f in (TwiceCrossEntropy.apply, plain_cross_entropy))
    assert_same(ours, expected)


class SavedSlope(PyLayer):
    """A kernel in forward only, which computes a tensor that is saved."""

    @staticmethod
    def forward(ctx, x):
        def kernel(x_ref, y_ref, slope_ref):
            y_ref[...] = jnp.tanh(x_ref[...])
            slope_ref[...] = 1 - y_ref[...] ** 2

        y, slope = run_kernel(kernel, x, outputs=2)
        ctx.save_for_backward(slope, x * 2)
        return y

    @staticmethod
    def backward(ctx, dy):
        slope, _ = ctx.saved_tensor()
        return dy * slope


@crossed(SECOND_ORDER)
def test_a_kernel_in_forward_has_no_derivative_in_reverse_mode(transform):
    with pytest.raises(ValueError, match=r"."):
        transform(loss_of(SavedSlope.apply), (X,))


@crossed(FORWARD_OVER_REVERSE)
def test_forward_over_reverse_of_a_kernel_in_forward(transform):
    # JAX has the rule of a kernel in forward mode.
    assert_same(transform(loss_of(SavedSlope.apply), (X,)), transform(loss_of(jnp.tanh), (X,)))


class ReturnedSlope(PyLayer):
    """The way out: the tensor is an output, which has the rule of the layer."""

    @staticmethod
    def forward(ctx, x):
        def kernel(x_ref, y_ref, slope_ref):
            y_ref[...] = jnp.tanh(x_ref[...])
            slope_ref[...] = 1 - y_ref[...] ** 2

        y, slope = run_kernel(kernel, x, outputs=2)
        ctx.save_for_backward(y, slope)
        return y, slope

    @staticmethod
    def backward(ctx, dy, dslope):
        y, slope = ctx.saved_tensor()
        return dy * slope - 2 * dslope * y * slope


@crossed(SECOND_ORDER, FORWARD_OVER_REVERSE)
def test_a_tensor_that_is_returned_has_second_derivatives(transform):
    assert_same(transform(loss_of(lambda x: ReturnedSlope.apply(x)[0]), (X,)), transform(loss_of(jnp.tanh), (X,)))


# -- kernels of which JAX knows no derivative at all ----------------------------------------------


class InPlace(PyLayer):
    """JAX refuses to differentiate a kernel that writes into its argument."""

    @staticmethod
    def forward(ctx, x):
        def kernel(x_ref, y_ref, slope_ref):
            y = jnp.tanh(x_ref[...])
            slope_ref[...] = 1 - y**2
            y_ref[...] = y

        y, slope = run_kernel(kernel, x, outputs=2, input_output_aliases={0: 0})
        ctx.save_for_backward(slope, x * 2)
        return y

    @staticmethod
    def backward(ctx, dy):
        return dy * ctx.saved_tensor()[0]


class ForwardMode(InPlace):
    forward_mode = True


class OwnBatching(InPlace):
    @staticmethod
    def vmap(info, in_dims, x):
        return InPlace.apply(x), 0


@pytest.mark.parametrize("layer", [InPlace, ForwardMode, OwnBatching])
@crossed(FIRST_ORDER)
def test_a_first_derivative_does_not_need_it(layer, transform):
    assert_same(transform(loss_of(layer.apply), (X,)), transform(loss_of(jnp.tanh), (X,)))


@pytest.mark.parametrize("layer", [InPlace, ForwardMode, OwnBatching])
@crossed(SECOND_ORDER, FORWARD_OVER_REVERSE)
def test_a_second_derivative_does(layer, transform):
    with pytest.raises(NotImplementedError, match="JVP with aliasing"):
        transform(loss_of(layer.apply), (X,))


# -- what stays as it is --------------------------------------------------------------------------


def test_other_errors_of_backward_are_not_hidden():
    class Broken(CrossEntropy):
        @staticmethod
        def backward(ctx, dloss):
            if dloss.ndim == 1:
                raise LookupError("of the user")
            return CrossEntropy.backward(ctx, dloss)

    logits, labels = cross_entropy_arguments()
    for run in (lambda f: f, jax.jit):
        with pytest.raises(LookupError, match="of the user") as caught:
            SECOND_ORDER["grad_of_grad"](run(loss_of(Broken.apply)), (logits, labels))
        assert "This happened in" in "".join(caught.value.__notes__)


def test_a_kernel_with_a_rule_of_its_own_is_not_refused():
    @jax.custom_vjp
    def slope(y, dy):
        return run_kernel(slope_kernel, y, dy)[0]

    slope.defvjp(
        lambda y, dy: (slope(y, dy), (y, dy)), lambda saved, c: (-2 * saved[0] * saved[1] * c, c * (1 - saved[0] ** 2))
    )

    class Ruled(Tanh):
        @staticmethod
        def backward(ctx, dy):
            return jax.jit(slope)(*ctx.saved_tensor(), dy)

    for name in ("grad_of_grad", "jit_of_grad_of_grad", "second_order_in_scan", "second_order_in_remat"):
        assert_same(SECOND_ORDER[name](loss_of(Ruled.apply), (X,)), SECOND_ORDER[name](loss_of(jnp.tanh), (X,)))


def test_a_kernel_that_is_not_differentiated_is_not_refused():
    class Rounded(PyLayer):
        """The kernel reads a value without a gradient."""

        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x**3

        @staticmethod
        def backward(ctx, dy):
            (x,) = ctx.saved_tensor()
            noise = run_kernel(tanh_kernel, jax.lax.stop_gradient(x))[0]
            return dy * 3 * x**2 + 0 * noise

    for name in ("grad_of_grad", "jit_of_grad_of_grad", "vmap_of_grad_of_grad", "second_order_in_scan"):
        assert_same(SECOND_ORDER[name](loss_of(Rounded.apply), (X,)), SECOND_ORDER[name](loss_of(lambda x: x**3), (X,)))
