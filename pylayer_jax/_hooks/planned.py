"""Functions whose residuals are kept by a plan for the whole function.

    J     the decorated function, staged; bodies of scan, cond and shard_map in it are planned functions too
    F     jax.vjp of J, staged: operands -> values, residuals           B    its backward: residuals, cotangents -> ...
    F'    F without what only residuals need; a kept tensor is packed behind the equation that makes it
    B'    B, in which a residual is made again when an equation with a cotangent first reads it

A `Planned` is a `RuleFunction` of J. Its rule makes the `Plan` and runs F'; the transpose of its linear map runs B'.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pylayer_jax._jax.jaxprs import (
    all_equations,
    body_inputs,
    equations_to,
    inner_jaxprs,
    interpret_opened,
    is_user_code,
    jaxpr_of,
    line_of,
    operations,
    outside_effects,
    stage,
    variables,
    with_jaxpr,
)
from pylayer_jax._jax.rule_function import Values, apply, merge, payload_of, rule_function_p, scatter, select
from pylayer_jax._jax.traces import (
    NEEDS_VALUES,
    Literal,
    PassThroughTrace,
    ShapedArray,
    Var,
    current,
    current_trace,
    eval_jaxpr,
    is_differentiated,
    is_staged,
    is_staging,
    is_tracer,
    set_current_trace,
)
from pylayer_jax._jax.types import as_arrays, is_nan_reported, is_ref, typeof, unchecked
from pylayer_jax._trees import WeakTable, has_changed, hashable_or_none, split

from .active import PLANNED, active, entered_block, is_reported
from .origins import Program, ReportMark, name_of_equation
from .pack import IDLE, Origin, Pair, Place, is_selected, pack_tensor, roundings_of, steps_for
from .plan import SMALL, Graph, Keeping, Terms, as_it_is, n_bytes, segments
from .primitives import BODIES, FACTS, UNKNOWN
from .saving import (
    Held,
    HookedFunction,
    Lent,
    Linearized,
    Mark,
    ReadAgain,
    SavedByRule,
    Saver,
    UsersRule,
    Vjp,
    behind_barrier,
    held,
    largest,
    numbered,
    past_blocks,
    unpacked,
    without_hooks,
)

__tracebackhide__ = True  # pytest hides these frames, as JAX does elsewhere

# -- equations ---------------------------------------------------------------------------------------------


def is_of_backward(source: Any) -> bool:
    return "transpose(jvp" in str(source.name_stack)


def has_backward(jaxpr: Any) -> bool:
    return any(is_of_backward(e.source_info) for e in all_equations(jaxpr))


def _computation_key(e: Any, operands: Sequence[Any]) -> Any:
    """Return a key of what an equation computes, or None for one that may differ from an equal one."""
    if e.effects or e.primitive.name not in FACTS:
        return None
    read = [(x.aval, np.asarray(x.val).tobytes()) if isinstance(x, Literal) else x for x in operands]
    return hashable_or_none((e.primitive, tuple(e.params.items()), tuple(read)))


def _is_held(equation: Any, index: int) -> bool:
    """Return whether a result of an equation is `Held` in its inner jaxprs."""
    if isinstance(payload_of(equation), Held):
        return True
    if equation.primitive.name not in (*BODIES, "jit"):
        return False
    for jaxpr in inner_jaxprs(equation.params):
        maker = {v: e for e in jaxpr.eqns for v in e.outvars}
        v = jaxpr.outvars[index]
        # A shard_map returns a scalar residual as an array of one entry.
        while not isinstance(v, Literal) and v in maker and FACTS[maker[v].primitive.name].is_move and maker[v].invars:
            v = maker[v].invars[0]
        if not isinstance(v, Literal) and v in maker and _is_held(maker[v], maker[v].outvars.index(v)):
            return True
    return False


# -- the staged function -----------------------------------------------------------------------------------


class Surroundings(NamedTuple):
    """What a planned function knows of the code around it."""

    pair: Pair
    origin: Origin = Origin()  # has the call of the decorated function; for a body, its scan, cond or shard_map too
    terms: Terms | None = None  # for a limit
    is_in_scan: bool = False


BodyPlans = tuple[Any, list[Any]]  # an equation, and the planned functions of its bodies


def prepared(jaxpr: Any, is_outside: Sequence[bool], around: Surroundings, bodies: list[BodyPlans] | None) -> Any:
    """Return a copy that applies rules of users as `UsersRule`s, and bodies as planned functions, added to `bodies`."""
    outside = {*jaxpr.constvars, *select(jaxpr.invars, is_outside)}  # what comes from outside the decorated function
    return jaxpr.replace(eqns=[x for e in jaxpr.eqns for x in _prepared_equation(e, outside, around, bodies)])


def _prepared_equation(e: Any, outside: set[Any], around: Surroundings, bodies: list[BodyPlans] | None) -> list[Any]:
    name, params = e.primitive.name, e.params
    inner, is_outside = inner_jaxprs(params), [isinstance(x, Literal) or x in outside for x in e.invars]
    names = _primitives_in(inner[0]) if name == "jit" else frozenset([name])
    if all(is_outside) and all(FACTS[operation].is_view for operation in names - {"jit"}):
        outside.update(e.outvars)
    if name == "custom_vjp_call":  # not a `custom_jvp`, which keeps the result of a comparison
        rule = UsersRule(name, Saver(), jaxpr_of([e]))
        return [_application(rule, e, rule.jaxpr.invars, e.outvars)]
    if name == "jit":
        (code,) = inner
        has_rules = "custom_vjp_call" in names and is_user_code(code)
        if not has_rules and (bodies is None or names.isdisjoint(BODIES)):
            return [e]
        # Calls of one jitted function share its equations, but each keeps its own residuals, so it gets a copy.
        changed = with_jaxpr(params["jaxpr"], prepared(code, is_outside, around, bodies))
        return [e.replace(params={**params, "jaxpr": changed})]
    has_refs = not all(isinstance(x.aval, ShapedArray) for x in e.invars)
    if bodies is None or name not in BODIES or has_refs or any(j.constvars for j in inner):
        return [e]
    if name == "cond" and around.pair.moves_to_host:
        return [e]
    n_before, carried = body_inputs(e)
    of_computed = Place.COMPUTED if name == "shard_map" else Place.LENT  # a shard_map packs what it reads, in shards
    places = [Place.OUTSIDE if x else of_computed for x in is_outside[n_before:]]
    for i in carried:
        places[i] = Place.COMPUTED
    origin = dataclasses.replace(around.origin, operation=name, sources=(*around.origin.sources, e.source_info))
    around = around._replace(origin=origin, is_in_scan=around.is_in_scan or name == "scan")
    is_planned = [bool(body.eqns) for body in inner]
    functions = [Planned(body, places, f"the body of a {name}", around) for body in select(inner, is_planned)]
    codes = merge(is_planned, map(_planned_body, functions), inner)
    if name == "cond":
        changed: Any = {"branches": tuple(map(with_jaxpr, params["branches"], codes))}
    else:
        changed = {"jaxpr": with_jaxpr(params["jaxpr"], codes[0])}
    is_lent = [place is Place.LENT for place in places]
    positions, lent = np.flatnonzero(is_lent).tolist(), select(e.invars[n_before:], is_lent)
    marked = [Var(v.aval) for v in lent]
    marks = [_application(Lent([v.aval for v in lent], functions, positions), e, lent, marked)] if lent else []
    operands = [*e.invars[:n_before], *merge(is_lent, marked, e.invars[n_before:])]
    bodies.append((e, functions))
    return [*marks, e.replace(invars=operands, params={**params, **changed})]


def _application(function: Any, like: Any, invars: Sequence[Any], outvars: Sequence[Any]) -> Any:
    """Return an equation that applies a function with a rule where another equation stands."""
    params, effects = rule_function_p.params_of(function), outside_effects(function.jaxpr)
    return like.replace(primitive=rule_function_p, params=params, invars=invars, outvars=outvars, effects=effects)


_primitives = WeakTable()  # jaxpr -> the names of its primitives: a function of jax.numpy is one jaxpr in many calls


def _primitives_in(jaxpr: Any) -> frozenset[str]:
    if (found := _primitives.get(jaxpr)) is None:
        found = frozenset(operations(jaxpr))
        _primitives.put(jaxpr, found)
    return found


def _planned_body(function: Planned) -> Any:
    """Return a jaxpr whose only equation is this function of a body."""
    body = function.jaxpr
    outputs = [Var(v.aval) for v in body.outvars]
    like = body.eqns[0]  # has the context of the body, as the mesh of a shard_map, but also scopes, which go
    like = like.replace(source_info=like.source_info.replace(name_stack=type(like.source_info.name_stack)()))
    return body.replace(outvars=outputs, eqns=[_application(function, like, body.invars, outputs)])


@dataclasses.dataclass(eq=False)
class Pass:
    """A backward pass, B, for the values that have a cotangent."""

    jaxpr: Any  # cotangents -> cotangents of the differentiated operands; it reads variables of the forward pass
    reached: Sequence[bool]  # for each of these operands: whether it has a cotangent
    dependent: set[Any]  # the variables that depend on cotangents, and results of effects
    equations: Sequence[Any]  # those of dependent variables
    maker: Mapping[Any, Any]  # variable -> equation


Marks = dict[Any, list[tuple[Any, int]]]  # variable -> its marks, each with the position in it


def _compares(jaxpr: Any) -> bool:
    """Return whether the derivative of a jaxpr compares values, or a layer in it saves exact tensors."""
    equations = [*all_equations(jaxpr)]
    saved = [mark for mark in map(payload_of, equations) if isinstance(mark, SavedByRule)]
    return any(FACTS[e.primitive.name].needs_exact for e in equations) or any(mark.is_exact for mark in saved)


class Derivative:
    """The forward pass of a function as a jaxpr, F, and its backward passes, with jitted functions opened."""

    def __init__(self, run: Callable[..., Values], types: Sequence[Any], nonzero: Sequence[bool], name: str) -> None:
        def forward(*args: Any) -> tuple[list[Any], Any]:
            vjp = Vjp(name)
            values, residuals = vjp.linearize(run, args, nonzero)
            return [*values, *residuals], vjp

        with active(PLANNED):
            jaxpr, consts, self.vjp = stage(forward, types, name)
        # By variable, of all passes: concrete arrays that rules of users and jitted functions close over.
        self.constants = dict(zip(jaxpr.invars, consts, strict=False))
        self.calls_of: dict[Any, Any] = {}  # result of an equation, of all passes -> the jitted functions around it
        self.operation_of: dict[Any, Any] = {}  # the same -> a key of the operation that the equation belongs to
        code, self.marks = self._simplified(jaxpr)
        self.inputs = jaxpr.invars[len(consts) :]
        self.forward = code.replace(invars=[*self.constants, *self.inputs])  # constants, operands -> values, residuals
        n = len(self.vjp.value_types)
        self.outputs, self.residuals = self.forward.outvars[:n], self.forward.outvars[n:]
        self.maker = {v: e for e in self.forward.eqns for v in e.outvars}  # of the forward pass, in order
        self._passes: dict[Any, Pass] = {}

    def _simplified(self, jaxpr: Any, given: Mapping[Any, Any] = {}) -> tuple[Any, Marks]:
        """Return a jaxpr with opened jitted functions, and its marks. It reads `given` variables of another."""
        equations, marks = list[Any](), Marks()
        computed: dict[Any, Any] = {}  # what an equation computes -> its results: each value is kept and made once

        def rule(e: Any, operands: list[Any], calls: tuple[Any, ...]) -> Sequence[Any]:
            if isinstance(mark := payload_of(e), Mark):
                for i, x in enumerate(operands):
                    if not isinstance(x, Literal):
                        marks.setdefault(x, []).append((mark, mark.original_positions[i]))
                return operands
            key = _computation_key(e, operands)
            if key in computed:
                return computed[key]
            # The jaxpr of a jitted function may be called several times, so its variables are made anew.
            results = [Var(v.aval) for v in e.outvars] if calls else e.outvars
            equations.append(e.replace(invars=operands, outvars=results))
            self.calls_of |= dict.fromkeys(results, calls)
            # JAX gives derivatives the traceback of their operation, and one to all of its own jitted function.
            operation = tuple(dict.fromkeys([id(x.source_info.traceback or x) for x in (*calls, e)]))
            self.operation_of |= dict.fromkeys(results, operation)
            if key is not None:
                computed[key] = results
            return results

        known = {v: v for v in jaxpr.invars} | dict(given)
        outvars = interpret_opened(rule, jaxpr, known, self.constants)
        return jaxpr.replace(eqns=equations, outvars=outvars), marks

    def evaluate(self, code: Any, values: dict[Any, Any]) -> None:
        is_checked = is_nan_reported()
        # JAX checks results of jitted functions, not those within. tests: hooks/test_modes.py
        for part in [jaxpr_of([e]) for e in code.eqns] if is_checked else [code]:
            is_inner = is_checked and any(self.calls_of[v] for v in part.outvars)
            run = unchecked(eval_jaxpr) if is_inner else eval_jaxpr
            try:
                found = run(part, (), *map(values.__getitem__, part.invars))
            except FloatingPointError as error:  # of `jax.debug_nans`: the user's frames are those of the staging
                for e in part.eqns if is_checked else ():
                    error.add_note(f"The operation {e.primitive.name} is at {line_of([e.source_info])}.")
                raise
            values.update(zip(part.outvars, found, strict=True))

    @functools.cached_property
    def whole_backward(self) -> Pass | None:
        try:
            return self.backward([True] * len(self.vjp.cotangent_types))
        except Exception:
            # An output may have no derivative, or none for these cotangents. Backward raises this error if it runs.
            # tests: integrations/test_solvers.py::test_implicit_gradients
            return None

    @functools.cached_property
    def readers(self) -> dict[Any, frozenset[Any]]:
        """Return the residuals that backward reads, each with the operations whose derivatives read it."""
        residuals, backward = variables(self.residuals), self.whole_backward
        if backward is None:
            return {x: frozenset() for x in residuals}
        found: dict[Any, frozenset[Any]] = {}
        read = [(e.invars, self.operation_of[e.outvars[0]]) for e in backward.maker.values()]
        for atoms, operation in [*read, (backward.jaxpr.outvars, None)]:
            for x in set(variables(atoms)).intersection(residuals):
                found[x] = found.get(x, frozenset()) | {operation}
        # tests: test_a_layer_that_reads_more_if_a_cotangent_is_missing
        others = [x for x in residuals if any(mark.depends_on_cotangents for mark, _ in self.marks.get(x, ()))]
        return dict.fromkeys(others if len(self.vjp.cotangent_types) > 1 else (), frozenset[Any]()) | found

    @functools.cached_property
    def read_by_segment(self) -> list[Collection[Any]]:
        """Return the residuals that each segment of backward reads, those of the last segment first."""
        if (backward := self.whole_backward) is None:
            return [self.readers]
        wanted = [[x for e in segment for x in e.invars] for segment in segments(backward)]
        wanted[-1] += backward.jaxpr.outvars
        first, *others = [equations_to(backward.jaxpr, backward.dependent, atoms)[1] for atoms in wanted[::-1]]
        read_by_others = set[Any]().union(*others)
        first |= self.readers.keys() - read_by_others  # also what is read for some cotangents only
        return [self.readers.keys() & read for read in (first, *others)]

    def backward(self, used: Sequence[bool]) -> Pass:
        """Return the pass for a mask of the values with a tangent: whether each has a cotangent."""
        if (key := tuple(used)) in self._passes:
            return self._passes[key]
        n = len(self.residuals)

        def run(*args: Any) -> tuple[Values, list[bool]]:
            found = self.vjp.gradients(args[:n], scatter(args[n:], used))
            reached = [x is not None for x in found]
            return select(found, reached), reached

        with active(PLANNED):
            types = [*[v.aval for v in self.residuals], *select(self.vjp.cotangent_types, used)]
            code, consts, reached = stage(run, types, "backward")
        inputs = code.invars[len(consts) :]
        self.constants |= zip(code.invars, consts, strict=False)
        jaxpr, _ = self._simplified(code, dict(zip(inputs, self.residuals, strict=False)))
        jaxpr = jaxpr.replace(invars=inputs[n:])
        dependent = set(jaxpr.invars)
        for e in jaxpr.eqns:
            if e.effects or not dependent.isdisjoint(variables(e.invars)):
                dependent.update(e.outvars)
        live = live_equations(jaxpr, jaxpr.outvars)
        equations = [e for e in live if e.effects or not dependent.isdisjoint(e.outvars)]
        maker = {v: e for e in live for v in e.outvars}
        return self._passes.setdefault(key, Pass(jaxpr, reached, dependent, equations, maker))  # of the first thread


def live_equations(jaxpr: Any, wanted: Sequence[Any]) -> list[Any]:
    return equations_to(jaxpr, (), wanted, keeps_effects=True)[0]


class Action(NamedTuple):
    """A part of a pass: some variables get a value or another one, then code is evaluated."""

    restored: Sequence[Any]  # the residuals that are unpacked, in staged code behind a barrier with cotangents
    replaced: Sequence[Any]  # by what a barrier returns; before that, in a forward pass, by the rounded tensor
    code: Any  # a jaxpr
    dropped: Sequence[Any] = ()  # what no later action reads: eager code would hold it until the pass ends


def with_lifetimes(actions: Sequence[Action], returned: Sequence[Any]) -> list[Action]:
    """Return the actions, each of which drops what is not read later."""
    live, found = set(variables(returned)), list[Action]()
    for action in reversed([x for x in actions if x.restored or x.replaced or x.code.eqns]):
        code, given = action.code, {*action.restored, *action.replaced}
        dropped = given.union(code.invars, code.outvars) - live
        code = code.replace(outvars=[v for v in code.outvars if v in live])
        found.append(action._replace(code=code, dropped=list(dropped)))
        live = live.difference(code.outvars).union(code.invars).difference(given).union(action.replaced)
    return found[::-1]


_PRICES: Final = 1e-2, 1e6  # the lowest and the highest that a limit may lead to
_N_TRIES: Final = 13  # bisections of a price
_MOST_PLANS: Final = 4  # for a limit


class Plan:
    """What a function keeps for backward, and how backward gets its residuals."""

    def __init__(
        self,
        derivative: Derivative,
        around: Surroundings,
        places: Sequence[Place],
        name: str,
        origin: Callable[[Any], Origin],
        bodies: Sequence[BodyPlans],
    ) -> None:
        self.derivative, self.name, self.origin, self._bodies = derivative, name, origin, bodies
        pair = self.pair = around.pair
        self.terms = around.terms
        self.maker, forward, readers = derivative.maker, derivative.forward, derivative.readers
        self.held = {v for v, marks in derivative.marks.items() if any(isinstance(m, Held) for m, _ in marks)}
        self.held |= {v for e in forward.eqns for i, v in enumerate(e.outvars) if _is_held(e, i)}
        self.held &= self.maker.keys()
        place_of = dict.fromkeys(forward.invars, Place.CONSTANT) | dict(zip(derivative.inputs, places, strict=True))
        never_packed = {v for v, place in place_of.items() if pair.never_packs(place)}
        self._actions: dict[Any, list[Action]] = {}  # of a backward pass, by its cotangents
        self._keepings: dict[Any, Keeping] = {}  # by variable or, if the pair does not choose tensors, by type
        self._constants = {v for v, place in place_of.items() if place is Place.CONSTANT}
        for e in forward.eqns:  # not random seeds, which have no operand either
            if FACTS[e.primitive.name].recomputed and self._constants.issuperset(variables(e.invars)):
                self._constants.update(e.outvars)
        lent = {v for v in never_packed if place_of[v] is Place.LENT}
        fixed = self._fixed(never_packed)
        self.graph = Graph(derivative, pair, never_packed, lent, self._keeping_of, fixed, around.is_in_scan)
        self.kept, self.made = self.graph.choose(self.terms)
        self._made_residuals = [v for v in readers if v in self.made]
        read = equations_to(forward, self.kept, [*readers])[1]
        free_inputs = [v for v in forward.invars if v in read and v in self.graph.free]
        self.residual_variables = [*free_inputs, *self.kept]  # whose values JAX keeps for backward
        if pair.unmatched:
            for v in (*self.kept, *self._made_residuals):
                pair.note(self.origin(v), v not in self.made)
        most = max([n_bytes(v.aval) for v in self.kept], default=0)
        self.small = {v for v in (*self.kept, *self.maker) if n_bytes(v.aval) < SMALL * most}
        self._packed = {v for v in self.kept if self.graph.keeping(v).steps}
        # Not what a loop has packed: XLA would copy all of it.
        own = [v for v in self.kept if v in self.maker and v not in self.held]
        self._to_round = {v for v in own if v.aval.dtype.itemsize < 4 and jnp.issubdtype(v.aval.dtype, jnp.floating)}

    def _fixed(self, never_packed: Collection[Any]) -> dict[Any, Keeping]:
        """Return what has to be kept: what rules save, a transpose compares, `only` excludes, or a mark holds."""
        found, residuals = dict[Any, Keeping](), self.derivative.readers

        def fix(v: Any, is_exact: bool) -> None:
            while (e := self.maker.get(v)) is not None and FACTS[e.primitive.name].is_move:
                if self.pair.is_selective and e.primitive.name == "name":  # the name may choose other hooks
                    break
                if not e.invars or isinstance(e.invars[0], Literal):
                    return
                v = e.invars[0]
            if v not in never_packed:
                keeping = self._keeping_of(v)
                if is_exact and keeping.roundings - {UNKNOWN}:
                    found[v] = as_it_is(v)  # also if another rule saves it
                found.setdefault(v, keeping)

        for v in self.derivative.marks:
            if v in residuals and (saved := self._marks_of(v, SavedByRule)):
                fix(v, any(mark.is_exact for mark in saved))
        may_be_whole = not self._bodies or self.pair.moves_to_host
        for e in self.derivative.forward.eqns:
            compared = variables(e.invars) if FACTS[e.primitive.name].needs_exact else ()
            if may_be_whole and e.primitive.name in BODIES and any(map(_compares, inner_jaxprs(e.params))):
                compared = e.outvars  # some are residuals. tests: test_what_a_max_pooling_compares_is_not_rounded
            for x in compared:
                if x in residuals:
                    fix(x, True)
        # Here `only` chooses what is computed again.
        if self.pair.only is not None and (self.pair.limit is not None or not self.pair.all_steps()):
            asked = [v for v in residuals if v not in never_packed]
            found |= {v: as_it_is(v) for v in asked if not self._asked(v, is_selected, self.pair.only)}
        return found | {v: as_it_is(v) for v in self.held}

    def _marks_of(self, v: Any, kind: type[Any]) -> list[Any]:
        """Return the marks of a kind that a variable has, here or in a body to which it is lent."""
        found = list[Any]()
        for mark, i in self.derivative.marks.get(v, ()):
            if isinstance(mark, kind):
                found.append(mark)
            for plan in [f.plan for f in mark.functions if f.plan] if isinstance(mark, Lent) else ():
                found += plan.marks_of_input(plan.derivative.inputs[mark.inputs[i]], kind)
        return found

    def marks_of_input(self, x: Any, kind: type[Any]) -> list[Any]:
        """Return the marks of a free input and its views, so that a plan around this one respects them."""
        # tests: test_rules_that_compare_what_they_saved
        marked = [v for v in self.derivative.marks if self.graph.input_of.get(v) is x]
        return [mark for v in marked for mark in self._marks_of(v, kind)]

    @functools.cached_property
    def inputs_read_again(self) -> set[Any]:
        """Return the free inputs from which backward computes something again."""
        read = variables([x for v in self.made for x in self.maker[v].invars])
        return {self.graph.input_of[v] for v in read if v in self.graph.free}

    def _keeping_of(self, v: Any) -> Keeping:
        if v in self._constants or (v in self.derivative.marks and self._marks_of(v, ReadAgain)):
            return as_it_is(v)
        key = (v.aval.shape, v.aval.dtype) if not self.pair.is_selective else v
        if key not in self._keepings:
            steps = self._asked(v, steps_for, self.pair)
            is_known = all(isinstance(n, int) for n in v.aval.shape)  # `jax.export` makes symbolic lengths
            sizes = [step.size for step in steps if step.size and is_known]
            size = sizes[0](v.aval) if sizes else n_bytes(v.aval)
            self._keepings[key] = Keeping(steps, roundings_of(steps, v.aval), size)
        return self._keepings[key]

    def _asked(self, v: Any, question: Callable[..., Any], of: Any) -> Any:
        """Return the answer of the predicates, which get a tracer, as under `jax.jit`."""
        ask = lambda x: question(of, x, self.where(v), self.origin(v))
        if not self.pair.predicates():
            return ask(v.aval)
        _, _, answer = stage(lambda x: ([], ask(x)), [v.aval], "only")
        return answer

    def where(self, v: Any) -> str:
        for mark, i in self.derivative.marks.get(v, ()):
            if isinstance(mark, SavedByRule) and mark.layer:
                return f"{mark.layer}, saved tensor {i}"
        e = self.maker.get(v)
        return f"an input of {self.name}" if e is None else f"the operation {e.primitive.name} in {self.name}"

    def kept_bytes(self) -> float:
        return self.bytes_by_type(self.terms).total()

    def bytes_by_type(self, terms: Terms | None) -> Counter[Any]:
        """Return how many bytes would be kept, those of bodies in all iterations too."""
        kept = self.kept if terms == self.terms else self.graph.choose(terms)[0]
        found = Counter[Any]()
        for v in kept:
            if not (v in self.held and self.maker[v].primitive.name in BODIES):  # which are counted below
                found[v.aval.shape, v.aval.dtype] += int(self.graph.keeping(v).bytes)
        for equation, functions in self._bodies:
            of_body, times = Counter[Any](), equation.params.get("length", 1)
            for plan in [function.plan for function in functions if function.plan]:
                of_body |= plan.bytes_by_type(terms)  # of two branches, JAX keeps one array if the types are equal
            for (shape, dtype), size in of_body.items():
                found[(times, *shape) if times > 1 else shape, dtype] += times * size
        return found

    def terms_for(self, limit: float, shares: bool) -> Terms:
        """Return about the lowest price at which the bytes are within the limit, or one at which they are the least."""
        bytes_at = lambda terms: self.bytes_by_type(terms).total()
        low, high = [Terms(price, shares) for price in _PRICES]
        if bytes_at(high) > limit:  # and maybe at a lower price fewer: what one segment keeps serves others
            prices = np.geomspace(*_PRICES, _N_TRIES).tolist()
            return min([Terms(price, shares) for price in prices], key=bytes_at)
        for _ in range(_N_TRIES):
            middle = Terms(math.sqrt(low.price * high.price), shares)
            low, high = (low, middle) if bytes_at(middle) <= limit else (middle, high)
        return high

    def peak_bytes(self) -> float:
        """Return how many bytes backward holds at most, of what is kept, made again, and its own."""
        used = [True] * len(self.derivative.vjp.cotangent_types)
        actions = self._backward_actions(used, is_program=True) if self.derivative.whole_backward else []
        last = {v: i for i, action in enumerate(actions) for v in action.dropped}
        alive, kept, peak = set(self.kept), set(self.kept), 0.0
        for i, action in enumerate(actions):
            alive.update(action.restored, action.code.outvars)
            peak = max(peak, sum([n_bytes(v.aval) for v in alive - self.graph.free]))
            alive -= {v for v in action.dropped if v not in kept or last[v] == i}
        return peak

    # -- forward -----------------------------------------------------------------------------------------

    def run_forward(self, primals: Sequence[Any]) -> tuple[Values, list[Any], list[Any]]:
        """Return the values; the residuals, packed; and further residuals."""
        derivative = self.derivative
        keeps_all = is_reported.value or is_nan_reported()
        values = {**derivative.constants, **dict(zip(derivative.inputs, primals, strict=True))}
        residual_of: dict[Any, Any] = {}
        for action in self._forward_actions:
            for v in action.replaced:
                if v in self._to_round and is_staged(values[v]):
                    # XLA may compute in float32: the forward pass would go on with another value than the one in
                    # bfloat16 that is kept. tests: test_recompute.py::test_the_forward_pass_reads_what_is_kept
                    info = jnp.finfo(v.aval.dtype)
                    values[v] = jax.lax.reduce_precision(values[v], info.nexp, info.nmant)
                if v in self._packed:
                    (x,) = as_arrays([values[v]])
                    packed = pack_tensor(self.pair, self.graph.keeping(v).steps, x, self.where(v), self.origin(v))
                    (values[v],), (residual_of[v],) = behind_barrier([x], [packed])
            derivative.evaluate(action.code, values)
            for v in () if keeps_all else action.dropped:
                values.pop(v, None)
        residual_of |= {v: values[v] for v in self.residual_variables if v not in self._packed}
        outputs = [v.val if isinstance(v, Literal) else values[v] for v in derivative.outputs]
        further = self._further_residuals(values) if keeps_all else []
        is_program = any(map(is_staged, (*primals, *residual_of.values())))
        self.pair.n_recomputed[is_program] += len(self._made_residuals)
        return outputs, [residual_of[v] for v in self.residual_variables], further

    @functools.cached_property
    def _forward_actions(self) -> list[Action]:
        changed, actions = self._packed | self._to_round, list[Action]()
        replaced, equations = [v for v in self.derivative.forward.invars if v in changed], list[Any]()
        for e in live_equations(self.derivative.forward, [*self.derivative.outputs, *self.kept]):
            equations.append(e)
            if changed_here := [v for v in e.outvars if v in changed]:
                actions.append(Action((), replaced, jaxpr_of(equations)))
                replaced, equations = changed_here, []
        returned = [*self.derivative.outputs, *[v for v in self.residual_variables if v not in self._packed]]
        return with_lifetimes([*actions, Action((), replaced, jaxpr_of(equations))], returned)

    def _further_residuals(self, values: dict[Any, Any]) -> list[Any]:
        """Return residuals for the report and for JAX's check for NaN, which sees only results of programs."""
        jaxpr = self.derivative.forward
        again = [v for v in self._made_residuals if v.aval.shape]
        missing = [e for e in live_equations(jaxpr, again) if not all(v in values for v in e.outvars)]
        self.derivative.evaluate(jaxpr_of(missing), values)
        found: list[Any] = []
        if is_reported.value:
            key_of = {v: next(iter(self.origin(v).keys), "") for v in self.kept}
            for v in filter(lambda v: is_tracer(values[v]), (*self.kept, *again)):
                names = dict.fromkeys(key_of[x] for x in self._missing([v])[1] if x in key_of)
                from_ = (", ".join(names) or "inputs") if v in self.made else None
                found += apply(ReportMark(typeof(values[v]), self.origin(v), from_), [values[v]])
        return found + largest([values[v] for v in (*again, *[v for v in self.kept if v in self._packed])])

    def run_backward(self, residuals: Sequence[Any], arrays: Sequence[Any], cotangents: Sequence[Any]) -> Values:
        """`residuals` have positions in place of arrays."""
        # JAX may have differentiated the function after its call, as `jax.grad` of `jax.jit` does.
        if self.pair.is_selective and entered_block(self.pair) is None:
            self.pair.warn_of_unmatched()
        with without_hooks():
            used = [c is not None for c in cotangents]
            backward = self.derivative.backward(used)
            residual_of = dict(zip(self.residual_variables, residuals, strict=True))
            given = select(cotangents, used)
            values = {**self.derivative.constants, **dict(zip(backward.jaxpr.invars, given, strict=True))}
            is_program = any(map(is_staged, given))
            for action in self._backward_actions(used, is_program):
                found = [residual_of[v] for v in action.restored]
                tensors, replaced = unpacked(found, arrays, [values[v] for v in action.replaced])
                values |= zip([*action.restored, *action.replaced], [*tensors, *replaced], strict=True)
                self.derivative.evaluate(action.code, values)
                for v in action.dropped:
                    values.pop(v, None)
            outputs = [v.val if isinstance(v, Literal) else values[v] for v in backward.jaxpr.outvars]
            return scatter(outputs, backward.reached)

    def _backward_actions(self, used: Sequence[bool], is_program: bool) -> list[Action]:
        """Return actions in which a variable that does not depend on cotangents is computed where it is first read.

        In staged code, XLA would compute them when the forward pass ends, and hold them, so they wait for the
        cotangents. What comes from outside is read anew each time: else XLA shares a slice of stacked weights with the
        forward pass, and holds it from there on. So is what is small: else XLA writes out the broadcast of a standard
        deviation, and does not fuse it into each operation that reads it.
        """
        if (key := (*used, is_program)) in self._actions:
            return self._actions[key]
        backward = self.derivative.backward(used)
        constants_of_backward = self.derivative.constants.keys() - set(self.derivative.forward.invars)
        always_known = {*backward.dependent, *constants_of_backward}
        actions, restored, equations = list[Action](), list[Any](), list[Any]()
        replaced: Sequence[Any] = []
        returned = [v for v in variables(backward.jaxpr.outvars) if v not in always_known]
        parts = segments(backward) if self.graph.has_segments(self.terms) else [backward.equations]
        read_by = {id(part[0]): variables([x for e in part for x in e.invars]) for part in parts if part}
        known = set(always_known)
        for e in [*backward.equations, None]:
            if id(e) in read_by:  # a new segment
                shared = known.intersection(read_by[id(e)]) if self.terms and self.terms.shares else set[Any]()
                known = always_known | shared
            read = variables(e.invars) if e else returned
            if not known.issuperset(read):
                actions.append(Action(restored, replaced, jaxpr_of(equations)))
                again, residuals = self._missing(read, known, backward.maker)
                # A barrier takes no Refs.
                replaced = [v for v in read if v in backward.dependent and isinstance(v.aval, ShapedArray)]
                found = self._before_broadcasts(replaced, known, backward) if is_program else (replaced, list[Any]())
                replaced, broadcasts = found
                restored, equations = [*residuals], [*broadcasts, *again]
                read_anew = {v for v in residuals if v in self.graph.free or v in self.small}
                for x in again:
                    operands = variables(x.invars)
                    is_cheap = FACTS[x.primitive.name].is_view or self.small.issuperset(x.outvars)
                    if is_cheap and operands and read_anew.issuperset(operands):
                        read_anew.update(x.outvars)
                known.update({*residuals, *[v for x in again for v in x.outvars]} - read_anew)
            equations += [e] if e else []
        actions.append(Action(restored, replaced, jaxpr_of(equations)))
        return self._actions.setdefault(key, with_lifetimes(actions, backward.jaxpr.outvars))

    def _before_broadcasts(
        self, cotangents: Sequence[Any], known: Collection[Any], backward: Pass
    ) -> tuple[Sequence[Any], list[Any]]:
        """Return what to wait for, and the equations from it to the cotangents: XLA writes out what a barrier gets."""
        found, equations = list[Any](), list[Any]()
        # A cotangent may be the broadcast of a number, or of that of a mean.
        # tests: test_the_cotangent_of_a_sum_or_a_mean_is_not_written_out
        for cotangent in cotangents:
            smallest, v, chain, n = cotangent, cotangent, list[Any](), 0
            while (e := backward.maker.get(v)) and FACTS[e.primitive.name].recomputed:
                (*others, v) = sorted(variables(e.invars), key=backward.dependent.__contains__)  # it is the last
                if any([x.aval.shape or x not in known for x in others]):  # noqa: C419 - a list is faster
                    break
                chain.append(e)
                if e.primitive.name == "broadcast_in_dim":
                    smallest, n = v, len(chain)
            found.append(smallest)
            equations += chain[:n][::-1]
        return list(dict.fromkeys(found)), equations

    def _missing(
        self, wanted: Iterable[Any], known: Collection[Any] = (), own: Mapping[Any, Any] = {}
    ) -> tuple[list[Any], dict[Any, None]]:
        """Return the equations that compute variables, in order, and what they begin with. `own`: those of backward."""
        residuals, kept = dict[Any, None](), set(self.kept)
        order: dict[int, Any] = {}
        to_visit = [(v, False) for v in reversed([*wanted])]
        while to_visit:
            v, is_ready = to_visit.pop()
            if v in known or v in residuals:
                continue
            e = None if v in kept else self.maker.get(v) or own.get(v)
            if e is None:
                residuals[v] = None
                continue
            if is_ready:
                order.setdefault(id(e), e)
            elif id(e) not in order:
                to_visit += [(v, True), *[(x, False) for x in reversed(variables(e.invars))]]
        return list(order.values()), residuals


class Planned(HookedFunction):
    """A decorated function that is planned as a whole, a body in it, or one operation of a `with` block."""

    def __init__(self, jaxpr: Any, places: Sequence[Place], name: str, around: Surroundings) -> None:
        self.jaxpr, self._places, self.name, self.around = jaxpr, places, name, around
        self.is_body = bool(around.origin.sources)
        self._is_of_backward = is_of_backward(current())
        self._plans: dict[Any, Plan] = {}
        self.plan: Plan | None = None  # of the last linearization, which is the one that JAX stages

    def _new_plan(self, nonzero: Sequence[bool], plan_at: Callable[[Surroundings], Plan]) -> Plan:
        pair, limit = self.around.pair, self.around.pair.limit
        if self.is_body:  # the function around it has decided on the price, and warns
            return plan_at(self.around)
        if limit is None:
            plan = plan_at(self.around)
            is_decorated = self.around.origin.entry is not None
            if is_decorated and not (plan.kept or plan.made) and "remat2" in _primitives_in(self.jaxpr):
                pair.warn_once(
                    f"there is nothing to pack in {self.name}: jax.checkpoint computes all that backward "
                    "needs again. Apply jax.checkpoint to parts of the function, or only the hooks."
                )
            return plan
        # Eager code calls a function again and again, and the search takes longer than the function.
        key = self.name, *nonzero, *[(e.primitive, *[v.aval for v in e.outvars]) for e in self.jaxpr.eqns]
        terms, bytes_found = pair.terms_of.get(key, (None, None))
        plan = plan_at(self.around._replace(terms=terms))
        if plan.kept_bytes() > limit and plan.kept_bytes() != bytes_found:
            found = [self._within(limit, shares, plan, plan_at) for shares in (False, True)]
            least = min(map(Plan.kept_bytes, found))
            plan = min([plan for plan in found if plan.kept_bytes() <= max(least, limit)], key=Plan.peak_bytes)
            if least > limit:
                pair.warn_once(
                    f"{self.name} keeps {math.ceil(least):,} bytes for backward, more than the limit of "
                    f"{math.floor(limit):,}. It is the least that can be kept: the rest cannot be computed again, "
                    "would take too many operations, or is what other hooks inside it keep."
                )
        pair.terms_of[key] = plan.terms, plan.kept_bytes()
        return plan

    def _within(self, limit: float, shares: bool, plan: Plan, plan_at: Callable[[Surroundings], Plan]) -> Plan:
        """Return a plan that meets a limit, or the one that keeps the least."""
        tried = [plan]
        while tried[-1].kept_bytes() > limit and len(tried) <= _MOST_PLANS:
            # A body that computes more again may read more from around it, which has to be kept too: so plan anew.
            # tests: test_limit.py::test_the_least_is_what_is_held
            if (terms := tried[-1].terms_for(limit, shares)) == tried[-1].terms:
                break
            tried.append(plan_at(self.around._replace(terms=terms)))
        return min(tried, key=Plan.kept_bytes)

    def _plan_at(self, around: Surroundings, types: Sequence[Any], nonzero: Sequence[bool], plans_bodies: bool) -> Plan:
        is_outside = [place in (Place.CONSTANT, Place.OUTSIDE) for place in self._places]
        bodies = list[BodyPlans]()
        code = prepared(self.jaxpr, is_outside, around, bodies if plans_bodies else None)
        derivative = Derivative(lambda *args: eval_jaxpr(code, (), *args), types, nonzero, self.name)
        origin: Callable[[Any], Origin] = lambda _: Origin()
        if around.pair.is_selective or is_reported.value:
            # What a loop carries is computed by the loop, and what a shard_map gets, in shards, by the shard_map.
            computed = {v for v, place in zip(derivative.inputs, self._places, strict=True) if place is Place.COMPUTED}
            program = Program(derivative.forward, self.jaxpr, derivative.calls_of)
            origin = lambda v: program.origin(program.source(v), around.origin, computed)
        return Plan(derivative, around, self._places, self.name, origin, bodies)

    def lower_rule(self, context: Any, *args: Any) -> Any:  # JAX differentiates a function before it lowers it
        pair = self.around.pair
        if not pair.n_used and (self._is_of_backward or has_backward(self.jaxpr)):
            pair.warn_once(IDLE)
        return super().lower_rule(context, *args)

    def linearized(self, primals: Sequence[Any], nonzero: Sequence[bool]) -> Linearized:
        with without_hooks():
            # Residuals that are packed within a body have no second derivative.
            plans_bodies = not any(map(is_differentiated, primals))
            types = [typeof(x) for x in primals]
            key = tuple(nonzero), tuple(types), plans_bodies, is_reported.value
            if key not in self._plans:
                plan_at = lambda around: self._plan_at(around, types, nonzero, plans_bodies)
                self._plans[key] = self._new_plan(nonzero, plan_at)
            plan = self.plan = self._plans[key]
            values, residuals, further = plan.run_forward(primals)
        # A decorated function around this one, which may pack the free inputs, learns how this one reads them.
        is_nested = active.value is PLANNED and not self.is_body
        not_held = select(primals, [place is not Place.COMPUTED for place in self._places])
        for i, v in enumerate(plan.residual_variables if is_nested else ()):
            if not is_tracer(residuals[i]):
                continue
            own_type = [typeof(residuals[i])]
            if saved := plan.marks_of_input(v, SavedByRule):
                flags = [any(x.is_exact for x in saved), any(x.depends_on_cotangents for x in saved)]
                (residuals[i],) = apply(SavedByRule(own_type, "", *flags), [residuals[i]])
            if v in plan.inputs_read_again:
                (residuals[i],) = apply(ReadAgain(own_type), [residuals[i]])
            if v in plan.graph.free:
                not_held.append(residuals[i])
        arrays, residuals = numbered(residuals)
        transpose = functools.partial(plan.run_backward, residuals)
        return values, transpose, [*held(as_arrays(arrays), not_held), *further], plan.derivative.vjp


# -- calls ---------------------------------------------------------------------------------------------------


@functools.cache
def _not_inlined() -> Any:
    jaxpr, _, _ = stage(lambda x: ([jax.jit(jax.lax.neg)(x)], None), [typeof(1.0)], "a jitted function")
    return jaxpr.eqns[0].params["inline"]


class _NothingInlined(PassThroughTrace):
    """A trace in which JAX does not inline its own jitted functions: it caches their linearizations."""

    __slots__ = ()

    def process_primitive(self, primitive: Any, tracers: Sequence[Any], params: dict[str, Any], /) -> Any:
        if primitive.name == "jit" and not is_nan_reported():  # JAX checks each operation outside of jitted functions
            is_inlined = params["inline"] != _not_inlined()
            params = {**params, "inline": _not_inlined()}
            if is_inlined:  # elsewhere, so it takes the name that its result has there
                equations = params["jaxpr"].eqns
                computing = [e for e in equations if not FACTS[e.primitive.name].is_move] or equations
                params["name"] = name_of_equation(computing[-1]) if computing else ""
        with set_current_trace(self.parent_trace):
            return primitive.bind(*tracers, **params)


def stage_calls(function: Callable[..., tuple[Sequence[Any], Any]], types: Sequence[Any], name: str) -> Any:
    """Stage a function. JAX's own jitted functions stay calls, as in eager mode."""

    def run(*args: Any) -> tuple[Sequence[Any], Any]:
        with set_current_trace(_NothingInlined(current_trace())):
            return function(*args)

    return stage(run, types, name)


def stage_for_plan(function: Callable[..., tuple[Sequence[Any], Any]], types: Sequence[Any], name: str) -> Any:
    """Stage a function for a plan, which packs in place of the hooks around it."""
    with past_blocks(), active(PLANNED):
        return stage_calls(function, types, name)


def name_of(function: Any) -> str:
    return getattr(getattr(function, "func", function), "__name__", type(function).__name__)  # or of a `partial`


class NotPlannedError(Exception):
    """A function cannot be staged as a whole; the text says why."""


def call_planned(function: Callable[..., Any], pair: Pair, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a decorated function where JAX traces or differentiates it."""
    tensors, skeleton = split((args, kwargs))
    if any(map(is_ref, skeleton.statics())):
        raise NotPlannedError("an argument is a jax.Ref")
    tensors = as_arrays(tensors)

    def run(*tensors: Any) -> tuple[list[Any], Any]:
        given = skeleton.fill(tensors)
        outputs, out_skeleton = split(function(*given[0], **given[1]))
        if has_changed((list(tensors), skeleton), split(given)):
            before, after = ({**dict(enumerate(xs)), **named} for xs, named in (skeleton.fill(tensors), given))
            changed = next((name for name in before if has_changed(split(before[name]), split(after[name]))), "")
            raise NotPlannedError(f"it changes its argument {changed} in place")
        return as_arrays(outputs), out_skeleton

    name = name_of(function)
    try:
        jaxpr, consts, out_skeleton = stage_for_plan(run, [typeof(x) for x in tensors], name)
    except NEEDS_VALUES as error:
        error.add_note(
            f"{name} is decorated with saved-tensor hooks, so it is staged as a whole. Code that needs concrete values "
            "runs in a `with` block of the hooks, as it stands."
        )
        raise
    if any(map(is_ref, consts)):
        raise NotPlannedError("it closes over a jax.Ref")
    # A concrete array is a constant of a program. What eager code closes over is like an argument.
    places = [Place.CONSTANT if is_staging() and not is_tracer(x) else Place.OUTSIDE for x in consts]
    around = Surroundings(pair, Origin(entry=current()))
    planned = Planned(jaxpr, [*places, *[Place.OUTSIDE] * len(tensors)], name, around)
    with past_blocks():
        values = apply(planned, [*as_arrays(consts), *tensors])
    return out_skeleton.fill(values)
