"""Where the values of a jaxpr come from, also those that an inner jaxpr computes.

    { lambda ; a:f32[8]. let                                        a: an input
        b:f32[8] c:f32[3,8] = scan[                                 c: 3 times its part e
          length=3
          jaxpr={ lambda ; d:f32[8]. let
              e:f32[8] = rule_function[name=Tanh] d                 e: an operation, "saved[0]" of the layer Tanh
            in (e, e) }
        ] a
      in (c,) }
"""

from __future__ import annotations

import dataclasses
import itertools
import os
from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple

from pylayer_jax._hooks import PACK_SCOPE
from pylayer_jax._jax.imports import summarize
from pylayer_jax._jax.jaxprs import inner_jaxprs, is_literal, scan_counts
from pylayer_jax._jax.primitives import object_of
from pylayer_jax._jax.rule_function import BatchedFunction, rule_function_p
from pylayer_jax._layer_rule import StagedLayer

Equations = tuple[Any, ...]  # an equation, after the equations that hold its jaxpr, outermost first


class Saver(NamedTuple):
    """A layer that saves a value."""

    layer: str
    name: str  # of the value, as in saved[0]
    equations: Equations


@dataclasses.dataclass(eq=False)
class Value:
    """One value in a program. A jaxpr that is called twice computes two."""

    aval: Any
    kind: Literal["input", "constant", "operation"]
    name: str  # of the input or the operation
    equations: Equations = ()
    operands: Sequence[Value] = ()
    part: Value | None = None  # the value of an inner jaxpr that each iteration, device or branch contributes to it
    whole: Value | None = None  # the value of which an input of an inner jaxpr is one part
    times: int = 1  # the number of iterations that contribute a part
    savers: list[Saver] = dataclasses.field(default_factory=list)
    number: int = dataclasses.field(default_factory=itertools.count().__next__)  # in the order of the program

    def chain(self) -> Iterator[Value]:
        """Yield the value, its parts from the outside in, and the wholes of the last one from the inside out."""
        value: Value | None = self
        while value is not None:
            yield value
            value = value.part or value.whole

    def innermost(self) -> tuple[Value, int]:
        """Return what one iteration of all loops computes, and the number of iterations."""
        value, times = self, 1
        while value.part is not None:
            value, times = value.part, times * value.times
        return value, times

    def unpacked(self) -> Value:
        """Return the tensor that pack hooks made the value of; the value itself if no hook did."""
        seen = set[Value]()
        origins: list[Value] = []
        waiting: list[Value] = [self]
        while waiting:
            value = waiting.pop()
            if value in seen:
                continue
            seen.add(value)
            one, _ = value.innermost()
            if one.whole is None and any(PACK_SCOPE in str(e.source_info.name_stack) for e in one.equations):
                waiting.extend(one.operands)
            else:
                origins.append(value)
        # The other origins are numbers that a hook holds, and the index of the device.
        return max(origins, key=lambda v: (v.kind != "constant", v.aval.size), default=self)


def line_of(equations: Equations) -> str:
    """Return the file and line of the user's code that an equation comes from, as in `model.py:12`."""
    # The equations of a jitted function of JAX have no line of a user, but the equation that calls it has.
    places = (summarize(e.source_info) for e in reversed(equations))  # as in /home/me/model.py:12:4 (loss)
    place = next(filter(None, places), "").split(" (")[0]
    return ":".join(os.path.basename(place).split(":")[:2])


def outputs_of(jaxpr: Any, inputs: Sequence[Value], within: Equations = ()) -> list[Value]:
    """Return the values that a jaxpr returns; `within` are the equations that hold it."""
    value_of = dict(zip(jaxpr.invars, inputs, strict=True))
    value_of |= {v: Value(v.aval, "constant", "closed over") for v in jaxpr.constvars}

    def read(atoms: Sequence[Any]) -> list[Value]:
        return [Value(a.aval, "constant", str(a.val)) if is_literal(a) else value_of[a] for a in atoms]

    for equation in jaxpr.eqns:
        results = _results((*within, equation), read(equation.invars))
        value_of.update(zip(equation.outvars, results, strict=True))
    return read(jaxpr.outvars)


# The results of these primitives are their operands, and take no memory of their own.
_IDENTITIES = frozenset(("name", "optimization_barrier", "pcast", "pvary", "reduce_precision", "stop_gradient"))


def _results(equations: Equations, operands: list[Value]) -> list[Value]:
    equation = equations[-1]
    name, inner = equation.primitive.name, inner_jaxprs(equation.params)
    results = [Value(v.aval, "operation", name, equations, operands) for v in equation.outvars]
    parts: Sequence[Value] = ()
    # A scalar leaves a shard_map as an array with one entry per device.
    if name in _IDENTITIES or (name == "broadcast_in_dim" and results[0].aval.size == 1):
        return operands[: len(results)]
    if (found := _layer_of(equation, operands)) is not None:
        _note_savers(equations, *found, results)
    elif name == "scan":
        n_consts, n_carry = scan_counts(equation.params)
        wholes = [*[None] * n_carry, *operands[n_consts + n_carry :]]
        inputs = [*operands[:n_consts], *_inner_inputs(equations, inner[0].invars[n_consts:], wholes)]
        parts = outputs_of(inner[0], inputs, equations)
        for result in results[n_carry:]:
            result.times = equation.params["length"]
    elif name == "cond":
        branches = [outputs_of(branch, operands[1:], equations) for branch in inner]
        # For a residual of another branch, a branch returns an array that is filled with one number.
        parts = [max(values, key=_is_computed) for values in zip(*branches, strict=True)]
    elif name == "shard_map":
        parts = outputs_of(inner[0], _inner_inputs(equations, inner[0].invars, operands), equations)
    elif len(inner) == 1 and _types(inner[0].invars, inner[0].outvars) == _types(operands, results):
        return outputs_of(inner[0], operands, equations)  # a jitted function, a checkpoint, an identity of ours
    for result, part in zip(results, parts, strict=False):
        result.part = part
    return results


def _inner_inputs(equations: Equations, variables: Sequence[Any], wholes: Sequence[Value | None]) -> list[Value]:
    name = equations[-1].primitive.name
    pairs = zip(variables, wholes, strict=True)
    return [Value(v.aval, "operation", name, equations, whole=whole) for v, whole in pairs]


def _types(*values: Sequence[Any]) -> list[Any]:
    return [[(getattr(v.aval, "shape", None), getattr(v.aval, "dtype", None)) for v in vs] for vs in values]


def _is_computed(value: Value) -> tuple[bool, bool]:
    value, _ = value.innermost()
    return bool(value.savers), value.kind != "constant" and value.name not in ("broadcast_in_dim", "empty2")


def _layer_of(equation: Any, operands: list[Value]) -> tuple[StagedLayer, list[Value]] | None:
    """Return the layer that an equation applies, to one example or to a batch, and the operands of the layer."""
    if equation.primitive is not rule_function_p:
        return None
    function = object_of(equation)
    while isinstance(function, BatchedFunction):
        function, operands = function.inner, operands[function.n_consts :]
    return (function, operands) if isinstance(function, StagedLayer) else None


def _note_savers(equations: Equations, staged: StagedLayer, operands: list[Value], results: list[Value]) -> None:
    """Enter a layer as the saver of its residuals."""
    layer = staged.call.layer
    given: Any = layer.saved_names if isinstance(layer.saved_names, tuple) else ()
    names = staged.kept.names(len(staged.positions), lambda i: (given and given[i]) or f"saved[{i}]")
    for name, residual in zip(names, staged.residuals(operands[staged.n_consts :], results), strict=True):
        value: Value | None = residual
        while value is not None:
            value.savers.append(Saver(layer.__name__, name, equations))
            value = value.whole
    for result in results:
        result.name = layer.__name__
