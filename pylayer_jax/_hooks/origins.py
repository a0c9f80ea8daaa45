"""Finds where the values of a jaxpr come from, also where an inner jaxpr computes them.

    { lambda ; a:f32[8]. let                                 a: an input
        b:f32[8] c:f32[3,8] = scan[                          c: three parts e, one per iteration
          length=3 jaxpr={ lambda ; d:f32[8]. let
              e:f32[8] = rule_function[name=Tanh] d          e: an operation, saved[0] of the layer Tanh
            in (e, e) } ] a
      in (c,) }

`Program(jaxpr).source(c)` is the equation that computes e. Its notes say that the layer Tanh saves it as saved[0]. The
report reads these; for plans, `Program.origin` makes an `Origin` of them.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp

from pylayer_jax._jax.jaxprs import inner_jaxprs, is_literal, is_users, jaxpr_and_consts, scan_counts, stage
from pylayer_jax._jax.rule_function import (
    BatchedFunction,
    RuleFunction,
    Values,
    apply,
    payload_of,
    payload_of_params,
    rule_function_p,
)
from pylayer_jax._jax.transparency import Identity, PartialFunction

from .pack import PACK_SCOPE, Origin
from .primitives import BODIES, JITTED, ROWS

# -- functions that leave notes ----------------------------------------------------------------------------


class Mark(RuleFunction):
    """Marks a tensor that a plan keeps or makes, so that `saved_tensors_report` finds it.

    Its result is a further, empty residual: f32[0,8,4] for f32[8,4], or f32[3,0,8,4] in a scan of length 3.
    """

    def __init__(self, aval: Any, origin: Origin, recomputed_from: str | None) -> None:
        self.name, self.origin, self.recomputed_from = "mark", origin, recomputed_from
        self.jaxpr, _, _ = stage(lambda x: ([jax.lax.slice_in_dim(x[None], 0, 0)], None), [aval], self.name)

    def rule(self, primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Values, Values]:
        return apply(self, primals), [None]


class LayerFunction(RuleFunction):
    """Base class of the function that applies a layer."""

    @property
    def layer_name(self) -> str:
        raise NotImplementedError

    def saved(self, operands: Sequence[Any], results: Sequence[Any]) -> list[tuple[Any, str]]:
        """Return the saved values among operands and results, with their names."""
        raise NotImplementedError


def _nested_functions(equation: Any) -> list[Any]:
    """Return the function of a `rule_function` and those nested in it, outermost first."""
    functions: list[Any] = [payload_of_params(equation.params)] if equation.primitive is rule_function_p else [None]
    while isinstance(functions[-1], (BatchedFunction, PartialFunction)):
        outer = functions[-1]
        functions.append(outer.inner if isinstance(outer, BatchedFunction) else outer.whole)
    return functions


def _saved(equation: Any) -> list[tuple[Any, str]]:
    *wrappers, function = _nested_functions(equation)
    operands, outputs = equation.invars, list[Any](equation.outvars)
    for wrapper in wrappers:
        if isinstance(wrapper, BatchedFunction):
            operands = operands[wrapper.n_consts :]
        else:  # a part of the layer; after the outputs in `positions`, it returns residuals for another part
            operands = operands[wrapper.n_residuals :]
            computed = dict(zip(wrapper.positions, outputs, strict=False))
            outputs = [computed.get(i) for i in range(len(wrapper.whole.jaxpr.outvars))]
    return [(v, name) for v, name in function.saved(operands, outputs) if v is not None]


# -- jaxprs and the equations that hold them -----------------------------------------------------------------

# Their result equals their operand. If both are residuals, JAX keeps two copies of one tensor.
_IDENTITIES: Final = frozenset(("name", "optimization_barrier", "pcast", "pvary", "stop_gradient"))


def _returns_operands(equation: Any) -> bool:
    name, params = equation.primitive.name, equation.params
    if equation.primitive is rule_function_p:
        return isinstance(payload_of(equation), Identity)
    if name == "reduce_precision":  # `jax.checkpoint` applies it to what a policy saves, and keeps all bits
        info = jnp.finfo(equation.outvars[0].aval.dtype)
        return params["exponent_bits"] >= info.nexp and params["mantissa_bits"] >= info.nmant
    if name == "broadcast_in_dim":  # a shard_map returns a scalar residual as an array with one entry per device
        return equation.outvars[0].aval.size == 1
    return name in _IDENTITIES


class Frame:
    """A jaxpr, and the equation that holds it. A jaxpr that a program calls twice has two frames."""

    def __init__(
        self, jaxpr: Any, equations: tuple[Any, ...], outer: Frame | None, calls_of: Mapping[Any, Any]
    ) -> None:
        self.jaxpr, self.outer = jaxpr, outer
        self.equations = equations  # those around the jaxpr, outermost first
        self._calls_of = calls_of  # result of an equation -> the calls around it that were opened
        self.maker = {v: (e, i) for e in jaxpr.eqns for i, v in enumerate(e.outvars)}
        self.place = {v: i for i, v in enumerate(jaxpr.invars)}
        self._inner: dict[int, list[Frame]] = {}

    def equations_to(self, equation: Any) -> tuple[Any, ...]:
        calls = self._calls_of.get(equation.outvars[0], ()) if equation.outvars else ()
        return (*self.equations, *calls, equation)

    def inner(self, equation: Any) -> list[Frame]:
        """Return the frames of the jaxprs in an equation whose results they compute."""
        if id(equation) not in self._inner:
            found = inner_jaxprs(equation.params)
            function = _nested_functions(equation)[-1]
            is_opaque = isinstance(function, (LayerFunction, Mark))
            if is_opaque or not (equation.primitive.name in BODIES or _only_calls(equation, found)):
                found = []
            around = self.equations_to(equation)
            self._inner[id(equation)] = [Frame(jaxpr, around, self, {}) for jaxpr in found]
        return self._inner[id(equation)]

    def operand(self, variable: Any) -> Any:
        """Return the operand of the equation around this jaxpr that is an input, or of which it is a slice."""
        if self.outer is None or variable not in self.place:
            return None
        place, equation = self.place[variable], self.equations[-1]
        if equation.primitive.name == "cond":
            return equation.invars[place + 1]
        if equation.primitive.name == "scan":
            n_consts, n_carry = scan_counts(equation)
            if n_consts <= place < n_consts + n_carry:  # the scan computes it
                return None
        return equation.invars[place]


def _only_calls(equation: Any, inner: Sequence[Any]) -> bool:
    """Return whether an equation only calls a jaxpr, as a jitted function or a checkpoint does."""
    return len(inner) == 1 and _shapes(inner[0].invars, inner[0].outvars) == _shapes(equation.invars, equation.outvars)


def _shapes(*values: Sequence[Any]) -> list[Any]:
    return [[getattr(v.aval, "shape", None) for v in vs] for vs in values]


# -- the sources of values -----------------------------------------------------------------------------------


class Source(NamedTuple):
    """Where a value comes from: an input or constant, or the equation that computes it, perhaps in parts."""

    frame: Frame
    variable: Any
    equations: tuple[Any, ...]  # those that lead to it, outermost first; none for an input or a constant
    aval: Any  # of one part
    times: int = 1  # the number of parts
    is_part: bool = False  # whether a scan, cond or shard_map returns the value
    others: tuple[Source, ...] = ()  # if a cond returns the value: what its other branches return in its place

    @property
    def key(self) -> Any:
        return self.frame, id(self.variable)

    @property
    def is_input(self) -> bool:
        return not self.equations and not is_literal(self.variable) and self.variable in self.frame.place

    @property
    def is_packed(self) -> bool:
        """Whether a pack hook computed the value."""
        return any(PACK_SCOPE in str(e.source_info.name_stack) for e in self.equations)

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
    def layer(self) -> str:
        return self.function.layer_name if isinstance(self.function, LayerFunction) else ""

    @property
    def name(self) -> str:
        if self.equations:
            return self.layer or self.equations[-1].primitive.name
        return str(self.variable.val) if is_literal(self.variable) else "closed over"


class Note(NamedTuple):
    """A note that a layer saves a value, or that the value has a name."""

    layer: str  # the layer that saves the value; empty for a `Mark` and for `checkpoint_name`
    name: str
    equations: tuple[Any, ...]  # those that lead to the layer
    origin: Origin | None = None  # of a `Mark`


class Program:
    """A jaxpr whose values have sources, and notes on them."""

    def __init__(self, jaxpr: Any, code: Any, calls_of: Mapping[Any, Any] = {}) -> None:
        """`code`: the staged function, of which `jaxpr` is a derivative; its operations give the names."""
        self._name_of = names_of_equations(code)
        self._notes = defaultdict[Any, list[Note]](list)
        self._tensors: dict[Any, tuple[Source, Any]] = {}
        self.frame = Frame(jaxpr, (), None, calls_of)
        self._collect(self.frame)

    def notes(self, source: Source) -> list[Note]:
        return self._notes.get(source.key, [])

    def _collect(self, frame: Frame) -> None:
        for e in frame.jaxpr.eqns:
            function = _nested_functions(e)[-1]
            for inner in frame.inner(e):
                self._collect(inner)
            if e.primitive.name == "name":
                self._note(frame, e.invars[0], Note("", e.params["name"], frame.equations_to(e)))
            elif isinstance(function, LayerFunction):
                for v, name in _saved(e):
                    self._note(frame, v, Note(function.layer_name, name, frame.equations_to(e)))
            elif isinstance(function, Mark):
                origin = function.origin
                name = origin.name or origin.operation
                source = self.source(e.invars[-1], frame)  # the operands before it are constants of batched code
                if name and source.equations and not source.is_packed:
                    self._note(frame, e.invars[-1], Note("", name, (), origin))

    def _note(self, frame: Frame, variable: Any, note: Note) -> None:
        self._notes[self.source(variable, frame).key].append(note)

    def source(self, variable: Any, frame: Frame | None = None) -> Source:
        frame = frame or self.frame
        aval = variable.aval
        while not is_literal(variable):
            equation, i = frame.maker.get(variable, (None, 0))
            if equation is None:
                operand = frame.operand(variable)
                if operand is None:
                    break
                assert frame.outer is not None
                frame, variable = frame.outer, operand
            elif _returns_operands(equation):
                variable = equation.invars[i]
            elif branches := frame.inner(equation):
                found = [self.source(branch.jaxpr.outvars[i], branch) for branch in branches]
                is_saved = lambda x: any(note.layer for note in self.notes(x))  # noqa: E731
                first, *rest = sorted(found, key=lambda x: (not is_saved(x), x.is_placeholder))
                if aval.shape != variable.aval.shape:  # an inner jaxpr got a slice of the result of this equation
                    first = first._replace(aval=aval, times=1)
                elif equation.primitive.name == "scan" and i >= scan_counts(equation)[1]:
                    first = first._replace(times=first.times * equation.params["length"])
                return first._replace(
                    is_part=first.is_part or equation.primitive.name in BODIES,
                    others=(*first.others, *[x for x in rest if not x.is_placeholder]),
                )
            else:
                return Source(frame, variable, frame.equations_to(equation), aval)
        # The loop around a frame computes what it carries.
        is_carried = frame.outer is not None and not is_literal(variable) and variable in frame.place
        return Source(frame, variable, frame.equations if is_carried else (), aval)

    def tensor(self, packed: Source) -> tuple[Source, Any]:
        """Return the source of the tensor of which a pack hook computed a value, and a key of the hook's operand."""
        if packed.key not in self._tensors:
            # An equation of a pack hook may also read constants and the index of the device.
            operands = [(self.source(v, packed.frame), (packed.frame, id(v))) for v in packed.equations[-1].invars]
            tensors = [self.tensor(x) if x.is_packed else (x, key) for x, key in operands]
            size = lambda found: (not found[0].is_constant, found[0].aval.size)  # noqa: E731
            self._tensors[packed.key] = max(tensors, key=size, default=(packed, None))
        return self._tensors[packed.key]

    # -- names -------------------------------------------------------------------------------------------

    def operation(self, source: Source) -> str:
        """Return the name of the operation that computes a value: of a function of jax.numpy, or of a primitive."""
        for e in source.equations:
            if e.source_info.traceback in self._name_of:
                return self._name_of[e.source_info.traceback]
            if e.primitive.name in JITTED and not is_users(jaxpr_and_consts(e.params["jaxpr"])[0]):
                return e.params["name"]
        return source.name

    def origin(self, source: Source, outer: Origin, given: Mapping[Any, Origin] = {}) -> Origin:
        """Return the origin of a value in a body with the origin `outer`; `given` has those of inputs."""
        notes, others = list[Note](), list[Source]()
        while True:
            notes, others = [*self.notes(source), *notes], [*others, *source.others]
            is_view = bool(source.equations) and ROWS[source.name].is_view and bool(source.equations[-1].invars)
            if not is_view:
                break
            operand = self.source(source.equations[-1].invars[0], source.frame)
            if operand.is_constant or operand.is_packed:
                break
            source = operand
        own = outer
        if source.is_input:
            own = given.get(source.variable, Origin())
        elif source.equations:
            operation = "" if source.layer else self.operation(source)
            sources = (*outer.sources, *[e.source_info for e in source.equations])
            own = dataclasses.replace(outer, operation=operation, layer=source.layer, name="", sources=sources)
        savers = [note for note in notes if note.layer]
        names = [note.name for note in notes if not note.layer]
        found = tuple(self.origin(x, outer, given) for x in others)
        own = dataclasses.replace(own, name=names[-1] if names else own.name, others=found or own.others)
        if not savers:
            return own
        # A name from `saved_names` replaces any other; a default name such as "saved[0]" is for tensors without a name.
        layer, name = savers[0][:2]
        keeps_name = own.name and name.startswith(("saved[", "ctx."))
        return dataclasses.replace(own, layer=own.layer or layer, name=own.name if keeps_name else name)


def names_of_equations(jaxpr: Any) -> dict[Any, str]:
    """Return the names of operations by JAX's traceback, which their derivatives share."""
    name_of: dict[Any, str] = {}
    for equation in jaxpr.eqns:
        inner = inner_jaxprs(equation.params)
        is_call = equation.primitive.name in JITTED and not is_users(inner[0])
        if inner and not is_call:
            for code in inner:
                name_of |= names_of_equations(code)
        elif equation.source_info.traceback is not None:
            name_of[equation.source_info.traceback] = equation.params["name"] if is_call else equation.primitive.name
    return name_of
