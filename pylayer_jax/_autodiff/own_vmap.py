"""A layer's own batching: its `vmap` method runs a whole batch, where JAX would map the code of `forward`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pylayer_jax._jax.jaxprs import stage
from pylayer_jax._jax.rule_function import BatchRun
from pylayer_jax._jax.tracers import NEEDS_VALUES, concrete_value
from pylayer_jax._jax.types import as_arrays, typeof
from pylayer_jax._methods.batches import check_mapped, map_outputs
from pylayer_jax._methods.outputs import Outputs

from .layer_call import LayerCall


def run_vmap_method(
    call: LayerCall, axis: Any, dims: Sequence[Any], tensors: Sequence[Any]
) -> tuple[Outputs, list[Any]]:
    """The outputs of a batch: their structure, and the tensors with the mapped axis in front."""
    __tracebackhide__ = True
    with call.scope("vmap"):
        return map_outputs(call.layer.vmap, call.arguments, axis, dims, as_arrays(tensors))


def eager_batch_run(call: LayerCall, run: Callable[..., list[Any]], axis: Any, dims: Sequence[Any]) -> BatchRun:
    """`run`, which applies `forward` to one example, for a batch, by the `vmap` of the class."""

    def run_batch(*tensors: Any) -> tuple[list[Any], list[int]]:
        __tracebackhide__ = True
        outputs, values = run_vmap_method(call, axis, dims, tensors)
        if axis.size and (types := _output_types(call, run, dims, tensors)) is not None:
            check_mapped(call.name, axis, values, types)
        call.outputs = outputs
        return values, [0] * len(values)

    return run_batch


def _output_types(
    call: LayerCall, run: Callable[..., list[Any]], dims: Sequence[Any], tensors: Sequence[Any]
) -> list[Any] | None:
    """The types of the outputs of one example; None if they cannot be known here."""
    try:
        jaxpr, _consts, _ = stage(lambda *one: (run(*one), None), call.arguments.avals, call.source)
        return [v.aval for v in jaxpr.outvars]
    except NEEDS_VALUES:
        pass
    try:  # host code runs on the first example
        first = [x if d is None else jnp.take(x, 0, axis=d) for x, d in zip(tensors, dims, strict=True)]
        return [typeof(x) for x in run(*map(concrete_value, first))]
    except jax.errors.ConcretizationTypeError:
        return None
