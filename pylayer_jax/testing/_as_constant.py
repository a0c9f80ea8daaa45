"""A layer where the gradient of something else is taken: its tensors are then constants of a trace."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pylayer_jax._jax.tracers import NEEDS_VALUES
from pylayer_jax._trees.messages import plural

from ._hidden_tensors import hidden_tensors, with_hidden_tensors
from ._layer_under_test import LayerUnderTest, outputs_and_grads
from ._runs import Run

__tracebackhide__ = True  # pytest hides the frames of this module

_Function = Callable[[list[Any]], list[Any]]


def as_constant(layer: LayerUnderTest) -> str:
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
    flat, outputs, cotangents = layer.flat, layer.outputs, list(layer.cotangents.values())
    factors = {k: jnp.ones_like(outputs[k]) for k in layer.cotangents}
    count, values = len(factors), flat.values
    end = count + len(values)
    # Hidden tensors are then all that is not differentiated.
    wanted = range(end if hidden else count)

    def scaled(args: list[Any]) -> list[Any]:
        """Of the factors, the differentiated values, and hidden tensors: the outputs, multiplied by the factors."""
        function = with_hidden_tensors(flat, args[end:]) if hidden else flat
        returned = function.outputs(args[count:end])
        return [factor * returned[k] for factor, k in zip(args, factors, strict=False)]

    def results(transform: Callable[[_Function], _Function], args: list[Any]) -> Any:
        return outputs_and_grads(transform(scaled), args, dict(enumerate(cotangents)), wanted)

    args = [*factors.values(), *values, *hidden]
    found = {" of jit": results(jax.jit, args)}
    within = {" of scan": _in_scan, " of cond": _in_cond(count), " of jax.checkpoint": jax.checkpoint}
    found |= jax.jit(lambda args: {label: results(transform, args) for label, transform in within.items()})(args)
    where = ", where objects hold traced values" if hidden else ", where it is not differentiated"
    for label, (scaled_outputs, gradients) in found.items():
        for k, w, y, gradient in zip(factors, cotangents, scaled_outputs, gradients, strict=False):
            noise = layer.noise_of_outputs[k]
            layer.comparison().of_arrays(y, outputs[k], f"output {k}{label}{where}", noise)
            name = f"the gradient of a factor of output {k}{label}{where}"
            layer.comparison().of_arrays(gradient, w * outputs[k], name, 2 * noise)
        layer.compare(Run(f"{label}{where}", layer.cotangents, dict(enumerate(gradients[count:]))))


def _in_scan(f: _Function) -> _Function:
    def run(args: list[Any]) -> list[Any]:
        outputs = jax.lax.scan(lambda _, xs: (None, f(xs)), None, [x[None] for x in args])[1]
        return [y[0] for y in outputs]

    return run


def _in_cond(count: int) -> Callable[[_Function], _Function]:
    return lambda f: lambda args: jax.lax.cond(jnp.asarray(True), f, lambda args: args[:count], args)
