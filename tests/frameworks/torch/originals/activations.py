"""Functions of one tensor to one tensor, as real torch ones."""

from __future__ import annotations

import torch
from torch.autograd import Function
from torch.nn import functional


class Swish(Function):
    """T40."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * torch.sigmoid(x)

    @staticmethod
    def backward(ctx, grad_output):
        x = ctx.saved_tensors[0]
        s = torch.sigmoid(x)
        return grad_output * s * (1 + x * (1 - s))


class Mish(Function):
    """T41."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * torch.tanh(functional.softplus(x))

    @staticmethod
    def backward(ctx, grad_output):
        x = ctx.saved_tensors[0]
        t = torch.tanh(functional.softplus(x))
        return grad_output * (t + x * torch.sigmoid(x) * (1 - t * t))


class HardSigmoid(Function):
    """T42."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return torch.clamp(x + 3, 0, 6) / 6

    @staticmethod
    def backward(ctx, grad_output):
        x = ctx.saved_tensors[0]
        return torch.where(x.abs() <= 3, grad_output / 6, torch.zeros_like(x))


class HardSwish(Function):
    """T43."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * torch.clamp(x + 3, 0, 6) / 6

    @staticmethod
    def backward(ctx, grad_output):
        x = ctx.saved_tensors[0]
        above = torch.where(x > 3, grad_output, torch.zeros_like(x))
        return torch.where(x.abs() <= 3, grad_output * (x / 3 + 0.5), above)


class HardMish(Function):
    """T44."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return 0.5 * x * torch.clamp(x + 2, 0, 2)

    @staticmethod
    def backward(ctx, grad_output):
        x = ctx.saved_tensors[0]
        above = torch.where(x > 0, grad_output, torch.zeros_like(x))
        return torch.where((x >= -2) & (x <= 0), grad_output * (x + 1), above)
