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
    """A layer that is tested under all transforms, and a function in plain JAX with the same derivatives."""

    name: str
    layer: Callable[..., Any]  # takes `args`; calls `kind.apply`
    reference: Callable[..., Any]  # takes `args`
    args: tuple[Any, ...]  # arrays, of which those of floats are differentiated
    # True if the reference was made by `ruled`. JAX differentiates the outputs of such a reference as plain code, not
    # by its rule. If the loss is linear in the outputs, this does not matter: the cotangents are constants, and the
    # second derivative is right as long as the rule reads only inputs.
    linear_loss: bool = False
    second_order: bool = True  # whether the reference also has the second derivatives of the layer
    # A pattern in the TypeError of jax.hessian, if `backward` is not linear in its cotangents; empty if it is.
    forward_over_reverse: str = ""
    kind: type[PyLayer] = PyLayer  # the class of `layer`

    @property
    def is_linear(self) -> bool:
        """Whether `backward` is linear in its cotangents, so that JAX can transpose it."""
        return not self.forward_over_reverse

    def in_forward_mode(self, monkeypatch: Any) -> Case:
        """Return the case with `forward_mode = True` for its layer.

        Until the test ends, the module of the layer has a subclass with this flag in place of each of its layers,
        because layers call each other.
        """
        module = sys.modules[self.kind.__module__]
        subclasses = {
            name: type(name, (kind,), {"forward_mode": True})
            for name, kind in vars(module).items()
            if isinstance(kind, type) and issubclass(kind, PyLayer) and kind.__module__ == module.__name__
        }
        for name, subclass in subclasses.items():
            monkeypatch.setattr(module, name, subclass)
        kind = next((subclass for subclass in subclasses.values() if subclass.__base__ is self.kind), self.kind)
        # A function of the module, unlike `apply`, looks up the subclass itself.
        layer = kind.apply if self.layer == self.kind.apply else self.layer
        return dataclasses.replace(self, kind=kind, layer=layer)


CASES: list[Case] = []  # the registry


def case(
    reference: Callable[..., Any],
    *args: Any,
    call: Callable[..., Any] | None = None,
    name: str = "",
    cases: list[Case] = CASES,
    **flags: Any,
) -> Any:
    """Return a decorator that adds a layer to the registry, or to another list of `cases`.

    The test calls `call(*args)`, which is `apply(*args)` of the layer by default. `flags` are fields of `Case`.
    """
    arrays = tuple(jnp.asarray(a, jnp.float32) if isinstance(a, (float, list)) else a for a in args)

    def add(layer: type[PyLayer]) -> type[PyLayer]:
        cases.append(Case(name or layer.__name__, call or layer.apply, reference, arrays, kind=layer, **flags))
        return layer

    return add


def after(layer: Any, module: str, name: str = "") -> type[PyLayer]:
    """Return a PyLayer with the `forward` and `backward` of another layer, such as a `Function`.

    It belongs to `module`, the name of the module that registers it, so that `Case.in_forward_mode` finds it there.
    """
    methods = {method: vars(layer)[method] for method in ("forward", "backward")}
    return type(name or layer.__name__, (PyLayer,), {"__module__": module, "__doc__": layer.__doc__, **methods})


def ruled(value: Callable[..., Any], rule: Callable[..., Any]) -> Callable[..., Any]:
    """Return a `jax.custom_vjp` of `value` with the gradients `rule(args, cotangent)`, a tuple of one per argument."""
    function = jax.custom_vjp(value)
    function.defvjp(lambda *args: (value(*args), args), rule)
    return function


def numpy_grid(*shape: int, low: float = -1.4, high: float = 1.7) -> np.ndarray:
    """Return an array of equally spaced numbers from low to high, in a random order."""
    ordered = np.linspace(low, high, int(np.prod(shape)))
    return np.random.default_rng(sum(shape)).permutation(ordered).reshape(shape).astype(np.float32)


def grid(*shape: int, low: float = -1.4, high: float = 1.7) -> jax.Array:
    """Return `numpy_grid` as a JAX array."""
    return jnp.asarray(numpy_grid(*shape, low=low, high=high))


X = grid(2, 3)
W = grid(3, 3, low=-0.8, high=0.9)
R3 = grid(3, low=0.2, high=1.1)
