"""One layer, tanh with its output saved, written for PyLayer and for each of the alternatives."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pylayer_jax import PyLayer


class Contestant(NamedTuple):
    """A framework's version of the layer; the calls return once the result is there."""

    name: str
    layer: Callable[[Any], Any]
    array: Callable[[int], Any]  # a square input of that width
    forward: Callable[[Any], Any]
    gradient: Callable[[Any], Any]
    second: Callable[[Any], Any]  # gradient of the sum of the gradient
    traced: bool = False  # whether jax.jit can compile it


def _values(width: int) -> np.ndarray:
    return np.linspace(-1.0, 1.0, width * width, dtype=np.float32).reshape(width, width)


def _in_jax(name: str, layer: Callable[[jax.Array], jax.Array]) -> Contestant:
    gradient = jax.grad(lambda x: layer(x).sum())
    second = jax.grad(lambda x: gradient(x).sum())
    return Contestant(
        name,
        layer,
        lambda width: jnp.asarray(_values(width)),
        lambda x: layer(x).block_until_ready(),
        lambda x: gradient(x).block_until_ready(),
        lambda x: second(x).block_until_ready(),
        traced=True,
    )


def pylayer() -> Contestant:
    class Tanh(PyLayer):
        @staticmethod
        def forward(ctx, x):
            y = jnp.tanh(x)
            ctx.save_for_backward(y)
            return y

        @staticmethod
        def backward(ctx, dy):
            (y,) = ctx.saved_tensor()
            return dy * (1 - y * y)

    return _in_jax("PyLayer", Tanh.apply)


def custom_vjp() -> Contestant:
    @jax.custom_vjp
    def tanh(x):
        return jnp.tanh(x)

    def forward(x):
        y = jnp.tanh(x)
        return y, y

    tanh.defvjp(forward, lambda y, dy: (dy * (1 - y * y),))
    return _in_jax("custom_vjp", tanh)


def equinox() -> Contestant:
    eqx = importlib.import_module("equinox")

    @eqx.filter_custom_vjp
    def tanh(x):
        return jnp.tanh(x)

    @tanh.def_fwd
    def forward(perturbed, x):
        y = jnp.tanh(x)
        return y, y

    @tanh.def_bwd
    def backward(y, dy, perturbed, x):
        return dy * (1 - y * y)

    return _in_jax("equinox", tanh)


def torch() -> Contestant:
    torch = importlib.import_module("torch")

    class Tanh(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            y = torch.tanh(x)
            ctx.save_for_backward(y)
            return y

        @staticmethod
        def backward(ctx, dy):
            (y,) = ctx.saved_tensors
            return dy * (1 - y * y)

    def gradient(x, again=False):
        x = x.detach().requires_grad_()
        (first,) = torch.autograd.grad(Tanh.apply(x).sum(), x, create_graph=again)
        return torch.autograd.grad(first.sum(), x) if again else first

    return Contestant(
        "torch",
        Tanh.apply,
        lambda width: torch.from_numpy(_values(width)),
        Tanh.apply,
        gradient,
        lambda x: gradient(x, again=True),
    )


def paddle() -> Contestant:
    paddle = importlib.import_module("paddle")

    class Tanh(paddle.autograd.PyLayer):
        @staticmethod
        def forward(ctx, x):
            y = paddle.tanh(x)
            ctx.save_for_backward(y)
            return y

        @staticmethod
        def backward(ctx, dy):
            (y,) = ctx.saved_tensor()
            return dy * (1 - y * y)

    def gradient(x, again=False):
        x = x.detach()
        x.stop_gradient = False
        (first,) = paddle.grad(Tanh.apply(x).sum(), x, create_graph=again)
        return paddle.grad(first.sum(), x) if again else first

    return Contestant(
        "paddle",
        Tanh.apply,
        lambda width: paddle.to_tensor(_values(width)),
        Tanh.apply,
        gradient,
        lambda x: gradient(x, again=True),
    )


def gather() -> tuple[list[Contestant], list[str]]:
    """PyLayer and the contestants that are installed, and the names of those that are not."""
    present, absent = [pylayer(), custom_vjp()], []
    for build in (equinox, torch, paddle):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # Paddle warns of a compiler cache when it is imported
                present.append(build())
        except ImportError:
            absent.append(build.__name__)
    return present, absent
