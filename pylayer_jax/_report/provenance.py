"""Where the values of a jaxpr come from, also within the jaxprs of its equations."""

from __future__ import annotations

import dataclasses
import itertools
import os
import re
from collections.abc import Iterator, Sequence
from typing import Any, Literal

from pylayer_jax._autodiff.stage_forward import StagedForward
from pylayer_jax._hooks.packing import PACK_SCOPE
from pylayer_jax._jax.define_primitive import held_object
from pylayer_jax._jax.imports import summarize
from pylayer_jax._jax.jaxprs import inner_jaxprs, is_literal, scan_counts
from pylayer_jax._jax.masks import scatter
from pylayer_jax._jax.rule_function import BatchedFunction, RuleFunction, UsedPart, rule_function_p

Equations = tuple[Any, ...]  # one, behind those that hold its jaxpr


@dataclasses.dataclass(eq=False)
class Value:
    """A value that a jaxpr computes. Each call of the jaxpr computes another one."""

    number: int  # in the order of the program
    aval: Any
    kind: Literal["input", "constant", "operation"]
    name: str  # of the input or operation
    equations: Equations = ()
    operands: Sequence[Value] = ()
    whole: Value | None = None  # of which it is the part that one iteration or one device sees
    each: Value | None = None  # what one iteration, one device or one branch returns, of which it is made
    times: int = 1  # the iterations
    layers: list[tuple[str, str, Equations]] = dataclasses.field(default_factory=list)  # class and name that saves it

    def chain(self) -> Iterator[Value]:
        """The value, what it is made of in inner jaxprs, and what that is a part of."""
        value: Value | None = self
        while value is not None:
            yield value
            value = value.each or value.whole

    def innermost(self) -> tuple[Value, int]:
        """What one iteration of all loops computes, and the number of iterations."""
        value, times = self, 1
        while value.each is not None:
            value, times = value.each, times * value.times
        return value, times

    def unpacked(self) -> Value:
        """The tensor from which a pack hook computed the value; the value itself if no hook did."""
        # What else a hook reads are numbers that it holds, and the index of the device.
        return max(self.sources(1), key=lambda v: (v.kind != "constant", v.aval.size), default=self)

    def pack_step(self) -> int:
        """The number of the pair of a chain whose pack hook computed the value; 1 without a chain, 0 without hooks."""
        made, _ = self.innermost()
        scopes = " ".join(str(e.source_info.name_stack) for e in made.equations) if made.whole is None else ""
        return max(map(int, re.findall(rf"{PACK_SCOPE}_(\d+)", scopes)), default=int(PACK_SCOPE in scopes))

    def sources(self, step: int) -> list[Value]:
        """What the pair of this number in a chain, and those behind it, computed the value from."""
        seen: set[Value] = set()
        origins: list[Value] = []
        waiting: list[Value] = [self]
        while waiting:
            value = waiting.pop()
            if value in seen:
                continue
            seen.add(value)
            if value.pack_step() >= step:
                waiting.extend(value.innermost()[0].operands)
            else:
                origins.append(value)
        return origins


def source_of(equations: Equations) -> str:
    """File and line of the user's code that an equation comes from, as in `model.py:12`."""
    # In a jitted function of JAX there is none: then it is the line that calls the function.
    places = (summarize(e.source_info) for e in reversed(equations))  # as in /home/me/model.py:12:4 (loss)
    place = next(filter(None, places), "").split(" (")[0]
    return ":".join(os.path.basename(place).split(":")[:2])


# Each result of these primitives is an operand, the last one the last operand, and needs no memory of its own.
_PASS_ON = frozenset(
    (
        "map_all_outputs", "barrier", "forbid_derivative", "name", "optimization_barrier", "pcast", "pvary",
        "reduce_precision", "stop_gradient", "with_tangent",
    )
)  # fmt: skip


class Values:
    """Follows the equations of a jaxpr, and finds for each value where it comes from, and which layers save it."""

    def __init__(self) -> None:
        self._numbers = itertools.count()

    def new(self, variable: Any, kind: Any, name: str, **others: Any) -> Value:
        return Value(next(self._numbers), variable.aval, kind, name, **others)

    def outputs(self, jaxpr: Any, inputs: Sequence[Value], within: Equations = ()) -> list[Value]:
        """The values that a jaxpr returns, which stands within some equations."""
        known = dict(zip(jaxpr.invars, inputs, strict=True))
        known |= {v: self.new(v, "constant", "closed over") for v in jaxpr.constvars}

        def read(atoms: Sequence[Any]) -> list[Value]:
            return [self.new(a, "constant", str(a.val)) if is_literal(a) else known[a] for a in atoms]

        for equation in jaxpr.eqns:
            results = self._results((*within, equation), read(equation.invars))
            known.update(zip(equation.outvars, results, strict=True))
        return read(jaxpr.outvars)

    def _results(self, equations: Equations, operands: list[Value]) -> list[Value]:
        equation = equations[-1]
        name, outvars, inner = equation.primitive.name, equation.outvars, inner_jaxprs(equation.params)

        def new(variables: Sequence[Any], **others: Sequence[Any]) -> list[Value]:
            columns = zip(variables, *others.values(), strict=True)
            facts = [(v, dict(zip(others, each, strict=True))) for v, *each in columns]
            return [self.new(v, "operation", name, equations=equations, **each) for v, each in facts]

        # A scalar leaves a shard_map as an array with one entry per device.
        if name in _PASS_ON or (name == "broadcast_in_dim" and outvars[0].aval.size == 1):
            return operands[len(operands) - len(outvars) :]
        if name == "scan":
            consts, carries = scan_counts(equation.params)
            wholes = [*[None] * carries, *operands[consts + carries :]]
            given = [*operands[:consts], *new(inner[0].invars[consts:], whole=wholes)]
            times = [1] * carries + [equation.params["length"]] * (len(outvars) - carries)
            return new(outvars, each=self.outputs(inner[0], given, equations), times=times)
        if name == "cond":
            branches = [self.outputs(branch, operands[1:], equations) for branch in inner]
            # For what another branch keeps, a branch returns an array that is filled with one number.
            return new(outvars, each=[max(values, key=_is_computed) for values in zip(*branches, strict=True)])
        if name == "shard_map":
            return new(outvars, each=self.outputs(inner[0], new(inner[0].invars, whole=operands), equations))
        function = held_object(equation) if name == rule_function_p.name else None
        is_layer = function is not None and function.jaxpr is not None and function.kind == "layer"
        if len(inner) == 1 and not is_layer and _types(inner[0].invars, inner[0].outvars) == _types(operands, outvars):
            return self.outputs(inner[0], operands, equations)
        results = new(outvars, operands=[operands] * len(outvars))
        if is_layer:
            _tell_layers(equations, operands, results)
        return results


def _types(*values: Sequence[Any]) -> list[Any]:
    return [[(getattr(v.aval, "shape", None), getattr(v.aval, "dtype", None)) for v in vs] for vs in values]


def _is_computed(value: Value) -> tuple[bool, bool]:
    value, _ = value.innermost()
    return bool(value.layers), value.kind != "constant" and value.name not in ("broadcast_in_dim", "empty2")


def _tell_layers(equations: Equations, operands: Sequence[Value], results: Sequence[Value]) -> None:
    """Tell the values that a layer saves that it does."""
    staged, operands, values = _of_one_example(held_object(equations[-1]), operands, results)
    layer = staged.call.layer
    given: Any = layer.saved_names if isinstance(layer.saved_names, tuple) else ()
    names = staged.saved.residual_names(len(staged.sources), lambda i: (given and given[i]) or f"saved[{i}]")
    saved = staged.residuals(operands[staged.consts :], values)
    for name, value in zip(names, saved, strict=True):
        part = value
        while part is not None:
            part.layers.append((layer.__name__, name, equations))
            part = part.whole
    for value in results:
        value.name = layer.__name__


def _of_one_example(
    function: RuleFunction, operands: Sequence[Value], values: Sequence[Any]
) -> tuple[StagedForward, Sequence[Value], Sequence[Any]]:
    """The staged layer that a function applies, its operands, and its values, of which unused ones are None."""
    while not isinstance(function, StagedForward):
        if isinstance(function, UsedPart):
            function, values = function.whole, scatter(values, function.used)
        else:
            assert isinstance(function, BatchedFunction)
            function, operands = function.inner, operands[function.closed_over :]
    return function, operands, values
