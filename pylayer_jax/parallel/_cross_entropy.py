"""The cross entropy of logits whose vocabulary is spread over devices."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from pylayer_jax._layer import PyLayer
from pylayer_jax._methods.context import PyLayerContext

from ._axes import Axes, AxisName, accumulated, as_input, as_parts, as_varying, check_replicated, mesh_axes, vary_alike
from ._collectives import CopyTo, ReduceFrom


class VocabParallelCrossEntropy(PyLayer):
    """The losses, the maxima h of the logits, and the logarithms s of the sums of exponentials.

    With the softmax p = exp((z - h) - s) of logits z, s = log sum exp(z - h), t the label's one-hot row, and m = 0 for
    a label outside of the vocabulary, else 1,

        loss = m (s - t.(z - h)),    ds = p.dz,    d loss = m (p.dz - t.dz).

    h cancels, so that it counts as a constant. Not h + s, which has lost s by rounding where h is large. s is an output
    so that `backward` may save it: a saved output carries the layer's own rule at every order, with `backward` as its
    derivative. The logits are an input, which the caller has already; the softmax would be one more array of their
    size, in float32.
    """

    @staticmethod
    def forward(ctx: PyLayerContext, logits: jax.Array, labels: jax.Array, axes: Axes) -> tuple[jax.Array, ...]:
        z = accumulated(logits)
        # JAX has no derivative of pmax.
        highest = jax.lax.pmax(jax.lax.stop_gradient(z.max(-1)), axes)
        shifted = z - as_varying(highest, axes)[..., None]
        total, picked = _reduced(axes, jnp.exp(shifted).sum(-1), _picked(shifted, labels, axes))
        log_sum = jnp.log(total)
        losses = _where_valid(log_sum - picked, labels, logits, axes)
        ctx.axes = axes
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(highest)
        ctx.save_for_backward(logits, labels, highest, log_sum)
        return losses, highest, log_sum

    @staticmethod
    def backward(ctx: PyLayerContext, dloss: jax.Array | None, _: None, dlog_sum: jax.Array | None) -> Any:
        logits, labels, highest, log_sum = ctx.saved_tensors
        gradient = None
        if dloss is not None:
            dloss = _where_valid(dloss, labels, logits, ctx.axes)
            dlog_sum = dloss if dlog_sum is None else dloss + dlog_sum
            gradient = -_own_one_hot(CopyTo.apply(dloss, ctx.axes), labels, logits, ctx.axes)
        if dlog_sum is not None:
            part = _softmax(logits, highest, log_sum, ctx.axes) * CopyTo.apply(dlog_sum, ctx.axes)[..., None]
            gradient = part if gradient is None else part + gradient
        return gradient, None

    @staticmethod
    def jvp(ctx: PyLayerContext, dlogits: jax.Array | None, *_: Any) -> Any:
        if dlogits is None:
            return None, None, None
        logits, labels, highest, log_sum = ctx.saved_tensors
        dz = accumulated(dlogits)
        dlog_sum = (_softmax(logits, highest, log_sum, ctx.axes) * dz).sum(-1)
        dlog_sum, dpicked = _reduced(ctx.axes, dlog_sum, _picked(dz, labels, ctx.axes))
        return _where_valid(dlog_sum - dpicked, labels, logits, ctx.axes), None, dlog_sum


def _softmax(logits: jax.Array, highest: jax.Array, log_sum: jax.Array, axes: Axes) -> jax.Array:
    shifted = accumulated(logits) - as_varying(highest, axes)[..., None]
    return jnp.exp(shifted - CopyTo.apply(log_sum, axes)[..., None])


def _reduced(axes: Axes, *parts: jax.Array) -> jax.Array:
    return ReduceFrom.apply(jnp.stack(parts), axes)  # one all-reduce


def _own_label(labels: jax.Array, size: int, axes: Axes) -> jax.Array:
    """The labels, counted from the first one that this device holds."""
    return as_varying(labels, axes) - jax.lax.axis_index(axes).astype(labels.dtype) * size


def _picked(z: jax.Array, labels: jax.Array, axes: Axes) -> jax.Array:
    """The entry at each label, or 0 if another device, or none, holds it."""
    own = _own_label(labels, z.shape[-1], axes)
    entry = jnp.take_along_axis(z, own[..., None], -1, mode="clip")[..., 0]
    return jnp.where((own >= 0) & (own < z.shape[-1]), entry, jnp.zeros_like(entry))


def _where_valid(x: jax.Array, labels: jax.Array, logits: jax.Array, axes: Axes) -> jax.Array:
    size = logits.shape[-1] * jax.lax.axis_size(axes)
    return jnp.where((labels >= 0) & (labels < size), x, jnp.zeros_like(x))


def _own_one_hot(x: jax.Array, labels: jax.Array, logits: jax.Array, axes: Axes) -> jax.Array:
    """x at the entry of each label, 0 elsewhere; of the shape of the logits."""
    own = _own_label(labels, logits.shape[-1], axes)[..., None]
    entries = jax.lax.broadcasted_iota(own.dtype, logits.shape, logits.ndim - 1)
    return jnp.where(own == entries, x[..., None], jnp.zeros_like(x[..., None]))


def vocab_parallel_cross_entropy(logits: jax.Array, labels: jax.Array, axis_name: AxisName) -> jax.Array:
    """The cross entropy of integer labels, where each device holds the logits of its own part of the vocabulary.

    Megatron: `vocab_parallel_cross_entropy`. Paddle's fleet: `_c_softmax_with_cross_entropy` (`ParallelCrossEntropy`).

    Forward, all-reduces one maximum per label, then two numbers per label. Backward, communicates nothing. Each device
    saves its own logits, the labels, and two numbers per label. The maximum is subtracted before exponentials are
    taken; bfloat16 and float16 are computed in float32.

    A label outside of [0, vocabulary) has the loss 0 and no gradient, on every device: -100, or any other negative
    number, marks labels to leave out, as `ignore_index` does in Paddle and torch. (Megatron leaves the log-sum-exp
    there, to be masked by the caller.)

    Args:
        logits: floats of shape [..., vocabulary / N], entry i of device d for label d * vocabulary / N + i.
        labels: integers of shape [...], replicated over `axis_name`: equal on all devices along it.
        axis_name: a mesh axis, or a tuple of them; N devices.

    Returns:
        One loss per label, of shape [...], in float32 (float64 for logits of float64), replicated over `axis_name`.

    Raises:
        TypeError: unless logits are real floats and labels integers.
        ValueError: if `axis_name` is no mesh axis, or the shapes do not fit; with check_vma=True, if the labels vary
            over `axis_name`, or the logits do not.
    """
    name = "vocab_parallel_cross_entropy"
    axes = mesh_axes(name, axis_name)
    logits, labels = as_input(name, "logits", logits), as_input(name, "labels", labels)
    if not jnp.issubdtype(logits.dtype, jnp.floating):
        raise TypeError(
            f"parallel.{name}: logits: expected a floating-point dtype; got {logits.dtype}. Give the logits themselves."
        )
    if not jnp.issubdtype(labels.dtype, jnp.integer):
        raise TypeError(
            f"parallel.{name}: labels: expected integers; got {labels.dtype}. Give the index of each label, not "
            "one-hot rows or probabilities."
        )
    if not logits.ndim or labels.shape != logits.shape[:-1]:
        raise ValueError(
            f"parallel.{name}: labels: expected the shape of logits without the last axis (logits: {logits.shape}); "
            f"got {labels.shape}. Give one label for each row of logits."
        )
    check_replicated(name, "labels", labels, axes)
    # Narrower integers may not hold the size of the vocabulary, and unsigned ones no label before that of a device.
    labels = labels.astype(jnp.int64 if labels.dtype.itemsize == 8 else jnp.int32)
    logits, labels = vary_alike(axes, logits, labels)
    wrong, instead = "the vocabulary counts {size} times", "with the whole vocabulary, cut it with scatter_to"
    logits = as_parts(name, "logits", logits, axes, wrong, instead)
    losses, *_ = VocabParallelCrossEntropy.apply(logits, labels, axes)
    return losses
