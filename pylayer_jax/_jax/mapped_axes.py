"""Which values `jax.vmap` maps, and along which axes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import jax

from .probes import FORWARD, MAPPED, REVERSE
from .tracers import active_traces, is_of_current_trace

# The names of mapped axes that the running code does not use. It is part of jit's cache key.
shared_axes: Final = jax.make_user_context(frozenset())


def is_mapped(value: Any) -> bool:
    """Whether `jax.vmap` maps a value; not one that all examples share, as custom_vjp functions return it."""
    return isinstance(value, MAPPED.tracer) and value.batch_dim is not None


def differs_between_examples(value: Any) -> bool:
    """Whether the running `jax.vmap` maps a value."""
    return is_mapped(value) and is_of_current_trace(value)


def shared_by_examples(value: Any) -> Any:
    """A value that the running `jax.vmap` does not map, as the code around the map knows it."""
    return value.val if isinstance(value, MAPPED.tracer) and is_of_current_trace(value) else value


def is_named(axis: Any, **_: Any) -> bool:
    """Whether a mapped axis, as a batching rule is given it, has a name, so that collectives may reach it."""
    return type(axis.name) is not object


def axes_shared_by(values: Sequence[Any]) -> frozenset[Any]:
    """The names of the mapped axes along which the examples share all of `values`."""
    traces = [t for t in active_traces() if isinstance(t, MAPPED.trace) and is_named(t.axis_data)]
    maps = [trace for x in values for trace in _maps_of(x)] if traces else ()
    return frozenset(t.axis_data.name for t in traces if not any(t is m for m in maps))


def is_mapped_along(value: Any, axes: frozenset[Any]) -> bool:
    return any(trace.axis_data.name in axes for trace in _maps_of(value))


def _maps_of(value: Any) -> list[Any]:
    """The trace of each `jax.vmap` that maps a value, or what a differentiation of it stands for."""
    maps: list[Any] = []
    while isinstance(value, (MAPPED.tracer, REVERSE.tracer, FORWARD.tracer)):
        if isinstance(value, MAPPED.tracer):
            maps += [value._trace] if is_mapped(value) else []
            value = value.val
        else:
            value = value.primal
    return maps
