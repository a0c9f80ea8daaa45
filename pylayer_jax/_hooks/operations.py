"""The trace of a `with` block of hooks, which packs what each operation keeps.

    c = gelu a          becomes    c = rule_function[name=gelu] a     a planned function of this one operation

In code that JAX traces, a `BlockTrace` gets every operation in the block: an addition, a jitted function, a scan, a
function with a custom gradient. If JAX differentiates it now, or may do so later, the trace binds a `Planned` function
of it in its place. The plan knows which operands the block computed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax

from pylayer_jax._jax.jaxprs import all_equations, inner_jaxprs, with_current_line
from pylayer_jax._jax.rule_function import Values, apply, payload_of, rule_function_p
from pylayer_jax._jax.traces import (
    FORWARD,
    REVERSE,
    STAGED,
    PassThroughTrace,
    ShapedArray,
    TraceState,
    current,
    current_trace,
    eval_jaxpr,
    is_staging,
    is_tracer,
    nothing_is_traced,
    set_current_trace,
    whole_batch,
    without_pass_through,
)
from pylayer_jax._jax.transparency import Identity
from pylayer_jax._jax.types import has_tangent, is_nan_reported, typeof
from pylayer_jax._trees import WeakTable, hashable_or_none

from .active import OFF, PLANNED, SUSPENDED, Block, active, active_pair, innermost_block
from .pack import Pair, Place
from .planned import Planned, Surroundings, has_backward, is_of_backward, stage_for_plan
from .primitives import FACTS, Facts, is_number
from .saving import Saver, UsersRule

__tracebackhide__ = True  # pytest hides these frames, as JAX does elsewhere

# -- one operation -----------------------------------------------------------------------------------------


class Operation(NamedTuple):
    bind: Callable[..., Any]  # a function from the operands to a list of values
    kind: str  # the name of the primitive
    name: str  # the name in errors, jaxprs and reports: for a jitted function, that of the function
    params: dict[str, Any] = {}
    primitive: Any = None  # None for a custom rule or a shard_map, for which a trace has separate methods


def _facts_of(operation: Operation, of_floats: bool) -> Iterator[Facts]:
    """Yield the facts of an operation, or of those in a jitted function: of all, or of those that compute floats."""
    if operation.kind != "jit":
        yield FACTS[operation.kind]
        return
    for e in (e for jaxpr in inner_jaxprs(operation.params) for e in all_equations(jaxpr)):
        if e.primitive.name != "jit" and (not of_floats or any(has_tangent(v.aval) for v in e.outvars)):
            yield FACTS[e.primitive.name]


def _is_view(operation: Operation, args: Sequence[Any], values: Sequence[Any]) -> bool:
    if operation.kind == "jit" and not all(any(has_tangent(typeof(x)) for x in xs) for xs in (args, values)):
        return False  # else `all` is over nothing: `one_hot` of labels, a mask
    return all(f.is_view for f in _facts_of(operation, of_floats=True))


def _may_keep_residuals(operation: Operation, args: Sequence[Any]) -> bool:
    kinds = {type(whole_batch(x)) for x in args}
    is_in_reverse_mode = REVERSE.tracer in kinds
    # In reverse-over-forward mode (`jax.grad` of a function that calls `jax.jvp`), JAX keeps tensors only for a second
    # derivative. Such tensors are not packed.
    is_in_forward_mode = FORWARD.tracer in kinds and not is_in_reverse_mode
    is_later = STAGED.tracer in kinds and not is_in_forward_mode  # JAX may differentiate the jaxpr later
    are_arrays = {type(typeof(x)) for x in args} <= {ShapedArray}  # not Refs or tokens
    if not (is_in_reverse_mode or is_later) or not are_arrays or operation.kind == "while":  # which has no reverse mode
        return False
    factors = args[1:] if operation.kind == "div" else args
    has_number = FACTS[operation.kind].keeps_numbers and any(map(is_number, factors))
    return not (has_number or all(f.keeps_nothing for f in _facts_of(operation, of_floats=True)))


class _BlockMark(Identity):
    """Marks staged code that enters a block while another block is open."""

    name = "hooks_block"


def _holds_block(jaxpr: Any) -> bool:
    """Return whether hooks packed, or were entered, while JAX staged this jaxpr."""
    return any(isinstance(payload_of(e), (_BlockMark, Planned)) for e in all_equations(jaxpr))


# -- the trace -------------------------------------------------------------------------------------------


class BlockTrace(PassThroughTrace):
    __slots__ = ("block", "is_staging", "outer", "places")

    def __init__(self, pair: Pair) -> None:
        trace = current_trace()
        # Past the traces of outer blocks: only the innermost pair applies.
        super().__init__(without_pass_through(trace))
        self.outer = trace if isinstance(trace, BlockTrace) else None
        self.is_staging = is_staging()  # if True, a concrete array is a constant of the program
        self.block = Block(pair, self)  # has the pair: JAX keeps traces in its caches, and must not keep the hooks
        self.places = WeakTable()  # value -> its `Place`

    # -- methods that JAX calls ----------------------------------------------------------------------

    def process_primitive(self, primitive: Any, tracers: Sequence[Any], params: dict[str, Any], /) -> Any:
        def bind(*args: Any) -> Any:
            found = primitive.bind(*args, **params)
            return found if primitive.multiple_results else [found]

        kind = name = primitive.name
        if kind == "convert_element_type":
            aval = typeof(tracers[0])
            same = {"new_dtype": aval.dtype, "weak_type": aval.weak_type, "sharding": None}
            if same == params and isinstance(tracers[0], jax.Array):
                return tracers[0]  # in eager mode JAX would make a copy, which hooks would pack too
        if kind == "jit" or primitive is rule_function_p:
            name = params["name"]
        values = self._process(Operation(bind, kind, name, params, primitive), tracers)
        return values if primitive.multiple_results else values[0]

    def _process_call(self, method: str, primitive: Any, *operands: Any, **params: Any) -> Any:
        *functions, tracers = operands

        def bind(*args: Any) -> Any:
            return getattr(current_trace(), method)(primitive, *functions, args, **params)

        kind, function = primitive.name, functions[0]
        # Where JAX evaluates a jaxpr, `__name__` is a name of JAX.
        name = function.debug_info.func_name if hasattr(function, "debug_info") else getattr(function, "__name__", kind)
        return self._process(Operation(bind, kind, name), tracers)

    process_custom_jvp_call = functools.partialmethod(_process_call, "process_custom_jvp_call")
    process_custom_vjp_call = functools.partialmethod(_process_call, "process_custom_vjp_call")

    def process_shard_map(self, primitive: Any, fun: Any, tracers: Any, /, **params: Any) -> Any:
        trees: list[Any] = []  # of each call: an internal tree of JAX, which is no pytree

        def bind(*args: Any) -> Any:
            tree = current_trace().process_shard_map(primitive, fun, args, **params)
            values = list(tree.vals)
            trees.append(tree.update([None] * len(values)))  # without tracers, which `jax.checking_leaks` would find
            return values

        values = self._process(Operation(bind, primitive.name, primitive.name), tracers)
        return trees[-1].update(values)

    # -- one operation -------------------------------------------------------------------------------

    def _process(self, operation: Operation, args: Sequence[Any]) -> Values:
        with set_current_trace(self.parent_trace):
            if active.value is not self.block or self.block.value is None:
                # Hooks are suspended, or an inner block is open, or JAX restored this trace after the block was left.
                return operation.bind(*args)
            self.block.check_task()
            places = list(map(self.place_of, args))
            values = self._bind(operation, args, places)
        # A view of a value from outside stays outside, even if the block computes an integer operand of the view, such
        # as a start index of `dynamic_slice`.
        of_floats = [p for p, x in zip(places, args, strict=True) if has_tangent(typeof(x))] or places
        # Random numbers have no operand either, and are not computed again.
        if set(places) <= {Place.CONSTANT} and all(f.recomputed for f in _facts_of(operation, of_floats=False)):
            self.put_place(values, Place.CONSTANT)
        elif Place.COMPUTED in of_floats or not _is_view(operation, args, values):
            computed = values
            if operation.kind == "jit":  # which may return some of its operands
                (code,) = inner_jaxprs(operation.params)
                outside = [v for v, place in zip(code.invars, places, strict=True) if place is Place.OUTSIDE]
                computed = [x for x, v in zip(values, code.outvars, strict=True) if v not in outside]
            self.put_place(computed, Place.COMPUTED)
        return values

    def _bind(self, operation: Operation, args: Sequence[Any], places: Sequence[Place]) -> Values:
        inner = inner_jaxprs(operation.params)
        # A Ref that a jaxpr closes over is not an operand of the equation that has the jaxpr as a parameter.
        closes_over_ref = any(not isinstance(v.aval, ShapedArray) for jaxpr in inner for v in jaxpr.constvars)
        if closes_over_ref or any(map(_holds_block, inner)):
            return operation.bind(*args)
        if not _may_keep_residuals(operation, args):
            # The keys of JAX's caches contain the active block: JAX would compile an eager operation per pair.
            with active(SUSPENDED):
                return operation.bind(*args)
        is_custom_rule = operation.primitive is None and operation.kind != "shard_map"
        if is_custom_rule and TraceState().differentiates(args):  # JAX can call its function only once
            return apply(UsersRule(operation.name, Saver(self.block.value, places=places), bind=operation.bind), args)
        planned, operands = self._planned(operation, args, places)
        if not any(has_tangent(v.aval) for v in planned.jaxpr.outvars) or _holds_block(planned.jaxpr):
            return eval_jaxpr(planned.jaxpr, (), *operands)
        return apply(planned, operands)

    def _planned(self, operation: Operation, args: Sequence[Any], places: Sequence[Place]) -> tuple[Planned, Values]:
        """Return a planned function of one operation, and its operands, each tensor once."""
        distinct = {id(x): (x, place) for x, place in zip(args, places, strict=True)}
        position_of = {key: i for i, key in enumerate(distinct)}
        operands, places = [x for x, _ in distinct.values()], [place for _, place in distinct.values()]
        positions = [position_of[id(x)] for x in args]
        types, plans = list(map(typeof, operands)), self.block.plans
        parts = *operation.params.items(), *types, *places, *positions
        key = hashable_or_none((operation.primitive, parts, jax.enable_x64.value))
        # In staged code and in errors, each operation has its own source line.
        is_shared = operation.primitive is not None and key is not None and not (self.is_staging or is_nan_reported())
        if is_shared and (found := plans.get(key)):
            return found, operands
        run = lambda *xs: (operation.bind(*[xs[i] for i in positions]), None)
        jaxpr, consts, _ = stage_for_plan(run, types, operation.name)
        places = [*map(self.place_of, consts), *places]
        planned = Planned(with_current_line(jaxpr), places, operation.name, Surroundings(self.block.value))
        if is_shared and not consts:
            plans[key] = planned
        return planned, [*consts, *operands]

    # -- where values come from ----------------------------------------------------------------------

    def place_of(self, value: Any) -> Place:
        is_constant = not is_tracer(value) if self.is_staging else is_number(value)
        return self.places.get(value, Place.CONSTANT if is_constant else Place.OUTSIDE)

    def put_place(self, values: Sequence[Any], place: Place) -> None:
        """Record the place of these values; also in enclosing blocks, which have their own records."""
        for value in values:
            self.places.put(value, place)
        if self.outer is not None:
            self.outer.put_place(values, place)


class BackwardWatch(PassThroughTrace):
    """A trace that notes whether a backward pass runs under it, eagerly or in a jitted function."""

    __slots__ = ("was_seen",)

    def __init__(self) -> None:
        super().__init__(current_trace())
        self.was_seen = False

    def process_primitive(self, primitive: Any, tracers: Sequence[Any], params: dict[str, Any], /) -> Any:
        if not self.was_seen:
            self.was_seen = is_of_backward(current()) or any(map(has_backward, inner_jaxprs(params)))
        with set_current_trace(self.parent_trace):
            return primitive.bind(*tracers, **params)


def enter_block(pair: Pair) -> None:
    if innermost_block() is not None and not isinstance(current_trace(), BlockTrace):
        apply(_BlockMark(()), ())  # so that no enclosing operation packs: only the innermost pair applies
    block = Block(pair) if active.value is OFF or nothing_is_traced() else BlockTrace(pair).block
    block.enter()


# -- layers in a block -----------------------------------------------------------------------------------


def saver_of(layer: str, operands: Sequence[Any], is_exact: bool) -> Saver | None:
    pair, trace = active_pair(), current_trace()
    if pair is None and active.value is not PLANNED:
        return None
    places = list(map(trace.place_of, operands)) if isinstance(trace, BlockTrace) else None
    return Saver(pair, layer, places, is_exact)


def mark_as_computed(values: Sequence[Any]) -> None:
    if isinstance(trace := current_trace(), BlockTrace):
        trace.put_place(values, Place.COMPUTED)
