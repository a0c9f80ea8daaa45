"""Layers that people really write in Paddle. Each is one text, which runs under real Paddle and under this library.

P and a number name the layer in the list of layers that they are taken from.
"""

from __future__ import annotations

from types import SimpleNamespace

from tests.kit import names


def layers(xp):
    class Recompute(xp.PyLayer):
        """P8, short: nested differentiation; one tuple of tensors, saved as one entry, takes one tuple of gradients."""

        @staticmethod
        def forward(ctx, run_function, preserve_rng_state, inputs):
            ctx.run_function = run_function
            ctx.save_for_backward(inputs)
            return run_function(*inputs)

        @staticmethod
        def backward(ctx, dy):
            (inputs,) = ctx.saved_tensor()
            return (xp.pull(ctx.run_function, inputs, dy)[1],)

    class MoEScatter(xp.PyLayer):
        """P9, one rank. Its backward overwrites rows, so that one contribution of repeated rows is left."""

        @staticmethod
        def forward(ctx, inp, pos, local_count, global_count, fwd_batch, world_size, group=None):
            ctx.moe_args = inp.shape[0], world_size, group
            ctx.save_for_backward(pos, local_count, global_count)
            return inp[pos]

        @staticmethod
        def backward(ctx, dy):
            pos, _, _ = ctx.saved_tensor()
            rows, _, _ = ctx.moe_args
            zeros = xp.zeros([rows, *dy.shape[1:]], dtype=dy.dtype)
            return xp.put(zeros, pos, dy), None, None, None

    class MoEGather(xp.PyLayer):
        """P10, one rank: rows put in their places; backward takes them from there, repeated or not."""

        @staticmethod
        def forward(ctx, buf, pos, local_count, global_count, local_batch, world_size, group=None):
            ctx.save_for_backward(pos, local_count, global_count)
            ctx.moe_args = local_batch, world_size, group
            zeros = xp.zeros([local_batch, *buf.shape[1:]], dtype=buf.dtype)
            return xp.put(zeros, pos, buf)

        @staticmethod
        def backward(ctx, dy):
            pos, _, _ = ctx.saved_tensor()
            return dy[pos], None, None, None

    def half_away(x):
        return xp.sign(x) * xp.floor(xp.abs(x) + 0.5)

    def _sides(q, qn, qp):
        low, up = (q < qn).astype(q.dtype), (q > qp).astype(q.dtype)
        return low, up, 1 - low - up

    class LSQ(xp.PyLayer):
        """P14, one step per channel or for all: the scale of the gradient is a tensor on an attribute."""

        @staticmethod
        def forward(ctx, weight, alpha, g, qn, qp, per_channel=False, quant_axis=0):
            ctx.save_for_backward(weight, alpha)
            ctx.other = g, qn, qp, per_channel, quant_axis
            alpha = LSQ._spread(alpha, weight, per_channel, quant_axis)
            return xp.clip(half_away(weight / alpha), qn, qp) * alpha

        @staticmethod
        def backward(ctx, dy):
            weight, alpha = ctx.saved_tensor()
            g, qn, qp, per_channel, axis = ctx.other
            q = weight / LSQ._spread(alpha, weight, per_channel, axis)
            low, up, mid = _sides(q, qn, qp)
            slope = dy * (low * qn + up * qp + mid * (half_away(q) - q))
            return mid * dy, slope.sum(tuple(i for i in range(weight.ndim) if not per_channel or i != axis)) * g

        @staticmethod
        def _spread(alpha, weight, per_channel, axis):
            return alpha.reshape([-1 if i == axis else 1 for i in range(weight.ndim)]) if per_channel else alpha

    class LSQPlus(xp.PyLayer):
        """P15: a step and an offset; the slot of g is left out of the result."""

        @staticmethod
        def forward(ctx, x, alpha, beta, g, qn, qp):
            ctx.save_for_backward(x, alpha, beta)
            ctx.other = g, qn, qp
            return xp.clip(half_away((x - beta) / alpha), qn, qp) * alpha + beta

        @staticmethod
        def backward(ctx, dy):
            x, alpha, beta = ctx.saved_tensor()
            g, qn, qp = ctx.other
            q = (x - beta) / alpha
            low, up, mid = _sides(q, qn, qp)
            dalpha = (dy * (low * qn + up * qp + mid * (half_away(q) - q))).sum() * g
            return mid * dy, dalpha, ((low + up) * dy).sum() * g

    class RouterLoss(xp.PyLayer):
        """P19: the gradient of the loss does not depend on the cotangent."""

        @staticmethod
        def forward(ctx, x, router_loss, num_acc_steps, enable_delay_scale_loss):
            ctx.shape, ctx.dtype, ctx.steps = router_loss.shape, router_loss.dtype, num_acc_steps
            ctx.delay = enable_delay_scale_loss
            return x

        @staticmethod
        def backward(ctx, dy):
            return dy, xp.full(ctx.shape, 1.0 if ctx.delay else 1 / ctx.steps, ctx.dtype)

    class AuxiliaryLoss(xp.PyLayer):
        """P24, variant A: ones of shape [1] for a loss without dimensions."""

        @staticmethod
        def forward(ctx, x, loss):
            ctx.dtype = loss.dtype
            ctx.required_aux_loss = xp.needs_gradient(ctx, 1, loss)
            return x

        @staticmethod
        def backward(ctx, dy):
            return dy, xp.ones([1], ctx.dtype) if ctx.required_aux_loss else None

    class SavedAuxiliaryLoss(xp.PyLayer):
        """P24, variant B: saves the loss, hands on a copy, and leaves the slot of a loss without gradient empty."""

        @staticmethod
        def forward(ctx, x, loss):
            ctx.save_for_backward(loss)
            ctx.required = xp.needs_gradient(ctx, 1, loss)
            return xp.copy(x)

        @staticmethod
        def backward(ctx, dy):
            (loss,) = ctx.saved_tensor()
            return dy, xp.ones_like(loss) if ctx.required else None

    class GatherEach(xp.PyLayer):
        """P25, where nothing is initialised."""

        @staticmethod
        def forward(ctx, x):
            return (x,)

        @staticmethod
        def backward(ctx, *grads):
            return grads[0]

    class LayerNorm2d(xp.PyLayer):
        """P26: saves two intermediates and an input."""

        @staticmethod
        def forward(ctx, x, weight, bias, eps):
            ctx.eps = eps
            mu, var = xp.mean(x, 1, keepdims=True), xp.var(x, 1, keepdims=True)
            y = (x - mu) / xp.sqrt(var + eps)
            ctx.save_for_backward(y, var, weight)
            return weight.reshape([-1, 1, 1]) * y + bias.reshape([-1, 1, 1])

        @staticmethod
        def backward(ctx, dy):
            y, var, weight = ctx.saved_tensor()
            g = dy * weight.reshape([-1, 1, 1])
            dx = (g - y * xp.mean(g * y, 1, keepdims=True) - xp.mean(g, 1, keepdims=True)) / xp.sqrt(var + ctx.eps)
            return dx, (dy * y).sum((0, 2, 3)), dy.sum((0, 2, 3))

    class ClippedReversal(xp.PyLayer):
        """P28: saves a plain int, and clips the cotangent."""

        @staticmethod
        def forward(ctx, x, lambda_=1):
            ctx.save_for_backward(lambda_)
            return xp.copy(x)

        @staticmethod
        def backward(ctx, dy):
            (lambda_,) = ctx.saved_tensor()
            return xp.clip(-lambda_ * dy, -0.5, 0.5)

    class Reversal(xp.PyLayer):
        """P29: a float made a tensor to save it, and torch's slots in the result, one too many for Paddle."""

        @staticmethod
        def forward(ctx, x, lambda_):
            ctx.save_for_backward(xp.asarray(lambda_, x.dtype))
            return xp.copy(x)

        @staticmethod
        def backward(ctx, dy):
            return -ctx.saved_tensor()[0] * dy, None

    return SimpleNamespace(**locals())


ported = names.text(layers, names.JAX)
