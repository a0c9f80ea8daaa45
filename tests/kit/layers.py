"""Defines `layer`, which makes a layer from functions, a few layers that many tests use, and a pair of hooks."""

import types

import jax
import jax.numpy as jnp

from pylayer_jax import Function, PyLayer, saved_tensors_hooks


def layer(forward=None, backward=None, base=PyLayer, name="Made", *, plain=False, **members):
    """Make a layer from functions.

    By default, `forward(ctx, x)` returns `2 * x` and `backward(ctx, dy)` returns `dy`, unless `base` has these methods.
    With `plain=True`, the methods take no context: `forward` takes the arguments, which the made layer saves, and
    `backward` takes them before the cotangents. Other keywords are flags of the class, or functions for static methods:

        layer(jnp.sin, lambda x, dy: dy * jnp.cos(x), plain=True, forward_mode=True)
    """
    if base in (PyLayer, Function):
        forward, backward = forward or (lambda ctx, x: x * 2), backward or (lambda ctx, dy: dy)

    def saving_forward(ctx, *arguments):
        ctx.save_for_backward(*arguments)
        return forward(*arguments)

    def backward_of_saved(ctx, *cotangents):
        return backward(*ctx.saved_tensors, *cotangents)

    methods = (saving_forward, backward_of_saved) if plain else (forward, backward)
    members |= {key: x for key, x in zip(("forward", "backward"), methods, strict=True) if x is not None}
    namespace = {key: staticmethod(x) if isinstance(x, types.FunctionType) else x for key, x in members.items()}
    return type(name, (base,), namespace)


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
# The gradient of `Steep` is twice that of tanh.
Steep = layer(base=Tanh, name="Steep", backward=lambda ctx, dy: 2 * Tanh.backward(ctx, dy))
SteepBothWays = layer(base=Steep, name="SteepBothWays", forward_mode=True)


# The next three are not made with `plain=True`, because messages and reports name the parameters of their `forward`.
class Multiply(PyLayer):
    @staticmethod
    def forward(ctx, a, b):
        ctx.save_for_backward(a, b)
        return a * b

    @staticmethod
    def backward(ctx, dy):
        a, b = ctx.saved_tensors
        return dy * b, dy * a


class Matmul(PyLayer):
    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x @ w

    @staticmethod
    def backward(ctx, dy):
        x, w = ctx.saved_tensors
        return dy @ w.T, x.T @ dy


class Square(PyLayer):
    """Layer that saves its input."""

    forward_mode = True

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, dy):
        return 2 * dy * ctx.saved_tensors[0]


class Multiples(PyLayer):
    """Layer whose backward reads what forward saved only if one of the outputs has no cotangent."""

    @staticmethod
    def forward(ctx, x):
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x)
        return 2 * x, 3 * x

    @staticmethod
    def backward(ctx, da, db):
        (x,) = ctx.saved_tensors
        return 3 * db + 0 * x if da is None else 2 * da + 0 * x if db is None else 2 * da + 3 * db


def loss(layer_class, *arguments, **keywords):
    """Return a function of the first argument of a layer: the sum of the output, with these further arguments."""
    return lambda x: layer_class.apply(x, *arguments, **keywords).sum()


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
