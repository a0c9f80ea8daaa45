"""Functions of one tensor to one tensor, each with its slope: T40 to T44."""

from __future__ import annotations


def define(xp):
    def activation(name, value, slope):
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return value(x)

        def backward(ctx, grad_output):
            return slope(ctx.saved_tensors[0], grad_output)

        return type(name, (xp.Function,), {"forward": staticmethod(forward), "backward": staticmethod(backward)})

    def swish_slope(x, dy):
        s = xp.sigmoid(x)
        return dy * s * (1 + x * (1 - s))

    def mish_slope(x, dy):
        t = xp.tanh(xp.softplus(x))
        return dy * (t + x * xp.sigmoid(x) * (1 - t * t))

    def hard_swish_slope(x, dy):
        above = xp.where(x > 3, dy, xp.zeros_like(x))
        return xp.where(xp.abs(x) <= 3, dy * (x / 3 + 0.5), above)

    def hard_mish_slope(x, dy):
        above = xp.where(x > 0, dy, xp.zeros_like(x))
        return xp.where((x >= -2) & (x <= 0), dy * (x + 1), above)

    def hard_sigmoid_slope(x, dy):
        return xp.where(xp.abs(x) <= 3, dy / 6, xp.zeros_like(x))

    Swish = activation("Swish", lambda x: x * xp.sigmoid(x), swish_slope)
    Mish = activation("Mish", lambda x: x * xp.tanh(xp.softplus(x)), mish_slope)
    HardSigmoid = activation("HardSigmoid", lambda x: xp.clip(x + 3, 0, 6) / 6, hard_sigmoid_slope)
    HardSwish = activation("HardSwish", lambda x: x * xp.clip(x + 3, 0, 6) / 6, hard_swish_slope)
    HardMish = activation("HardMish", lambda x: 0.5 * x * xp.clip(x + 2, 0, 2), hard_mish_slope)
    return locals()
