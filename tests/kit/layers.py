"""A few layers and a pair of hooks, for tests and benchmarks that are about something else."""

import types

import jax
import jax.numpy as jnp

from pylayer_jax import PyLayer, saved_tensors_hooks


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


class ForwardTanh(Tanh):
    forward_mode = True


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


class Matmul(PyLayer):
    """Saves its inputs, two matrices."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x @ w

    @staticmethod
    def backward(ctx, dy):
        x, w = ctx.saved_tensor()
        return dy @ w.T, x.T @ dy


class Square(PyLayer):
    """Saves its input, and has forward mode."""

    forward_mode = True

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, dy):
        (x,) = ctx.saved_tensor()
        return 2 * dy * x


def layer_of(forward, gradient, /, name="Made", base=PyLayer, **members):
    """A layer that saves its arguments: `forward(*arguments)`, and `gradient(*arguments, *cotangents)`."""

    def run(ctx, *arguments):
        ctx.save_for_backward(*arguments)
        return forward(*arguments)

    def pull(ctx, *cotangents):
        return gradient(*ctx.saved_tensors, *cotangents)

    return layer_with(base, name, **{"forward": run, "backward": pull} | members)


def layer_with(base=PyLayer, name="Made", /, **members):
    """A class with these flags and methods, which are static."""
    static = {key: staticmethod(x) if isinstance(x, types.FunctionType) else x for key, x in members.items()}
    return type(name, (base,), static)


def bits():
    """Lossless, and without a derivative of its own."""

    def pack(x):
        return (jax.lax.bitcast_convert_type(x, jnp.int32),) if x.dtype == jnp.float32 else x

    def unpack(packed):
        return jax.lax.bitcast_convert_type(packed[0], jnp.float32) if isinstance(packed, tuple) else packed

    return saved_tensors_hooks(pack, unpack)
