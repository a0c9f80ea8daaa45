"""Finds where the values of a jaxpr come from, also where an inner jaxpr computes them.

    { lambda ; a:f32[8]. let                                 a: an input
        b:f32[8] c:f32[3,8] = scan[                          c: three parts e, one per iteration
          length=3 jaxpr={ lambda ; d:f32[8]. let
              e:f32[8] = rule_function[name=Tanh] d          e: an operation, saved[0] of the layer Tanh
            in (e, e) } ] a
      in (c,) }

`Program(jaxpr, code).source(c)` is the equation that computes e. Its notes say that the layer Tanh saves it as
saved[0]. The report reads these; for plans, `Program.origin` makes an `Origin` of them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pylayer_jax._jax.jaxprs import body_inputs, frames_between, inner_jaxprs, interpret, is_user_code, shapes_of, stage
from pylayer_jax._jax.rule_function import BatchedFunction, RuleFunction, Values, apply, payload_of, rule_function_p
from pylayer_jax._jax.traces import Literal
from pylayer_jax._jax.transparency import Identity, PartialFunction

from .pack import PACK_SCOPE, Origin
from .primitives import BODIES, FACTS

# -- functions that leave notes ----------------------------------------------------------------------------


class ReportMark(RuleFunction):
    """Marks a tensor that a plan keeps or makes, so that `saved_tensors_report` finds it.

    Its result is a further, empty residual: f32[0,8,4] for f32[8,4], or f32[3,0,8,4] in a scan of length 3.
    """

    def __init__(self, aval: Any, origin: Origin, recomputed_from: str | None) -> None:
        self.name, self.origin, self.recomputed_from = "mark", origin, recomputed_from
        self.jaxpr, _, _ = stage(lambda x: ([jax.lax.slice_in_dim(x[None], 0, 0)], None), [aval], self.name)

    def rule(self, primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Values, Values]:
        return apply(self, primals), [None]


def _nested_functions(equation: Any) -> list[Any]:
    """Return the function of a `rule_function` and those nested in it, outermost first."""
    functions: list[Any] = [payload_of(equation)]
    while isinstance(functions[-1], (BatchedFunction, PartialFunction)):
        outer = functions[-1]
        functions.append(outer.inner if isinstance(outer, BatchedFunction) else outer.whole)
    return functions


def _saved(functions: Sequence[Any], operands: Sequence[Any], results: Sequence[Any]) -> list[tuple[Any, str]]:
    *wrappers, function = functions
    for wrapper in wrappers:
        if isinstance(wrapper, BatchedFunction):
            operands = operands[wrapper.n_consts :]
        else:  # a part of the layer; after the results in `positions`, it returns residuals for another part
            operands = operands[wrapper.n_residuals :]
            computed = dict(zip(wrapper.positions, results, strict=False))
            results = [computed.get(i) for i in range(len(wrapper.whole.jaxpr.outvars))]
    return [(x, name) for x, name in function.saved(operands, results) if x is not None]


# -- equations -----------------------------------------------------------------------------------------------


def _returns_operands(equation: Any) -> bool:
    name, params = equation.primitive.name, equation.params
    if equation.primitive is rule_function_p:
        return isinstance(payload_of(equation), Identity)
    if name == "reduce_precision":  # `jax.checkpoint` applies it to what a policy saves, and keeps all bits
        info = jnp.finfo(equation.outvars[0].aval.dtype)
        return params["exponent_bits"] >= info.nexp and params["mantissa_bits"] >= info.nmant
    if name == "broadcast_in_dim":  # a shard_map returns a scalar residual as an array with one entry per device
        return equation.outvars[0].aval.size == 1
    return name in ("name", "optimization_barrier", "pcast", "pvary", "stop_gradient")


def _bodies(equation: Any) -> list[Any]:
    """Return the jaxprs that compute the results of a loop or a cond, of a jitted function or another call."""
    found = inner_jaxprs(equation.params)
    shapes = lambda x: (shapes_of(x.invars), shapes_of(x.outvars))
    is_call = len(found) == 1 and shapes(found[0]) == shapes(equation)
    return found if equation.primitive.name in BODIES or is_call else []


# -- the sources of values -----------------------------------------------------------------------------------


class Source(NamedTuple):
    """Where a value comes from: an input or constant, or the equation that computes it, perhaps in parts."""

    variable: Any
    equations: tuple[Any, ...]  # those that lead to it, outermost first; none for an input or a constant
    operands: Sequence[Source]  # of the last of these
    notes: list[Origin]  # each has the layer that saves the value and its name there, or a name; shared by all copies
    aval: Any  # of one part
    is_input: bool = False
    times: int = 1  # the number of parts
    is_part: bool = False  # whether a scan, cond or shard_map returns the value
    others: tuple[Source, ...] = ()  # if a cond returns the value: what its other branches return in its place
    packed: tuple[Source, Any] | None = None  # of what a pack hook or mark computed: its tensor, and its key

    @property
    def key(self) -> Any:
        return _key(self.variable, self.equations)

    @property
    def is_constant(self) -> bool:
        return not self.equations and not self.is_input

    @property
    def is_placeholder(self) -> bool:
        """Whether it may be what a branch of a cond returns for a residual of another branch."""
        return self.is_constant or self.name in ("broadcast_in_dim", "empty2")

    @property
    def function(self) -> Any:
        """The layer or the mark that computes the value, or another function with a rule."""
        return _nested_functions(self.equations[-1])[-1] if self.equations else None

    @property
    def recomputed_from(self) -> str | None:
        return self.function.recomputed_from if isinstance(self.function, ReportMark) else None

    @property
    def layer(self) -> str:
        return getattr(self.function, "layer_name", "")

    @property
    def name(self) -> str:
        if self.equations:
            return self.layer or self.equations[-1].primitive.name
        return str(self.variable.val) if isinstance(self.variable, Literal) else "closed over"


def _key(variable: Any, equations: tuple[Any, ...]) -> Any:
    return *map(id, equations), id(variable)  # two calls of one jaxpr have the same variables


def _new_source(variable: Any, *equations: Any, operands: Sequence[Source] = (), **more: Any) -> Source:
    return Source(variable, equations, operands, [], variable.aval, **more)


def _passed(sources: Sequence[Source], outside: Sequence[Any], inside: Sequence[Any]) -> list[Source]:
    """Return the sources of the variables `inside`, which are those `outside` or slices of them."""
    return [
        x if given == got else x._replace(aval=v.aval, times=1)
        for x, v, given, got in zip(sources, inside, shapes_of(outside), shapes_of(inside), strict=True)
    ]


class Program:
    """A jaxpr whose values have sources."""

    def __init__(self, jaxpr: Any, code: Any, calls_of: Mapping[Any, Any] = {}) -> None:
        """`code`: what `jaxpr` is a derivative of; `calls_of`: result of an equation -> the inlined calls around it."""
        self._named, self._calls_of = names_of_equations(code), calls_of
        self.origin_of_marked: dict[Any, Origin] = {}  # key of a source -> what its `ReportMark` says
        inputs = [_new_source(v, is_input=True) for v in jaxpr.invars]
        variables = [*jaxpr.constvars, *jaxpr.invars, *[v for e in jaxpr.eqns for v in e.outvars]]
        self._source_of = dict(zip(variables, self._sources(jaxpr, inputs, (), variables), strict=True))

    def source(self, atom: Any) -> Source:
        return _new_source(atom) if isinstance(atom, Literal) else self._source_of[atom]

    def _sources(
        self, jaxpr: Any, inputs: Sequence[Source], around: tuple[Any, ...], wanted: Sequence[Any]
    ) -> list[Source]:
        """Return the sources of `wanted`, with their notes."""

        def rule(e: Any, operands: list[Source]) -> Iterable[Source]:
            calls = self._calls_of.get(e.outvars[0], ()) if e.outvars else ()
            equations = *around, *calls, e
            packed = None
            if any(PACK_SCOPE in str(x.source_info.name_stack) for x in equations):
                # The tensor is the largest operand: a pack hook may also read constants and the index of the device.
                read = [x.packed or (x, _key(v, equations[:-1])) for v, x in zip(e.invars, operands, strict=True)]
                packed = max(read, key=lambda found: (not found[0].is_constant, found[0].aval.size), default=None)
            functions = _nested_functions(e)
            function = functions[-1]
            if isinstance(function, ReportMark):
                x = operands[-1]  # the operands before it are constants of batched code
                packed = x, _key(e, equations)
                x.notes.append(Origin(name=function.origin.name))
                if function.origin.entry is not None:
                    self.origin_of_marked[x.key] = function.origin
            results = [_new_source(v, *equations, operands=operands, packed=packed) for v in e.outvars]
            if layer := getattr(function, "layer_name", ""):
                sources = tuple(x.source_info for x in equations)
                for x, name in _saved(functions, operands, results):
                    x.notes.append(Origin(layer=layer, name=name, sources=sources))
            if e.primitive.name == "name":
                operands[0].notes.append(Origin(name=e.params["name"]))
            if _returns_operands(e):
                return _passed(operands, e.invars, e.outvars)
            bodies = [] if layer or isinstance(function, ReportMark) else _bodies(e)
            return self._sources_of_bodies(e, bodies, operands, equations) if bodies else results

        known = {v: _new_source(v) for v in jaxpr.constvars} | dict(zip(jaxpr.invars, inputs, strict=True))
        return interpret(rule, jaxpr.eqns, known, wanted, of_literal=_new_source)

    def _sources_of_bodies(
        self, e: Any, bodies: Sequence[Any], operands: Sequence[Source], equations: tuple[Any, ...]
    ) -> Iterator[Source]:
        """Yield the sources of the results of an equation, which jaxprs in it compute."""
        n_before, carried = body_inputs(e)
        found = list[list[Source]]()
        for body in bodies:
            inputs = _passed(operands[n_before:], e.invars[n_before:], body.invars)
            for i in carried:  # the scan computes it
                inputs[i] = _new_source(body.invars[i], *equations)
            found.append(self._sources(body, inputs, equations, body.outvars))
        is_saved = lambda x: any(note.layer for note in x.notes)
        for i, branches in enumerate(zip(*found, strict=True)):
            first, *rest = sorted(branches, key=lambda x: (not is_saved(x), x.is_placeholder))
            n_parts = e.params["length"] if e.primitive.name == "scan" and i >= len(carried) else 1
            yield first._replace(
                times=first.times * n_parts,
                is_part=first.is_part or e.primitive.name in BODIES,
                others=(*first.others, *[x for x in rest if not x.is_placeholder]),
            )

    # -- names -------------------------------------------------------------------------------------------

    def operation(self, source: Source) -> str:
        """Return the name of the operation that computes a value: of a function of jax.numpy, or of a primitive."""
        for e in source.equations:
            if name := self._named.get(id(e.source_info.traceback), ("", ()))[0]:
                return name
            if e.primitive.name == "jit" and (name := name_of_equation(e)):
                return name
        return source.name

    def origin(self, source: Source, outer: Origin, computed: Collection[Any] = ()) -> Origin:
        """Return the origin of a value. `outer`: that of the constants, and of the inputs that are `computed`."""
        notes, others = list[Origin](), list[Source]()
        while True:
            notes, others = [*source.notes, *notes], [*others, *source.others]
            is_view = bool(source.operands) and not source.layer and FACTS[source.name].is_view
            if not is_view or source.operands[0].is_constant or source.operands[0].packed:
                break
            e = source.equations[-1]  # a `device_put` of several arrays has a result for each
            source = source.operands[e.outvars.index(source.variable) if len(e.outvars) == len(e.invars) else 0]
        own = outer
        if source.is_input and source.variable not in computed:
            own = Origin()
        elif source.equations:
            operation = "" if source.layer else self.operation(source)
            own_sources = [e.source_info for e in source.equations]
            _, around = self._named.get(id(own_sources[-1].traceback), ("", ()))
            sources = (*outer.sources, *around, *own_sources)
            own = dataclasses.replace(outer, operation=operation, layer=source.layer, sources=sources)
        savers = [note for note in notes if note.layer]
        names = [note.name for note in notes if note.name and not note.layer]
        found = tuple(self.origin(x, outer, computed) for x in others)
        own = dataclasses.replace(own, name=names[-1] if names else own.name, others=found or own.others)
        if not savers:
            return own
        # A name from `saved_names` replaces any other; a default name such as "saved[0]" is for tensors without a name.
        saver = savers[0]
        keeps_name = own.name and saver.name.startswith(("saved[", "ctx."))
        return dataclasses.replace(own, layer=own.layer or saver.layer, name=own.name if keeps_name else saver.name)


def name_of_equation(equation: Any) -> str:
    """Return the name of a jitted function of JAX, or of a primitive; "" for other functions and loops."""
    name, inner = equation.primitive.name, inner_jaxprs(equation.params)
    if name == "jit" and not is_user_code(*inner):
        return equation.params["name"]
    return "" if inner else name


def names_of_equations(jaxpr: Any, around: tuple[Any, ...] = ()) -> dict[Any, tuple[str, tuple[Any, ...]]]:
    """Return names of operations, and calls of `jax.checkpoint` around, by id of a traceback that derivatives share."""
    found: dict[Any, tuple[str, tuple[Any, ...]]] = {}
    for equation in jaxpr.eqns:
        inner, source, name = inner_jaxprs(equation.params), equation.source_info, name_of_equation(equation)
        # Equations of a function that JAX inlines have one traceback. The last one names it, but a move does not.
        is_move, key = FACTS[equation.primitive.name].is_move, id(source.traceback)
        if source.traceback is not None and not (is_move and key in found):
            found[key] = name, around
        if inner and not name:
            outer = (*around, source) if equation.primitive.name == "remat2" else around
            for code in inner:
                for key, (inner_name, sources) in names_of_equations(code, outer).items():
                    # JAX traces a function once for several calls, perhaps from different functions.
                    known = found.get(key, ("", sources))[1]
                    is_same = len(known) == len(sources) and not any(map(frames_between, known, sources))
                    found[key] = inner_name, (sources if is_same else ())
    return found
