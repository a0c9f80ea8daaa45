"""The traces that are active and the tracers that they make.

JAX gives these classes no public names. Therefore this module learns them at import: it transforms (with `jax.vmap`,
for example) a function that notes the classes of its argument and of the current trace. This happens in
`jax.eval_shape`, which compiles nothing and starts no backend. If JAX is not as expected, the import fails.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import jax
import numpy as np

from .imports import Trace, Tracer, eval_context, get_opaque_trace_state, take_current_trace

# The exceptions of JAX for traced code that needs a number.
NEEDS_VALUES = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
)


# -- classes, learned by looking -------------------------------------------------------------------


class TransformClasses(NamedTuple):
    """The classes of one transformation."""

    tracer: type[Any]  # the class of the arguments of a transformed function
    trace: type[Any]  # the class of the current trace while the function runs


def current_trace() -> Any:
    with take_current_trace() as trace:
        return trace


def learn(what: str, look: Callable[[Any], Any]) -> Any:
    """Return the result of `look` for a staged array.

    Raises:
        ImportError: if `look` fails; the message names the versions of JAX that were tested.
    """
    found: list[Any] = []
    try:
        # The package may be imported within a function that is traced.
        with eval_context(), jax.disable_jit(False):
            jax.eval_shape(lambda x: found.append(look(x)), jax.ShapeDtypeStruct((1,), np.float32))
        return found[0]
    except Exception as error:
        raise ImportError(
            f"pylayer_jax cannot find {what} in jax {jax.__version__} ({type(error).__name__}: {error}). It was tested "
            "with jax 0.10.2 and 0.12.0. Install one of these, or a newer pylayer_jax."
        ) from error


def expect(condition: bool, found: object) -> None:
    if not condition:
        raise TypeError(f"found {found}")


def _classes_of(name: str, transform: Callable[[Any, Any], object], value_below: str | None = None) -> TransformClasses:
    """Learn the classes of a transformation. `value_below` is the tracer's attribute that holds the value below it."""

    def look(x: Any) -> TransformClasses:
        outer, found = current_trace(), set[TransformClasses]()

        def transformed(y: Any) -> Any:
            trace = current_trace()
            expect(y._trace is trace and trace.parent_trace is outer, f"{type(trace)}, not within {outer}")
            expect(value_below is None or getattr(y, value_below) is x, f"another {value_below} of {type(y)}")
            found.add(TransformClasses(type(y), type(trace)))
            return y

        transform(transformed, x)
        expect(len(found) == 1, found or "no call of the function")
        return found.pop()

    return learn(f"the tracers and traces of {name}", look)


with eval_context():
    EVAL_TRACE: type[Any] = type(current_trace())
    _NO_TRACE = get_opaque_trace_state(convention="nnx")
STAGED = _classes_of("jax.jit", lambda f, x: jax.jit(f)(x))
BATCHED = _classes_of("jax.vmap", lambda f, x: jax.vmap(f)(x), value_below="val")
FORWARD = _classes_of("jax.jvp", lambda f, x: jax.jvp(f, (x,), (x,)), value_below="primal")
REVERSE = _classes_of("jax.vjp and jax.linearize", lambda f, x: (jax.vjp(f, x), jax.linearize(f, x)), "primal")
PARTIAL = _classes_of("jax.linear_transpose", lambda f, x: jax.linear_transpose(f, x))  # noqa: PLW0108


def _sharding_of_jit(x: Any) -> type[Any]:
    (equation,) = jax.make_jaxpr(jax.jit(lambda y: y))(x).eqns
    (sharding,) = equation.params["out_shardings"]
    expect(not isinstance(sharding, jax.sharding.Sharding), sharding)
    return type(sharding)


UNSPECIFIED_SHARDING = learn("the shardings of a jitted function that places nothing", _sharding_of_jit)


def _check_classes(x: Any) -> None:
    kinds = (STAGED, BATCHED, FORWARD, REVERSE, PARTIAL)
    for classes in ([k.tracer for k in kinds], [EVAL_TRACE, *(k.trace for k in kinds)]):
        expect(all(sum(issubclass(c, other) for other in classes) == 1 for c in classes), classes)
    found: list[Any] = []
    jax.vmap(lambda y: found.append((current_trace().axis_data.name, y.batch_dim)), axis_name="i")(x)
    expect(found == [("i", 0)], found)


learn("classes that tell transformations apart, and the axis of jax.vmap", _check_classes)


# -- values ------------------------------------------------------------------------------------------


def is_tracer(value: object) -> bool:
    return isinstance(value, Tracer)


def is_batched(value: Any) -> bool:
    """Return whether a value is batched by the innermost `jax.vmap` that traces it."""
    return isinstance(value, BATCHED.tracer) and value.batch_dim is not None


def whole_batch(value: Any) -> Any:
    """Return the batch that a value is an example of, through nested `jax.vmap`s; any other value itself."""
    while isinstance(value, BATCHED.tracer):
        value = value.val
    return value


def is_unknown(value: Any) -> bool:
    """Return whether a value, or the batch that it is an example of, is unknown while JAX finds a linear function."""
    value = whole_batch(value)
    return isinstance(value, PARTIAL.tracer) and not value.is_known()


def is_differentiated(value: Any) -> bool:
    """Return whether a value, or the batch that it is an example of, is being differentiated."""
    return isinstance(whole_batch(value), (FORWARD.tracer, REVERSE.tracer))


def is_in_forward_mode(value: Any) -> bool:
    """Return whether `jax.jvp` differentiates a value, or the batch that it is an example of."""
    return isinstance(whole_batch(value), FORWARD.tracer)


def is_staged(value: Any) -> bool:
    """Return whether a value, or the batch that it is an example of, belongs to a jaxpr that is being made."""
    return isinstance(whole_batch(value), STAGED.tracer)


# -- traces ------------------------------------------------------------------------------------------


def nothing_is_traced() -> bool:
    """Return whether no transformation is active. JAX has no other public test; this takes a third of a microsecond."""
    return get_opaque_trace_state(convention="nnx") == _NO_TRACE


class PassThroughTrace(Trace):
    """Base class of a trace that wraps another trace and makes no tracers of its own."""

    __slots__ = ("parent_trace",)

    def __init__(self, parent_trace: Any) -> None:
        super().__init__()
        self.parent_trace = parent_trace
        self.requires_low = parent_trace.requires_low
        # flax.nnx compares `_weakref` to see whether a value belongs to the current transformation. This trace
        # transforms nothing, so it has the `_weakref` of its parent. tests/around/test_flax_nnx.py
        if hasattr(parent_trace, "_weakref"):
            self._weakref = parent_trace._weakref

    def process_call(self, *args: Any) -> Any:  # jax 0.10, for the known part of a checkpointed loop
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


_KINDS: Final = {
    "passes through": PassThroughTrace,
    "staging": STAGED.trace,
    "forward mode": FORWARD.trace,
    "reverse mode": REVERSE.trace,
    "usual": (EVAL_TRACE, BATCHED.trace, PARTIAL.trace),
}


@functools.cache
def _kind_of(trace_class: type[Any]) -> str:
    return next((kind for kind, classes in _KINDS.items() if issubclass(trace_class, classes)), "unusual")


def trace_below(trace: Any) -> Any:
    """Return the first trace that transforms something: `trace` itself, or one further out."""
    while isinstance(trace, PassThroughTrace):
        trace = trace.parent_trace
    return trace


def active_traces() -> list[tuple[str, Any]]:
    """Return the current trace and all outer traces, each with its kind, without those that transform nothing."""
    traces: list[tuple[str, Any]] = []
    trace = current_trace()
    while trace is not None:
        kind = _kind_of(type(trace))
        if kind != "passes through":
            traces.append((kind, trace))
        trace = getattr(trace, "parent_trace", None)
    return traces


class Surroundings(NamedTuple):
    """The transformations in which code runs."""

    is_staged: bool  # an active trace makes a jaxpr
    differentiations: list[Any]  # traces of differentiations within that jaxpr, innermost first
    is_forward_mode: bool  # the innermost of these differentiations is `jax.jvp`
    is_forward_over_reverse: bool  # `jax.jvp` of a reverse-mode differentiation
    is_differentiated: bool  # any differentiation is active
    is_unusual: bool  # a trace that is neither staging nor eager, as that of an eager jax.shard_map

    def will_be_differentiated_later(self, values: Sequence[Any]) -> bool:
        """Return whether an operation on `values` becomes an equation that JAX may differentiate later."""
        return self.is_staged and not any(
            is_differentiated(x) and any(whole_batch(x)._trace is t for t in self.differentiations) for x in values
        )


def surroundings() -> Surroundings:
    """Return the transformations that are active now."""
    is_staged = is_unusual = False
    within: list[Any] = []
    modes: list[str] = []  # the modes of all differentiations, innermost first
    for kind, trace in active_traces():
        if kind == "staging":
            is_staged = True
        elif kind in ("forward mode", "reverse mode"):
            modes.append(kind)
            if not is_staged:
                within.append(trace)
        elif kind == "unusual" and not is_staged:
            is_unusual = True
    is_forward_over_reverse = bool(modes) and modes[0] == "reverse mode" and "forward mode" in modes
    is_forward_mode = bool(within) and modes[0] == "forward mode"
    return Surroundings(is_staged, within, is_forward_mode, is_forward_over_reverse, bool(modes), is_unusual)


def is_staging() -> bool:
    """Return whether an active trace makes a jaxpr, at any level."""
    return "staging" in [kind for kind, _ in active_traces()]


def trace_of_primals(primals: Sequence[Any]) -> Any:
    """Return the trace in which a jvp rule of a primitive computes with concrete primals.

    JAX runs the rule in a trace that records linear operations; a method of the user must not see that trace.
    """
    trace = current_trace()
    while isinstance(trace, PARTIAL.trace) and not any(map(is_unknown, primals)):
        trace = trace.parent_trace
    return trace
