"""Functions that prove that a jaxpr is linear in some of its inputs, and transpose it after such a proof.

    ZERO      known to be zero
    CONSTANT  does not depend on the inputs for which the proof is made
    LINEAR    linear in these inputs
    a str     perhaps not linear in these inputs: the name of the first operation that is not known to be linear

JAX transposes any composition of operations that have a transpose rule. It is affine, and linear if it maps zero to
zero. JAX also drops, without an error, a dependence through integers, booleans or PRNG keys, which have no tangents.
So the proof gives each value one of these kinds, by a table with one rule per operation. An operation without a rule,
such as a new one of JAX, is not known to be linear.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, Final

import jax
import numpy as np

from .jaxprs import body_inputs, inner_jaxprs, interpret, jaxpr_and_consts
from .rule_function import merge, payload_of, scatter, select
from .traces import eval_jaxpr
from .types import full_tangent, has_tangent

Kind = str
ZERO: Final = "\0zero"
CONSTANT: Final = "\0constant"
LINEAR: Final = "\0linear"
_KNOWN: Final = (ZERO, CONSTANT, LINEAR)


class NotLinearError(TypeError):
    """Error for a function that has to be transposed but is not linear, or that JAX cannot transpose."""


def why_not_linear(jaxpr: Any, is_input: Sequence[bool], first_values: Sequence[Any]) -> str:
    """Return why a jaxpr may be nonlinear where `is_input`, or "" after a proof."""
    kinds = [LINEAR if is_set else CONSTANT for is_set in is_input]
    found = _why(evaluate_kinds(jaxpr, kinds))
    if found and any(map(_is_zero, first_values)):  # read values only if the proof needs them
        kinds = [ZERO if _is_zero(c) else kind for c, kind in itertools.zip_longest(first_values, kinds)]
        found = _why(evaluate_kinds(jaxpr, kinds))
    return found


def _why(kinds: Sequence[Kind]) -> str:
    for kind in kinds:
        if kind not in _KNOWN:
            return f"it has the operation {kind}"
    return "it returns a value that does not depend on them" if CONSTANT in kinds else ""


def _is_zero(value: Any) -> bool:
    try:
        return value is not None and not np.any(np.asarray(value))
    except Exception:  # NumPy cannot convert tracers and keys
        return False


def evaluate_kinds(jaxpr: Any, kinds: Sequence[Kind]) -> list[Kind]:
    known = dict.fromkeys(jaxpr.constvars, CONSTANT) | dict(zip(jaxpr.invars, kinds, strict=True))
    return interpret(_kinds, jaxpr.eqns, known, jaxpr.outvars, lambda a: ZERO if _is_zero(a.val) else CONSTANT)


def _kinds(equation: Any, operands: list[Kind]) -> list[Kind]:
    name = equation.primitive.name
    found = _RULES.get(name, _unknown)(equation, operands)
    kinds = [found] * len(equation.outvars) if isinstance(found, str) else found
    lost = f"{name!r}, whose result has no tangent"
    pairs = zip(equation.outvars, kinds, strict=True)
    return [lost if kind == LINEAR and not has_tangent(v.aval) else kind for v, kind in pairs]


# -- the table -----------------------------------------------------------------------------------------

Rule = Callable[[Any, list[Kind]], Kind | list[Kind]]  # of all results, or of each
_RULES: dict[str, Rule] = {}


def _unknown(equation: Any, operands: list[Kind]) -> Kind:
    return _combine(operands, f"{equation.primitive.name!r}")


def _combine(kinds: Sequence[Kind], if_linear: Kind) -> Kind:
    """Return the first kind that is perhaps not linear, else `if_linear` if one is LINEAR, else CONSTANT."""
    failed = next((k for k in kinds if k not in _KNOWN), None)
    return failed or (if_linear if LINEAR in kinds else CONSTANT)


def _sum(name: str, kinds: Sequence[Kind], others: Sequence[Kind] = (), if_others: Kind = "") -> Kind:
    """Return the kind of the result of an operation that is jointly linear in operands, and not linear in others."""
    if (kind := _combine(others, if_others)) != CONSTANT:
        return kind
    if all(k == ZERO for k in kinds):
        return ZERO
    affine = f"{name!r}, which adds a term that does not depend on them"
    return _combine(kinds, affine if CONSTANT in kinds else LINEAR)


def _product(equation: Any, operands: list[Kind]) -> Kind:
    factors = operands[:2]
    if ZERO in factors and all(k in _KNOWN for k in factors):
        return ZERO
    both = factors == [LINEAR, LINEAR]
    return _combine(operands, f"{equation.primitive.name!r} of two terms that depend on them" if both else LINEAR)


def _linear_in(positions: Sequence[int], equation: Any, operands: list[Kind]) -> Kind:
    name, others = equation.primitive.name, [k for i, k in enumerate(operands) if i not in positions]
    return _sum(name, [operands[i] for i in positions], others, f"{name!r}")


for _name in (
    "add", "add_any", "all_gather", "all_gather_invariant", "all_gather_reduced", "all_to_all", "broadcast_in_dim",
    "complex", "concatenate", "conj", "convert_element_type", "copy", "cumsum", "fft", "imag", "layout_constraint",
    "name", "neg", "pad", "pbroadcast", "ppermute", "preduced", "psum", "psum_invariant", "pvary", "real",
    "reduce_precision", "reduce_scatter", "reduce_sum", "reduce_window_sum", "reduced_vary_cast", "reshape", "reshard",
    "rev", "sharding_constraint", "slice", "split", "squeeze", "stack", "sub", "tile", "transpose", "unreduced_psum",
    "unreduced_reduce_scatter", "unstack", "vary_unreduced_cast", "with_memory_space_constraint",
):  # fmt: skip
    _RULES[_name] = lambda equation, operands: _sum(equation.primitive.name, operands)
_RULES.update(dict.fromkeys(("mul", "dot_general", "conv_general_dilated", "ragged_dot_general"), _product))
for _name, _positions in (
    ("div", (0,)), ("dynamic_slice", (0,)), ("dynamic_update_slice", (0, 1)), ("scatter-add", (0, 2)),
    ("scatter-mul", (0,)), ("scatter-sub", (0, 2)), ("select_and_gather_add", (0,)), ("select_and_scatter_add", (0,)),
    ("triangular_solve", (1,)), ("tridiagonal_solve", (3,)),
):  # fmt: skip
    _RULES[_name] = functools.partial(_linear_in, _positions)
for _name in ("device_put", "optimization_barrier"):
    _RULES[_name] = lambda _, operands: operands  # each result is the operand at its position
_RULES["select_n"] = lambda e, operands: _linear_in(range(1, len(operands)), e, operands)
_RULES["custom_linear_solve"] = lambda e, operands: _linear_in(range(len(operands))[-len(e.outvars) :], e, operands)


def _gather(equation: Any, operands: list[Kind]) -> Any:
    # An index out of bounds reads the fill value, by default NaN for floats. The rule accepts NaN, which users notice.
    fill = equation.params.get("fill_value")
    is_linear = fill is None or fill == 0 or np.isnan(fill)
    return _linear_in((0,), equation, operands) if is_linear else _unknown(equation, operands)


def _scatter(equation: Any, operands: list[Kind]) -> Any:
    # A scatter that applies a function, as x.at[i].apply(f) does, may be nonlinear.
    applies_function = equation.params.get("update_jaxpr") is not None
    return _unknown(equation, operands) if applies_function else _linear_in((0, 2), equation, operands)


def _linear_map(equation: Any, operands: list[Kind]) -> Kind:
    name, n = payload_of(equation).name, payload_of(equation).n_residuals
    return _sum(name, operands[n:], operands[:n], f"{name!r}, whose saved tensors depend on them")


def _rule_function(equation: Any, operands: list[Kind]) -> list[Kind]:
    # If `backward` applies another layer, JAX transposes that layer's `forward`, so this `forward` has to be linear.
    function = payload_of(equation)
    kinds = evaluate_kinds(function.jaxpr, operands)
    return [k if k in _KNOWN or k in operands else f"{k}, in {function.name}" for k in kinds]


_RULES.update(gather=_gather, scatter=_scatter, linear_map=_linear_map, rule_function=_rule_function)


# -- calls, branches, loops -------------------------------------------------------------------------------


def _call(equation: Any, operands: list[Kind]) -> list[Kind]:
    jaxpr = inner_jaxprs(equation.params)[0]
    consts = [CONSTANT] * (len(jaxpr.invars) - len(operands))
    return evaluate_kinds(jaxpr, consts + operands)[: len(equation.outvars)]


def _joined(one: Sequence[Kind], other: Sequence[Kind]) -> list[Kind]:
    """Combine the kinds of the results of two branches, or of a loop's carried values before and after a step."""
    return [a if a == b else _sum("a loop or branch", [a, b]) for a, b in zip(one, other, strict=True)]


def _cond(equation: Any, operands: list[Kind]) -> Kind | list[Kind]:
    index, *rest = operands
    if index not in (CONSTANT, ZERO):
        return _unknown(equation, [index])
    first, *others = [evaluate_kinds(jaxpr_and_consts(branch)[0], rest) for branch in equation.params["branches"]]
    return functools.reduce(_joined, others, first)


def _loop(body: Any, operands: list[Kind], carried: range) -> list[Kind]:
    jaxpr, _ = jaxpr_and_consts(body)
    consts, carry, rest = operands[: carried.start], operands[carried.start : carried.stop], operands[carried.stop :]
    while True:  # until no kind changes: a kind only moves away from ZERO and CONSTANT, to the reason of an error
        results = evaluate_kinds(jaxpr, [*consts, *carry, *rest])
        joined = _joined(carry, results[: len(carried)])
        if joined == carry:
            return [*carry, *results[len(carried) :]]
        carry = joined


def _while(equation: Any, operands: list[Kind]) -> list[Kind]:
    n_cond, n_body = equation.params["cond_nconsts"], equation.params["body_nconsts"]
    carried = range(n_body, n_body + len(equation.outvars))
    carry = _loop(equation.params["body_jaxpr"], operands[n_cond:], carried)
    (goes_on,) = evaluate_kinds(jaxpr_and_consts(equation.params["cond_jaxpr"])[0], [*operands[:n_cond], *carry])
    # If the condition depends on the inputs (its kind is then a reason), so do the values after a number of steps.
    return carry if goes_on in (CONSTANT, ZERO) else [goes_on] * len(carry)


_RULES.update(dict.fromkeys(("jit", "closed_call", "custom_jvp_call", "remat2", "shard_map"), _call))
_RULES.update({"cond": _cond, "while": _while})
_RULES["scan"] = lambda e, operands: _loop(e.params["jaxpr"], operands, body_inputs(e)[1])


def transpose_jaxpr(
    name: str, jaxpr: Any, args: Sequence[Any], cotangents: Sequence[Any], inputs: str = "its arguments"
) -> list[Any]:
    """Compute the cotangents of the arguments that are None. Raise a NotLinearError unless a proof succeeds."""
    is_input = [x is None for x in args]
    used = [c is not None and has_tangent(v.aval) for v, c in zip(jaxpr.outvars, cotangents, strict=True)]
    if not any(used):
        return [None] * len(args)
    jaxpr = jaxpr.replace(outvars=select(jaxpr.outvars, used))
    if reason := why_not_linear(jaxpr, is_input, args):
        raise NotLinearError(f"{name} is not linear in {inputs}, as {reason}.")

    def linear(*values: Any) -> list[Any]:
        __tracebackhide__ = True
        return eval_jaxpr(jaxpr, (), *merge(is_input, values, args))

    given = [full_tangent(c, v.aval) for v, c in zip(jaxpr.outvars, select(cotangents, used), strict=True)]
    types = select([v.aval for v in jaxpr.invars], is_input)
    return scatter(jax.linear_transpose(linear, *types)(given), is_input)
