"""Facts about tracers, and about the traces that are active.

Most classes of tracers and traces have no public names, and are therefore recognised by the names of their types.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from .imports import (
    Trace,
    Tracer,
    ad,
    concrete_or_error,
    eval_context,
    get_opaque_trace_state,
    partial_eval,
    take_current_trace,
)

# Raised where traced code asks for a number.
NEEDS_VALUES = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
)

with eval_context():
    # Within `eval_context` no trace is active, even if this module is imported inside a trace.
    _NO_TRACE = get_opaque_trace_state(convention="nnx")


def nothing_is_traced() -> bool:
    # The only public way to ask whether any transformation is active; a third of a microsecond.
    return get_opaque_trace_state(convention="nnx") == _NO_TRACE


# -- one value ------------------------------------------------------------------------------------


def is_tracer(value: object) -> bool:
    return isinstance(value, Tracer)


def is_mapped(value: object) -> bool:
    return type(value).__name__ == "BatchTracer"


def _example_of(value: object) -> object:
    """The value that `jax.vmap` maps."""
    while is_mapped(value):
        value = getattr(value, "val", None)
    return value


def is_differentiated(value: object) -> bool:
    """Whether `jax.grad`, `jax.vjp`, `jax.linearize` or `jax.jvp` differentiates a value, or a batch of it."""
    value = _example_of(value)
    return type(value).__name__ == "LinearizeTracer" or isinstance(value, ad.JVPTracer)


def is_forward_mode_tracer(value: object) -> bool:
    value = _example_of(value)
    return isinstance(value, ad.JVPTracer) or type(value).__name__ == "JetTracer"


def is_reverse_mode_tracer(value: object) -> bool:
    return type(_example_of(value)).__name__ == "LinearizeTracer"


def is_rematerialization_tracer(value: object) -> bool:
    """With JAX_REMAT3 a forward rule runs before the differentiation, and JAX reports every input as perturbed."""
    return type(value).__name__ == "RematTracer"


def is_unknown(value: object) -> bool:
    """Whether `jax.linear_transpose` traces a value, or a batch of it, to transpose what is computed from it."""
    return type(_example_of(value)).__name__ == "JaxprTracer"


def is_staged(value: object) -> bool:
    """Whether a value (or the value that `jax.vmap` maps) stands in a jaxpr that is being made."""
    return isinstance(_example_of(value), partial_eval.DynamicJaxprTracer)


def is_staged_below(value: object) -> bool:
    """Whether the primal value below one reverse-mode differentiation (and `jax.vmap`) is staged."""
    value = _example_of(value)
    return is_staged(getattr(value, "primal", None) if is_reverse_mode_tracer(value) else value)


def is_differentiated_twice(value: object) -> bool:
    """Whether a reverse-mode differentiation stands within another differentiation of the same value."""
    value = _example_of(value)
    return is_reverse_mode_tracer(value) and is_differentiated(getattr(value, "primal", None))


def concrete_value(value: Any) -> Any:
    """The number below any stack of differentiations; raises ConcretizationTypeError under jit and vmap."""
    return concrete_or_error(None, value, "pylayer_jax needs the value")


# -- the traces -----------------------------------------------------------------------------------


def current_trace() -> Any:
    with take_current_trace() as trace:
        return trace


class PassThroughTrace(Trace):
    """The base of a trace that stands before another trace and makes no tracers of its own."""

    __slots__ = ("parent_trace",)

    def __init__(self, parent_trace: Any) -> None:
        super().__init__()
        self.parent_trace = parent_trace
        self.requires_low = parent_trace.requires_low
        # What libraries compare to see whether a value belongs to the running transformation (flax.nnx): it is that of
        # the trace below, since this one transforms nothing.
        if hasattr(parent_trace, "_weakref"):
            self._weakref = parent_trace._weakref

    def process_call(self, *args: Any) -> Any:  # jax 0.10, of the part of a checkpointed loop that is known
        return self.parent_trace.process_call(*args)

    def process_custom_jvp_call(self, *args: Any, **params: Any) -> Any:
        return self.parent_trace.process_custom_jvp_call(*args, **params)

    def process_custom_vjp_call(self, *args: Any, **params: Any) -> Any:
        return self.parent_trace.process_custom_vjp_call(*args, **params)

    def process_shard_map(self, *args: Any, **params: Any) -> Any:
        return self.parent_trace.process_shard_map(*args, **params)

    def stage_value(self, val: Any) -> Any:
        return self.parent_trace.stage_value(val)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.parent_trace, name)  # other attributes of the current trace that JAX reads, as `cur_qdd`


def trace_below(trace: Any) -> Any:
    while isinstance(trace, PassThroughTrace):
        trace = trace.parent_trace
    return trace


def active_traces() -> list[Any]:
    """The current trace, and those further out."""
    traces: list[Any] = []
    trace = trace_below(current_trace())
    while trace is not None:
        traces.append(trace)
        trace = trace_below(getattr(trace, "parent_trace", None))
    return traces


def is_leaked(value: object) -> bool:
    """Whether a value belongs to a transformation that has ended, so that no operation can use it."""
    if not is_tracer(value):
        return False
    traces = active_traces()
    # If a trace does not tell what is further out, nothing is known.
    return type(traces[-1]).__name__ == "EvalTrace" and not any(getattr(value, "_trace", None) is t for t in traces)


# A JaxprTrace runs the jvp rules of a function that jax.linearize takes apart.
_EAGER_TRACES = frozenset({"EvalTrace", "JVPTrace", "LinearizeTrace", "BatchTrace", "JaxprTrace", "JetTrace"})


def _is_staging_trace(trace: Any) -> bool:
    return type(trace).__name__ not in _EAGER_TRACES


def is_forward_mode_trace(trace: Any) -> bool:
    return isinstance(trace, ad.JVPTrace) or type(trace).__name__ == "JetTrace"


def is_forward_mode_here(tensors: Sequence[Any], traces: Sequence[Any]) -> bool:
    """Whether forward mode differentiates an operation on `tensors` where it is applied, inside `jax.vmap` too.

    `traces` are the active ones.
    """
    if not any(map(is_forward_mode_tracer, tensors)):
        return False
    innermost = next((t for t in traces if _differentiations([t]) or _is_staging_trace(t)), None)
    return is_forward_mode_trace(innermost)


def _differentiations(traces: Sequence[Any]) -> list[bool]:
    """The differentiations among some traces: True for `jax.jvp`."""
    facts = ((is_forward_mode_trace(trace), type(trace).__name__) for trace in traces)
    return [is_forward for is_forward, name in facts if is_forward or name == "LinearizeTrace"]


def is_differentiating() -> bool:
    return bool(_differentiations(active_traces()))


def is_forward_mode() -> bool:
    """Whether `jax.jvp` differentiates the running code, on any level."""
    return any(_differentiations(active_traces()))


def is_forward_over_reverse(traces: Sequence[Any]) -> bool:
    """Whether `jax.jvp` differentiates a reverse-mode derivative, as in `jax.jvp` of `jax.grad`.

    `traces` are the active ones.
    """
    found = _differentiations(traces)
    return bool(found) and not found[0] and any(found)


def is_staging(include_outer: bool = False) -> bool:
    """Whether the running code becomes a jaxpr: in jit, scan, shard_map and the like; not in eager grad, jvp or vmap.

    With `include_outer`, also if a trace further out stages, as in grad or vmap within jit.
    """
    for trace in active_traces():
        if _is_staging_trace(trace):
            return True
        if not include_outer and type(trace).__name__ != "JaxprTrace":
            return False
    return False


def is_deferred(tensors: Sequence[Any], traces: Sequence[Any] | None = None) -> bool:
    """Whether an operation on `tensors` is only staged here, so that JAX may differentiate it later, or several times.

    A differentiation outside of the jaxpr that is being made does that later: it sees the jaxpr as a whole. `traces`
    are the active ones, if the caller has them.
    """
    within: list[Any] = []  # the traces within the one that makes the jaxpr
    for trace in active_traces() if traces is None else traces:
        if _is_staging_trace(trace):
            break
        within.append(trace)
    else:
        return False  # no jaxpr is being made
    examples = filter(is_differentiated, map(_example_of, tensors))
    return not any(getattr(x, "_trace", None) is trace for x in examples for trace in within)


def is_rematerialized() -> bool:
    """Whether the running code is being staged for `jax.checkpoint`, on any level."""
    frames = (getattr(trace, "frame", None) for trace in active_traces())
    return any("remat" in str(getattr(getattr(f, "debug_info", None), "traced_for", "")) for f in frames)
