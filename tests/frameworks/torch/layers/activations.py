"""Functions of one tensor to one tensor."""

from __future__ import annotations


def define(xp):
    class Swish(xp.Function):
        """T40."""

        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x * xp.sigmoid(x)

        @staticmethod
        def backward(ctx, grad_output):
            x = ctx.saved_tensors[0]
            s = xp.sigmoid(x)
            return grad_output * s * (1 + x * (1 - s))

    class Mish(xp.Function):
        """T41."""

        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x * xp.tanh(xp.softplus(x))

        @staticmethod
        def backward(ctx, grad_output):
            x = ctx.saved_tensors[0]
            t = xp.tanh(xp.softplus(x))
            return grad_output * (t + x * xp.sigmoid(x) * (1 - t * t))

    class HardSigmoid(xp.Function):
        """T42."""

        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return xp.clip(x + 3, 0, 6) / 6

        @staticmethod
        def backward(ctx, grad_output):
            x = ctx.saved_tensors[0]
            return xp.where(xp.abs(x) <= 3, grad_output / 6, xp.zeros_like(x))

    class HardSwish(xp.Function):
        """T43."""

        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x * xp.clip(x + 3, 0, 6) / 6

        @staticmethod
        def backward(ctx, grad_output):
            x = ctx.saved_tensors[0]
            above = xp.where(x > 3, grad_output, xp.zeros_like(x))
            return xp.where(xp.abs(x) <= 3, grad_output * (x / 3 + 0.5), above)

    class HardMish(xp.Function):
        """T44."""

        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return 0.5 * x * xp.clip(x + 2, 0, 2)

        @staticmethod
        def backward(ctx, grad_output):
            x = ctx.saved_tensors[0]
            above = xp.where(x > 0, grad_output, xp.zeros_like(x))
            return xp.where((x >= -2) & (x <= 0), grad_output * (x + 1), above)

    return locals()
