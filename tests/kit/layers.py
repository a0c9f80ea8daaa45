"""Defines `layer`, which makes a layer from functions, a few layers that many tests use, and a pair of hooks."""

import types

import jax
import jax.numpy as jnp

from pylayer_jax import Function, PyLayer, saved_tensors_hooks


def layer(forward=None, backward=None, base=PyLayer, name="Made", *, plain=False, **members):
    """Make a layer from functions.

    By default, `forward(ctx, x)` returns `2 * x` and `backward(ctx, dy)` returns `dy`, unless `base` has these methods.
    With `plain=True` no method takes a context: `forward(*arguments)` has its arguments saved, and `backward` is
    `backward(*arguments, *cotangents)`. Other keywords are flags of the class, or functions for static methods.
    """
    if base in (PyLayer, Function):
        forward, backward = forward or (lambda ctx, x: x * 2), backward or (lambda ctx, dy: dy)

    def run(ctx, *arguments):
        ctx.save_for_backward(*arguments)
        return forward(*arguments)

    def pull(ctx, *cotangents):
        return backward(*ctx.saved_tensors, *cotangents)

    methods = {"forward": run, "backward": pull} if plain else {"forward": forward, "backward": backward}
    members = {key: method for key, method in methods.items() if method is not None} | members
    static = {key: staticmethod(x) if isinstance(x, types.FunctionType) else x for key, x in members.items()}
    return type(name, (base,), static)


class Tanh(PyLayer):
    """Layer that saves its output."""

    @staticmethod
    def forward(ctx, x):
        y = jnp.tanh(x)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, dy):
        (y,) = ctx.saved_tensor()
        return dy * (1 - y**2)


ForwardTanh = layer(base=Tanh, name="ForwardTanh", forward_mode=True)
# Twice the true gradient.
Steep = layer(base=Tanh, name="Steep", backward=lambda ctx, dy: 2 * Tanh.backward(ctx, dy))
SteepBothWays = layer(base=Steep, name="SteepBothWays", forward_mode=True)
# The next three save their inputs, and name them: `plain` would not.
Multiply = layer(
    lambda ctx, a, b: ctx.save_for_backward(a, b) or a * b,
    lambda ctx, dy: (dy * ctx.saved_tensors[1], dy * ctx.saved_tensors[0]),
    name="Multiply",
)
Matmul = layer(
    lambda ctx, x, w: ctx.save_for_backward(x, w) or x @ w,
    lambda ctx, dy: (dy @ ctx.saved_tensors[1].T, ctx.saved_tensors[0].T @ dy),
    name="Matmul",
)
Square = layer(
    lambda ctx, x: ctx.save_for_backward(x) or x * x,
    lambda ctx, dy: 2 * dy * ctx.saved_tensors[0],
    name="Square",
    forward_mode=True,
)


def loss(made, *rest, **named):
    """Return the sum of a layer's output, as a function of its first argument."""
    return lambda x: made.apply(x, *rest, **named).sum()


def text_of(error):
    """Return the message of an exception, with its notes."""
    return "\n".join([str(error), *getattr(error, "__notes__", ())])


def bits():
    """Return hooks that pack a tensor without loss, but whose `unpack` has no derivative."""

    def pack(x):
        return (jax.lax.bitcast_convert_type(x, jnp.int32),) if x.dtype == jnp.float32 else x

    def unpack(packed):
        return jax.lax.bitcast_convert_type(packed[0], jnp.float32) if isinstance(packed, tuple) else packed

    return saved_tensors_hooks(pack, unpack)
