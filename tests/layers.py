"""Two plain layers, for tests and benchmarks that are about something else."""

import jax.numpy as jnp

from pylayer_jax import PyLayer


class Tanh(PyLayer):
    """Saves its output."""

    @staticmethod
    def forward(ctx, x):
        y = jnp.tanh(x)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, dy):
        (y,) = ctx.saved_tensor()
        return dy * (1 - y**2)


class Multiply(PyLayer):
    """Saves its inputs."""

    @staticmethod
    def forward(ctx, a, b):
        ctx.save_for_backward(a, b)
        return a * b

    @staticmethod
    def backward(ctx, dy):
        a, b = ctx.saved_tensor()
        return dy * b, dy * a
