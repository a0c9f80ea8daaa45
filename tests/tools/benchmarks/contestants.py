"""One layer, tanh with its output saved, written for PyLayer and for each of the alternatives."""

import importlib
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pylayer_jax import once_differentiable
from tests.kit import names


class Contestant(NamedTuple):
    """A framework's version of the layer; the calls return once the result is there."""

    name: str
    layer: Callable[[Any], Any]
    array: Callable[[int], Any]  # a square input of that width
    forward: Callable[[Any], Any]
    gradient: Callable[[Any], Any]
    second: Callable[[Any], Any]  # gradient of the sum of the gradient
    step: Callable[[int, int, bool], Callable[[], Any]] | None = None  # forward and backward of: width, depth, compiled
    once_differentiable: Callable[[Any], Any] | None = None  # the layer without a second derivative


def _values(width: int) -> np.ndarray:
    return np.linspace(-1.0, 1.0, width * width, dtype=np.float32).reshape(width, width)


def chain(layer: Callable[[Any], Any], depth: int) -> Callable[[Any], Any]:
    def loss(x: Any) -> Any:
        for _ in range(depth):
            x = layer(x)
        return x.sum()

    return loss


def _in_jax(name: str, layer: Any, once_differentiable: Any = None) -> Contestant:
    def step(width: int, depth: int, compiled: bool) -> Callable[[], Any]:
        x, run = array(width), jax.value_and_grad(chain(layer, depth))
        if compiled:
            run = jax.jit(run).lower(x).compile()
        return lambda: jax.block_until_ready(run(x))

    def array(width: int) -> jax.Array:
        return jnp.asarray(_values(width))

    gradient = jax.grad(lambda x: layer(x).sum())
    second = jax.grad(lambda x: gradient(x).sum())
    calls = [lambda x, f=f: f(x).block_until_ready() for f in (layer, gradient, second)]
    return Contestant(name, layer, array, *calls, step, once_differentiable)


def _tanh(xp: names.Names) -> Any:
    """The layer in a framework with classes, or here."""
    tanh = xp.tanh  # looked up here, as each call is measured

    class Tanh(xp.PyLayer):
        @staticmethod
        def forward(ctx, x):
            y = tanh(x)
            ctx.save_for_backward(y)
            return y

        @staticmethod
        def backward(ctx, dy):
            (y,) = xp.saved(ctx)
            return dy * (1 - y * y)

    return Tanh


def pylayer() -> Contestant:
    layer = _tanh(names.JAX)
    once = type("OnceTanh", (layer,), {"backward": staticmethod(once_differentiable(layer.backward))})
    return _in_jax("PyLayer", layer.apply, once.apply)


def jitted_pylayer() -> Contestant:
    """The same within an inner jax.jit, which traces a repeated layer once."""
    return _in_jax("jit(PyLayer)", jax.jit(_tanh(names.JAX).apply))


def custom_vjp() -> Contestant:
    tanh = jax.custom_vjp(lambda x: jnp.tanh(x))
    tanh.defvjp(lambda x: (jnp.tanh(x),) * 2, lambda y, dy: (dy * (1 - y * y),))
    return _in_jax("custom_vjp", tanh, tanh)


def equinox() -> Contestant:
    tanh = importlib.import_module("equinox").filter_custom_vjp(lambda x: jnp.tanh(x))
    tanh.def_fwd(lambda perturbed, x: (jnp.tanh(x),) * 2)
    tanh.def_bwd(lambda y, dy, perturbed, x: dy * (1 - y * y))
    return _in_jax("equinox", tanh)


def torch() -> Contestant:
    torch = importlib.import_module("torch")
    return _elsewhere("torch", names.Torch(torch), torch.autograd.grad)


def paddle() -> Contestant:
    paddle = importlib.import_module("paddle")
    return _elsewhere("paddle", names.Paddle(paddle), paddle.grad)


def _elsewhere(name: str, xp: Any, grad: Callable[..., Any]) -> Contestant:
    """A framework that JAX does not trace: it takes part in eager mode alone."""
    layer = _tanh(xp).apply

    def gradient(x, again=False):
        x = xp.leaf(x)
        (first,) = grad(layer(x).sum(), x, create_graph=again)
        return grad(first.sum(), x) if again else first

    def array(width):
        return xp.tensor(_values(width))

    return Contestant(name, layer, array, layer, gradient, lambda x: gradient(x, again=True))


def gather() -> tuple[list[Contestant], list[str]]:
    """PyLayer and the contestants that are installed, and the names of those that are not."""
    present, absent = [pylayer(), custom_vjp(), jitted_pylayer()], []
    for build in (equinox, torch, paddle):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # Paddle warns of a compiler cache when it is imported
                present.append(build())
        except ImportError:
            absent.append(build.__name__)
    return present, absent
