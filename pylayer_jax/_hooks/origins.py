"""Finds the origin of the values of a jaxpr, also where an inner jaxpr computes them.

    { lambda ; a:f32[8]. let                                 a: an input
        b:f32[8] c:f32[3,8] = scan[                          c: three parts e, one per iteration
          length=3 jaxpr={ lambda ; d:f32[8]. let
              e:f32[8] = rule_function[name=Tanh] d          e: an operation, saved[0] of the layer Tanh
            in (e, e) } ] a
      in (c,) }

`outputs_of` returns a `Value` of c, whose `part` is the `Value` of e, and a `Note`: the layer Tanh saves e as saved[0].
The report reads these. For plans, `origin_of_value` turns them into `Origin`s.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
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
from .primitives import JITTED, ROWS

# -- marks -------------------------------------------------------------------------------------------------


class Mark(RuleFunction):
    """A function that marks a tensor which JAX keeps for backward, so that `saved_tensors_report` finds it.

    Its result is a further residual, an empty array such as f32[0,8,4] for f32[8,4]. Each enclosing scan or `jax.vmap`
    adds one axis in front: f32[3,0,8,4].
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


# -- values and notes on them -----------------------------------------------------------------------------

Equations = tuple[Any, ...]  # from the outermost equation to the innermost; each holds the jaxpr of the next equation


@dataclasses.dataclass(frozen=True, eq=False)
class Value:
    """A value that a program computes. If a program calls a jaxpr twice, each variable of the jaxpr has two values."""

    aval: Any
    # "input", "constant", "operation"; of the result of a `Mark`: "mark", or "recomputed" for its tensor. What a pack
    # hook computes is "constant": its row is that of `tensor`.
    kind: str
    name: str  # the name of the input, the operation or the layer; of the result of a `Mark`: the name of the tensor
    equations: Equations = ()
    tensor: Value | None = None  # the tensor from which a pack hook computed the value
    part: Value | None = None  # if a scan, shard_map or cond returns the value: the value that its inner jaxpr returns
    times: int = 1  # the number of iterations, each of which computes one `part`
    whole: Value | None = None  # for a slice, which an inner jaxpr gets: the operand of the scan or shard_map
    viewed: Value | None = None  # the operand of which the value is a reshape, slice or cast
    others: tuple[Value, ...] = ()  # if a cond returns the value: what its other branches return in its place
    layer: str = ""  # the layer that computed the value; of the result of a `Mark`: the layer that saved the tensor
    mark: Mark | None = None

    @property
    def bytes(self) -> int:
        return self.aval.size * self.aval.dtype.itemsize

    def innermost(self) -> tuple[Value, int]:
        """Return the part that one iteration of the innermost loop computes, and the number of such parts."""
        value, times = self, 1
        while value.part is not None:
            value, times = value.part, times * value.times
        return value, times

    def unsliced(self) -> Value:
        return self if self.whole is None else self.whole.unsliced()


class Note(NamedTuple):
    """A note that a layer saves a value, or that the value has a name."""

    value: Value
    layer: str  # the layer that saves the value; empty for a `Mark` and for `checkpoint_name`
    name: str
    equations: Equations  # the equation that applies the layer
    origin: Origin | None = None  # of a `Mark`


def by_value(notes: Sequence[Note]) -> dict[Value, list[Note]]:
    notes_of: dict[Value, list[Note]] = {}
    for note in notes:
        notes_of.setdefault(note.value.unsliced(), []).append(note)
    return notes_of


def notes_on(value: Value, notes_of: Mapping[Value, list[Note]]) -> list[Note]:
    """Return the notes on the unsliced value, on its slices and on its parts."""
    whole = value.unsliced()
    on_part = [] if whole.part is None else notes_on(whole.part, notes_of)
    return [*on_part, *notes_of.get(whole, ())]


# -- origins ------------------------------------------------------------------------------------------------


def names_of_equations(jaxprs: Sequence[Any]) -> dict[Any, str]:
    """Return the names of operations by JAX's traceback, which their derivatives share."""
    name_of: dict[Any, str] = {}
    for equation in [e for jaxpr in jaxprs for e in jaxpr.eqns]:
        inner = inner_jaxprs(equation.params)
        is_call = equation.primitive.name in JITTED and not is_users(inner[0])
        if inner and not is_call:
            name_of |= names_of_equations(inner)
        elif equation.source_info.traceback is not None:
            name_of[equation.source_info.traceback] = equation.params["name"] if is_call else equation.primitive.name
    return name_of


def origin_of_value(
    value: Value, notes_of: Any, origin_of: dict[Value, Origin], outer: Origin, name_of: Mapping[Any, str]
) -> Origin:
    found, others = list[Note](), list[Value]()
    while True:
        found = [*notes_on(value, notes_of), *found]
        inner = value
        while inner.part is not None:
            others += inner.others
            inner = inner.part
        if inner.viewed is None and inner.unsliced() is value:
            break
        value = inner.viewed or inner.unsliced()
    named = [note for note in found if not note.layer]
    savers = [note for note in found if note.layer]
    own = origin_of.get(value)
    if own is None and value.kind == "constant":
        own = outer
    if own is None:
        sources = (*outer.sources, *[e.source_info for e in value.equations])
        operation = "" if value.layer else operation_name(value, name_of)
        own = dataclasses.replace(outer, operation=operation, layer=value.layer, name="", sources=sources)
    if named:
        own = dataclasses.replace(own, name=named[-1].name)
    if others:
        own = dataclasses.replace(
            own, others=tuple(origin_of_value(x, notes_of, origin_of, outer, name_of) for x in others)
        )
    return with_saver(own, savers[0].layer, savers[0].name) if savers else own


def with_saver(own: Origin, layer: str, name: str) -> Origin:
    # A name from `saved_names` replaces any other; a default name such as "saved[0]" is for tensors without a name.
    name = own.name if is_default(name) and own.name else name
    return dataclasses.replace(own, layer=own.layer or layer, name=name)


def is_default(name: str) -> bool:
    return name.startswith(("saved[", "ctx."))


def operation_name(value: Value, name_of: Mapping[Any, str]) -> str:
    for equation in value.equations:
        if equation.source_info.traceback in name_of:
            return name_of[equation.source_info.traceback]
        if equation.primitive.name in JITTED and not is_users(jaxpr_and_consts(equation.params["jaxpr"])[0]):
            return equation.params["name"]
    return value.name


# -- values of a jaxpr --------------------------------------------------------------------------------------


def outputs_of(jaxpr: Any, inputs: Sequence[Value], within: Equations = ()) -> tuple[list[Value], list[Note]]:
    """Return a `Value` for each output of a jaxpr inside of the equations `within`, and the notes on all its values."""
    value_of, notes = values_of(jaxpr, inputs, within)
    return [Value(a.aval, "constant", str(a.val)) if is_literal(a) else value_of[a] for a in jaxpr.outvars], notes


def values_of(
    jaxpr: Any, inputs: Sequence[Value], within: Equations = (), calls_of: Mapping[Any, Equations] = {}
) -> tuple[dict[Any, Value], list[Note]]:
    """Return the values of all variables, and the notes on them. `calls_of`: result -> calls that were opened."""
    value_of = dict(zip(jaxpr.invars, inputs, strict=True))
    value_of |= {v: Value(v.aval, "constant", "closed over") for v in jaxpr.constvars}
    notes: list[Note] = []

    def read(atoms: Sequence[Any]) -> list[Value]:
        return [Value(a.aval, "constant", str(a.val)) if is_literal(a) else value_of[a] for a in atoms]

    for equation in jaxpr.eqns:
        calls = calls_of.get(equation.outvars[0], ()) if equation.outvars else ()
        results, new_notes = _results((*within, *calls, equation), read(equation.invars))
        value_of.update(zip(equation.outvars, results, strict=True))
        notes += new_notes
    return value_of, notes


def _results(equations: Equations, operands: list[Value]) -> tuple[list[Value], list[Note]]:
    """Return the results of the last equation, and the notes on all values in it."""
    equation = equations[-1]
    name = equation.primitive.name
    if _returns_operands(equation):
        is_name = name == "name"
        return operands, [Note(operands[0], "", equation.params["name"], equations)] if is_name else []
    if name in _PARTS:
        parts, times, others, notes = _PARTS[name](equations, operands)
        outputs = zip(equation.outvars, parts, times, others, strict=True)
        return [
            dataclasses.replace(v, aval=out.aval, part=v, times=n, whole=None, others=more)
            for out, v, n, more in outputs
        ], notes
    function = _nested_functions(equation.params)[-1] if equation.primitive is rule_function_p else None
    if isinstance(function, LayerFunction):
        return _layer_results(equations, operands)
    if isinstance(function, Mark):
        return _mark_results(equation, function, operands)
    if _only_calls(equation):
        return outputs_of(inner_jaxprs(equation.params)[0], operands, equations)
    return _operation_results(equations, operands, name), []


def _operation_results(equations: Equations, operands: list[Value], name: str) -> list[Value]:
    outvars = equations[-1].outvars
    if not any(PACK_SCOPE in str(e.source_info.name_stack) for e in equations):
        is_view = ROWS[name].is_view and operands and operands[0].kind != "constant"
        viewed = operands[0] if is_view else None
        return [Value(v.aval, "operation", name, equations, viewed=viewed) for v in outvars]
    # An equation of a pack hook may also read constants and the index of the device.
    tensors = [v.tensor or v for v in operands]
    tensor = max(tensors, key=lambda v: (v.kind != "constant", v.aval.size), default=None)
    return [Value(v.aval, "constant", name, equations, tensor) for v in outvars]


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


def _only_calls(equation: Any) -> bool:
    """Return whether an equation only calls a jaxpr, as a jitted function or a checkpoint does."""
    inner = inner_jaxprs(equation.params)
    return len(inner) == 1 and _shapes(inner[0].invars, inner[0].outvars) == _shapes(equation.invars, equation.outvars)


def _shapes(*values: Sequence[Any]) -> list[Any]:
    return [[getattr(v.aval, "shape", None) for v in vs] for vs in values]


# -- equations with inner jaxprs, whose outputs are parts of the results --------------------------

# The parts, how many iterations compute each of them, what other branches return, and notes.
Parts = tuple[list[Value], list[int], list[tuple[Value, ...]], list[Note]]


def _scan_parts(equations: Equations, operands: list[Value]) -> Parts:
    params = equations[-1].params
    (inner,) = inner_jaxprs(params)
    n_consts, n_carry = scan_counts(equations[-1])
    n_before = n_consts + n_carry
    carry = [Value(v.aval, "operation", "scan", equations) for v in inner.invars[n_consts:n_before]]
    slices = _slices(operands[n_before:], inner.invars[n_before:])
    parts, notes = outputs_of(inner, [*operands[:n_consts], *carry, *slices], equations)
    return parts, [1] * n_carry + [params["length"]] * (len(parts) - n_carry), [()] * len(parts), notes


def _shard_map_parts(equations: Equations, operands: list[Value]) -> Parts:
    (inner,) = inner_jaxprs(equations[-1].params)
    parts, notes = outputs_of(inner, _slices(operands, inner.invars), equations)
    return parts, [1] * len(parts), [()] * len(parts), notes


# Each branch of a `cond` returns placeholders, which these primitives compute, for the residuals of the others.
_PLACEHOLDERS: Final = ("broadcast_in_dim", "empty2")


def _cond_parts(equations: Equations, operands: list[Value]) -> Parts:
    branches = [outputs_of(branch, operands[1:], equations) for branch in inner_jaxprs(equations[-1].params)]
    notes = [note for _, of_branch in branches for note in of_branch]
    notes_of = by_value(notes)

    def is_placeholder(value: Value) -> bool:
        return value.kind == "constant" or value.name in _PLACEHOLDERS

    def preference(value: Value) -> tuple[bool, bool, bool]:
        is_saved = any(note.layer for note in notes_on(value, notes_of))
        return is_saved, not is_placeholder(value), value.kind == "operation"

    slots = list(zip(*(values for values, _ in branches), strict=True))
    parts = [max(values, key=preference) for values in slots]
    others = [
        tuple(v for v in values if v is not part and not is_placeholder(v))
        for values, part in zip(slots, parts, strict=True)
    ]
    return parts, [1] * len(parts), others, notes


_PARTS: Final[dict[str, Callable[[Equations, list[Value]], Parts]]] = {
    "scan": _scan_parts,
    "shard_map": _shard_map_parts,
    "cond": _cond_parts,
}


def _slices(wholes: Sequence[Value], variables: Sequence[Any]) -> list[Value]:
    pairs = zip(wholes, variables, strict=True)
    return [dataclasses.replace(v, aval=x.aval, part=None, times=1, whole=v) for v, x in pairs]


# -- layers and marks -----------------------------------------------------------------------------


def _layer_results(equations: Equations, operands: list[Value]) -> tuple[list[Value], list[Note]]:
    *wrappers, function = _nested_functions(equations[-1].params)
    layer = function.layer_name
    results = [dataclasses.replace(v, layer=layer, viewed=None) for v in _operation_results(equations, operands, layer)]
    outputs: list[Any] = results
    for wrapper in wrappers:
        if isinstance(wrapper, BatchedFunction):
            operands = operands[wrapper.n_consts :]
        else:  # a part of the layer; after the outputs in `positions`, it returns residuals for another part
            operands = operands[wrapper.n_residuals :]
            computed = dict(zip(wrapper.positions, outputs, strict=False))
            outputs = [computed.get(i) for i in range(len(wrapper.whole.jaxpr.outvars))]
    saved = function.saved(operands, outputs)
    return results, [Note(v, layer, name, equations) for v, name in saved if v is not None]


def _mark_results(equation: Any, mark: Mark, operands: list[Value]) -> tuple[list[Value], list[Note]]:
    tensor, origin = operands[-1], mark.origin  # the operands before it are constants of batched code
    name = origin.name or origin.operation
    kind = "mark" if mark.recomputed_from is None else "recomputed"
    result = Value(equation.outvars[0].aval, kind, name, tensor.equations, layer=origin.layer, mark=mark)
    return [result], [Note(tensor, "", name, (), origin)] if tensor.kind == "operation" and name else []


def _nested_functions(params: dict[str, Any]) -> list[Any]:
    """Return the function of a `rule_function` and those nested in it, outermost first."""
    functions = [payload_of_params(params)]
    while isinstance(functions[-1], (BatchedFunction, PartialFunction)):
        outer = functions[-1]
        functions.append(outer.inner if isinstance(outer, BatchedFunction) else outer.whole)
    return functions
