"""Internals of JAX that this package uses: traces, tracers, and names that JAX may move to another module.

JAX gives the classes of traces and tracers no public names. So this module, at import, transforms a function, as by
`jax.vmap`, that records the classes of its argument and of the current trace. This runs in `jax.eval_shape`, which
compiles nothing and starts no backend. An unexpected class raises an ImportError.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

# Lint forbids imports of JAX's submodules elsewhere. The rest of the package uses `jax`, `jax.numpy`, `jax.lax`,
# `jax.tree_util`, `jax.errors` and this subpackage, to which `name as name` exports a name.
import jax
import numpy as np
from jax.ad_checkpoint import checkpoint_name as checkpoint_name
from jax.core import ShapedArray as ShapedArray
from jax.core import Tracer, eval_context
from jax.core import eval_jaxpr as eval_jaxpr
from jax.custom_derivatives import SymbolicZero as SymbolicZero
from jax.experimental import io_callback as io_callback
from jax.experimental.buffer_callback import buffer_callback as buffer_callback
from jax.extend.core import DebugInfo as DebugInfo
from jax.extend.core import Jaxpr as Jaxpr
from jax.extend.core import Literal as Literal
from jax.extend.core import Primitive as Primitive
from jax.extend.core import Var as Var
from jax.extend.core import get_opaque_trace_state, take_current_trace
from jax.extend.core import jaxprs_in_params as jaxprs_in_params
from jax.extend.core import primal_dtype_to_tangent_dtype as primal_dtype_to_tangent_dtype
from jax.extend.core import set_current_trace as set_current_trace
from jax.extend.core import unmapped_aval as unmapped_aval
from jax.extend.linear_util import wrap_init as wrap_init
from jax.extend.source_info_util import current as current
from jax.extend.source_info_util import register_exclusion as register_exclusion
from jax.extend.source_info_util import summarize as summarize
from jax.interpreters import ad as ad
from jax.interpreters import batching as batching
from jax.interpreters import mlir as mlir
from jax.interpreters import partial_eval as partial_eval
from jax.lax import convert_element_type_p as convert_element_type_p

# JAX raises these exceptions if traced code needs a concrete value.
NEEDS_VALUES = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
)


# -- classes, discovered at import -------------------------------------------------------------------


class TransformClasses(NamedTuple):
    tracer: type[Any]  # the class of the arguments of a transformed function
    trace: type[Any]  # the class of the current trace while the function runs


def current_trace() -> Any:
    with take_current_trace() as trace:
        return trace


def discover(what: str, probe: Callable[[Any], Any]) -> Any:
    """Return the result of `probe` for a tracer of `jax.eval_shape`. If it fails, raise an ImportError."""
    found: list[Any] = []  # `jax.eval_shape` can return arrays only
    try:
        # A traced function may import this package. In an eval context, none of its transformations is active.
        with eval_context(), jax.disable_jit(False):
            jax.eval_shape(lambda x: found.append(probe(x)), jax.ShapeDtypeStruct((1,), np.float32))
        return found[0]
    except Exception as error:
        raise ImportError(
            f"pylayer_jax cannot find {what} in jax {jax.__version__} ({type(error).__name__}: {error}). It was tested "
            "with jax 0.10.2 and 0.12.0. Install one of these, or a newer pylayer_jax."
        ) from error


def check(condition: bool, found: object) -> None:
    if not condition:
        raise TypeError(f"found {found}")


def _classes_of(
    name: str, transform: Callable[[Any, Any], object], primal_attribute: str | None = None
) -> TransformClasses:
    """Find the classes of a transformation, whose tracers hold their value in `primal_attribute`."""

    def probe(x: Any) -> TransformClasses:
        outer, found = current_trace(), set[TransformClasses]()

        def transformed(y: Any) -> Any:
            trace = current_trace()
            check(y._trace is trace and trace.parent_trace is outer, f"{type(trace)}, not within {outer}")
            primal = x if primal_attribute is None else getattr(y, primal_attribute)
            check(primal is x, f"another {primal_attribute} of {type(y)}")
            found.add(TransformClasses(type(y), type(trace)))
            return y

        transform(transformed, x)
        check(len(found) == 1, found or "no call of the function")
        return found.pop()

    return discover(f"the tracers and traces of {name}", probe)


with eval_context():
    EVAL_TRACE: type[Any] = type(current_trace())
    _NO_TRACE = get_opaque_trace_state()
STAGED = _classes_of("jax.jit", lambda f, x: jax.jit(f)(x))
BATCHED = _classes_of("jax.vmap", lambda f, x: jax.vmap(f)(x), primal_attribute="val")
FORWARD = _classes_of("jax.jvp", lambda f, x: jax.jvp(f, (x,), (x,)), primal_attribute="primal")
REVERSE = _classes_of(
    "jax.vjp and jax.linearize", lambda f, x: (jax.vjp(f, x), jax.linearize(f, x)), primal_attribute="primal"
)
PARTIAL = _classes_of("jax.linear_transpose", jax.linear_transpose)


def _check_classes(x: Any) -> None:
    kinds = (STAGED, BATCHED, FORWARD, REVERSE, PARTIAL)
    for classes in ([k.tracer for k in kinds], [EVAL_TRACE, *(k.trace for k in kinds)]):
        are_unrelated = all(sum(issubclass(c, other) for other in classes) == 1 for c in classes)
        check(are_unrelated, classes)
    found: list[Any] = []
    jax.vmap(lambda y: found.extend((current_trace().axis_data.name, y.batch_dim)), axis_name="i")(x)
    jax.linear_transpose(lambda y: found.extend((y.is_known(), y.pval.get_known())), x)
    check(found == ["i", 0, False, None], found)


discover("classes that tell transformations apart, the axis of jax.vmap, and which values are known", _check_classes)


# -- values ------------------------------------------------------------------------------------------


def is_tracer(value: object) -> bool:
    return isinstance(value, Tracer)


def batch_traces(value: Any) -> set[Any]:
    """Return the traces of the (nested) `jax.vmap`s that batch a value."""
    found = set[Any]()
    while isinstance(value, BATCHED.tracer):
        if value.batch_dim is not None:
            found.add(value._trace)
        value = value.val
    return found


def whole_batch(value: Any) -> Any:
    """Return the array of the whole batch for a tracer of (nested) `jax.vmap`, or the value itself."""
    while isinstance(value, BATCHED.tracer):
        value = value.val
    return value


def is_unknown(value: Any) -> bool:
    """Return whether a value, or its whole batch, is unknown to a partial evaluation (`jax.linear_transpose`)."""
    value = whole_batch(value)
    return isinstance(value, PARTIAL.tracer) and not value.is_known()


def is_differentiated(value: Any) -> bool:
    return isinstance(whole_batch(value), (FORWARD.tracer, REVERSE.tracer))


def is_in_forward_mode(value: Any) -> bool:
    return isinstance(whole_batch(value), FORWARD.tracer)


def is_staged(value: Any) -> bool:
    return isinstance(whole_batch(value), STAGED.tracer)


# -- traces ------------------------------------------------------------------------------------------


def nothing_is_traced() -> bool:
    """Return whether no transformation is active, in a third of a microsecond. JAX has no other public test."""
    return get_opaque_trace_state() == _NO_TRACE


class PassThroughTrace:
    """Base class of traces that wrap another trace and make no tracers.

    It is no `Trace`, whose attributes it has from the parent: for example that by which flax.nnx sees whether a value
    belongs to the current transformation, since this trace transforms nothing. tests: integrations/test_flax_nnx.py
    """

    __slots__ = ("__weakref__", "parent_trace")

    def __init__(self, parent_trace: Any) -> None:
        self.parent_trace = parent_trace

    def __getattr__(self, name: str) -> Any:
        return getattr(self.parent_trace, name)


_NEUTRAL_TRACES: Final = (EVAL_TRACE, BATCHED.trace, PARTIAL.trace, PassThroughTrace)


def without_pass_through(trace: Any) -> Any:
    while isinstance(trace, PassThroughTrace):
        trace = trace.parent_trace
    return trace


def _traces() -> list[Any]:
    """Return the current trace and those outside of it, from the innermost outwards."""
    traces = [current_trace()]
    while (outer := getattr(traces[-1], "parent_trace", None)) is not None:
        traces.append(outer)
    return traces


class TraceState:
    """The transformations that are active where code runs.

        vmap(jit(grad(f))) runs f with the traces of grad, jit, vmap and eager mode, from the innermost outwards

    The innermost staging trace, that of jit, makes a jaxpr, so the traces outside of it transform an operation only
    when JAX evaluates this jaxpr. `differentiations`, `is_forward_mode` and `has_unknown_trace` describe only the
    traces inside of it.
    """

    def __init__(self) -> None:
        self.is_staged = False  # as `is_staging()`: whether the current trace or an outer one makes a jaxpr
        self.differentiations: list[Any] = []  # the traces that differentiate each operation as soon as it runs
        self.has_unknown_trace = False  # as in an eager shard_map
        modes: list[TransformClasses] = []
        for trace in _traces():
            if isinstance(trace, STAGED.trace):
                self.is_staged = True
            elif isinstance(trace, (FORWARD.trace, REVERSE.trace)):
                modes.append(FORWARD if isinstance(trace, FORWARD.trace) else REVERSE)
                if not self.is_staged:
                    self.differentiations.append(trace)
            elif not self.is_staged and not isinstance(trace, _NEUTRAL_TRACES):
                self.has_unknown_trace = True
        self.is_differentiated = bool(modes)
        self.is_forward_over_reverse = modes[:1] == [REVERSE] and FORWARD in modes  # as for jvp(grad(f))
        self.is_forward_mode = bool(self.differentiations) and modes[0] is FORWARD

    def differentiates(self, values: Sequence[Any]) -> bool:
        """Return whether JAX differentiates an operation on `values` as it runs."""
        traces = [whole_batch(x)._trace for x in values if is_differentiated(x)]
        return any([trace is t for trace in traces for t in self.differentiations])  # noqa: C419 - a list is faster


def is_active(tracer: Any) -> bool:
    return any(trace is tracer._trace for trace in _traces())


def is_staging() -> bool:
    return any([isinstance(trace, STAGED.trace) for trace in _traces()])  # noqa: C419 - a list is faster


def is_named(axis: Any) -> bool:
    return type(axis.name) is not object  # without a name, `axis.name` is a bare object()


def trace_of_primals(primals: Sequence[Any]) -> Any:
    """Return the trace in which a user's method must run."""
    # To linearize a primitive, JAX runs its JVP rule in a partial evaluation, with known primals and unknown tangents.
    trace = current_trace()
    while isinstance(trace, PARTIAL.trace) and not any(map(is_unknown, primals)):
        trace = trace.parent_trace
    return trace
