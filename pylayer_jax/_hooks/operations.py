"""The trace of a block of hooks, which replaces operations by functions with their own derivative rules.

    c = sin a          becomes    c = rule_function[name=sin] a

    its derivative:               c, r = sin a, cos a;  p = pack r;  dc = linear_map[name=sin] p da

In code that JAX traces, a `BlockTrace` gets every operation in the block: any equation that JAX binds, such as an
addition, a jitted function, a scan, a function with a custom gradient. If JAX differentiates the operation now, or may
do so later, the trace usually binds a `HookedOperation` instead. Its rule calls `jax.vjp` on the operation, with hooks
suspended so that nothing is packed twice, and packs the residuals.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import weakref
from collections.abc import Callable, Collection, Generator, Sequence
from typing import Any, Final, NamedTuple

import jax
import numpy as np

from pylayer_jax._jax.jaxprs import (
    as_parameter,
    has_equation,
    inner_jaxprs,
    is_literal,
    is_users,
    jaxpr_and_consts,
    scan_counts,
    stage,
)
from pylayer_jax._jax.rule_function import (
    LinearMap,
    RuleFunction,
    UnstagedBatch,
    Values,
    apply,
    apply_linear,
    merge,
    payload_of,
    rule_function_p,
    scatter,
    select,
)
from pylayer_jax._jax.traces import (
    BATCHED,
    FORWARD,
    REVERSE,
    STAGED,
    DebugInfo,
    PassThroughTrace,
    ShapedArray,
    current,
    current_trace,
    eval_jaxpr,
    is_differentiated,
    is_staged,
    is_staging,
    is_tracer,
    nothing_is_traced,
    set_current_trace,
    trace_of_primals,
    whole_batch,
    without_pass_through,
)
from pylayer_jax._jax.transparency import Identity
from pylayer_jax._jax.types import as_arrays, has_tangent, tangent_type, typeof
from pylayer_jax._trees import WeakTable

from .active import (
    OFF,
    PLANNED,
    Block,
    active,
    active_pair,
    hooks_suspended,
    innermost_block,
    is_reported,
)
from .host import HostStore
from .origins import layer_of_params, origins_of, with_saver
from .pack import Origin, Pair
from .planned import LayerMarks, Planned, held, pulled, transposed_code
from .primitives import JITTED, KEPT, MOST_EQUATIONS, ROWS, Expression, Row, fold, is_number
from .residuals import (
    PackedResiduals,
    Packing,
    Recorder,
    keeps_residuals,
    outside_blocks,
    pack_residuals,
    recomputed,
    short_jaxpr,
)

# -- facts per operation ---------------------------------------------------------------------------------

# See NOTE [names made once] in `_custom_vjp.py`.
_PLAIN_RUN: Final = DebugInfo("vjp", "an operation in a block of hooks", None, None)
_CUSTOM_RULES: Final = ("custom_jvp_call", "custom_vjp_call", rule_function_p.name)


class _Facts(NamedTuple):
    """Properties of a jitted function. A long one counts as no view, and its vjp as keeping arrays."""

    is_view: bool  # all its equations are views, or have no tangent
    # Its vjp keeps no array if each tuple has the position of an operand that is a number. None: it may keep an array.
    numbers: Sequence[tuple[int, ...]] | None
    has_loop: bool
    has_rule: bool  # it applies a custom rule
    is_users: bool  # the user's code defines it: JAX's own functions have no source lines


_facts: Final = WeakTable()  # jaxpr -> its facts


def _facts_of(params: dict[str, Any]) -> _Facts:
    key = params["jaxpr"]
    if (facts := _facts.get(key)) is None:
        facts = _found_facts(params)
        _facts.put(key, facts)
    return facts


def _found_facts(params: dict[str, Any]) -> _Facts:
    jaxpr, _ = jaxpr_and_consts(params["jaxpr"])
    has_loop = has_equation(jaxpr, "scan", "while")
    if short_jaxpr(params) is None or any(inner_jaxprs(e.params) for e in jaxpr.eqns):
        return _Facts(False, None, has_loop, _has_rule(jaxpr), is_users(jaxpr))
    rows = [(e, ROWS.get(e.primitive.name, KEPT)) for e in jaxpr.eqns]
    is_view = [row.is_view or not any(has_tangent(v.aval) for v in e.outvars) for e, row in rows]
    # The operands of each product, and the divisor of each division.
    factors = [e.invars[e.primitive.name == "div" :] for e, row in rows if not row.keeps_nothing and row.keeps_numbers]
    position_of = {v: i for i, v in enumerate(jaxpr.invars)}
    for e, row in rows:
        if row.is_view and not e.outvars[0].aval.shape and not is_literal(e.invars[0]) and e.invars[0] in position_of:
            position_of[e.outvars[0]] = position_of[e.invars[0]]  # a number in another dtype
    numbers = [
        tuple(position_of[v] for v in atoms if v in position_of) for atoms in factors if not any(map(is_literal, atoms))
    ]
    keeps_nothing = all(row.keeps_nothing or row.keeps_numbers for _, row in rows) and all(numbers)
    return _Facts(all(is_view), numbers if keeps_nothing else None, has_loop, _has_rule(jaxpr), is_users(jaxpr))


def _has_rule(jaxpr: Any) -> bool:
    return has_equation(jaxpr, *_CUSTOM_RULES)


class Operation(NamedTuple):
    """One operation that JAX passes to the trace of a block of saved-tensor hooks."""

    bind: Callable[..., Any]  # a function from the operands to a list of values
    kind: str  # the name of the primitive
    name: str  # the name in errors, jaxprs and reports: for a jitted function, that of the function
    params: dict[str, Any] = {}
    primitive: Any = None  # None for a custom rule or a shard_map, for which a trace has separate methods

    @property
    def is_jitted(self) -> bool:
        return self.kind in JITTED

    @property
    def layer(self) -> str:
        return layer_of_params(self.params) if self.primitive is rule_function_p else ""

    @property
    def row(self) -> Row | None:
        return ROWS.get(self.kind)

    @property
    def is_view(self) -> bool:
        return self.row.is_view if self.row else self.is_jitted and _facts_of(self.params).is_view

    @property
    def is_users_rule(self) -> bool:
        """Whether a rule of a user may save tensors in this operation."""
        if self.is_jitted:
            facts = _facts_of(self.params)
            return facts.has_rule and facts.is_users
        # A shard_map gives the trace a function and no jaxpr.
        is_rule = self.kind in (*_CUSTOM_RULES, "shard_map")
        return is_rule or any(map(_has_rule, inner_jaxprs(self.params)))

    @property
    def holds_code(self) -> bool:
        """Whether code of the user in this operation may name its tensors."""
        if self.is_jitted:
            return _facts_of(self.params).is_users
        return self.kind == "shard_map" or (self.kind not in _CUSTOM_RULES and bool(inner_jaxprs(self.params)))

    def keeps_nothing(self, args: Sequence[Any], pair: Pair) -> bool:
        """Return whether the vjp keeps no array that hooks pack. Hooks of users see numbers too."""
        if row := self.row:
            is_number_kept = row.keeps_numbers and pair.recomputes and any(map(is_number, args[self.kind == "div" :]))
            return row.keeps_nothing or is_number_kept
        numbers = _facts_of(self.params).numbers if self.is_jitted else None
        if numbers is None or (numbers and not pair.recomputes):
            return False
        return all(any(is_number(args[i]) for i in positions) for positions in numbers)

    def expression(self, inputs: Sequence[Any], value: Any) -> Expression | None:
        """Return an expression of the result, or None if backward may never compute it again."""
        if self.row:
            return Expression.of(self.primitive, self.params, inputs, typeof(value)) if self.row.recomputed else None
        if not self.is_jitted or _facts_of(self.params).numbers is None:
            return None
        jaxpr, consts = jaxpr_and_consts(self.params["jaxpr"])
        known = dict(zip((*jaxpr.invars, *jaxpr.constvars), (*inputs, *consts), strict=True))
        for e in jaxpr.eqns:
            operands = [v.val if is_literal(v) else known[v] for v in e.invars]
            if e.primitive.name == "convert_element_type" and is_number(operands[0]):
                known[e.outvars[0]] = np.asarray(operands[0], e.params["new_dtype"])
                continue
            if len(e.outvars) > 1 or not ROWS.get(e.primitive.name, KEPT).recomputed:
                return None
            known[e.outvars[0]] = Expression.of(e.primitive, e.params, operands, e.outvars[0].aval)
        found = known.get(jaxpr.outvars[0])
        return found if isinstance(found, Expression) else None


class HookedOperation(RuleFunction):
    """A function that computes one operation, and whose rule packs the residuals.

    After the operands of the operation, further ones may follow, from which backward can compute those again.
    """

    def __init__(
        self,
        operation: Operation,
        pair: Pair,
        n_operands: int,
        origin: Origin,
        origins: Sequence[Origin],
        expressions: dict[int, Any],
        left_unpacked: Collection[int],
    ) -> None:
        self.name, self.params = operation.name, operation.params
        self.bind = operation.bind
        self.is_users_rule, self.holds_code = operation.is_users_rule, operation.holds_code
        self.pair = pair
        self.origin = origin  # the origin of the results
        self.n_operands = n_operands  # without further ones
        self.origins = origins  # the origin of each operand, with further ones
        self.expressions = expressions  # position of an operand -> an expression of `_Position`s
        self.left_unpacked = left_unpacked  # the positions of operands that are not packed

    def stage(self, args: Sequence[Any]) -> Values:
        """Stage the operation to a jaxpr, so that it can run several times. Return its closed-over values."""
        run = lambda *args: (self.bind(*args[: self.n_operands]), None)  # noqa: E731
        self.jaxpr, consts, _ = stage(run, [typeof(x) for x in args], self.name)
        self.n_consts = len(consts)
        return consts

    def run(self, *args: Any) -> Values:
        return self.bind(*args[: self.n_operands]) if self.jaxpr is None else super().run(*args)

    def batch(self, axis: Any, dims: Sequence[Any], types: Sequence[Any]) -> tuple[RuleFunction, Values, Any]:
        if self.jaxpr is None:  # JAX can call the Python function of this operation only once
            return UnstagedBatch(self, axis, dims), [], None
        return super().batch(axis, dims, types)

    def transpose(self, jaxpr: Any, args: Sequence[Any], cotangents: Sequence[Any]) -> Values:
        return transposed_code(jaxpr, args, cotangents)

    def rule(self, primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Values, Values]:
        __tracebackhide__ = True
        n_read = self.n_consts + self.n_operands  # the operation does not read the further operands
        nonzero = [t is not None and i < n_read for i, t in enumerate(tangents)]
        given = select(tangents, nonzero)
        if not given:
            values = apply(self, primals)
            return values, [None] * len(values)

        run: Any = lambda *args: self.run(*merge(nonzero, args, primals))  # noqa: E731
        run.__fun_debug_info__ = _PLAIN_RUN
        if not keeps_residuals(given):
            with hooks_suspended():
                values, found = jax.jvp(run, select(primals, nonzero), given)
            return values, [t if has_tangent(typeof(v)) else None for v, t in zip(values, found, strict=True)]
        # JAX runs this rule inside a partial evaluation, in which the tangents are unknown. The hooks run in the trace
        # outside of it, in which the primals are known.
        with set_current_trace(without_pass_through(trace_of_primals(primals))):
            recorder = Recorder(current_trace())
            with hooks_suspended(), set_current_trace(recorder):
                values, pullback = jax.vjp(run, *select(primals, nonzero))
            leaves, treedef = jax.tree_util.tree_flatten(pullback)
            residuals = as_arrays(leaves)  # JAX keeps some constants in internal array classes
            is_read = self.holds_code and is_reported.value
            origins = self._origins(primals, nonzero, [*values, *residuals]) if is_read else {}
            packing = self._packing(primals, dict(zip(map(id, leaves), residuals, strict=True)), recorder, origins)
            packed, arrays, values = pack_residuals(packing, residuals, values)
            arrays = held(arrays, primals)
        linear = Pullback(self.name, packed, treedef, [typeof(x) for x in values])
        found = apply_linear(linear, arrays, given)
        return values, scatter(found, [has_tangent(typeof(v)) for v in values])

    def _origins(self, primals: Sequence[Any], nonzero: Sequence[bool], found: Sequence[Any]) -> dict[int, Origin]:
        """Return the origins by id of `found`: the results, and the arrays of the vjp function."""

        def differentiated(*args: Any) -> list[Any]:
            run = lambda *given: self.run(*merge(nonzero, given, args))  # noqa: E731
            values, pullback = jax.vjp(run, *select(args, nonzero))
            return [*values, *as_arrays(jax.tree_util.tree_leaves(pullback))]

        given = [*[Origin()] * self.n_consts, *self.origins]
        jaxprs = inner_jaxprs(self.params) if self.jaxpr is None else [self.jaxpr]
        return origins_of(differentiated, jaxprs, primals, given, self.origin, found)

    def _packing(
        self, primals: Sequence[Any], array_of: dict[int, Any], recorder: Recorder, origins: dict[int, Origin]
    ) -> Packing:
        """Return the arguments of `pack_residuals`. `array_of`: id of a leaf of the vjp function -> its array."""
        primals = [array_of.get(id(x), x) for x in primals]
        consts, args = primals[: self.n_consts], primals[self.n_consts :]
        done: dict[int, Any] = {}
        expressions = {
            i: fold(x, lambda x: args[x.number] if isinstance(x, _Position) else x, done=done)
            for i, x in self.expressions.items()
        }
        of_operands = {id(args[i]): (args[i], x) for i, x in expressions.items() if i not in self.left_unpacked}
        left, done_left = [(x, x) for x in consts], dict[int, Any]()
        for i in sorted(self.left_unpacked):
            residual = args[i]
            if i in expressions:
                residual = recomputed(expressions[i], lambda x: None if is_number(x) else x, done_left)
            left.append((args[i], residual))
        origins = _origins_by_id(args, self.origins) | origins

        def origin_of(x: Any, _: int) -> Origin:
            own, of_layer = origins.get(id(x)), self.pair.origins.get(_viewed(x, recorder.expressions))
            if of_layer is None:
                return own or self.origin
            return with_saver(own or dataclasses.replace(self.origin, operation=""), of_layer.layer, of_layer.name)

        return Packing(
            self.pair,
            f"the operation {self.name}, residual",
            operands=primals,
            origin_of=origin_of,
            left_unpacked=left,
            expressions={**of_operands, **recorder.expressions},
            amplified=recorder.amplified,
            exact=recorder.compared,
            is_users_rule=self.is_users_rule,
        )


def _viewed(x: Any, expressions: dict[int, tuple[Any, Expression]]) -> Any:
    while (found := expressions.get(id(x), (x, None))[1]) and found.function.row.is_view and found.inputs:
        x = found.inputs[0]
    return x


def _origins_by_id(operands: Sequence[Any], origins: Sequence[Origin]) -> dict[int, Origin]:
    # In eager mode, `checkpoint_name` returns its operand itself: of two origins of one array, the named one is last.
    pairs = sorted(zip(operands, origins, strict=False), key=lambda pair: bool(pair[1].name))
    return {id(x): origin for x, origin in pairs}


class Pullback(LinearMap):
    """The derivative of an operation, which maps packed residuals and tangents of operands to tangents of results."""

    def __init__(self, name: str, packed: PackedResiduals, treedef: Any, value_types: Sequence[Any]) -> None:
        self.name = name
        self.n_residuals = packed.n_arrays
        self.types = [tangent_type(t) for t in value_types if has_tangent(t)]
        self._packed = packed
        self._treedef = treedef  # of the function that `jax.vjp` returned
        self._value_types = value_types

    def transpose(self, residuals: Sequence[Any], cotangents: Sequence[Any]) -> Values:
        __tracebackhide__ = True
        with outside_blocks():
            unpacked = self._packed.unpack(residuals, cotangents)
            pullback = jax.tree_util.tree_unflatten(self._treedef, unpacked.all())
            return self._call(pullback, unpacked.cotangents)

    def _call(self, pullback: Any, cotangents: Sequence[Any]) -> Values:
        return pulled(pullback, cotangents, self._value_types, self.name)

    def evaluate(self, residuals: Sequence[Any], tangents: Sequence[Any]) -> Values:
        __tracebackhide__ = True
        types = tuple(jax.ShapeDtypeStruct(t.shape, t.dtype) for t in self.types)
        with outside_blocks():
            pullback = jax.tree_util.tree_unflatten(self._treedef, self._packed.unpack(residuals, ()).all())
            transposed = jax.linear_transpose(lambda *cotangents: self._call(pullback, cotangents), *types)
            return list(transposed(list(tangents)))


# -- four outcomes ---------------------------------------------------------------------------------------


class Outcome(enum.Enum):
    """A way to process an operation in a block of hooks."""

    PASS_ON = "bind it in the trace below: a block inside it packs, or it closes over a Ref"
    SUSPEND = "bind it in the trace below, with hooks suspended: JAX keeps nothing for it that hooks could pack"
    PACK_INSIDE = "stage the body of a loop again, in a block of its own: each iteration packs"
    HOOK = "bind it as a `HookedOperation`"


def _outcome(operation: Operation, args: Sequence[Any], pair: Pair) -> Outcome:
    inner = inner_jaxprs(operation.params)
    # A Ref that a jaxpr closes over is not an operand of the equation that has the jaxpr as a parameter.
    closes_over_ref = any(not isinstance(v.aval, ShapedArray) for jaxpr in inner for v in jaxpr.constvars)
    if closes_over_ref or any(map(_holds_block, inner)):
        return Outcome.PASS_ON
    examples = list(map(whole_batch, args))
    if not _has_reverse_mode(operation, args, examples) or operation.keeps_nothing(args, pair):
        return Outcome.SUSPEND
    return Outcome.PACK_INSIDE if _packs_inside(operation, examples) else Outcome.HOOK


def _has_reverse_mode(operation: Operation, args: Sequence[Any], examples: Sequence[Any]) -> bool:
    """Return whether JAX differentiates in reverse mode, or may do so later. `examples`: whole batches of `args`."""
    kinds = {type(x) for x in examples}
    is_differentiated = REVERSE.tracer in kinds
    # In reverse-over-forward mode (`jax.grad` of a function that calls `jax.jvp`), JAX keeps tensors only for a second
    # derivative. Such tensors are not packed.
    is_in_forward_mode = FORWARD.tracer in kinds and not is_differentiated
    is_later = STAGED.tracer in kinds and not is_in_forward_mode  # JAX may differentiate the jaxpr later
    are_arrays = {type(typeof(x)) for x in args} <= {ShapedArray}  # not Refs or tokens
    return (is_differentiated or is_later) and are_arrays and operation.kind != "while"  # which has no reverse mode


def _packs_inside(operation: Operation, examples: Sequence[Any]) -> bool:
    # After a scan, JAX would have stacked the unpacked residuals of all iterations.
    differentiated = [x for x in examples if isinstance(x, REVERSE.tracer)]
    is_staged_below = any(map(is_staged, [*examples, *[x.primal for x in differentiated]]))
    if not (operation.is_jitted or operation.kind == "scan") or not is_staged_below:
        return False
    if any(is_differentiated(x.primal) for x in differentiated):
        return False  # residuals packed within a scan have no second derivative
    return operation.kind == "scan" or _facts_of(operation.params).has_loop


def _runs_once(operation: Operation, args: Sequence[Any], trace: Any) -> bool:
    """Return whether JAX differentiates the operation as it runs: once, in `jax.vjp`, so without staging it first.

    JAX can stage an operation with a custom rule only once.
    """
    examples = list(map(whole_batch, args))
    if operation.kind == "shard_map":
        return False
    while isinstance(trace, (BATCHED.trace, REVERSE.trace)):
        if any(isinstance(x, REVERSE.tracer) and x._trace is trace for x in examples):
            return True
        # A trace that differentiates none of the operands passes the operation on to its parent trace.
        trace = without_pass_through(trace.parent_trace)
    return False


class _BlockMark(Identity):
    """Marks staged code that enters a block while another block is open."""

    name = "hooks_block"


def _holds_block(jaxpr: Any) -> bool:
    """Return whether a nested block was entered while JAX staged this jaxpr."""
    for equation in jaxpr.eqns:
        if equation.primitive is rule_function_p and isinstance(payload_of(equation), (_BlockMark, Planned)):
            return True
        if any(map(_holds_block, inner_jaxprs(equation.params))):
            return True
    return False


# -- the trace -------------------------------------------------------------------------------------------


class Place(enum.Enum):
    """Where a value was computed, as seen from a block of hooks."""

    OUTSIDE = 0  # before the block; or a view of such a value
    CONSTANT = 1  # a concrete number; in staged code, any concrete array
    BLOCK = 2  # in the block, from values that are not all constant


class ValueRecord(NamedTuple):
    """What a `BlockTrace` knows about one value."""

    place: Place
    origin: Origin = Origin()
    expression: Expression | None = None  # from which backward may compute the value again, if it keeps the operands


class BlockTrace(PassThroughTrace):
    """The current trace in a block of hooks, to which JAX passes each operation."""

    __slots__ = ("block", "entry", "is_staging", "outer", "records", "within")

    def __init__(self, pair: Pair, entry: Any = None, within: Sequence[Any] = ()) -> None:
        trace = current_trace()
        super().__init__(
            without_pass_through(trace)
        )  # skip the traces of outer blocks: only the innermost pair applies
        self.outer = trace if isinstance(trace, BlockTrace) else None
        self.entry = entry  # source information of the block's entry, if the report needs it
        self.within = within  # source information of the loops around, since that of an operation begins in the body
        self.is_staging = is_staging()  # if True, a concrete array is a constant of the program
        self.block = Block(pair, self)
        self.records = WeakTable()  # value -> `ValueRecord`; for other values see `record_of`

    def origin(self, operation: str, layer: str) -> Origin:
        """Return the origin of what an operation or a layer computes now."""
        sources = (*self.within, current()) if self.entry else ()
        return Origin("" if layer else operation, layer, sources=sources, block=self.entry)

    @property
    def pair(self) -> Pair:
        return self.block.value  # JAX's caches keep traces, and must not keep the hooks with them

    # -- methods that JAX calls ----------------------------------------------------------------------

    def process_primitive(self, primitive: Any, tracers: Sequence[Any], params: dict[str, Any], /) -> Any:
        __tracebackhide__ = True

        def bind(*args: Any, **changed: Any) -> Any:
            found = primitive.bind(*args, **{**params, **changed})
            return found if primitive.multiple_results else [found]

        kind = name = primitive.name
        if kind == "convert_element_type":
            aval = typeof(tracers[0])
            if {"new_dtype": aval.dtype, "weak_type": aval.weak_type, "sharding": None} == params:
                return tracers[0]  # in eager mode JAX would make a copy, which hooks would pack too
        if kind in JITTED or primitive is rule_function_p:
            name = params["name"]
        elif kind == "custom_vjp_call":
            name = params["call_jaxpr"].debug_info.func_name
        values = self._process(Operation(bind, kind, name, params, primitive), tracers)
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

        kind, function = primitive.name, functions[0]
        # Where JAX evaluates a jaxpr, `__name__` is a name of JAX.
        name = function.debug_info.func_name if hasattr(function, "debug_info") else getattr(function, "__name__", kind)
        return self._process(Operation(bind, kind, name), tracers)

    def process_shard_map(self, primitive: Any, fun: Any, tracers: Any, /, **params: Any) -> Any:
        __tracebackhide__ = True
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
        __tracebackhide__ = True
        with set_current_trace(self.parent_trace):
            if active.value is not self.block or self.block.value is None:
                # Hooks are suspended, or an inner block is open, or JAX restored this trace after the block was left.
                return operation.bind(*args)
            self.block.check_task()
            records = list(map(self.record_of, args))
            origin = self.origin(operation.name, operation.layer)
            values = self._bind(operation, args, records, origin)
        self._record_results(operation, args, records, origin, values)
        return values

    def _bind(
        self, operation: Operation, args: Sequence[Any], records: Sequence[ValueRecord], origin: Origin
    ) -> Values:
        __tracebackhide__ = True
        outcome = _outcome(operation, args, self.pair)
        if outcome is Outcome.PASS_ON:
            return operation.bind(*args)
        if outcome is Outcome.SUSPEND:
            # The keys of JAX's caches contain the active block: JAX would compile an eager operation per pair.
            with hooks_suspended():
                return operation.bind(*args)
        if outcome is Outcome.PACK_INSIDE:
            values = self._pack_inside(operation, args, records, origin)
            if values is not None:
                return values
        expressions, further = _expressions(args, records)
        left = [i for i, record in enumerate(records) if self.is_left_unpacked(record)]
        origins = [record.origin for record in (*records, *map(self.record_of, further))]
        hooked = HookedOperation(operation, self.pair, len(args), origin, origins, expressions, left)
        operands = [*args, *further]
        if _runs_once(operation, args, self.parent_trace):
            return apply(hooked, operands)
        consts = hooked.stage(operands)
        has_no_tangent = not any(has_tangent(v.aval) for v in hooked.jaxpr.outvars)
        if has_no_tangent or _holds_block(hooked.jaxpr):
            return hooked.run(*consts, *operands)
        return apply(hooked, [*consts, *operands])

    def _pack_inside(
        self, operation: Operation, args: Sequence[Any], records: Sequence[ValueRecord], origin: Origin
    ) -> Values | None:
        """Bind a scan or a jitted function whose body is staged again in a block of hooks.

        Return None if the new body closes over values, or its results have other types.
        """
        __tracebackhide__ = True
        jaxpr, consts = jaxpr_and_consts(operation.params["jaxpr"])
        if operation.kind == "scan":
            n_consts, n_carry = scan_counts(operation.params)
            carry = [ValueRecord(Place.BLOCK, origin)] * n_carry
            records = [*records[:n_consts], *carry, *records[n_consts + n_carry :]]

        def body(*args: Any) -> tuple[list[Any], None]:
            trace = BlockTrace(self.pair, self.entry, origin.sources)
            for x, record in zip(args, records, strict=True):
                trace.set_record([x], record._replace(expression=None))  # whose arrays are not available in the body
            trace.block.enter()
            try:
                return eval_jaxpr(jaxpr, consts, *args), None
            finally:
                trace.block.leave()

        new_jaxpr, closed_over, _ = stage(body, [v.aval for v in jaxpr.invars], operation.kind)
        if closed_over or [v.aval for v in new_jaxpr.outvars] != [v.aval for v in jaxpr.outvars]:
            return None
        return operation.bind(*args, jaxpr=as_parameter(new_jaxpr))

    def is_left_unpacked(self, record: ValueRecord) -> bool:
        """Return whether the hooks never pack a value, whichever operation keeps it."""
        return record.place is Place.CONSTANT or (record.place is Place.OUTSIDE and not self.pair.packs_arguments)

    # -- where values come from ----------------------------------------------------------------------

    def record_of(self, value: Any) -> ValueRecord:
        record = self.records.get(value)
        if record is None:
            is_constant = not is_tracer(value) if self.is_staging else is_number(value)
            return _CONSTANT if is_constant else _OUTSIDE
        return record

    def set_record(self, values: Sequence[Any], record: ValueRecord) -> None:
        """Store a record of these values, also in enclosing blocks, which have their own records of outside values."""
        if record != _OUTSIDE:  # `record_of` returns `_OUTSIDE` for a value without a record
            for value in values:
                self.records.put(value, record)
        if self.outer is not None and record.place is not Place.OUTSIDE:
            self.outer.set_record(values, record)

    def _record_results(
        self, operation: Operation, args: Sequence[Any], records: Sequence[ValueRecord], origin: Origin, values: Values
    ) -> None:
        """Record where results come from, and how backward may compute them again."""
        place = _place_of_results(operation, args, records)
        if operation.is_view:
            origin = next((r.origin for r in records if r.place is not Place.CONSTANT), origin)
            if operation.kind == "name":
                origin = dataclasses.replace(origin, name=operation.params["name"])
        expression = None
        if len(values) == 1 and operation.primitive:
            if place is Place.OUTSIDE and not self.pair.packs_arguments:
                inputs = self._inputs(args, records)
                expression = Expression.of(operation.primitive, operation.params, inputs, typeof(values[0]))
            elif place is Place.BLOCK and self.pair.recomputes and operation.keeps_nothing(args, self.pair):
                # In eager mode, this record could be the last reference to an operand of a sum. (The results of other
                # operations here have one operand, of the same size.)
                is_sum = sum([not is_number(x) for x in args]) > 1
                is_weak = is_sum and not self.is_staging
                leaves = [weakref.ref(x) if is_weak and is_tracer(x) else x for x in args]
                expression = operation.expression(self._inputs(leaves, records), values[0])
        if place is Place.BLOCK and operation.holds_code and is_reported.value:
            given, jaxprs = [r.origin for r in records], inner_jaxprs(operation.params)
            with set_current_trace(self.parent_trace):
                origins = origins_of(operation.bind, jaxprs, args, given, origin, values)
            for value in values:
                self.set_record([value], ValueRecord(place, origins.get(id(value), origin)))
        else:
            self.set_record(values, ValueRecord(place, origin, expression))

    def _inputs(self, leaves: Sequence[Any], records: Sequence[ValueRecord]) -> list[Any]:
        """Replace operands by their expressions, unless the chain would become too long."""

        def is_leaf(e: Expression | None) -> bool:
            return e is None or e.depth >= MOST_EQUATIONS

        return [x if is_leaf(r.expression) else r.expression for x, r in zip(leaves, records, strict=True)]


_OUTSIDE: Final = ValueRecord(Place.OUTSIDE)
_CONSTANT: Final = ValueRecord(Place.CONSTANT)


class _Position(NamedTuple):
    number: int  # among the operands of a `HookedOperation`


def _expressions(args: Sequence[Any], records: Sequence[ValueRecord]) -> tuple[dict[int, Expression], Values]:
    """Return the expressions of operands, with positions for values, and the further values among these."""
    operands = list(args)
    position_of: dict[int, _Position] = {}
    for i, x in enumerate(args):
        position_of.setdefault(id(x), _Position(i))

    def position(x: Any) -> Any:
        if is_number(x) and id(x) not in position_of:
            return x
        if id(x) not in position_of:
            position_of[id(x)] = _Position(len(operands))
            operands.append(x)
        return position_of[id(x)]

    given = [record.expression for record in records]
    # A list, since `done` has ids of all of them: of an expression that is gone, the next one could have the id.
    # tests: test_operands_of_conditionals
    found = given if is_staging() else [x and _revived(x) for x in given]
    done: dict[int, Any] = {}
    expressions = {i: fold(x, position, done=done) for i, x in enumerate(found) if x is not None}
    return expressions, operands[len(args) :]


def _revived(expression: Expression) -> Expression | None:
    """Replace weak references by their values. Return None if one is gone."""
    values: list[Any] = []

    def value_of(x: Any) -> Any:
        values.append(x() if isinstance(x, weakref.ref) else x)
        return values[-1]

    revived = fold(expression, value_of)
    return None if any(x is None for x in values) else revived


def _place_of_results(operation: Operation, args: Sequence[Any], records: Sequence[ValueRecord]) -> Place:
    # A view of a value from outside counts as outside, even if the block computes an integer operand of the view, such
    # as a start index of `dynamic_slice`.
    places = [record.place for record in records]
    if all(place is Place.CONSTANT for place in places):
        return Place.CONSTANT
    of_floats = [place for place, x in zip(places, args, strict=True) if has_tangent(typeof(x))] or places
    comes_from_outside = Place.OUTSIDE in places and Place.BLOCK not in of_floats
    return Place.OUTSIDE if operation.is_view and comes_from_outside else Place.BLOCK


class BackwardWatch(PassThroughTrace):
    """A trace that notes whether a backward pass runs under it, eagerly or in a jitted function."""

    __slots__ = ("was_seen",)

    def __init__(self) -> None:
        super().__init__(current_trace())
        self.was_seen = False

    def process_primitive(self, primitive: Any, tracers: Sequence[Any], params: dict[str, Any], /) -> Any:
        __tracebackhide__ = True
        self.was_seen = self.was_seen or _is_backward(current()) or any(map(_holds_backward, inner_jaxprs(params)))
        with set_current_trace(self.parent_trace):
            return primitive.bind(*tracers, **params)


def _is_backward(source: Any) -> bool:
    return "transpose(jvp" in str(source.name_stack)


def _holds_backward(jaxpr: Any) -> bool:
    return any(_is_backward(e.source_info) or any(map(_holds_backward, inner_jaxprs(e.params))) for e in jaxpr.eqns)


def enter_block(pair: Pair) -> Block:
    """Enter a block of a pair. The caller has to leave it."""
    if innermost_block() is not None and not isinstance(current_trace(), BlockTrace):
        apply(_BlockMark(()), ())  # so that no enclosing operation packs: only the innermost pair applies
    if active.value is OFF or nothing_is_traced():
        return Block(pair).enter()
    return BlockTrace(pair, current() if is_reported.value else None).block.enter()


# -- for the report --------------------------------------------------------------------------------------


def hooks_ignored() -> contextlib.AbstractContextManager[Any]:
    return active(OFF)


def tensors_marked() -> contextlib.AbstractContextManager[Any]:
    """Return a context in which each tensor that is kept for backward gets a `Mark`, by which the report finds it."""
    return is_reported(True)


@contextlib.contextmanager
def names_recorded() -> Generator[None]:
    """Unless a block is open, enter one that packs nothing, but records where each tensor is computed."""
    if innermost_block() is not None:
        yield
        return
    block = enter_block(Pair((), ("report",), HostStore(), recomputes=False, packs_arguments=False))
    try:
        yield
    finally:
        block.leave()


# -- layers in a block -----------------------------------------------------------------------------------


class LayerBlock(NamedTuple):
    """Data that one call of a layer needs from the block of hooks around it."""

    pair: Pair
    origin: Origin  # the origin of the tensors that the layer computes
    origins: Sequence[Origin]  # the origin of each input
    is_left_unpacked: Sequence[bool]  # a mask of the inputs that are not packed
    is_exact: bool  # whether tensors stay as they are if hooks would round them

    def pack(
        self, owner: str, names: Sequence[str], inputs: Sequence[Any], tensors: Sequence[Any], outputs: Sequence[Any]
    ) -> tuple[PackedResiduals, list[Any], list[Any]]:
        """Pack the tensors that the layer saved under `names`, as `pack_residuals` does."""
        origin_of = _origins_by_id(inputs, self.origins)

        def origin(tensor: Any, index: int) -> Origin:
            # An input keeps its origin, if anything is known of it.
            own = origin_of.get(id(tensor))
            own = own if own is not None and own.keys else self.origin
            return with_saver(own, self.origin.layer, names[index])

        left = [(x, x) for x, is_left in zip(inputs, self.is_left_unpacked, strict=False) if is_left]
        exact = [id(x) for x in tensors] if self.is_exact else ()  # `forward` of a layer of NumPy may run again on them
        # As in `HookedOperation.rule`, the hooks run in a trace in which the values of the saved tensors are known.
        with set_current_trace(without_pass_through(trace_of_primals([*tensors, *outputs]))):
            packing = Packing(self.pair, owner, inputs, origin, left, exact=exact, is_users_rule=True)
            packed, arrays, outputs = pack_residuals(packing, tensors, outputs)
            return packed, held(arrays, inputs), outputs

    def hold(self, arrays: Sequence[Any]) -> list[Any]:
        return held(arrays)


def layer_block(layer: str, operands: Sequence[Any], is_exact: bool) -> LayerBlock | LayerMarks | None:
    """Return the block of hooks around a call of a layer, if there is one."""
    if active.value is PLANNED:
        return LayerMarks(layer, is_exact)
    pair = active_pair()
    if pair is None:
        return None
    trace = _trace_of_block()
    if trace is None:  # only the trace of the block knows which values the block has computed
        return LayerBlock(pair, Origin(layer=layer), [], [], is_exact)
    records = [trace.record_of(whole_batch(x)) for x in operands]
    origin = trace.origin("", layer)
    is_left = list(map(trace.is_left_unpacked, records))
    return LayerBlock(pair, origin, [r.origin for r in records], is_left, is_exact)


def layers_pack_themselves() -> Any:
    # JAX bypasses the trace of the block, which would pack the tensors of the layer again.
    return set_current_trace(without_pass_through(current_trace()))


def mark_as_computed(values: Sequence[Any], origin: Origin) -> None:
    """Record that the block computed these outputs of a layer, or of a planned function."""
    if (trace := _trace_of_block()) is not None:
        trace.set_record(list(map(whole_batch, values)), ValueRecord(Place.BLOCK, origin))


def _trace_of_block() -> BlockTrace | None:
    """Return the trace of the current block, also inside `jax.vmap`."""
    trace = current_trace()
    while isinstance(trace, BATCHED.trace):
        trace = trace.parent_trace
    return trace if isinstance(trace, BlockTrace) else None
