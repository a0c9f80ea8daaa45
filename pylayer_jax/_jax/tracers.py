"""Facts about tracers, and about the traces that are active."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

from .imports import Trace, Tracer, concrete_or_error, eval_context, get_opaque_trace_state
from .probes import (
    EVAL_TRACE,
    FORWARD,
    JET,
    JIT,
    MAPPED,
    REVERSE,
    STAGED,
    TRANSPOSED,
    checkpoint,
    current_trace,
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


def is_of_current_trace(value: Any) -> bool:
    """Whether the running transformation made a value."""
    return is_tracer(value) and value._trace is trace_below(current_trace())


def _example_of(value: Any) -> Any:
    """The value that `jax.vmap` maps."""
    while isinstance(value, MAPPED.tracer):
        value = value.val
    return value


def is_differentiated(value: object) -> bool:
    """Whether `jax.grad`, `jax.vjp`, `jax.linearize` or `jax.jvp` differentiates a value, or a batch of it."""
    return isinstance(_example_of(value), (REVERSE.tracer, FORWARD.tracer))


def is_reverse_mode_tracer(value: object) -> bool:
    return isinstance(_example_of(value), REVERSE.tracer)


def is_rematerialization_tracer(value: object) -> bool:
    """With JAX_REMAT3 a forward rule runs before the differentiation, and JAX reports every input as perturbed."""
    return isinstance(value, checkpoint().tracers)


def is_unknown(value: object) -> bool:
    """Whether `jax.linear_transpose` traces a value, or a batch of it, to transpose what is computed from it."""
    return isinstance(_example_of(value), TRANSPOSED.tracer)


def is_staged(value: object) -> bool:
    """Whether a value (or the value that `jax.vmap` maps) stands in a jaxpr that is being made."""
    return isinstance(_example_of(value), STAGED.tracer)


def is_staged_below(value: Any) -> bool:
    """Whether the primal value below one reverse-mode differentiation (and `jax.vmap`) is staged."""
    value = _example_of(value)
    return is_staged(value.primal if isinstance(value, REVERSE.tracer) else value)


def is_differentiated_twice(value: Any) -> bool:
    """Whether a reverse-mode differentiation stands within another differentiation of the same value."""
    value = _example_of(value)
    return isinstance(value, REVERSE.tracer) and is_differentiated(value.primal)


def concrete_value(value: Any) -> Any:
    """The number below any stack of differentiations; raises ConcretizationTypeError under jit and vmap."""
    return concrete_or_error(None, value, "pylayer_jax needs the value")


# -- the traces -----------------------------------------------------------------------------------


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
    trace = current_trace()
    while trace is not None:
        if not isinstance(trace, PassThroughTrace):
            traces.append(trace)
        trace = getattr(trace, "parent_trace", None)
    return traces


def trace_of_known_values(values: Sequence[Any]) -> Any:
    """The current trace; or the one further out to which `values` belong, if jax.linearize runs a jvp rule here."""
    trace = current_trace()
    while isinstance(trace, TRANSPOSED.trace) and not any(map(is_unknown, values)):
        trace = trace.parent_trace
    return trace


def is_leaked(value: Any) -> bool:
    """Whether a value belongs to a transformation that has ended, so that no operation can use it."""
    # If a trace does not tell what is further out, nothing is known.
    return is_of_no_active_trace(value) and isinstance(active_traces()[-1], EVAL_TRACE)


def is_of_no_active_trace(value: Any) -> bool:
    return is_tracer(value) and not any(value._trace is t for t in active_traces())


def is_outside_transpose(value: Any) -> bool:
    """Whether a value is further out than a jaxpr that JAX is making; if that is a transpose, JAX loses its constants.

    That of `jax.checkpoint` keeps them, and what this package stages becomes part of the code around it.
    """
    keeping, outside = ("pylayer_jax", checkpoint().traced_for), False
    for trace in active_traces() if is_tracer(value) else ():
        if value._trace is trace:
            return outside
        info = trace.frame.debug_info if isinstance(trace, STAGED.trace) else None
        outside = outside or (info is not None and info.traced_for not in keeping)
    return False


# The one of jax.linear_transpose also runs the jvp rules of a function that jax.linearize takes apart.
_EAGER_TRACES = (EVAL_TRACE, *(kind.trace for kind in (FORWARD, REVERSE, MAPPED, TRANSPOSED, JET)))


_DIFFERENTIATIONS = (REVERSE.trace, FORWARD.trace, JET.trace)
_FORWARD_MODE = (FORWARD.trace, JET.trace)
_IN_FORWARD_MODE = (FORWARD.tracer, JET.tracer)


def is_differentiating() -> bool:
    return any(isinstance(t, _DIFFERENTIATIONS) for t in active_traces())


def is_forward_mode() -> bool:
    """Whether `jax.jvp` differentiates the running code, on any level."""
    return bool([t for t in active_traces() if isinstance(t, _FORWARD_MODE)])


def is_staging(include_outer: bool = False) -> bool:
    """Whether the running code becomes a jaxpr: in jit, scan, shard_map and the like; not in eager grad, jvp or vmap.

    With `include_outer`, also if a trace further out stages, as in grad or vmap within jit.
    """
    for trace in active_traces():
        if not isinstance(trace, _EAGER_TRACES):
            return True
        if not include_outer and not isinstance(trace, TRANSPOSED.trace):
            return False
    return False


class Applied(NamedTuple):
    """What the active transformations do with an operation on some tensors."""

    is_differentiated: bool  # now, in either mode, by a transformation on any level
    is_in_forward_mode: bool  # by `jax.jvp`, which is the innermost to differentiate; also inside `jax.vmap`
    is_in_forward_over_reverse: bool  # the running code, as in `jax.jvp` of `jax.grad`
    is_transposed: bool  # by `jax.linear_transpose`
    is_staged: bool  # becomes an equation of a jaxpr here
    is_deferred: bool  # is only staged here, so that JAX may differentiate it later, or several times


def applied_to(tensors: Sequence[Any]) -> Applied:
    """Look at an operation on these tensors, once for all questions."""
    examples = [_example_of(x) for x in tensors]
    differentiated = [x for x in examples if isinstance(x, (REVERSE.tracer, FORWARD.tracer))]
    traces = active_traces()
    # The traces within the one that makes the jaxpr, if one does.
    staging = [i for i, t in enumerate(traces) if not isinstance(t, _EAGER_TRACES)][:1]
    within = traces[: staging[0]] if staging else traces
    modes = [isinstance(t, _FORWARD_MODE) for t in traces if isinstance(t, _DIFFERENTIATIONS)]
    within_modes = [isinstance(t, _FORWARD_MODE) for t in within if isinstance(t, _DIFFERENTIATIONS)]
    in_forward_mode = [x for x in examples if isinstance(x, _IN_FORWARD_MODE)]
    differentiated_within = [x for x in differentiated for t in within if x._trace is t]
    return Applied(
        is_differentiated=bool(differentiated),
        is_in_forward_mode=within_modes[:1] == [True] and bool(in_forward_mode),
        is_in_forward_over_reverse=True in modes and not modes[0],
        is_transposed=bool([x for x in examples if isinstance(x, TRANSPOSED.tracer)]),
        is_staged=bool(staging) and not [t for t in within if not isinstance(t, TRANSPOSED.trace)],
        # A differentiation outside of the jaxpr that is being made sees the jaxpr as a whole, later.
        is_deferred=bool(staging) and not differentiated_within,
    )


def is_in_eager_loop() -> bool:
    """Whether the running code is being staged for a loop, or the like, that runs in eager mode."""
    staging = [t for t in active_traces() if isinstance(t, STAGED.trace)]
    return bool(staging) and staging[-1].frame.debug_info.traced_for != JIT


def is_rematerialized() -> bool:
    """Whether the running code is being staged for `jax.checkpoint`, on any level."""
    staging = (t.frame.debug_info for t in active_traces() if isinstance(t, STAGED.trace))
    name = checkpoint().traced_for
    return any(info is not None and info.traced_for == name for info in staging)
