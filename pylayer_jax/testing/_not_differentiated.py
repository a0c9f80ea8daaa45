"""A layer where the gradient of something else is taken: its tensors are then constants of a trace."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pylayer_jax._jax.tracers import NEEDS_VALUES
from pylayer_jax._trees.messages import plural

from ._hidden_tensors import hidden_tensors, with_hidden_tensors
from ._layer_under_test import LayerUnderTest

__tracebackhide__ = True  # pytest hides the frames of this module

# Of factors, the differentiated values, and hidden tensors: the outputs, multiplied by the factors.
_Function = Callable[[dict[int, Any], list[Any], list[Any]], dict[int, Any]]


def not_differentiated(layer: LayerUnderTest) -> str:
    """Compare the gradients of factors by which the outputs are multiplied, and those beside hidden tensors."""
    _compare(layer, [])
    done = "the gradient of a factor of the outputs is right, within jit, scan, cond and remat"
    hidden = hidden_tensors(layer.flat)
    if not hidden:
        return done
    held = f"{plural(len(hidden), 'tensor', 'tensors')} in objects or functions"
    try:
        _compare(layer, hidden)
    except NEEDS_VALUES:
        return f"{done}; {held} cannot be traced"
    return f"{done}, with {held} too"


def _compare(layer: LayerUnderTest, hidden: list[Any]) -> None:
    flat, cotangents = layer.flat, layer.cotangents

    def scaled(factors: dict[int, Any], values: list[Any], tensors: list[Any]) -> dict[int, Any]:
        outputs = (with_hidden_tensors(flat, tensors) if tensors else flat).with_values(values).run()
        return {k: factors[k] * outputs[k] for k in factors}

    def gradients(transform: Callable[[_Function], _Function], *args: Any) -> Any:
        factors, values, tensors = args
        if tensors:  # which are then all that is not differentiated
            outputs, pull = jax.vjp(
                lambda factors, values: transform(scaled)(factors, values, tensors), factors, values
            )
        else:
            outputs, pull = jax.vjp(lambda factors: transform(scaled)(factors, values, tensors), factors)
        return outputs, pull(cotangents)

    args = {k: jnp.ones_like(layer.outputs[k]) for k in cotangents}, flat.values, hidden
    found = {label: gradients(transform, *args) for label, transform in _EAGERLY.items()}
    found |= jax.jit(lambda *args: {label: gradients(transform, *args) for label, transform in _UNDER_JIT.items()})(
        *args
    )
    where = f"{', where objects hold traced values' if hidden else ', where it is not differentiated'}"
    for label, (outputs, (of_factors, *of_values)) in found.items():
        for k, w in cotangents.items():
            y, noise = layer.outputs[k], layer.noise_of_outputs[k]
            layer.comparison.of_arrays(outputs[k], y, f"output {k}{label}{where}", noise)
            name = f"the gradient of a factor of output {k}{label}{where}"
            layer.comparison.of_arrays(of_factors[k], w * y, name, 2 * noise)
        for got in of_values:
            layer.compare_gradients(got, f"{label}{where}")


def _in_scan(f: _Function) -> _Function:
    def run(factors: dict[int, Any], values: list[Any], tensors: list[Any]) -> dict[int, Any]:
        xs = jax.tree_util.tree_map(lambda x: x[None], (values, tensors))
        outputs = jax.lax.scan(lambda _, x: (None, f(factors, *x)), None, xs)[1]
        return {k: y[0] for k, y in outputs.items()}

    return run


def _in_cond(f: _Function) -> _Function:
    return lambda *args: jax.lax.cond(jnp.asarray(True), f, lambda factors, *_: factors, *args)


_EAGERLY: dict[str, Callable[[_Function], _Function]] = {" of jit": jax.jit}
_UNDER_JIT = {
    " of scan": _in_scan,
    " of cond": _in_cond,
    " of jax.checkpoint": jax.checkpoint,
}
