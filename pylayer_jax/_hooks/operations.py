"""Packing of the residuals of plain JAX operations inside a block of hooks.

A block sets a new trace over the current trace, and JAX passes every operation of the block to the new trace. If JAX
differentiates an operation, now or perhaps later, the new trace binds a `RuleFunction`, whose rule is `jax.vjp` of
the operation with packed residuals:

    c = sin a          becomes    c = rule_function[name=sin] a

    its derivative:               c, r = sin a, cos a;  p = pack r;  dc = linear_map[name=sin] p da

An operation is anything that JAX binds: an addition, a jitted function, a scan, a function with a custom gradient.
Hooks are suspended inside an operation, so that its residuals are packed once. Only a staged scan, and a jitted
function that contains a loop, are staged again with packing inside.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import jax

from pylayer_jax._jax.identities import is_mark, leave_mark
from pylayer_jax._jax.imports import ShapedArray, eval_jaxpr, set_current_trace
from pylayer_jax._jax.jaxprs import (
    as_parameter,
    has_equation,
    inner_jaxprs,
    jaxpr_and_consts,
    scan_counts,
    stage,
)
from pylayer_jax._jax.masks import merge, scatter, select
from pylayer_jax._jax.primitives import object_of
from pylayer_jax._jax.rule_function import (
    LinearMap,
    RuleFunction,
    UnstagedBatch,
    Values,
    apply,
    apply_linear,
    rule_function_p,
)
from pylayer_jax._jax.tracers import (
    BATCHED,
    FORWARD,
    REVERSE,
    STAGED,
    PassThroughTrace,
    current_trace,
    is_differentiated,
    is_staged,
    is_staging,
    is_tracer,
    nothing_is_traced,
    trace_below,
    trace_of_primals,
    whole_batch,
)
from pylayer_jax._jax.types import as_arrays, full_cotangent, has_tangent, tangent_type, typeof

from .active import Block, active, active_pair, hooks_suspended, innermost_block
from .derive import MOVE_NAMES, Computed, Recorder, Residual, Root, adds_a_number, is_number, small_jaxpr, with_roots
from .pair import OFFSETS, Pair, TensorInfo, WeakTable
from .residuals import PackedResiduals, Packing, PairOfLayer, keeps_residuals

Bind = Callable[..., Any]

# Operations whose vjp keeps no array, so that hooks have nothing to pack.
_WITHOUT_RESIDUALS: Final = MOVE_NAMES | frozenset(
    (
        "add", "add_any", "concatenate", "convert_element_type", "device_put", "name", "neg", "new_ref", "pad", "pcast",
        "psum", "real", "imag", "reduce_sum", "sharding_constraint", "slice", "split", "stop_gradient", "sub",
    )
)  # fmt: skip
# Operations whose result is treated as a value from outside the block if their operand is one.
_PASSING_ON: Final = MOVE_NAMES | frozenset(
    (
        "convert_element_type", "device_put", "dynamic_slice", "name", "pcast", "sharding_constraint", "slice", "split",
        "stop_gradient",
    )
)  # fmt: skip
_JITTED: Final = ("jit", "pjit")
_MARK: Final = "hooks_block"  # marks staged code that enters a block while another block is open

# The sources of values in a block: from outside, a constant, or computed in the block.
OUTSIDE, CONSTANT, COMPUTED = range(3)


class Operation(RuleFunction):
    """One operation of a block, as a `RuleFunction` whose derivative keeps packed residuals.

    The last operands are not operands of the operation itself. They are values from outside the block, from which
    residuals can be recomputed.
    """

    def __init__(self, name: str, pair: Pair, run: Bind, stays: dict[int, Residual], names: Sequence[str]) -> None:
        self.name = name
        self._pair, self._run = pair, run
        self._stays = stays  # position of an operand that is not packed -> its residual
        self._names = names  # the name of each operand, for `only`
        self.jaxpr = None

    def stage(self, args: Sequence[Any]) -> Values:
        """Stage the operation, so that it can run more than once. Return the values that the operation closes over."""
        n, types = len(self._names), [typeof(x) for x in args]
        self.jaxpr, consts, _ = stage(lambda *args: (self._run(*args[:n]), None), types, self.name)
        self.n_consts = len(consts)
        return consts

    def run(self, *args: Any) -> Values:
        return self._run(*args[: len(self._names)]) if self.jaxpr is None else super().run(*args)

    def batch(self, axis: Any, dims: Sequence[Any], types: Sequence[Any]) -> tuple[RuleFunction, Values, Any]:
        if self.jaxpr is None:  # JAX can call the Python function of this operation only once
            return UnstagedBatch(self, axis, dims), [], None
        return super().batch(axis, dims, types)

    def transpose(self, args: Sequence[Any], cotangents: Sequence[Any]) -> Values:
        """Return cotangents of the operands that are None. JAX calls this to transpose code around a block."""
        missing = [x is None for x in args]
        types = [v.aval for v in self.jaxpr.invars]
        given = [full_cotangent(c, v.aval) for c, v in zip(cotangents, self.jaxpr.outvars, strict=True)]
        transposed = jax.linear_transpose(lambda *xs: self.run(*merge(missing, xs, args)), *select(types, missing))
        return scatter(transposed(given), missing)

    def rule(self, primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Values, Values]:
        __tracebackhide__ = True
        n = self.n_consts + len(self._names)
        nonzero = [t is not None and i < n for i, t in enumerate(tangents)]
        given = select(tangents, nonzero)
        if not given:
            values = apply(self, primals)
            return values, [None] * len(values)
        run = lambda *args: self.run(*merge(nonzero, args, primals))  # noqa: E731
        if not keeps_residuals(given):
            with hooks_suspended():
                values, found = jax.jvp(run, select(primals, nonzero), given)
            return values, [t if has_tangent(typeof(v)) else None for v, t in zip(values, found, strict=True)]
        with set_current_trace(trace_below(trace_of_primals(primals))):
            recorder = Recorder(current_trace())
            with hooks_suspended(), set_current_trace(recorder):
                values, pullback = jax.vjp(run, *select(primals, nonzero))
            leaves, treedef = jax.tree_util.tree_flatten(pullback)
            residuals = as_arrays(leaves)  # JAX keeps some constants in internal array classes
            packed, arrays, values = Packing(
                self._pair,
                f"the operation {self.name}, residual",
                lambda i: TensorInfo(operation=self.name, name=self._name_of(residuals[i], primals)),
                primals,
                self._known(primals, dict(zip(map(id, leaves), residuals, strict=True))),
                recorder.origins,
            ).pack(residuals, values)
        linear = _PackedPullback(self.name, packed, treedef, [typeof(x) for x in values])
        found = apply_linear(linear, arrays, given)
        return values, scatter(found, [has_tangent(typeof(v)) for v in values])

    def _known(self, primals: Sequence[Any], array_of: dict[int, Any]) -> list[tuple[Any, Residual]]:
        """Return the operands that are not packed, with their residuals. `array_of`: id of a leaf -> its array."""
        primals = [array_of.get(id(x), x) for x in primals]
        args = primals[self.n_consts :]
        found: list[tuple[Any, Residual]] = [(x, Root([x])) for x in primals[: self.n_consts]]
        for i, residual in self._stays.items():
            found.append((args[i], with_roots(residual, lambda root: Root([args[n] for n in root.arrays]))))
        return found

    def _name_of(self, residual: Any, primals: Sequence[Any]) -> str:
        named = [n for x, n in zip(primals[self.n_consts :], self._names, strict=False) if n and x is residual]
        return named[0] if named else ""


class _PackedPullback(LinearMap):
    """A linear map from packed residuals and tangents of the operands to tangents of the values."""

    def __init__(self, name: str, packed: PackedResiduals, pullback: Any, value_types: Sequence[Any]) -> None:
        self.name = name
        self.n_residuals = packed.n_arrays
        self.types = [tangent_type(t) for t in value_types if has_tangent(t)]
        self._packed = packed
        self._pullback = pullback  # the treedef of the function that `jax.vjp` returned
        self._value_types = value_types

    def pull(self, residuals: Sequence[Any], cotangents: Sequence[Any]) -> Values:
        __tracebackhide__ = True
        unpacked = self._packed.unpack(residuals, cotangents)
        pullback = jax.tree_util.tree_unflatten(self._pullback, list(unpacked))
        return self._call(pullback, unpacked.cotangents)

    def _call(self, pullback: Any, cotangents: Sequence[Any]) -> Values:
        given = iter(cotangents)
        full = [full_cotangent(next(given) if has_tangent(t) else None, t) for t in self._value_types]
        with hooks_suspended(), set_current_trace(trace_below(current_trace())):
            if not hasattr(pullback, "with_logs"):  # before jax 0.12
                return list(pullback(full))
            found, logs = pullback.with_logs(full)
        if logs:  # only JAX's own primitives may pass logs on
            raise TypeError(
                f"the backward of the operation {self.name} returns the logs {sorted(map(str, logs))}, which a block "
                "of hooks would lose. Apply the function that returns them (defvjp_with_logs) outside of the block."
            )
        return list(found)

    def push(self, residuals: Sequence[Any], tangents: Sequence[Any]) -> Values:
        __tracebackhide__ = True
        types = tuple(jax.ShapeDtypeStruct(t.shape, t.dtype) for t in self.types)
        pullback = jax.tree_util.tree_unflatten(self._pullback, list(self._packed.unpack(residuals, ())))
        transposed = jax.linear_transpose(lambda *cotangents: self._call(pullback, cotangents), *types)
        return list(transposed(list(tangents)))


class _Request(NamedTuple):
    """One operation that JAX asks the trace of a block to bind."""

    bind: Bind  # a function from the operands to a list of values
    name: str
    shown: str  # the name in errors and jaxprs
    params: dict[str, Any] = {}
    primitive: Any = None  # None for a custom rule or a shard_map, for which a trace has separate methods


class HooksTrace(PassThroughTrace):
    """The trace that gets all operations in a block of hooks."""

    __slots__ = ("block", "is_staging", "names", "outer", "outside", "sources")

    def __init__(self, pair: Pair) -> None:
        current = current_trace()
        super().__init__(trace_below(current))  # skip the traces of outer blocks: only the innermost pair applies
        self.outer = current if isinstance(current, HooksTrace) else None
        self.is_staging = is_staging()  # if True, a concrete array is a constant of the program
        self.block = Block(pair, self)
        self.sources = WeakTable()  # value -> CONSTANT or COMPUTED; for other values see `_source`
        self.outside = WeakTable()  # value -> the residual that recomputes it from values from outside
        self.names = WeakTable()  # value -> the name that `checkpoint_name` gave it

    @property
    def pair(self) -> Pair:
        return self.block.value  # JAX's caches keep traces, and must not keep the hooks with them

    # -- methods that JAX calls ----------------------------------------------------------------------

    def process_primitive(self, primitive: Any, tracers: Sequence[Any], params: dict[str, Any], /) -> Any:
        __tracebackhide__ = True

        def bind(*args: Any, **changed: Any) -> Any:
            found = primitive.bind(*args, **{**params, **changed})
            return found if primitive.multiple_results else [found]

        name = primitive.name
        if name == "convert_element_type" and _changes_nothing(tracers[0], **params):
            return tracers[0]  # in eager mode JAX would make a copy, which hooks would pack too
        shown = name
        if name in _JITTED or primitive is rule_function_p:
            shown = params["name"]
        elif name == "custom_vjp_call":
            shown = params["call_jaxpr"].debug_info.func_name
        values = self._process(_Request(bind, name, shown, params, primitive), tracers)
        if name == "name":
            self.names.put(values[0], params["name"])
        return values if primitive.multiple_results else values[0]

    def process_custom_jvp_call(self, *args: Any, **params: Any) -> Any:
        __tracebackhide__ = True
        return self._process_call("process_custom_jvp_call", *args, **params)

    def process_custom_vjp_call(self, *args: Any, **params: Any) -> Any:
        __tracebackhide__ = True
        return self._process_call("process_custom_vjp_call", *args, **params)

    def _process_call(self, method: str, primitive: Any, *args: Any, **params: Any) -> Any:
        __tracebackhide__ = True
        *functions, tracers = args

        def bind(*args: Any) -> Any:
            return getattr(current_trace(), method)(primitive, *functions, args, **params)

        name = primitive.name
        return self._process(_Request(bind, name, getattr(functions[0], "__name__", name)), tracers)

    def process_shard_map(self, primitive: Any, fun: Any, tracers: Any, /, **params: Any) -> Any:
        __tracebackhide__ = True
        result: Any = None  # an internal tree of JAX, which is no pytree

        def bind(*args: Any) -> Any:
            nonlocal result
            result = current_trace().process_shard_map(primitive, fun, args, **params)
            return list(result.vals)

        values = self._process(_Request(bind, primitive.name, primitive.name), tracers)
        return result.update(values)

    # -- one operation -------------------------------------------------------------------------------

    def _process(self, request: _Request, args: Sequence[Any]) -> Values:
        __tracebackhide__ = True
        with set_current_trace(self.parent_trace):
            if active.value is not self.block or self.block.is_left:
                # Hooks are suspended, an inner trace has ended, or an inner block passes on a packed operation.
                return request.bind(*args)
            self.block.check_task()
            sources = list(map(self._source, args))
            values = self._bind(request, args, sources)
        source = _source_of_results(request, args, sources)
        self.mark(values, source)
        if source == OUTSIDE and request.primitive and len(values) == 1 and not self.pair.packs_arguments:
            inputs = [x if is_number(x) else self.outside.get(x) or Root([x]) for x in args]
            self.outside.put(values[0], Computed(request.primitive, request.params, inputs))
        return values

    def _bind(self, request: _Request, args: Sequence[Any], sources: Sequence[int]) -> Values:
        __tracebackhide__ = True
        bind, name, shown, params, _ = request
        if [j for j in inner_jaxprs(params) if _holds_block(j) or _closes_over_ref(j)]:
            return bind(*args)
        kinds = {type(whole_batch(x)) for x in args}
        is_forward = FORWARD.tracer in kinds and REVERSE.tracer not in kinds
        is_differentiable = REVERSE.tracer in kinds or STAGED.tracer in kinds
        keeps_nothing = name in _WITHOUT_RESIDUALS and not (self.pair.keeps >= OFFSETS and adds_a_number(name, args))
        has_others = bool({type(typeof(x)) for x in args} - {ShapedArray})  # such as Refs and tokens
        keeps_nothing = keeps_nothing or name == "while"  # `while` has no reverse mode
        if keeps_nothing or is_forward or not is_differentiable or has_others:
            # Suspend the hooks: otherwise JAX would compile an eager operation again for each pair.
            with hooks_suspended():
                return bind(*args)
        if (inside := self._packing_inside(request, args, sources)) is not None:
            return inside
        stays, extra = self._what_stays(args)
        operation = Operation(shown, self.pair, bind, stays, [self.names.get(x, "") for x in args])
        # JAX calls the Python function of some operations only once.
        is_run_once = self._differentiates(args) and name != "shard_map"
        args = [*args, *extra]
        consts = [] if is_run_once else operation.stage(args)
        jaxpr = operation.jaxpr
        if jaxpr is not None and (_holds_block(jaxpr) or not any(has_tangent(v.aval) for v in jaxpr.outvars)):
            return operation.run(*consts, *args)
        return apply(operation, [*consts, *args])

    def _differentiates(self, args: Sequence[Any]) -> bool:
        """Return whether the trace below differentiates some operands, or their whole batches, in reverse mode."""
        examples = list(map(whole_batch, args))
        trace = self.parent_trace
        while isinstance(trace, (BATCHED.trace, REVERSE.trace)):
            if any(isinstance(x, REVERSE.tracer) and x._trace is trace for x in examples):
                return True
            trace = trace_below(trace.parent_trace)  # a trace that differentiates other values passes on the operation
        return False

    def _packing_inside(self, request: _Request, args: Sequence[Any], sources: Sequence[int]) -> Values | None:
        """Bind a staged scan, or a jitted function with a loop, so that each iteration packs. Else return None.

        If a scan were packed as a whole, JAX would first stack the residuals of all iterations.
        """
        __tracebackhide__ = True
        bind, name, _, params, _ = request
        if name not in ("scan", *_JITTED) or not any(map(_is_staged_below, args)):
            return None
        if any(map(_is_differentiated_twice, args)):  # residuals packed within a scan have no second derivative
            return None
        jaxpr, consts = jaxpr_and_consts(params["jaxpr"])
        if name != "scan" and not (has_equation(jaxpr, "scan") or has_equation(jaxpr, "while")):
            return None
        if name == "scan":
            n_consts, n_carry = scan_counts(params)
            sources = [*sources[:n_consts], *[COMPUTED] * n_carry, *sources[n_consts + n_carry :]]

        def body(*args: Any) -> tuple[list[Any], None]:
            trace = HooksTrace(self.pair)
            for x, source in zip(args, sources, strict=True):
                trace.mark([x], source)
            trace.block.enter()
            try:
                return eval_jaxpr(jaxpr, consts, *args), None
            finally:
                trace.block.leave()

        hooked, closed_over, _ = stage(body, [v.aval for v in jaxpr.invars], name)
        if closed_over or [v.aval for v in hooked.outvars] != [v.aval for v in jaxpr.outvars]:
            return None
        return bind(*args, jaxpr=as_parameter(hooked))

    def _what_stays(self, args: Sequence[Any]) -> tuple[dict[int, Residual], Values]:
        """Return residuals (with positions in place of arrays) of operands that are not packed, and extra operands."""
        operands = list(args)

        def position(root: Root) -> Root:
            (value,) = root.arrays
            if not any(value is other for other in operands):
                operands.append(value)
            return Root([next(i for i, other in enumerate(operands) if other is value)])

        kept = [(i, self.outside.get(x) or Root([x])) for i, x in enumerate(args) if self.stays(x)]
        stays = {i: with_roots(residual, position) for i, residual in kept}
        return stays, operands[len(args) :]

    def stays(self, value: Any) -> bool:
        """Return whether a value is not packed, no matter which operation keeps the value."""
        source = self._source(value)
        return source == CONSTANT or (source == OUTSIDE and not self.pair.packs_arguments)

    # -- where values come from ----------------------------------------------------------------------

    def _source(self, value: Any) -> int:
        is_constant = not is_tracer(value) if self.is_staging else is_number(value)
        return self.sources.get(value, CONSTANT if is_constant else OUTSIDE)

    def mark(self, values: Sequence[Any], source: int) -> None:
        """Record the source of the values."""
        if source != OUTSIDE:
            for value in values:
                self.sources.put(value, source)
        if self.outer is not None:
            self.outer.mark(values, source)


def _source_of_results(request: _Request, args: Sequence[Any], sources: Sequence[int]) -> int:
    """Return the source of the results of an operation, given the sources of its operands."""
    if not set(sources) - {CONSTANT}:
        return CONSTANT
    if COMPUTED in sources and OUTSIDE not in sources:
        return COMPUTED
    floats = [s for s, x in zip(sources, args, strict=True) if has_tangent(typeof(x))] or sources
    if COMPUTED in floats:
        return COMPUTED
    if request.name in _PASSING_ON:
        return OUTSIDE
    opened = small_jaxpr(request.params) if request.name in _JITTED else None
    only_moves = opened is not None and all(
        e.primitive.name in _PASSING_ON or not any(has_tangent(v.aval) for v in e.outvars) for e in opened[0].eqns
    )
    return OUTSIDE if only_moves else COMPUTED


def _changes_nothing(x: Any, *, new_dtype: Any, weak_type: bool, sharding: Any) -> bool:
    aval = typeof(x)
    return aval.dtype == new_dtype and aval.weak_type == weak_type and sharding is None


def _closes_over_ref(jaxpr: Any) -> bool:
    """Return whether a jaxpr closes over a `jax.Ref`, which is then not an operand of the equation with this jaxpr."""
    return bool([v for v in jaxpr.constvars if not isinstance(v.aval, ShapedArray)])


def _is_staged_below(value: Any) -> bool:
    """Return whether a value is staged, or its primal value if reverse mode differentiates the value."""
    value = whole_batch(value)
    return is_staged(value.primal if isinstance(value, REVERSE.tracer) else value)


def _is_differentiated_twice(value: Any) -> bool:
    """Return whether reverse mode differentiates a value inside another differentiation of the same value."""
    value = whole_batch(value)
    return isinstance(value, REVERSE.tracer) and is_differentiated(value.primal)


def _holds_block(jaxpr: Any) -> bool:
    """Return whether the code of a jaxpr entered a block of hooks."""
    for equation in jaxpr.eqns:
        if equation.primitive is rule_function_p and is_mark(object_of(equation), _MARK):
            return True
        if any(map(_holds_block, inner_jaxprs(equation.params))):
            return True
    return False


def enter_block(pair: Pair) -> Block:
    """Enter a block of a pair, and return the block. The caller has to leave the block."""
    if innermost_block() is not None and not isinstance(current_trace(), HooksTrace):
        leave_mark(_MARK)  # so that no enclosing operation packs: only the innermost pair applies
    if nothing_is_traced():
        return Block(pair).enter()
    return HooksTrace(pair).block.enter()


# -- layers in a block ---------------------------------------------------------------------------------


def pair_to_pack_with(operands: Sequence[Any] = ()) -> PairOfLayer | None:
    """Return the pair that packs the saved tensors of a layer applied here to `operands`, or None without a block.

    Raises:
        RuntimeError: if another asyncio task entered the block.
    """
    pair, trace = active_pair(), current_trace()
    if pair is None:
        return None
    # Only the trace of the block knows which values the block has computed.
    stays = [trace.stays(x) for x in operands] if isinstance(trace, HooksTrace) else []
    return PairOfLayer(pair, stays)


def layers_pack_themselves() -> contextlib.AbstractContextManager[None]:
    """Return a context for applying a layer. The trace of a block would otherwise treat the layer as an operation."""
    return set_current_trace(trace_below(current_trace()))


def mark_as_computed(values: Sequence[Any]) -> None:
    """Mark the outputs of a layer as values that were computed in the block."""
    if isinstance(trace := current_trace(), HooksTrace):
        trace.mark(values, COMPUTED)
