"""Defines `Case`, a layer with its reference and arguments, and `case`, which adds a layer to the registry."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pylayer_jax import PyLayer

stop = jax.lax.stop_gradient


@dataclasses.dataclass(frozen=True)
class Case:
    name: str
    layer: Callable[..., Any]  # of the arrays in args; calls Layer.apply
    reference: Callable[..., Any]
    args: tuple[Any, ...]  # float arrays are differentiated
    # Whether the loss is linear in the outputs, for references that are a plain custom_vjp: exact at second
    # order as long as what is differentiated again is made of inputs alone.
    linear_loss: bool = False
    second_order: bool = True  # whether the reference has the layer's second derivatives too
    forward_over_reverse: str = ""  # the error of jax.hessian, where backward cannot be transposed
    kind: type[PyLayer] = PyLayer  # the class of `layer`

    @property
    def is_linear(self) -> bool:
        """Whether `backward` is linear in its cotangents, so that JAX can transpose it."""
        return not self.forward_over_reverse

    def in_forward_mode(self, monkeypatch: Any) -> Case:
        """Return the same case with `forward_mode = True` for its layer and for the other layers of its module."""
        module = sys.modules[self.kind.__module__]
        kinds = {
            name: type(name, (kind,), {"forward_mode": True})
            for name, kind in vars(module).items()
            if isinstance(kind, type) and issubclass(kind, PyLayer) and kind.__module__ == module.__name__
        }
        for name, kind in kinds.items():
            monkeypatch.setattr(module, name, kind)
        kind = next((kind for kind in kinds.values() if kind.__base__ is self.kind), self.kind)
        called = self.layer != self.kind.apply
        return dataclasses.replace(self, kind=kind, layer=self.layer if called else kind.apply)


CASES: list[Case] = []  # the registry


def case(
    reference: Callable[..., Any], *args: Any, call: Callable[..., Any] | None = None, name: str = "", **flags: Any
) -> Any:
    """Return a decorator that adds a layer to the registry. `call` applies the layer, if not `apply(*args)`."""
    arrays = tuple(jnp.asarray(a, jnp.float32) if isinstance(a, (float, list)) else a for a in args)

    def add(layer: type[PyLayer]) -> type[PyLayer]:
        CASES.append(Case(name or layer.__name__, call or layer.apply, reference, arrays, kind=layer, **flags))
        return layer

    return add


def after(layer: Any, module: str, name: str = "") -> type[PyLayer]:
    """Return a PyLayer of `module` with the methods of another layer, such as a `Function`."""
    methods = {method: vars(layer)[method] for method in ("forward", "backward")}
    return type(name or layer.__name__, (PyLayer,), {"__module__": module, "__doc__": layer.__doc__, **methods})


def ruled(value: Callable[..., Any], rule: Callable[..., Any]) -> Callable[..., Any]:
    """Return `value` with the gradients `rule(args, cotangent)`, as a custom_vjp function that saves its inputs."""
    function = jax.custom_vjp(value)
    function.defvjp(lambda *args: (value(*args), args), rule)
    return function


def once(value: float, cotangent: Any) -> Any:
    """Return a gradient that does not depend on the cotangent. Under vmap there is one for each example."""
    return value + 0 * jnp.sum(cotangent)


def straight_through(value: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda x: x + stop(value(x) - x)


def numpy_grid(*shape: int, low: float = -1.4, high: float = 1.7) -> np.ndarray:
    """Return equally spaced numbers from low to high, in a random order."""
    ordered = np.linspace(low, high, int(np.prod(shape)))
    return np.random.default_rng(sum(shape)).permutation(ordered).reshape(shape).astype(np.float32)


def grid(*shape: int, low: float = -1.4, high: float = 1.7) -> jax.Array:
    return jnp.asarray(numpy_grid(*shape, low=low, high=high))


X = grid(2, 3)
W = grid(3, 3, low=-0.8, high=0.9)
R3 = grid(3, low=0.2, high=1.1)
