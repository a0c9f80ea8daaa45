"""Batch normalisation over the batches of several devices."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

from pylayer_jax._layer import PyLayer
from pylayer_jax._methods.context import PyLayerContext

from ._axes import (
    Axes,
    AxisName,
    accumulated,
    array_axis,
    as_input,
    as_varying,
    check_replicated,
    mesh_axes,
    vary_alike,
)
from ._collectives import CopyTo, ReduceFrom


class SyncBatchNorm(PyLayer):
    """y = (x - mean) inv scale + bias, with inv = (variance + epsilon)^-1/2 and statistics over n = N count numbers.

    Mean and variance are outputs, which `backward` saves: a saved output carries the layer's own rule at every order.
    With their cotangents, and sums over the batches of all devices,

        dbias = sum dy,   dscale = sum dy (x - mean) inv,
        m = dmean - inv scale dbias,   v = dvariance - inv^2 scale dscale / 2,
        dx = dy inv scale + (m + 2 v (x - mean)) / n.
    """

    @staticmethod
    def forward(
        ctx: PyLayerContext,
        x: jax.Array,
        scale: jax.Array,
        bias: jax.Array,
        axes: Axes,
        channel_axis: int,
        epsilon: float,
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        ctx.axes, ctx.channel_axis, ctx.epsilon = axes, channel_axis, epsilon
        count = _count(x, channel_axis, axes)
        # Two all-reduces: a variance out of one, as the mean of squares less the square of the mean, cancels.
        mean = ReduceFrom.apply(_own_sum(ctx, accumulated(x)), axes) / count
        centered = accumulated(x) - _beside(ctx, mean, x)
        variance = ReduceFrom.apply(_own_sum(ctx, centered**2), axes) / count
        slope = jax.lax.rsqrt(variance + epsilon) * scale.astype(variance.dtype)
        y = centered * _beside(ctx, slope, x) + _beside(ctx, bias.astype(variance.dtype), x)
        ctx.save_for_backward(x, scale, mean, variance)
        return y.astype(x.dtype), mean, variance

    @staticmethod
    def backward(ctx: PyLayerContext, dy: jax.Array, dmean: jax.Array, dvariance: jax.Array) -> Any:
        x, scale, mean, variance = ctx.saved_tensors
        dy, centered = accumulated(dy), accumulated(x) - _beside(ctx, mean, x)
        inv = jax.lax.rsqrt(variance + ctx.epsilon)
        sums = jnp.stack([_own_sum(ctx, dy), _own_sum(ctx, dy * centered)])
        dbias, total = ReduceFrom.apply(sums, ctx.axes)
        dscale, slope = total * inv, inv * scale.astype(variance.dtype)
        count = _count(x, ctx.channel_axis, ctx.axes)
        m = (dmean - slope * dbias) / count
        v = (2 * dvariance - inv * slope * dscale) / count
        dx = dy * _beside(ctx, slope, x) + _beside(ctx, m, x) + _beside(ctx, v, x) * centered
        return dx, dscale, dbias

    @staticmethod
    def jvp(ctx: PyLayerContext, dx: jax.Array, dscale: jax.Array, dbias: jax.Array, *_: None) -> Any:
        x, scale, mean, variance = ctx.saved_tensors
        dx, centered = accumulated(dx), accumulated(x) - _beside(ctx, mean, x)
        inv, count = jax.lax.rsqrt(variance + ctx.epsilon), _count(x, ctx.channel_axis, ctx.axes)
        sums = jnp.stack([_own_sum(ctx, dx), _own_sum(ctx, dx * centered)])
        dmean, dvariance = ReduceFrom.apply(sums, ctx.axes) / count
        dvariance = 2 * dvariance
        slope = inv * scale.astype(variance.dtype)
        dslope = inv * dscale.astype(variance.dtype) - slope * inv**2 * dvariance / 2
        dshift = dbias.astype(variance.dtype) - slope * dmean
        dy = dx * _beside(ctx, slope, x) + centered * _beside(ctx, dslope, x) + _beside(ctx, dshift, x)
        return dy.astype(x.dtype), dmean, dvariance


def _count(x: jax.Array, channel_axis: int, axes: Axes) -> int:
    """How many numbers of each channel all devices hold."""
    return math.prod(n for axis, n in enumerate(x.shape) if axis != channel_axis) * int(jax.lax.axis_size(axes))


def _own_sum(ctx: PyLayerContext, x: jax.Array) -> jax.Array:
    """The sum over the own batch, one number per channel."""
    return x.sum([axis for axis in range(x.ndim) if axis != ctx.channel_axis])


def _beside(ctx: PyLayerContext, per_channel: jax.Array, x: jax.Array) -> jax.Array:
    """A replicated value of each channel, for use beside the own batch, of the rank of x."""
    shape = [-1 if axis == ctx.channel_axis else 1 for axis in range(x.ndim)]
    return CopyTo.apply(per_channel, ctx.axes).reshape(shape)


def sync_batch_norm(
    x: jax.Array,
    scale: jax.Array,
    bias: jax.Array,
    axis_name: AxisName,
    *,
    channel_axis: int = -1,
    epsilon: float = 1e-5,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Batch normalisation with the statistics of the batches of all devices along a mesh axis.

    torch and Paddle: `SyncBatchNorm`. (Megatron and fleet have none of their own.)

    Forward, all-reduces the means, then the variances: one number per channel each. Backward, all-reduces two numbers
    per channel, which are the gradients of bias and scale too: those of the batch norm of the whole batch, on every
    device. (torch and Paddle return the own device's part of these, for data parallelism to add up.) Saves x, scale and
    the statistics. bfloat16 and float16 are computed in float32.

    Args:
        x: floats, of any shape with channels: the own part of the batch. A replicated x is N equal parts.
        scale, bias: floats of shape [channels], replicated over `axis_name`: equal on all devices along it.
        axis_name: a mesh axis, or a tuple of them; N devices.
        channel_axis: the axis of the channels in x. Statistics are over all others, and over the devices.
        epsilon: added to the variance.

    Returns:
        y, of the shape and dtype of x, which varies over `axis_name`; and the mean and the variance of each channel, of
        shape [channels], in float32 (float64 for x of float64), replicated over `axis_name`, for running averages. The
        variance is that of the numbers themselves (torch multiplies it by n / (n - 1) before it averages, n the count
        of numbers of a channel on all devices). Both are differentiable: `jax.lax.stop_gradient` where they go into a
        loss that should not be.

    Raises:
        TypeError: unless x, scale and bias are real floats.
        ValueError: if `axis_name` is no mesh axis, or the shapes do not fit; with check_vma=True, if scale or bias vary
            over `axis_name`.
    """
    name = "sync_batch_norm"
    axes = mesh_axes(name, axis_name)
    x, scale, bias = (as_input(name, n, v) for n, v in (("x", x), ("scale", scale), ("bias", bias)))
    channel_axis = array_axis(name, "channel_axis", channel_axis, x)
    for parameter, value in (("x", x), ("scale", scale), ("bias", bias)):
        if not jnp.issubdtype(value.dtype, jnp.floating):
            raise TypeError(
                f"parallel.{name}: {parameter}: expected a floating-point dtype; got {value.dtype}. Cast it "
                f"({parameter}.astype(jnp.float32))."
            )
    for parameter, value in (("scale", scale), ("bias", bias)):
        if value.shape != x.shape[channel_axis : channel_axis + 1]:
            raise ValueError(
                f"parallel.{name}: {parameter}: expected shape {x.shape[channel_axis : channel_axis + 1]}, one number "
                f"for each channel of x, of shape {x.shape} with channel_axis={channel_axis}; got {value.shape}. Give "
                "channel_axis if the channels are another axis."
            )
        check_replicated(name, parameter, value, axes)
    x, scale, bias = vary_alike(axes, x, scale, bias)
    y, mean, variance = SyncBatchNorm.apply(as_varying(x, axes), scale, bias, axes, channel_axis, epsilon)
    return y, mean, variance
