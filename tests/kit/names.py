"""Defines the names that the code of a layer calls, so that the same code runs under JAX, real torch and real Paddle.

    def layers(xp):  # `xp` is JAX, Torch(torch) or Paddle(paddle)
        class Sine(xp.PyLayer):
            @staticmethod
            def forward(ctx, x):
                ctx.save_for_backward(x)
                return xp.sin(x)

A name that the frameworks share, as `sin`, comes from the framework itself. The classes below add names that differ.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import pylayer_jax


class Names:
    """Names of one framework: the methods of this class, then the names in `modules`, searched in this order."""

    def __init__(self, *modules: Any) -> None:
        self.modules = modules

    def __getattr__(self, name: str) -> Any:
        for module in self.modules:
            if hasattr(module, name):
                return getattr(module, name)
        raise AttributeError(name)

    def saved(self, ctx: Any) -> Any:
        return ctx.saved_tensors

    def cast(self, x: Any, dtype: Any) -> Any:
        return x.astype(dtype)

    def once_differentiable(self, backward: Any) -> Any:
        return pylayer_jax.once_differentiable(backward)

    def jit(self, f: Any) -> Any:
        return f


class Jax(Names):
    Function, PyLayer, hooks = pylayer_jax.Function, pylayer_jax.PyLayer, pylayer_jax.saved_tensors_hooks
    detach = staticmethod(jax.lax.stop_gradient)
    tensor, jit = staticmethod(jnp.asarray), staticmethod(jax.jit)

    def __init__(self) -> None:
        super().__init__(jnp, jax.nn, jax)  # `jax` itself has the transforms

    def pull(self, function: Any, args: Any, dy: Any) -> Any:
        """Return the value of a function, and the gradients of its arguments for the cotangent `dy`."""
        y, pull = jax.vjp(function, *args)
        return y, pull(dy)

    def needs_gradient(self, ctx: Any, place: int, tensor: Any) -> bool:
        return ctx.needs_input_grad[place]


class Framework(Names):
    """Names for a framework whose tensors have methods with these names."""

    def copy(self, x: Any) -> Any:
        return x.clone()

    def detach(self, x: Any) -> Any:
        return x.detach()


class Torch(Framework):
    def __init__(self, torch: Any) -> None:
        super().__init__(torch, torch.nn.functional, torch.func)
        self.Function = self.PyLayer = torch.autograd.Function
        self.hooks = torch.autograd.graph.saved_tensors_hooks
        self.grad = torch.func.grad  # torch.nn.functional, searched before, has another `grad`
        self.moveaxis = torch.movedim  # torch.moveaxis has no batching rule for vmap of vmap
        self.once_differentiable = torch.autograd.function.once_differentiable

    def cast(self, x: Any, dtype: Any) -> Any:
        return x.to(getattr(self, dtype) if isinstance(dtype, str) else dtype)

    def leaf(self, x: Any) -> Any:
        """Return a copy that requires a gradient."""
        return x.detach().requires_grad_()

    def jvp(self, function: Any, primals: Any, tangents: Any) -> Any:
        """Compute a jvp by dual numbers, because torch.func.jvp refuses a context to which forward writes."""
        forward_ad = self.autograd.forward_ad
        with forward_ad.dual_level():
            y = function(*(forward_ad.make_dual(x, t) for x, t in zip(primals, tangents, strict=True)))
            return tuple(forward_ad.unpack_dual(y))

    def hessian(self, function: Any) -> Any:
        return functools.partial(self.autograd.functional.hessian, function)

    def needs_gradient(self, ctx: Any, place: int, tensor: Any) -> bool:
        return tensor.requires_grad


class Paddle(Framework):
    def __init__(self, paddle: Any) -> None:
        super().__init__(paddle, paddle.nn.functional)
        self.Function = self.PyLayer = paddle.autograd.PyLayer
        self.hooks = paddle.autograd.saved_tensors_hooks
        self.once_differentiable = paddle.autograd.py_layer.once_differentiable
        self.tensor = paddle.to_tensor

    def saved(self, ctx: Any) -> Any:
        return ctx.saved_tensor()

    def asarray(self, value: Any, dtype: Any) -> Any:
        return self.to_tensor(value, dtype=dtype)

    def pull(self, function: Any, args: Any, dy: Any) -> Any:
        """Compute a vjp by `backward`, because paddle.grad inside paddle.grad ends the process."""
        args = [self.leaf(x) for x in args]
        with self.enable_grad():
            y = function(*args)
        self.autograd.backward([y], [dy])
        return y, tuple(x.grad for x in args)

    def hessian(self, function: Any) -> Any:
        return lambda x: self.autograd.hessian(function(x := self.leaf(x)), x)[:]

    def leaf(self, x: Any) -> Any:
        x = x.detach()
        x.stop_gradient = False
        return x

    def needs_gradient(self, ctx: Any, place: int, tensor: Any) -> bool:
        return not tensor.stop_gradient


JAX = Jax()


@functools.cache
def of_framework(kind: type[Names], module: Any) -> Names:
    """Return `kind(module)`, such as `Torch(torch)`: always the same object, for the cache of `text`."""
    return kind(module)


@functools.cache
def text(define: Callable[[Any], Any], names: Names) -> Any:
    """Return `define(names)`, a namespace of layers. It is made once per framework."""
    return define(names)
