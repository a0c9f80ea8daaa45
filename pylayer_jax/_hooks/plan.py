"""Chooses what a function keeps for backward, what it packs, and what backward computes again.

    F  { lambda ; x w. let h = x @ w; s = logistic h; y = h * s in (y, w, x, h, s) }     y, then the residuals

    kept      h, in 8 bits     s follows from it
    free      x, w             they come from outside

Which variables are kept is a minimum cut of the `Graph` of the forward pass: of all sets from which backward can
compute the residuals, it has the fewest bytes, and of these sets the fewest operations. A limit adds both, by a price,
and divides backward into segments, each of which makes what it reads anew: else what the first one makes is held.
"""

from __future__ import annotations

import functools
import itertools
import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import jax.numpy as jnp

from pylayer_jax._jax.jaxprs import equations_to, variables
from pylayer_jax._jax.traces import Literal
from pylayer_jax._jax.types import has_tangent

from .pack import Pair, Step, roundings_of
from .primitives import EXACT, FACTS, OTHER, SAME, STEEP, UNKNOWN, Error, Operand, Rounding, is_repeatable, is_steep

SMALL: Final = 1 / 16  # a tensor is small beside another one of 16 times its size, as a mean beside its rows
_UNIT: Final = 1024  # an operation, in the capacities of a graph
_BYTE: Final = 1 << 40  # a byte, where bytes are compared first
_INFINITE: Final = 1 << 200
_LEAST: Final = 4  # the bytes of residuals that a segment reads, over those of the cotangents that it gets
_MOST_TIMES: Final = 8  # the segments in which a variable is made again, else a deep network takes long to trace
_MOST_TIMES_OF_PRODUCT: Final = 3
_MOST_DEGREES: Final = 2.1  # the error of a gradient is at most about twice that without recomputation


def _size(shape: Sequence[Any]) -> float:
    size: Any = math.prod(shape)  # no integer, if `jax.export` has symbolic dimensions
    return size if isinstance(size, int) else 1 << 40


def n_bytes(aval: Any) -> float:
    return _size(aval.shape) * aval.dtype.itemsize if hasattr(aval, "shape") else 0  # of a token


# -- a minimum cut -----------------------------------------------------------------------------------------


def minimum_cut(n_nodes: int, edges: Iterable[tuple[int, int, int]], source: int, sink: int) -> list[bool]:
    """Return a mask of the nodes on the side of the source, by the algorithm of Dinic (1970)."""
    ends, rest, edges_of = list[int](), list[int](), [list[int]() for _ in range(n_nodes)]
    for start, end, capacity in edges:  # edge i, and its reverse i ^ 1
        edges_of[start].append(len(ends))
        edges_of[end].append(len(ends) + 1)
        ends += end, start
        rest += capacity, 0
    while True:
        level = [-1] * n_nodes
        level[source] = 0
        reached = [source]
        for node in reached:
            for i in edges_of[node]:
                if rest[i] and level[ends[i]] < 0:
                    level[ends[i]] = level[node] + 1
                    reached.append(ends[i])
        if level[sink] < 0:
            return [x >= 0 for x in level]
        position, path = [0] * n_nodes, list[int]()
        node = source
        while True:
            if node == sink:
                flow = min([rest[i] for i in path])
                for i in path:
                    rest[i] -= flow
                    rest[i ^ 1] += flow
                first = next(n for n, i in enumerate(path) if not rest[i])
                node = ends[path[first] ^ 1]
                del path[first:]
                continue
            while position[node] < len(edges_of[node]):
                i = edges_of[node][position[node]]
                if rest[i] and level[ends[i]] == level[node] + 1:
                    path.append(i)
                    node = ends[i]
                    break
                position[node] += 1
            else:
                if node == source:
                    break
                node = ends[path.pop() ^ 1]
                position[node] += 1


# -- the graph ---------------------------------------------------------------------------------------------


class Terms(NamedTuple):
    """How backward computes costly operations again, to meet a limit."""

    price: float  # how many operations it may spend to save a byte
    shares: bool  # whether a segment has what the one before it made: fewer operations, but more is held


class Keeping(NamedTuple):
    """How a variable would be kept."""

    steps: Sequence[Step]
    roundings: frozenset[Rounding]
    bytes: float  # what the plan counts


def as_it_is(v: Any) -> Keeping:
    return Keeping((), frozenset(), n_bytes(v.aval))


class Made(NamedTuple):
    """What is known about a value that backward has or computes."""

    degrees: dict[Any, float]  # the kept variables with an error from which it is computed, each with its degree
    roundings: frozenset[Rounding]
    operations: frozenset[Any]  # those whose derivatives keep all rounded tensors that it is computed from
    steep: frozenset[Any]  # the variables whose equations may have enlarged an error
    by: str  # the primitive that computes it again; "" for a kept variable


_FREE: Final = Made({}, frozenset(), frozenset(), frozenset(), "")


class Graph:
    """`outside` has the inputs that are kept anyway; `keeping_of` returns how a variable would be kept.

    Those that are `lent` may be packed by the function around this one.
    """

    def __init__(
        self,
        derivative: Any,
        pair: Pair,
        outside: Collection[Any],
        lent: Collection[Any],
        keeping_of: Callable[[Any], Keeping],
        fixed: Mapping[Any, Keeping],
        is_in_scan: bool,
    ) -> None:
        self.jaxpr, self.maker, self.pair = derivative.forward, derivative.maker, pair
        self._derivative, self._is_in_scan = derivative, is_in_scan
        self._read = {id(e): variables(e.invars) for e in self.jaxpr.eqns}
        self.position = {v: i for i, v in enumerate(self.maker)}
        self.readers_of = derivative.readers  # residual -> the operations whose derivatives read it
        # What backward has without keeping it; and an input that is kept anyway, or a view of it -> the input.
        self.free, self.input_of = self._free(outside)
        self.slices_of_inputs = self.input_of.keys() - self.free  # at indices that the function computed
        # What has to be kept, and how; a slice of an input never is.
        self.fixed = {v: keeping for v, keeping in fixed.items() if v not in self.slices_of_inputs}
        self._keeping_of, self._keepings = keeping_of, dict(self.fixed)
        self._lent_input_of = {v: x for v, x in self.input_of.items() if x in lent}
        self._forbidden = set[Any]()  # what backward must not make because of errors
        # Jitted functions of JAX hold numbers as other dtypes.
        casts = [e for e in self.jaxpr.eqns if e.primitive.name == "convert_element_type"]
        self.number_of_cast = {e.outvars[0]: e.invars[0].val for e in casts if isinstance(e.invars[0], Literal)}
        # An error of these may become large: a residual among them is kept, or made from exact tensors.
        is_call = lambda e: e.primitive.name not in FACTS and e.primitive.multiple_results  # of a rule or a loop
        amplifying = [e for e in self.jaxpr.eqns if FACTS[e.primitive.name].amplifies or is_call(e)]
        self.read_by_amplifying = {x for e in amplifying for x in self._read[id(e)]}

    def _free(self, outside: Collection[Any]) -> tuple[set[Any], dict[Any, Any]]:
        """Return the free variables, and the input of each of these and of other views."""
        free, input_of = set(outside), {v: v for v in outside}
        for e in [e for e in self.jaxpr.eqns if FACTS[e.primitive.name].is_view]:
            # Of several operands, the first is the array, or each has a result, as in a `device_put`.
            arrays = e.invars if len(e.invars) == len(e.outvars) else e.invars[:1] * len(e.outvars)
            pairs = [(v, x) for v, x in zip(e.outvars, arrays, strict=False) if not isinstance(x, Literal)]
            if input_of.keys() >= {x for _, x in pairs}:
                free.update([v for v, _ in pairs] if free.issuperset(self._read[id(e)]) else ())
                input_of |= {v: input_of[x] for v, x in pairs}
        return free, input_of

    @functools.cached_property
    def from_keys(self) -> set[Any]:
        """Return what follows from keys and integers alone, as random bits and masks do: it can be repeated exactly."""
        found = {v for v in self.jaxpr.invars if not has_tangent(v.aval)}
        for e in self.jaxpr.eqns:
            if found.issuperset(self._read[id(e)]):
                found.update(e.outvars)
        return found

    @functools.cached_property
    def repeatable(self) -> set[Any]:
        """Return what backward may compute again to meet a limit, which only an exact pair has."""
        found = set[Any]()
        for e in self.jaxpr.eqns:
            facts = FACTS[e.primitive.name]
            may_repeat = facts.for_limit or (facts.decides and self.from_keys.issuperset(e.outvars))
            if is_repeatable(e) or (may_repeat and not e.effects):
                found.update(e.outvars)
        return found

    @functools.cached_property
    def uniform(self) -> set[Any]:
        """Return the arrays whose values are the same along the last axis."""
        found = {v for v in (*self.jaxpr.invars, *self.position) if getattr(v.aval, "shape", ())[-1:] == (1,)}
        for e in self.jaxpr.eqns:
            read = self._read[id(e)]
            if e.primitive.name == "broadcast_in_dim" and read:
                (x,), last = read, len(e.outvars[0].aval.shape) - 1
                dims = e.params["broadcast_dimensions"]
                is_uniform = last not in dims or x in found
            else:
                facts = FACTS[e.primitive.name]  # a transpose may move another axis to the end
                is_elementwise = Error.RELATIVE in facts.recomputed and not facts.is_move
                is_uniform = bool(read) and is_elementwise and found.issuperset(read)
            if is_uniform:
                found.update(e.outvars)
        return found

    @functools.cached_property
    def raised(self) -> set[Any]:
        """Return the products of which the function computes at least the third power."""
        degrees, raised = dict[Any, dict[Any, float]](), set[Any]()
        for e in self.jaxpr.eqns:
            facts = FACTS[e.primitive.name]
            if Error.RELATIVE in facts.recomputed:
                found = _degrees(e, [degrees.get(x, {}) for x in e.invars if not isinstance(x, Literal)])
                raised.update(x for x, degree in found.items() if degree >= 3)
                degrees |= {v: found | ({v: 1} if facts.adds_degrees else {}) for v in e.outvars}
        return raised

    @functools.cached_property
    def reach(self) -> dict[Any, float]:
        """Return the size of the largest variable that elementwise operations and moves make of each variable."""
        reach: dict[Any, float] = {}
        for e in reversed(self.jaxpr.eqns):
            if FACTS[e.primitive.name].recomputed:
                size = max([n_bytes(v.aval) for v in e.outvars] + [reach.get(v, 0) for v in e.outvars])
                reach.update({x: max(size, reach.get(x, 0)) for x in self._read[id(e)]})
        return reach

    def keeping(self, v: Any) -> Keeping:
        if v not in self._keepings:
            found = as_it_is(v) if v in self.slices_of_inputs else self._keeping_of(v)
            # A rounded mean would move all that is computed from it.
            # tests: test_a_mean_that_the_rest_is_computed_from_is_not_rounded
            if found.roundings and self.pair.recomputes_elementwise and n_bytes(v.aval) < SMALL * self.reach.get(v, 0):
                found = as_it_is(v)
            self._keepings[v] = found
        return self._keepings[v]

    def may_make(self, v: Any, has_limit: bool) -> bool:
        """Return whether backward may compute a variable again, as far as is known of errors."""
        e = self.maker.get(v)
        if e is None or v in self._forbidden or v in self.fixed:
            return False
        if v in self.slices_of_inputs:
            return True
        facts = FACTS[e.primitive.name]
        if has_limit:
            return v in self.repeatable
        return bool(facts.recomputed) if self.pair.recomputes_elementwise else Error.UNKNOWN in facts.recomputed

    # -- choice ------------------------------------------------------------------------------------------

    def choose(self, terms: Terms | None) -> tuple[list[Any], set[Any]]:
        """Return what to keep, and what backward makes again."""
        wanted_by_segment = self._derivative.read_by_segment if self.has_segments(terms) else [self.readers_of]
        while True:
            kept, shared, first_of = set[Any](), set[Any](), dict[Any, int]()
            for n, wanted in enumerate(wanted_by_segment):
                is_far = functools.partial(self._is_far, first_of, n)
                kept_here, made_here = self._cut(terms and terms.price, wanted, kept, shared, is_far)
                kept |= kept_here
                # The next segment may have what this one made, but not what this one was given, which is dropped then.
                shared = made_here - shared if terms and terms.shares else set()
            made = self._made_from(kept)
            failed = self._failed(kept, made) if terms is None else ()
            if not failed:
                return [v for v in (*self.jaxpr.invars, *self.position) if v in kept], set(made)
            self._forbidden.update(failed)

    def has_segments(self, terms: Terms | None) -> bool:
        # An iteration of a scan holds only what it makes itself.
        return terms is not None and not self._is_in_scan

    def _is_far(self, first_of: dict[Any, int], n: int, v: Any) -> bool:
        """Return whether segment `n` is too far from the first one that asked for a variable to make it again."""
        is_product = v in self.maker and FACTS[self.maker[v].primitive.name].is_product
        most = _MOST_TIMES_OF_PRODUCT if is_product else _MOST_TIMES
        return n - first_of.setdefault(v, n) >= most and v not in self.from_keys

    def _cut(
        self,
        price: float | None,
        residuals: Iterable[Any],
        kept: Collection[Any],
        shared: Collection[Any],
        is_far: Callable[[Any], bool],
    ) -> tuple[set[Any], set[Any]]:
        """Return what to keep for some residuals beside what is kept for others, and what is made again."""
        number_of: dict[Any, int] = {}
        edges: list[tuple[int, int, int]] = []
        uses: list[tuple[int, Any]] = []  # a node, and a variable that is needed to make it
        source, sink = 0, 1
        to_visit = list(residuals)
        while to_visit:
            v = to_visit.pop()
            if v in number_of or v in self.free or v in kept:
                continue
            node = number_of[v] = 2 * len(number_of) + 2  # node: it is needed; node + 1: backward makes it
            size = self.keeping(v).bytes
            edges.append((node, node + 1, int(size * (_BYTE if price is None else price * _UNIT)) + 1))
            if is_far(v) or not self.may_make(v, has_limit=price is not None):
                edges.append((node + 1, sink, _INFINITE))
                continue
            e = self.maker[v]
            # Of equal equations the later ones cost more, so that a limit takes them one by one.
            cost = 0 if v in shared else cost_of(e) * (1 + 0.05 * self.position[v] / len(self.position))
            edges.append((node + 1, sink, 1 + int(_UNIT * cost)))
            operands = self._read[id(e)]
            to_visit += operands
            uses += [(node + 1, x) for x in operands]
        edges += [(node, number_of[x], _INFINITE) for node, x in uses if x in number_of]
        edges += [(source, number_of[r], _INFINITE) for r in residuals if r in number_of]
        on_side = minimum_cut(2 * len(number_of) + 2, edges, source, sink)
        made = {v for v, node in number_of.items() if on_side[node + 1]}
        return {v for v, node in number_of.items() if on_side[node]} - made, made

    def _made_from(self, kept: Collection[Any]) -> list[Any]:
        """Return what backward makes from kept variables, in order."""
        known = self.free.union(kept)
        equations, read = equations_to(self.jaxpr, known, [*self.readers_of])
        return [v for e in equations for v in e.outvars if v in read and v not in known]

    # -- errors ------------------------------------------------------------------------------------------

    def _failed(self, kept: Collection[Any], order: Sequence[Any]) -> set[Any]:
        """Return the variables that backward may not make, for their errors."""
        operations = {v: self.readers_of.get(v, frozenset[Any]()) for v in (*kept, *self._lent_input_of.values())}
        while True:
            made, failed = self._judged(order, operations)
            # An operation that reads a residual keeps each tensor that it is made of, too. So more is within one
            # operation, which may allow more residuals.
            found = dict(operations)
            for v in self.readers_of:
                if v in made and v not in failed:
                    found |= {x: found[x] | self.readers_of[v] for x in made[v].degrees if x in found}
            if found == operations:
                return failed
            operations = found

    def _judged(
        self, order: Sequence[Any], operations: Mapping[Any, frozenset[Any]]
    ) -> tuple[dict[Any, Made], set[Any]]:
        known: dict[Any, Made] = {}
        for v, source in ({v: v for v in operations} | self._lent_input_of).items():
            is_lent = v in self._lent_input_of
            roundings = roundings_of(self.pair.all_steps(), v.aval) if is_lent else self.keeping(v).roundings
            known[v] = Made({source: 1} if roundings else {}, roundings, operations[source], frozenset(), "")
        made: dict[Any, Made] = {}
        failed: set[Any] = set()
        for v in order:
            e = self.maker[v]
            operands = [_FREE if isinstance(x, Literal) else known.get(x, _FREE) for x in e.invars]
            result = self._made(v, e, operands)
            if forbidden := self._forbidden_by(v, e, operands, result):
                failed |= forbidden
                result = result._replace(degrees={v: 1}, steep=frozenset())  # the next cut may keep it
            known[v] = made[v] = result
        return made, failed

    def _made(self, v: Any, e: Any, operands: Sequence[Made]) -> Made:
        inexact = [x for x in operands if x.roundings]
        shared = frozenset.intersection(*[x.operations for x in inexact]) if inexact else frozenset[Any]()
        steep, name = frozenset[Any]().union(*[x.steep for x in operands]), e.primitive.name
        if inexact and name in ("mul", "div") and is_steep(name, self._operands(e, operands)):
            steep |= {v}
        return Made(
            _degrees(e, [x.degrees for x in operands]),
            frozenset[Rounding]().union(*[x.roundings for x in operands]),
            shared | self.readers_of.get(v, frozenset()),
            steep,
            name,
        )

    def _operands(self, e: Any, operands: Sequence[Made]) -> list[Operand]:
        operation = self._derivative.operation_of[e.outvars[0]]
        return [
            Operand(
                a.val if isinstance(a, Literal) else self.number_of_cast.get(a, a),
                frozenset(x.degrees),
                SAME if operation in x.operations or not x.roundings else STEEP if x.steep else OTHER,
                x.by,
                not isinstance(a, Literal) and a in self.uniform,
            )
            for a, x in zip(e.invars, operands, strict=True)
        ]

    def _forbidden_by(self, v: Any, e: Any, operands: Sequence[Made], result: Made) -> set[Any]:
        """Return what backward may not make, if it may not compute `v` with these errors."""
        if v in self.slices_of_inputs:
            return set()
        if v in self.readers_of and not self._is_fine_enough(v, result):
            return {v}
        recomputed, errors = FACTS[e.primitive.name].recomputed, {Error.UNKNOWN}
        if self.pair.recomputes_elementwise:
            errors = {rounding.error for rounding in result.roundings} or {Error.EXACT}
        if not errors <= recomputed.keys():
            return {v}

        def is_allowed(operands: Sequence[Made]) -> bool:
            judged = self._operands(e, operands)
            return all(recomputed[error](e, judged) for error in errors)

        if is_allowed(operands):
            return set()
        # If only a large factor before this equation forbids it, keep the value behind the factor.
        is_behind_factor = is_allowed([x._replace(steep=frozenset()) for x in operands])
        return ((set(result.steep) - {v}) or {v}) if is_behind_factor else {v}

    def _is_fine_enough(self, v: Any, result: Made) -> bool:
        own = self.keeping(v).roundings  # if it were kept
        is_amplified = bool(own and result.roundings) and v in self.read_by_amplifying
        # In (ab)³, the error of a kept ab counts once, and those of a and b would add to their own.
        most = 1 if v in self.raised else _MOST_DEGREES
        has_high_degree = math.hypot(*result.degrees.values()) > most
        is_unknown = UNKNOWN in result.roundings and UNKNOWN not in own
        is_coarser = max(result.roundings, default=EXACT) > max([*own, own_rounding(v.aval.dtype)])
        return not (is_amplified or has_high_degree or is_unknown or is_coarser)


# -- segments ------------------------------------------------------------------------------------------------


def segments(backward: Any) -> list[Sequence[Any]]:
    """Divide the equations of a backward pass where few bytes of cotangents pass on, as between layers."""
    # tests: test_limit.py::test_what_is_made_again_is_not_held
    equations, dependent = backward.equations, backward.dependent
    last: dict[Any, int] = {}  # cotangent -> its last equation. Not cotangents of weights: nothing follows from them.
    for i, e in reversed([*enumerate(equations)]):
        if not dependent.issuperset(read := variables(e.invars)) or last.keys() & set(e.outvars):
            for v in dependent.intersection(read):
                last.setdefault(v, i)
    widths, sizes = list[float](), list[float]()  # by equation: bytes that pass on to it, and that were read before it
    passing, seen, size = set(backward.jaxpr.invars) & last.keys(), set[Any](), 0.0
    for i, e in enumerate(equations):
        widths.append(sum([n_bytes(v.aval) for v in passing]))
        sizes.append(size)
        new = set(variables(e.invars)) - dependent - seen
        size += sum([n_bytes(v.aval) for v in new])
        seen |= new
        passing = {v for v in passing if last[v] > i} | (last.keys() & set(e.outvars))
    starts = [0]
    for i, width in enumerate(widths):
        least = max(_LEAST * width, 1)
        near = slice(bisect_left(sizes, sizes[i] - least), bisect_right(sizes, sizes[i] + least))
        if sizes[i] - sizes[starts[-1]] >= least and min(widths[near]) == width:  # the narrowest place around
            starts.append(i)
    return [equations[i:j] for i, j in itertools.pairwise([*starts, len(equations)])]


# -- facts about equations -----------------------------------------------------------------------------------


@functools.cache
def own_rounding(dtype: Any) -> Rounding:
    is_float = jnp.issubdtype(dtype, jnp.inexact)
    return Rounding(Error.RELATIVE, float(jnp.finfo(dtype).eps) / 2) if is_float else EXACT


def _degrees(e: Any, operands: Iterable[Mapping[Any, float]]) -> dict[Any, float]:
    """Return the degree of the result in each variable of which the operands have a degree."""
    facts, found = FACTS[e.primitive.name], dict[Any, float]()
    for degrees in operands:
        for v, degree in degrees.items():
            found[v] = found.get(v, 0) + degree if facts.adds_degrees else max(found.get(v, 0), degree)
    return {v: facts.degree(e, degree) for v, degree in found.items()} if facts.degree else found


def cost_of(e: Any) -> float:
    """Return about how many operations an equation takes."""
    size = sum([_size(v.aval.shape) for v in e.outvars])
    name = e.primitive.name
    if name in ("dot_general", "ragged_dot_general"):
        numbers = e.params.get("dimension_numbers") or e.params["ragged_dot_dimension_numbers"].dot_dimension_numbers
        (contracted, _), _ = numbers
        return 2 * size * _size([e.invars[0].aval.shape[i] for i in contracted])
    if name == "conv_general_dilated":
        kernel, numbers = e.invars[1].aval.shape, e.params["dimension_numbers"]
        return 2 * size * _size(kernel) / kernel[numbers.rhs_spec[0]]
    if name.startswith(("reduce_", "arg")):
        return sum([_size(x.aval.shape) for x in e.invars])
    return size * FACTS[name].per_element
