"""Functions of one tensor to one tensor, ported from torch."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pylayer_jax import Function


class Swish(Function):
    """T40."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * jax.nn.sigmoid(x)

    @staticmethod
    def backward(ctx, grad_output):
        x = ctx.saved_tensors[0]
        s = jax.nn.sigmoid(x)
        return grad_output * s * (1 + x * (1 - s))


class Mish(Function):
    """T41."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * jnp.tanh(jax.nn.softplus(x))

    @staticmethod
    def backward(ctx, grad_output):
        x = ctx.saved_tensors[0]
        t = jnp.tanh(jax.nn.softplus(x))
        return grad_output * (t + x * jax.nn.sigmoid(x) * (1 - t * t))


class HardSigmoid(Function):
    """T42."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return jnp.clip(x + 3, 0, 6) / 6

    @staticmethod
    def backward(ctx, grad_output):
        x = ctx.saved_tensors[0]
        return jnp.where(jnp.abs(x) <= 3, grad_output / 6, jnp.zeros_like(x))


class HardSwish(Function):
    """T43."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * jnp.clip(x + 3, 0, 6) / 6

    @staticmethod
    def backward(ctx, grad_output):
        x = ctx.saved_tensors[0]
        above = jnp.where(x > 3, grad_output, jnp.zeros_like(x))
        return jnp.where(jnp.abs(x) <= 3, grad_output * (x / 3 + 0.5), above)


class HardMish(Function):
    """T44."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return 0.5 * x * jnp.clip(x + 2, 0, 2)

    @staticmethod
    def backward(ctx, grad_output):
        x = ctx.saved_tensors[0]
        above = jnp.where(x > 0, grad_output, jnp.zeros_like(x))
        return jnp.where((x >= -2) & (x <= 0), grad_output * (x + 1), above)
