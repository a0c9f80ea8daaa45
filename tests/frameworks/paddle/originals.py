"""Layers that people really write, as real Paddle ones; the ports have the same names where they are.

P and a number name the layer in the list of layers that they are taken from.
"""

from __future__ import annotations

import paddle
from paddle.autograd import PyLayer


class Recompute(PyLayer):
    """P8, short: one tuple of tensors, saved as one entry, takes one tuple of gradients."""

    @staticmethod
    def forward(ctx, run_function, preserve_rng_state, inputs):
        ctx.run_function = run_function
        ctx.save_for_backward(inputs)
        return run_function(*inputs)

    @staticmethod
    def backward(ctx, dy):
        (inputs,) = ctx.saved_tensor()
        detached = [x.detach() for x in inputs]
        for x in detached:
            x.stop_gradient = False
        with paddle.enable_grad():
            y = ctx.run_function(*detached)
        paddle.autograd.backward([y], [dy])  # paddle.grad within paddle.grad ends the process
        return (tuple(x.grad for x in detached),)


class MoEScatter(PyLayer):
    """P9, one rank: backward overwrites rows."""

    @staticmethod
    def forward(ctx, inp, pos, local_count, global_count, fwd_batch, world_size, group=None):
        ctx.moe_args = inp.shape[0], world_size, group
        ctx.save_for_backward(pos, local_count, global_count)
        return paddle.gather(inp, pos)

    @staticmethod
    def backward(ctx, dy):
        pos, _, _ = ctx.saved_tensor()
        rows, _, _ = ctx.moe_args
        zeros = paddle.zeros([rows, *dy.shape[1:]], dtype=dy.dtype)
        return paddle.scatter(zeros, pos, dy, overwrite=True), None, None, None


class MoEGather(PyLayer):
    """P10, one rank."""

    @staticmethod
    def forward(ctx, buf, pos, local_count, global_count, local_batch, world_size, group=None):
        ctx.save_for_backward(pos, local_count, global_count)
        ctx.moe_args = local_batch, world_size, group
        zeros = paddle.zeros([local_batch, *buf.shape[1:]], dtype=buf.dtype)
        return paddle.scatter(zeros, pos, buf, overwrite=True)

    @staticmethod
    def backward(ctx, dy):
        pos, _, _ = ctx.saved_tensor()
        return paddle.gather(dy, pos), None, None, None


def half_away(x):
    return paddle.sign(x) * paddle.floor(paddle.abs(x) + 0.5)


def _sides(q, qn, qp):
    low, up = (q < qn).astype(q.dtype), (q > qp).astype(q.dtype)
    return low, up, 1 - low - up


class LSQ(PyLayer):
    """P14."""

    @staticmethod
    def forward(ctx, weight, alpha, g, qn, qp, per_channel=False, quant_axis=0):
        ctx.save_for_backward(weight, alpha)
        ctx.other = g, qn, qp, per_channel, quant_axis
        alpha = LSQ._spread(alpha, weight, per_channel, quant_axis)
        return paddle.clip(half_away(weight / alpha), qn, qp) * alpha

    @staticmethod
    def backward(ctx, dy):
        weight, alpha = ctx.saved_tensor()
        g, qn, qp, per_channel, axis = ctx.other
        q = weight / LSQ._spread(alpha, weight, per_channel, axis)
        low, up, mid = _sides(q, qn, qp)
        slope = dy * (low * qn + up * qp + mid * (half_away(q) - q))
        return mid * dy, slope.sum([i for i in range(weight.ndim) if not per_channel or i != axis]) * g

    @staticmethod
    def _spread(alpha, weight, per_channel, axis):
        return alpha.reshape([-1 if i == axis else 1 for i in range(weight.ndim)]) if per_channel else alpha


class LSQPlus(PyLayer):
    """P15."""

    @staticmethod
    def forward(ctx, x, alpha, beta, g, qn, qp):
        ctx.save_for_backward(x, alpha, beta)
        ctx.other = g, qn, qp
        return paddle.clip(half_away((x - beta) / alpha), qn, qp) * alpha + beta

    @staticmethod
    def backward(ctx, dy):
        x, alpha, beta = ctx.saved_tensor()
        g, qn, qp = ctx.other
        q = (x - beta) / alpha
        low, up, mid = _sides(q, qn, qp)
        dalpha = (dy * (low * qn + up * qp + mid * (half_away(q) - q))).sum() * g
        return mid * dy, dalpha, ((low + up) * dy).sum() * g


class RouterLoss(PyLayer):
    """P19."""

    @staticmethod
    def forward(ctx, x, router_loss, num_acc_steps, enable_delay_scale_loss):
        ctx.shape, ctx.dtype, ctx.steps = router_loss.shape, router_loss.dtype, num_acc_steps
        ctx.delay = enable_delay_scale_loss
        return x

    @staticmethod
    def backward(ctx, dy):
        return dy, paddle.full(ctx.shape, 1.0 if ctx.delay else 1 / ctx.steps, ctx.dtype)


class AuxiliaryLoss(PyLayer):
    """P24, variant A."""

    @staticmethod
    def forward(ctx, x, loss):
        ctx.dtype = loss.dtype
        ctx.required_aux_loss = not loss.stop_gradient
        return x

    @staticmethod
    def backward(ctx, dy):
        return dy, paddle.ones([1], ctx.dtype) if ctx.required_aux_loss else None


class SavedAuxiliaryLoss(PyLayer):
    """P24, variant B."""

    @staticmethod
    def forward(ctx, x, loss):
        ctx.save_for_backward(loss)
        ctx.required = not loss.stop_gradient
        return x.clone()

    @staticmethod
    def backward(ctx, dy):
        (loss,) = ctx.saved_tensor()
        return dy, paddle.ones_like(loss) if ctx.required else None


class GatherEach(PyLayer):
    """P25, where nothing is initialised."""

    @staticmethod
    def forward(ctx, x):
        return (x,)

    @staticmethod
    def backward(ctx, *grads):
        return grads[0]


class LayerNorm2d(PyLayer):
    """P26."""

    @staticmethod
    def forward(ctx, x, weight, bias, eps):
        ctx.eps = eps
        mu, var = x.mean(1, keepdim=True), x.var(1, unbiased=False, keepdim=True)
        y = (x - mu) / paddle.sqrt(var + eps)
        ctx.save_for_backward(y, var, weight)
        return weight.reshape([-1, 1, 1]) * y + bias.reshape([-1, 1, 1])

    @staticmethod
    def backward(ctx, dy):
        y, var, weight = ctx.saved_tensor()
        g = dy * weight.reshape([-1, 1, 1])
        dx = (g - y * (g * y).mean(1, keepdim=True) - g.mean(1, keepdim=True)) / paddle.sqrt(var + ctx.eps)
        return dx, (dy * y).sum([0, 2, 3]), dy.sum([0, 2, 3])


class ClippedReversal(PyLayer):
    """P28."""

    @staticmethod
    def forward(ctx, x, lambda_=1):
        ctx.save_for_backward(lambda_)
        return x.clone()

    @staticmethod
    def backward(ctx, dy):
        (lambda_,) = ctx.saved_tensor()
        return paddle.clip(-lambda_ * dy, -0.5, 0.5)


class Reversal(PyLayer):
    """P29: one slot too many for Paddle."""

    @staticmethod
    def forward(ctx, x, lambda_):
        ctx.save_for_backward(paddle.to_tensor(lambda_, dtype=x.dtype))
        return x.clone()

    @staticmethod
    def backward(ctx, dy):
        return -ctx.saved_tensor()[0] * dy, None
