"""Functions whose residuals are kept by a plan for the whole function.

    J     the decorated function, staged; bodies of scan, cond and shard_map in it are planned functions too
    F     jax.vjp of J, staged: operands -> values, residuals           B    its backward: residuals, cotangents -> ...
    F'    F without what only residuals need; a kept tensor is packed behind the equation that makes it
    B'    B, in which a residual is made again when an equation with a cotangent first reads it

A `Planned` is a `RuleFunction` of J. Its rule makes the `Plan` and runs F'; its transpose runs B'.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pylayer_jax._jax.jaxprs import (
    as_parameter,
    evaluate_jaxpr,
    has_equation,
    inner_jaxprs,
    is_literal,
    is_users,
    jaxpr_and_consts,
    line_of,
    opened,
    outside_effects,
    scan_counts,
    stage,
)
from pylayer_jax._jax.rule_function import (
    LinearMap,
    RuleFunction,
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
    NEEDS_VALUES,
    DebugInfo,
    PassThroughTrace,
    Var,
    current,
    current_trace,
    eval_jaxpr,
    is_differentiated,
    is_staged,
    is_staging,
    is_tracer,
    set_current_trace,
    trace_of_primals,
    without_pass_through,
)
from pylayer_jax._jax.transparency import Identity, barrier
from pylayer_jax._jax.types import (
    as_arrays,
    full_cotangent,
    has_tangent,
    is_key,
    is_nan_reported,
    is_ref,
    tangent_type,
    typeof,
    unchecked,
    zeros_of,
)
from pylayer_jax._trees import has_changed, split

from .active import PLANNED, active, hooks_suspended, is_reported
from .origins import Mark, Value, by_value, names_of_equations, origin_of_value, values_of, with_saver
from .pack import Origin, Pair, is_selected, pack_tensor, roundings_of, steps_for
from .plan import Graph, Keeping, as_it_is, n_bytes, row_of
from .primitives import JITTED, ROWS, UNKNOWN, Expression, fold, leaves_of
from .residuals import keeps_residuals, outside_blocks

_DEBUG: Final = DebugInfo("pylayer_jax", "an equation of a plan", None, None)
_CUSTOM_RULES: Final = ("custom_jvp_call", "custom_vjp_call")


# -- marks -------------------------------------------------------------------------------------------------


class Held(Identity):
    """Marks residuals that a plan leaves as they are: other hooks packed them, or `ctx` keeps them as attributes."""

    name = "held"


class SavedByRule(Identity):
    """Marks what a rule of a user saves. The rule may compare it, so it is computed again by moves only."""

    name = "saved"

    def __init__(
        self, types: Sequence[Any], layer: str = "", names: Sequence[str] = (), is_exact: bool = False
    ) -> None:
        super().__init__(types)
        self.layer, self.names, self.is_exact = layer, names, is_exact

    def of(self, types: Sequence[Any]) -> Identity:
        return SavedByRule(types, self.layer, self.names, self.is_exact)

    def without_unused(self, used: Sequence[bool]) -> tuple[RuleFunction, list[bool]]:
        names = select(self.names, used) if self.names else ()
        part = SavedByRule(select([v.aval for v in self.jaxpr.outvars], used), self.layer, names, self.is_exact)
        return part, list(used)


def held(arrays: Sequence[Any], inputs: Sequence[Any] = ()) -> list[Any]:
    """Mark arrays, while a plan is made, as residuals that it leaves as they are. Inputs are not marked."""
    if active.value is not PLANNED:
        return list(arrays)
    known = {id(x) for x in inputs}
    is_own = [is_tracer(x) and id(x) not in known for x in arrays]
    own = select(arrays, is_own)
    return merge(is_own, apply(Held([typeof(x) for x in own]), own), arrays) if own else list(arrays)


def _mark_of(equation: Any) -> Any:
    payload = payload_of(equation) if equation.primitive is rule_function_p else None
    return payload if isinstance(payload, (Held, SavedByRule)) else None


Marks = dict[Any, list[tuple[Any, int]]]  # variable -> its marks, each with the position in it


def _simplified(jaxpr: Any) -> tuple[Any, Marks]:
    atom_of: dict[Any, Any] = {}
    marks: Marks = {}
    equations: list[Any] = []

    def read(atoms: Sequence[Any]) -> list[Any]:
        return [a if is_literal(a) else atom_of.get(a, a) for a in atoms]

    computed: dict[Any, Any] = {}  # what an equation computes -> its results: each value is kept and made once
    for e in jaxpr.eqns:
        operands = read(e.invars)
        if (mark := _mark_of(e)) is None:
            key = _key_of(e, operands)
            if key is not None and key in computed:
                atom_of |= zip(e.outvars, computed[key], strict=True)
                continue
            computed[key] = e.outvars
            equations.append(e.replace(invars=operands) if atom_of else e)
            continue
        atom_of |= zip(e.outvars, operands, strict=True)
        for i, x in enumerate(operands):
            if not is_literal(x):
                marks.setdefault(x, []).append((mark, i))
    return jaxpr.replace(eqns=equations, outvars=read(jaxpr.outvars)), marks


def _key_of(e: Any, operands: Sequence[Any]) -> Any:
    """Return a key of what an equation computes, or None for one that may differ from an equal one."""
    if e.effects or e.primitive.name not in ROWS:
        return None
    read = [(str(x.aval), np.asarray(x.val).tobytes()) if is_literal(x) else x for x in operands]
    key = e.primitive, tuple(e.params.items()), tuple(read)
    try:
        hash(key)
    except TypeError:  # a parameter has none
        return None
    return key


def _is_held(equation: Any, index: int) -> bool:
    """Return whether a result of an equation is `Held` in its inner jaxprs."""
    if isinstance(_mark_of(equation), Held):
        return True
    if equation.primitive.name not in ("scan", "cond", "shard_map", *JITTED):
        return False
    for jaxpr in inner_jaxprs(equation.params):
        v = jaxpr.outvars[index]
        found = [] if is_literal(v) else [(e, e.outvars.index(v)) for e in jaxpr.eqns if v in e.outvars]
        if any(_is_held(*x) for x in found):
            return True
    return False


class LayerMarks:
    """What a layer in a planned function gets in place of a block of hooks."""

    def __init__(self, layer: str, is_exact: bool) -> None:
        self.layer, self.is_exact, self.origin = layer, is_exact, Origin(layer=layer)

    def pack(
        self, _: str, names: Sequence[str], __: Sequence[Any], tensors: Sequence[Any], outputs: Sequence[Any]
    ) -> tuple[None, list[Any], list[Any]]:
        with set_current_trace(without_pass_through(trace_of_primals([*tensors, *outputs]))):
            mark = SavedByRule([typeof(x) for x in tensors], self.layer, names[: len(tensors)], self.is_exact)
            return None, apply(mark, as_arrays(tensors)), list(outputs)

    def hold(self, arrays: Sequence[Any]) -> list[Any]:
        return held(arrays)


class _UsersRule(RuleFunction):
    """One equation that applies a custom rule of a user, whose residuals are marked."""

    def __init__(self, jaxpr: Any, name: str) -> None:
        self.jaxpr, self.name = jaxpr, name

    def rule(self, primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Values, Values]:
        __tracebackhide__ = True
        nonzero = [t is not None for t in tangents]
        given = select(tangents, nonzero)
        run: Any = lambda *args: self.run(*merge(nonzero, args, primals))  # noqa: E731
        if not keeps_residuals(given):
            values, found = jax.jvp(run, select(primals, nonzero), given)
            return values, [t if has_tangent(typeof(v)) else None for v, t in zip(values, found, strict=True)]
        with set_current_trace(without_pass_through(trace_of_primals(primals))):
            values, pullback = jax.vjp(run, *select(primals, nonzero))
            leaves, treedef = jax.tree_util.tree_flatten(pullback)
            arrays = as_arrays(leaves)
            arrays = apply(SavedByRule([typeof(x) for x in arrays]), arrays) if arrays else arrays
        types = [typeof(v) for v in values]
        found = apply_linear(_RulePullback(self.name, treedef, len(arrays), types), arrays, given)
        return values, scatter(found, [has_tangent(t) for t in types])


class _RulePullback(LinearMap):
    def __init__(self, name: str, treedef: Any, n_residuals: int, value_types: Sequence[Any]) -> None:
        self.name, self.n_residuals, self._treedef, self._value_types = name, n_residuals, treedef, value_types
        self.types = [tangent_type(t) for t in value_types if has_tangent(t)]

    def transpose(self, residuals: Sequence[Any], cotangents: Sequence[Any]) -> Values:
        __tracebackhide__ = True
        pullback = jax.tree_util.tree_unflatten(self._treedef, list(residuals))
        return pulled(pullback, cotangents, self._value_types, self.name)

    def evaluate(self, residuals: Sequence[Any], tangents: Sequence[Any]) -> Values:
        return transposed(self, residuals, tangents)


def pulled(pullback: Any, cotangents: Sequence[Any], value_types: Sequence[Any], name: str) -> Values:
    """Call a vjp function with the cotangents of those values that have any."""
    __tracebackhide__ = True
    given = iter(cotangents)
    full = [full_cotangent(next(given) if has_tangent(t) else None, t) for t in value_types]
    if not hasattr(pullback, "with_logs"):  # before jax 0.12
        return list(pullback(full))
    found, logs = pullback.with_logs(full)
    if logs:  # only JAX's own primitives may pass logs on
        raise TypeError(
            f"the backward of the operation {name} returns the logs {sorted(map(str, logs))}, which a block of hooks "
            "would lose. Apply the function that returns them (defvjp_with_logs) outside of the block."
        )
    return list(found)


def transposed(linear: LinearMap, residuals: Sequence[Any], tangents: Sequence[Any]) -> Values:
    types = tuple(jax.ShapeDtypeStruct(t.shape, t.dtype) for t in linear.types)
    transpose = jax.linear_transpose(lambda *cotangents: linear.transpose(residuals, cotangents), *types)
    return list(transpose(list(tangents)))


def transposed_code(jaxpr: Any, args: Sequence[Any], cotangents: Sequence[Any]) -> Values:
    """Transpose code in hooks, for `jax.linear_transpose`; None among `args` for the linear ones."""
    missing = [x is None for x in args]
    types = [v.aval for v in jaxpr.invars]
    given = [full_cotangent(c, v.aval) for c, v in zip(cotangents, jaxpr.outvars, strict=True)]
    transpose = jax.linear_transpose(
        lambda *xs: evaluate_jaxpr(jaxpr, *merge(missing, xs, args)), *select(types, missing)
    )
    return scatter(transpose(given), missing)


# -- the staged function -----------------------------------------------------------------------------------


class Budget:
    """What a decorated function and the bodies in it may spend: operations per byte. One price for all of them."""

    def __init__(self, price: float = math.inf) -> None:
        self.price = price
        # planned function -> its plan, the number of its runs, and the equation of which it is one branch. (No ids as
        # keys: a function within a body may be gone when the next one is made.)
        self.plans: dict[Any, tuple[Plan, int, Any]] = {}

    def bytes_at(self, price: float) -> float:
        """Return how many bytes would be kept: of the branches of a cond, those of the largest."""
        of_equation: dict[Any, float] = {}
        for plan, times, key in self.plans.values():
            of_equation[key] = max(of_equation.get(key, 0), times * plan.bytes_at(price))
        return sum(of_equation.values())

    def price_for(self, limit: float) -> float:
        """Return about the lowest price at which the bytes are within the limit, or the highest price."""
        low, high = _PRICES
        if self.bytes_at(high) > limit:
            return high
        for _ in range(_N_TRIES):
            middle = math.sqrt(low * high)
            low, high = (low, middle) if self.bytes_at(middle) <= limit else (middle, high)
        return high


_PRICES: Final = 1e-2, 1e6
_N_TRIES: Final = 13


class Surroundings(NamedTuple):
    """What the bodies in a decorated function know of it."""

    pair: Pair
    entry: Any  # source information of the call
    budget: Budget
    times: int = 1  # how often the body runs
    within: tuple[Any, ...] = ()  # the equations around the body


def prepared(jaxpr: Any, outside: Sequence[bool | None], around: Surroundings, has_bodies: bool) -> Any:
    """Return a copy in which rules of users are marked and, if `has_bodies`, bodies are planned functions."""
    free = {v for v, x in zip(jaxpr.invars, outside, strict=True) if x is not False}
    equations = [_prepared_equation(e, free, around, has_bodies) for e in jaxpr.eqns]
    return jaxpr.replace(eqns=equations)


def _prepared_equation(e: Any, free: set[Any], around: Surroundings, has_bodies: bool) -> Any:
    name, params = e.primitive.name, e.params
    is_free = [is_literal(x) or x in free for x in e.invars]
    if row_of(e).is_view and all(is_free):
        free.update(e.outvars)
    if name in _CUSTOM_RULES:
        inputs = list(dict.fromkeys(x for x in e.invars if not is_literal(x)))
        single = _of_one(e, inputs)
        rule = _UsersRule(single, name)
        return e.replace(primitive=rule_function_p, params=rule_function_p.params_of(rule), invars=inputs)
    inner = inner_jaxprs(params)
    if name in JITTED:
        (code,) = inner
        if not (has_equation(code, *_CUSTOM_RULES) and is_users(code)) and not (has_bodies and _has_body(code)):
            return e
        changed = prepared(code, is_free, around, has_bodies)
        return e.replace(params={**params, "jaxpr": _with_consts(changed, params["jaxpr"])})
    if not has_bodies or name not in _BODIES or any(jaxpr_and_consts(p)[1] for p in _jaxprs_of(params)):
        return e
    if name == "scan":
        n_consts, n_carry = scan_counts(params)
        around = around._replace(times=around.times * params["length"])
        outside = [*[True] * n_consts, *[False] * n_carry, *is_free[n_consts + n_carry :]]
        return e.replace(params={**params, "jaxpr": _planned_body(inner[0], outside, around, e)})
    if name == "cond" and around.pair.is_on_host:
        return e  # JAX cannot batch a cond with effects in its branches
    if name == "cond":
        branches = [_planned_body(branch, [True] * len(branch.invars), around, e) for branch in inner]
        return e.replace(params={**params, "branches": tuple(branches)})
    (body,) = inner
    return e.replace(params={**params, "jaxpr": jaxpr_and_consts(_planned_body(body, is_free, around, e))[0]})


_BODIES: Final = ("scan", "cond", "shard_map")


def _jaxprs_of(params: dict[str, Any]) -> list[Any]:
    return [p for p in (params.get("jaxpr"), *params.get("branches", ())) if hasattr(p, "consts")]


def _has_body(jaxpr: Any) -> bool:
    return has_equation(jaxpr, *_BODIES)


def _with_consts(jaxpr: Any, like: Any) -> Any:
    return like.replace(jaxpr=jaxpr) if hasattr(like, "jaxpr") and like.jaxpr is not like else jaxpr


def _of_one(equation: Any, inputs: Sequence[Any]) -> Any:
    """Return a jaxpr of one equation."""
    jaxpr, _, _ = stage(lambda: ([], None), [], "an equation")
    return jaxpr.replace(
        invars=list(inputs), outvars=equation.outvars, eqns=[equation], effects=equation.effects, debug_info=_DEBUG
    )


def _planned_body(body: Any, outside: Sequence[bool], around: Surroundings, equation: Any) -> Any:
    """Return a jaxpr whose only equation is a planned function of this body."""
    if not body.eqns:
        return as_parameter(body)
    around = around._replace(within=(*around.within, equation))
    function = Planned(body, outside, f"the body of a {equation.primitive.name}", around)
    inputs = [Var(v.aval) for v in body.invars]
    outputs = [Var(v.aval) for v in body.outvars]
    first = body.eqns[0]  # in the context of the body, as in the mesh of a shard_map
    call = first.replace(
        source_info=first.source_info.replace(name_stack=type(first.source_info.name_stack)()),
        primitive=rule_function_p,
        params=rule_function_p.params_of(function),
        invars=inputs,
        outvars=outputs,
        effects=outside_effects(body),
    )
    return as_parameter(body.replace(invars=inputs, outvars=outputs, eqns=[call]))


def _evaluate(jaxpr: Any, equation: Any, read: Callable[[Any], Any], is_inner: bool) -> list[Any]:
    """Evaluate one equation of a jaxpr. JAX checks only results of jitted functions for NaN, not those within."""
    inputs = list(dict.fromkeys(v for v in equation.invars if not is_literal(v)))
    single = jaxpr.replace(
        invars=inputs, outvars=equation.outvars, eqns=[equation], effects=equation.effects, debug_info=_DEBUG
    )
    try:
        return (unchecked(eval_jaxpr) if is_inner else eval_jaxpr)(single, (), *map(read, inputs))
    except FloatingPointError as error:  # of `jax.debug_nans`: the user's frames are those of the staging
        error.add_note(f"The operation {equation.primitive.name} is at {line_of([equation.source_info])}.")
        raise


class Derivative(NamedTuple):
    """The forward pass of a function as a jaxpr, F, and its backward pass, B, with jitted functions opened."""

    forward: Any  # operands -> values, residuals
    calls_of: dict[Any, Any]  # result of an equation, of both -> the jitted functions around the equation
    operations: dict[Any, Any]  # the same -> a key of the operation that the equation belongs to
    marks: Marks
    backward: Any  # residuals, cotangents -> cotangents of the differentiated operands
    value_types: Sequence[Any]
    consts: Sequence[Any]  # concrete arrays that rules of users close over: the first operands of forward
    backward_consts: Mapping[Any, Any]  # the same of backward, by variable

    @property
    def n_values(self) -> int:
        return len(self.value_types)

    def is_inner(self, equation: Any) -> bool:
        return any(self.calls_of[v] for v in equation.outvars)

    @property
    def residuals(self) -> list[Any]:
        return self.forward.outvars[self.n_values :]


def derivative_of(run: Callable[..., Values], types: Sequence[Any], nonzero: Sequence[bool], name: str) -> Derivative:
    __tracebackhide__ = True

    def forward(*args: Any) -> tuple[list[Any], Any]:
        __tracebackhide__ = True
        values, pullback = jax.vjp(lambda *given: run(*merge(nonzero, given, args)), *select(args, nonzero))
        leaves, treedef = jax.tree_util.tree_flatten(pullback)
        return [*values, *as_arrays(leaves)], (treedef, list(map(typeof, values)))

    with active(PLANNED):
        jaxpr, consts, (treedef, value_types) = stage(forward, types, name)
    residual_types = [v.aval for v in jaxpr.outvars[len(value_types) :]]
    cotangent_types = [tangent_type(t) for t in value_types if has_tangent(t)]

    def backward(*args: Any) -> tuple[list[Any], None]:
        __tracebackhide__ = True
        pullback = jax.tree_util.tree_unflatten(treedef, args[: len(residual_types)])
        return pulled(pullback, args[len(residual_types) :], value_types, name), None

    with active(PLANNED):
        back, more, _ = stage(backward, [*residual_types, *cotangent_types], name)
    n = len(more)
    backward_consts = dict(zip(back.invars[:n], more, strict=True))
    opened_back, opened_forward = opened(back), opened(jaxpr)
    back = _simplified(opened_back.jaxpr)[0]
    back = back.replace(invars=back.invars[n:])
    unmarked, marks = _simplified(opened_forward.jaxpr)
    calls_of: dict[Any, Any] = {}
    operations: dict[Any, Any] = {}
    for code, calls, keys in (opened_back, opened_forward):
        for e, around, key in zip(code.eqns, calls, keys, strict=True):
            calls_of |= dict.fromkeys(e.outvars, around)
            operations |= dict.fromkeys(e.outvars, key)
    return Derivative(unmarked, calls_of, operations, marks, back, value_types, consts, backward_consts)


def live_equations(jaxpr: Any, wanted: Sequence[Any]) -> list[Any]:
    """Return the equations that compute `wanted`, or have effects."""
    read = {v for v in wanted if not is_literal(v)}
    found: list[Any] = []
    for e in reversed(jaxpr.eqns):
        if e.effects or any(v in read for v in e.outvars):
            found.append(e)
            read.update(v for v in e.invars if not is_literal(v))
    return found[::-1]


class Plan:
    """What a function keeps for backward, and how backward gets its residuals."""

    def __init__(
        self,
        derivative: Derivative,
        pair: Pair,
        outside: Sequence[bool | None],
        name: str,
        origins: _Origins | None,
        price: float,
    ) -> None:
        """`outside`: for each operand, whether it came from outside; None for a constant, which is never packed."""
        self.derivative, self.pair, self.name, self.origins = derivative, pair, name, origins
        forward, backward = derivative.forward, derivative.backward
        self.backward_equations = live_equations(backward, backward.outvars)
        self.source_of = dict(zip(backward.invars, derivative.residuals, strict=False))  # residual of B -> of F
        readers: dict[Any, set[Any]] = {}  # residual of F -> the operations whose derivatives read it
        read = [
            (x, derivative.operations[e.outvars[0]]) for e in self.backward_equations for x in e.invars if e.outvars
        ]
        for x, operation in [*read, *[(x, None) for x in backward.outvars]]:
            source = None if is_literal(x) else self.source_of.get(x)
            if source is not None and not is_literal(source):
                readers.setdefault(source, set()).add(operation)
        self.maker = {v: e for e in forward.eqns for v in e.outvars}
        self.held = {
            v
            for e in forward.eqns
            for i, v in enumerate(e.outvars)
            if any(isinstance(mark, Held) for mark, _ in derivative.marks.get(v, ())) or _is_held(e, i)
        }
        places = [*[None] * len(derivative.consts), *outside]
        is_outside = [x is None or (x and not pair.packs_arguments) for x in places]
        is_left = lambda v: not (has_tangent(v.aval) or pair.packs_arguments)  # noqa: E731
        free = {v for v, x in zip(forward.invars, is_outside, strict=True) if x or is_left(v)}
        self._constants = {v for v, x in zip(forward.invars, places, strict=True) if x is None}
        for e in forward.eqns:
            if not e.effects and all(is_literal(x) or x in self._constants for x in e.invars):
                self._constants.update(e.outvars)
        self.graph = Graph(
            forward,
            list(readers),
            pair,
            free,
            self._keeping,
            self._fixed(readers, free),
            {v: frozenset(found) for v, found in readers.items()},
            derivative.operations,
        )
        self.kept, self.made = self.graph.choose(price)
        needed = self._needed(readers)
        self.free = [v for v in forward.invars if v in self.graph.free and v in needed]
        if pair.unmatched:
            for v in (*self.kept, *[v for v in readers if v in self.made]):
                pair.note(self.origin(v), v not in self.made)
        self.forward_equations = live_equations(forward, [*forward.outvars[: derivative.n_values], *self.kept])
        self.dependent = self._dependent()

    def _fixed(self, residuals: Collection[Any], free: Collection[Any]) -> dict[Any, Keeping]:
        """Return what has to be kept: what rules of users save, what a transpose compares, what is marked."""
        found: dict[Any, Keeping] = {}

        def fix(v: Any, is_exact: bool) -> None:
            while (e := self.maker.get(v)) is not None and row_of(e).is_move and not self.pair.is_named(e):
                if not e.invars or is_literal(e.invars[0]):
                    return
                v = e.invars[0]
            if v not in free:
                keeping = self._keeping(v)
                found[v] = as_it_is(v) if is_exact and any(r != UNKNOWN for r in keeping.roundings) else keeping

        for v, marks in self.derivative.marks.items():
            for mark, _ in marks:
                if isinstance(mark, SavedByRule) and v in residuals:
                    fix(v, mark.is_exact)
        for e in self.derivative.forward.eqns:
            for x in e.invars if row_of(e).is_compared else ():
                if not is_literal(x) and x in residuals:
                    fix(x, True)
        if self.pair.only is not None and not self.pair.steps:  # the predicate of `recompute_saved`
            ask = lambda v: lambda x: is_selected(self.pair.only, x, self.where(v), self.origin(v))  # noqa: E731
            found |= {v: as_it_is(v) for v in residuals if v not in free and not self._asked(v, ask(v))}
        return found | {v: as_it_is(v) for v in self.held}

    def _needed(self, residuals: Collection[Any]) -> dict[Any, None]:
        """Return the variables that backward keeps or makes for some of its residuals."""
        found, to_visit = dict[Any, None](), list(residuals)
        kept = set(self.kept)
        while to_visit:
            v = to_visit.pop()
            if v not in found:
                found[v] = None
                e = None if v in kept else self.maker.get(v)
                to_visit += [x for x in e.invars if not is_literal(x)] if e else []
        return found

    @functools.cached_property
    def saved_inputs(self) -> dict[Any, Any]:
        """Return the free inputs that rules of users save, each with the class of its mark.

        A plan around this body must not compute them again. tests: test_rules_that_compare_what_they_saved
        """
        found: dict[Any, Any] = {}
        for v, marks in self.derivative.marks.items():
            exact = [mark.is_exact for mark, _ in marks if isinstance(mark, SavedByRule)]
            to_visit = [v] if exact else []
            while to_visit:
                x = to_visit.pop()
                if x in self.maker:
                    to_visit += [y for y in self.maker[x].invars if not is_literal(y)] if x in self.graph.free else []
                elif x in self.graph.free:
                    found[x] = Held if any(exact) or found.get(x) is Held else SavedByRule
        return found

    def _dependent(self) -> set[Any]:
        """Return the variables of backward that depend on cotangents."""
        jaxpr = self.derivative.backward
        found = set(jaxpr.invars[len(self.derivative.residuals) :])
        for e in jaxpr.eqns:
            if e.effects or any(not is_literal(v) and v in found for v in e.invars):
                found.update(e.outvars)
        return found

    def _keeping(self, v: Any) -> Keeping:
        if is_key(v.aval) or 0 in v.aval.shape or v in self._constants:
            return as_it_is(v)
        steps = self._asked(v, lambda x: steps_for(self.pair, x, self.where(v), self.origin(v)))
        return Keeping(steps, roundings_of(steps, v.aval), size_of(steps, v.aval))

    def _asked(self, v: Any, question: Callable[[Any], Any]) -> Any:
        """Return the answer of a predicate, which gets a tracer, as under `jax.jit`."""
        _, _, answer = stage(lambda x: ([], question(x)), [v.aval], "only")
        return answer

    def where(self, v: Any) -> str:
        """Return which tensor it is, for errors of hooks."""
        for mark, i in self.derivative.marks.get(v, ()):
            if isinstance(mark, SavedByRule) and mark.layer:
                return f"{mark.layer}, saved tensor {i}"
        e = self.maker.get(v)
        return f"an input of {self.name}" if e is None else f"the operation {e.primitive.name} in {self.name}"

    def origin(self, v: Any) -> Origin:
        return Origin() if self.origins is None else self.origins.of(v)

    def bytes_at(self, price: float) -> float:
        """Return how many bytes would be kept, without those that a body of a loop counts."""
        kept, _ = self.graph.choose(price)
        return sum([self.graph.keeping(v).bytes for v in kept if v not in self.held])

    # -- forward -----------------------------------------------------------------------------------------

    def run_forward(self, primals: Sequence[Any]) -> tuple[Values, list[Any], list[Any]]:
        """Return the values; the residuals of the free inputs, then of the kept variables; and further residuals."""
        jaxpr, n = self.derivative.forward, self.derivative.n_values
        values: dict[Any, Any] = dict(zip(jaxpr.invars, [*self.derivative.consts, *primals], strict=True))
        residual_of: dict[Any, Any] = {}
        kept = set(self.kept)

        def keep(variables: Sequence[Any]) -> None:
            for v in variables:
                if v in kept:
                    values[v], residual_of[v] = self._keep(v, values[v])

        keep(jaxpr.invars)
        for e in self.forward_equations:
            values.update(zip(e.outvars, self._evaluate(e, values), strict=True))
            keep(e.outvars)
        outputs = [v.val if is_literal(v) else values[v] for v in jaxpr.outvars[:n]]
        further = self._further_residuals(values)
        is_program = any(map(is_staged, residual_of.values())) or any(map(is_staged, primals))
        self.pair.n_recomputed[is_program] += len([v for v in self.made if v in self.graph.operations_of])
        return outputs, [*[values[v] for v in self.free], *[residual_of[v] for v in self.kept]], further

    def _evaluate(self, e: Any, values: Mapping[Any, Any]) -> list[Any]:
        return _evaluate(self.derivative.forward, e, values.__getitem__, self.derivative.is_inner(e))

    def _further_residuals(self, values: dict[Any, Any]) -> list[Any]:
        """Return residuals that only the report and JAX's check for NaN read, which looks at results of programs."""
        if not (is_reported.value or is_nan_reported()):
            return []
        jaxpr = self.derivative.forward
        again = [v for v in self.graph.operations_of if v in self.made and v.aval.shape]
        for e in live_equations(jaxpr, again):
            if not all(v in values for v in e.outvars):
                values.update(zip(e.outvars, self._evaluate(e, values), strict=True))
        found: list[Any] = []
        if is_reported.value:
            from_ = {v: ", ".join(dict.fromkeys(map(self._shown, self.sources(v)))) or "inputs" for v in again}
            for v in (*self.kept, *again):
                if is_tracer(values[v]):
                    found += apply(Mark(typeof(values[v]), self.origin(v), from_.get(v)), [values[v]])
        if is_nan_reported():
            hidden = [*again, *[v for v in self.kept if self.graph.keeping(v).steps]]
            traced = [jax.lax.stop_gradient(values[v]) for v in hidden if is_tracer(values[v]) and has_tangent(v.aval)]
            found += [jnp.max(jnp.abs(x)) for x in traced]
        return found

    def _shown(self, v: Any) -> str:
        return next(iter(self.origin(v).keys), "")

    def sources(self, v: Any) -> list[Any]:
        """Return the kept variables from which backward computes a variable."""
        kept = set(self.kept)
        return [x for x in self._needed([v]) if x in kept]

    def _keep(self, v: Any, value: Any) -> tuple[Any, Any]:
        """Return a value, in staged code behind a barrier, and its residual."""
        (x,) = as_arrays([value])
        with hooks_suspended():
            residual = pack_tensor(self.pair, self.graph.keeping(v).steps, x, self.where(v), self.origin(v))
        arrays = leaves_of(residual)
        if not isinstance(residual, Expression) or not any(map(is_staged, arrays)):
            return value, residual
        # Without the barrier, XLA may simplify unpack(pack(x)) to x and keep x (two casts cancel out), or pack late.
        value, *bound = barrier([x, *arrays])
        array_of = dict(zip(map(id, arrays), bound, strict=True))
        return value, fold(residual, lambda a: array_of[id(a)])


class _Origins:
    """The origins of the variables of a jaxpr."""

    def __init__(self, derivative: Derivative, code: Any, outer: Origin, given: Sequence[Origin]) -> None:
        jaxpr = derivative.forward
        inputs = [Value(v.aval, "input", str(i)) for i, v in enumerate(jaxpr.invars)]
        self._value_of, notes = values_of(jaxpr, inputs, (), derivative.calls_of)
        self._notes_of, self._outer = by_value(notes), outer
        self._name_of = names_of_equations([code])
        self._given = dict(zip(inputs, given, strict=True))
        self._marks = derivative.marks

    def of(self, v: Any) -> Origin:
        found = origin_of_value(self._value_of[v], self._notes_of, self._given, self._outer, self._name_of)
        for mark, i in self._marks.get(v, ()):
            if isinstance(mark, SavedByRule) and mark.names:
                found = with_saver(found, mark.layer, mark.names[i])
        return found


def size_of(steps: Sequence[Any], aval: Any) -> float:
    size = n_bytes(aval)
    for step in steps if all(isinstance(n, int) for n in aval.shape) else ():
        if step.size is not None:
            return step.size(aval)
    return size


class _Backward:
    """One run of the backward pass of a plan."""

    def __init__(self, plan: Plan, residual_of: Mapping[Any, Any], cotangents: Sequence[Any]) -> None:
        self._plan, self._residual_of = plan, residual_of
        self._jaxpr, self._forward = plan.derivative.backward, plan.derivative.forward
        self._maker = plan.maker | {v: e for e in plan.backward_equations for v in e.outvars}
        inputs = self._jaxpr.invars[len(plan.derivative.residuals) :]
        self._values = {**plan.derivative.backward_consts, **dict(zip(inputs, cotangents, strict=True))}
        self._views: dict[Any, Any] = {}  # what comes from outside, for the equation that reads it now

    def run(self) -> Values:
        dependent = self._plan.dependent
        for e in self._plan.backward_equations:
            if e.effects or any(v in dependent for v in e.outvars):
                self._prepare(e.invars)
                self._values.update(zip(e.outvars, self._evaluate(self._jaxpr, e), strict=True))
        self._prepare([v for v in self._jaxpr.outvars if is_literal(v) or v not in dependent])
        return list(map(self._read, self._jaxpr.outvars))

    def _evaluate(self, jaxpr: Any, e: Any) -> list[Any]:
        return _evaluate(jaxpr, e, self._read, self._plan.derivative.is_inner(e))

    def _source(self, v: Any) -> Any:
        return v if is_literal(v) else self._plan.source_of.get(v, v)

    def _read(self, v: Any) -> Any:
        v = self._source(v)
        return v.val if is_literal(v) else self._views[v] if v in self._views else self._values[v]

    def _prepare(self, variables: Sequence[Any]) -> None:
        """Compute those of the variables that do not depend on cotangents.

        In staged code, XLA would compute them when the forward pass ends, and hold them. So it waits for the other
        variables, the cotangents. What comes from outside is read anew each time: else XLA shares a slice of stacked
        weights with the forward pass, and holds it from there on.
        """
        self._views = {}
        order, arrays_of = self._missing(variables)
        arrays = {id(a): a for residual in arrays_of.values() for a in leaves_of(residual)}
        cotangents = list(dict.fromkeys(v for v in variables if not is_literal(v) and v in self._plan.dependent))
        if cotangents and any(map(is_staged, arrays.values())):
            operands = [*as_arrays(list(arrays.values())), *[self._values[v] for v in cotangents]]
            bound = barrier(operands, waits=True)
            arrays = dict(zip(arrays, bound, strict=False))
            self._values |= zip(cotangents, bound[len(arrays) :], strict=True)
        for v, residual in arrays_of.items():
            value = fold(residual, lambda a: arrays[id(a)], lambda function, inputs: function(*inputs))
            (self._views if v in self._plan.graph.free else self._values)[v] = value
        for e in order:
            read = [v for v in map(self._source, e.invars) if not is_literal(v)]
            is_view = row_of(e).is_view and bool(read) and all(v in self._views for v in read)
            jaxpr = self._forward if e.outvars[0] in self._plan.maker else self._jaxpr
            values = zip(e.outvars, self._evaluate(jaxpr, e), strict=True)
            (self._views if is_view else self._values).update(values)

    def _missing(self, variables: Sequence[Any]) -> tuple[list[Any], dict[Any, Any]]:
        """Return the equations that compute the variables, in order, and the residuals that these read."""
        arrays_of: dict[Any, Any] = {}
        order: dict[int, Any] = {}
        to_visit = [(v, False) for v in reversed(list(map(self._source, variables)))]
        while to_visit:
            v, is_ready = to_visit.pop()
            if is_literal(v) or v in self._values or v in arrays_of:
                continue
            if v in self._residual_of:
                arrays_of[v] = self._residual_of[v]
                continue
            e = self._maker[v]
            if id(e) in order:
                continue
            if is_ready:
                order[id(e)] = e
            else:
                to_visit += [(v, True), *[(self._source(x), False) for x in reversed(e.invars)]]
        return list(order.values()), arrays_of


class PlannedPullback(LinearMap):
    """The derivative of a planned function."""

    def __init__(self, plan: Plan, residuals: Sequence[Any], n_arrays: int) -> None:
        self.name, self._plan, self._residuals = plan.name, plan, residuals
        self.n_residuals = n_arrays
        self.types = [tangent_type(t) for t in plan.derivative.value_types if has_tangent(t)]

    def transpose(self, residuals: Sequence[Any], cotangents: Sequence[Any]) -> Values:
        __tracebackhide__ = True
        with outside_blocks():
            full = [zeros_of(t) if c is None else c for c, t in zip(cotangents, self.types, strict=True)]
            arrays = as_arrays(residuals)
            found = [fold(x, arrays.__getitem__) for x in self._residuals]
            residual_of = dict(zip([*self._plan.free, *self._plan.kept], found, strict=True))
            return _Backward(self._plan, residual_of, full).run()

    def evaluate(self, residuals: Sequence[Any], tangents: Sequence[Any]) -> Values:
        __tracebackhide__ = True
        return transposed(self, residuals, tangents)


class Planned(RuleFunction):
    """A function that is planned as a whole: a decorated one, or the body of a loop in it."""

    def __init__(
        self,
        jaxpr: Any,
        outside: Sequence[bool | None],
        name: str,
        around: Surroundings,
        warn: Callable[[str], None] | None = None,
    ) -> None:
        self.jaxpr, self.outside, self.name, self.around, self._warn = jaxpr, outside, name, around, warn
        self._plans: dict[Any, Plan] = {}

    def plan(self, types: Sequence[Any], nonzero: Sequence[bool], has_bodies: bool) -> Plan:
        __tracebackhide__ = True
        key = tuple(nonzero), tuple(types), has_bodies
        if key not in self._plans:
            self._plans[key] = self._new_plan(types, nonzero, has_bodies)
        plan, around = self._plans[key], self.around
        around.budget.plans[self] = plan, around.times, around.within[-1] if around.within else self
        return plan

    def _new_plan(self, types: Sequence[Any], nonzero: Sequence[bool], has_bodies: bool) -> Plan:
        __tracebackhide__ = True
        limit = self.around.pair.limit
        if self.around.within or limit is None:  # the function around a body has decided on the price
            return self._plan_at(self.around, types, nonzero, has_bodies)
        budget = Budget()
        plan = self._plan_at(self.around._replace(budget=budget), types, nonzero, has_bodies)
        budget.plans[self] = plan, 1, self
        if budget.bytes_at(math.inf) <= limit:
            return plan
        price = budget.price_for(limit)
        if (least := budget.bytes_at(price)) > limit and self._warn:
            self._warn(
                f"recompute_saved: {self.name} keeps {math.ceil(least):,} bytes for backward, more than the limit of "
                f"{math.floor(limit):,}. It is the least that can be kept: the rest cannot be computed again."
            )
        return self._plan_at(self.around._replace(budget=Budget(price)), types, nonzero, has_bodies)

    def _plan_at(self, around: Surroundings, types: Sequence[Any], nonzero: Sequence[bool], has_bodies: bool) -> Plan:
        __tracebackhide__ = True
        code = prepared(self.jaxpr, self.outside, around, has_bodies)
        run = lambda *args: eval_jaxpr(code, (), *args)  # noqa: E731
        derivative = derivative_of(run, types, nonzero, self.name)
        origins = None
        if around.pair.is_selective or is_reported.value:
            outer = Origin(sources=tuple(e.source_info for e in around.within), block=around.entry)
            # What a loop carries is computed by the loop.
            loop = around.within[-1].primitive.name if around.within else ""
            carried = dataclasses.replace(outer, operation=loop)
            n = len(derivative.consts)
            given = [*[Origin()] * n, *[carried if x is False else Origin() for x in self.outside]]
            origins = _Origins(derivative, self.jaxpr, outer, given)
        return Plan(derivative, around.pair, self.outside, self.name, origins, around.budget.price)

    def transpose(self, jaxpr: Any, args: Sequence[Any], cotangents: Sequence[Any]) -> Values:
        return transposed_code(jaxpr, args, cotangents)

    def rule(self, primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Values, Values]:
        __tracebackhide__ = True
        nonzero = [t is not None for t in tangents]
        given = select(tangents, nonzero)
        if not given:
            values = apply(self, primals)
            return values, [None] * len(values)
        if not keeps_residuals(given):
            run: Any = lambda *args: self.run(*merge(nonzero, args, primals))  # noqa: E731
            values, found = jax.jvp(run, select(primals, nonzero), given)
            return values, [t if has_tangent(typeof(v)) else None for v, t in zip(values, found, strict=True)]
        # JAX runs this rule inside a partial evaluation, in which the tangents are unknown. The hooks run in the trace
        # outside of it, in which the primals are known.
        with set_current_trace(without_pass_through(trace_of_primals(primals))):
            with outside_blocks():
                # Residuals that are packed within a body have no second derivative.
                has_bodies = not any(map(is_differentiated, primals))
                plan = self.plan([typeof(x) for x in primals], nonzero, has_bodies)
                values, residuals, further = plan.run_forward(primals)
            for i, v in enumerate(plan.free if active.value is PLANNED else ()):
                if v in plan.saved_inputs and is_tracer(residuals[i]):
                    types = [typeof(residuals[i])]
                    residuals[i : i + 1] = apply(plan.saved_inputs[v](types), [residuals[i]])
            position_of: dict[int, int] = {}
            arrays: list[Any] = []
            for x in [leaf for r in residuals for leaf in leaves_of(r)]:
                if id(x) not in position_of:
                    position_of[id(x)] = len(arrays)
                    arrays.append(x)
            linear = PlannedPullback(
                plan, [fold(r, lambda x: position_of[id(x)]) for r in residuals], len(arrays) + len(further)
            )
            arrays = [*held(as_arrays(arrays), select(primals, list(map(bool, self.outside)))), *further]
        found = apply_linear(linear, arrays, given)
        return values, scatter(found, [has_tangent(typeof(v)) for v in values])


# -- calls ---------------------------------------------------------------------------------------------------


@functools.cache
def _not_inlined() -> Any:
    """Return the parameter `inline` of functions that JAX does not inline."""
    jaxpr, _, _ = stage(lambda x: ([jax.jit(jax.lax.neg)(x)], None), [typeof(1.0)], "a jitted function")
    return jaxpr.eqns[0].params["inline"]


class _JittedKept(PassThroughTrace):
    """A trace in which JAX does not inline its own jitted functions, whose names are those of operations."""

    __slots__ = ()

    def process_primitive(self, primitive: Any, tracers: Sequence[Any], params: dict[str, Any], /) -> Any:
        __tracebackhide__ = True
        if primitive.name in JITTED and not is_nan_reported():  # JAX checks each operation outside of jitted functions
            params = {**params, "inline": _not_inlined()}
        with set_current_trace(self.parent_trace):
            return primitive.bind(*tracers, **params)


def name_of(function: Any) -> str:
    return getattr(getattr(function, "func", function), "__name__", type(function).__name__)  # or of a `partial`


class NotPlannedError(Exception):
    """A function cannot be staged as a whole; the text says why."""


def call_planned(
    function: Callable[..., Any],
    pair: Pair,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    warn: Callable[[str], None],
) -> Any:
    """Call a decorated function where JAX traces or differentiates it."""
    __tracebackhide__ = True
    tensors, skeleton = split((args, kwargs))
    if any(map(is_ref, skeleton.statics())):
        raise NotPlannedError("an argument is a jax.Ref")
    tensors = as_arrays(tensors)

    def run(*tensors: Any) -> tuple[list[Any], Any]:
        __tracebackhide__ = True
        given = skeleton.fill(tensors)
        with set_current_trace(_JittedKept(current_trace())):
            outputs, out_skeleton = split(function(*given[0], **given[1]))
        return as_arrays(outputs), (out_skeleton, has_changed((list(tensors), skeleton), split(given)))

    name = name_of(function)
    entry = current()
    with outside_blocks(), active(PLANNED):
        try:
            jaxpr, consts, (out_skeleton, is_changed) = stage(run, [typeof(x) for x in tensors], name)
        except NEEDS_VALUES as error:
            error.add_note(
                f"{name} is decorated with saved-tensor hooks, so it is staged as a whole. Code that needs concrete "
                "values runs in a `with` block of the hooks, as it stands."
            )
            raise
    if is_changed:
        raise NotPlannedError("it changes an argument in place")
    if any(map(is_ref, consts)):
        raise NotPlannedError("it closes over a jax.Ref")
    # A concrete array is a constant of a program. What eager code closes over is like an argument.
    places = [None if is_staging() and not is_tracer(x) else True for x in consts] + [True] * len(tensors)
    planned = Planned(jaxpr, places, name, Surroundings(pair, entry, Budget()), warn)
    with set_current_trace(without_pass_through(current_trace())):
        values = apply(planned, [*as_arrays(consts), *tensors])
    return out_skeleton.fill(values)
