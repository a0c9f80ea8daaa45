"""Finds where the values of a jaxpr come from, including the values that an inner jaxpr computes.

    { lambda ; a:f32[8]. let                                 a: an input
        b:f32[8] c:f32[3,8] = scan[                          c: three times its part e
          length=3
          jaxpr={ lambda ; d:f32[8]. let
              e:f32[8] = rule_function[name=Tanh] d          e: an operation, saved[0] of the layer Tanh
            in (e, e) }
        ] a
      in (c,) }

`outputs_of` returns the value c with this history.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
from collections.abc import Sequence
from typing import Any

from pylayer_jax._hooks import PACK_SCOPE
from pylayer_jax._jax.imports import summarize
from pylayer_jax._jax.jaxprs import inner_jaxprs, is_literal, scan_counts
from pylayer_jax._jax.primitives import object_of
from pylayer_jax._jax.rule_function import BatchedFunction, rule_function_p
from pylayer_jax._layer_rule import StagedLayer

Equations = tuple[Any, ...]  # an equation, after the equations that hold its jaxpr, outermost first


@dataclasses.dataclass(eq=False)
class Value:
    """One value in a program. A jaxpr that is called twice computes two."""

    aval: Any
    kind: str  # "input", "constant" or "operation"
    name: str  # of the input or the operation
    equations: Equations = ()
    operands: Sequence[Value] = ()
    part: Value | None = None  # the value of an inner jaxpr that each iteration, device or branch contributes
    times: int = 1  # the number of iterations that contribute a part
    is_slice: bool = False  # an input of an inner jaxpr: one part of a value, with the value's history
    copy_of: Value | None = None
    savers: list[tuple[str, str, Equations]] = dataclasses.field(default_factory=list)  # layer, name as in saved[0]
    number: int = dataclasses.field(default_factory=itertools.count().__next__)  # in the order of the program

    def innermost(self) -> tuple[Value, int]:
        """Return the part of the value that one iteration of all loops computes, and the number of iterations."""
        value, times = self, 1
        while value.part is not None:
            value, times = value.part, times * value.times
        return value, times

    def unpacked(self) -> Value:
        """Return the tensor from which pack hooks made the value; the value itself if no hook made it."""
        found: dict[Value, bool] = {}  # each value that leads to this one, and whether hooks made it
        waiting = [self]
        while waiting:
            value = waiting.pop()
            value = value.copy_of or value
            one, _ = value.innermost()
            scopes = [] if one.is_slice else [str(e.source_info.name_stack) for e in one.equations]
            found[value] = any(PACK_SCOPE in scope for scope in scopes)
            waiting += [x for x in one.operands if found[value] and x not in found]
        # Hooks also read numbers that they hold, and the index of the device.
        tensors = [value for value, is_packed in found.items() if not is_packed]
        return max(tensors, key=lambda v: (v.kind != "constant", v.aval.size), default=self)


def line_of(equations: Equations) -> str:
    """Return the file and line that an equation comes from, as in `model.py:12`.

    This is the innermost line outside of installed packages, so that a model of flax shows the user's line, which calls
    flax; or the innermost line, if all lines are in packages.
    """
    # The equations of a jitted function of JAX have no line of a user, but the equation that calls it has.
    stacks = [summarize(e.source_info, num_frames=1000).splitlines() for e in reversed(equations)]
    lines = [line for stack in stacks for line in reversed(stack)]  # as in /home/me/model.py:12:4 (loss)
    own = [line for line in lines if "site-packages" not in line and "dist-packages" not in line]
    place = (own or lines or [""])[0].rpartition(" (")[0]
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


# The results of these primitives equal their operands. JAX keeps a result beside its operand if it needs both.
_IDENTITIES = frozenset(("name", "optimization_barrier", "pcast", "pvary", "reduce_precision", "stop_gradient"))
# A `cond` returns the residuals of all branches. A branch fills those of other branches by these primitives.
_FILLED = ("broadcast_in_dim", "empty2")


def _results(equations: Equations, operands: list[Value]) -> list[Value]:
    equation = equations[-1]
    name, inner = equation.primitive.name, inner_jaxprs(equation.params)
    results = [Value(v.aval, "operation", name, equations, operands) for v in equation.outvars]
    times = [1] * len(results)
    # A scalar leaves a shard_map as an array with one entry per device.
    if name in _IDENTITIES or (name == "broadcast_in_dim" and results[0].aval.size == 1):
        return [dataclasses.replace(value, copy_of=value.copy_of or value) for value in operands]
    if name == "scan":
        n_consts, n_carry = scan_counts(equation.params)
        n_before = n_consts + n_carry
        carry = [Value(v.aval, "operation", name, equations) for v in inner[0].invars[n_consts:n_before]]
        slices = _slices(operands[n_before:], inner[0].invars[n_before:])
        parts = outputs_of(inner[0], [*operands[:n_consts], *carry, *slices], equations)
        times[n_carry:] = [equation.params["length"]] * (len(results) - n_carry)
    elif name == "cond":
        branches = [outputs_of(branch, operands[1:], equations) for branch in inner]
        is_computed = lambda v: (bool(v.savers), v.kind != "constant", v.name not in _FILLED)  # noqa: E731
        parts = [max(values, key=is_computed) for values in zip(*branches, strict=True)]
    elif name == "shard_map":
        parts = outputs_of(inner[0], _slices(operands, inner[0].invars), equations)
    elif equation.primitive is rule_function_p and _note_savers(equations, operands, results):
        return results
    elif len(inner) == 1 and _shapes(inner[0].invars, inner[0].outvars) == _shapes(operands, results):
        return outputs_of(inner[0], operands, equations)  # a jitted function, a checkpoint, an identity of ours
    else:
        return results
    return [
        Value(result.aval, v.kind, v.name, v.equations, part=v, times=n, savers=[*v.savers])
        for result, v, n in zip(results, parts, times, strict=True)
    ]


def _slices(wholes: Sequence[Value], variables: Sequence[Any]) -> list[Value]:
    own = {"part": None, "times": 1, "copy_of": None, "is_slice": True}
    return [dataclasses.replace(whole, aval=v.aval, **own) for whole, v in zip(wholes, variables, strict=True)]


def _shapes(*values: Sequence[Any]) -> list[Any]:
    return [[getattr(v.aval, "shape", None) for v in vs] for vs in values]


def _note_savers(equations: Equations, operands: list[Value], results: list[Value]) -> bool:
    """Enter the layer that an equation applies, to one example or a batch, as the saver of its residuals.

    Return False if the function of the equation is no layer.
    """
    function = object_of(equations[-1])
    while isinstance(function, BatchedFunction):
        function, operands = function.inner, operands[function.n_consts :]
    if not isinstance(function, StagedLayer):
        return False
    layer = function.call.layer
    names = function.call.residual_names(function.kept, len(function.positions))
    for name, residual in zip(names, function.residuals(operands[function.n_consts :], results), strict=True):
        residual.savers.append((layer.__name__, name, equations))
    for result in results:
        result.name = layer.__name__
    return True
