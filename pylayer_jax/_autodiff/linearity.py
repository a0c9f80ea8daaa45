"""A proof that a jaxpr is linear in some of its inputs.

JAX transposes any composition of the operations that have a transpose rule. Such a composition is affine, and it is
linear exactly if it is zero at zero. A jaxpr is therefore evaluated with *zero* for these inputs, in a lattice of two
values, zero and unknown:

- for each operation that keeps zero, a table says which of its operands have to be zero;
- loops, branches and calls are evaluated by their inner jaxprs, a loop until nothing changes;
- every other operation gives an unknown value. An operation that is new in JAX is refused until it is in the table.

Transposition also drops a dependence on the inputs that goes through integers, booleans or keys: they have no tangents.
A value that depends on the inputs and is of such a dtype must not reach an output.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from pylayer_jax._jax.custom_vjp import custom_function_name
from pylayer_jax._jax.jaxprs import inner_jaxprs, is_literal, jaxpr_and_consts, scan_counts
from pylayer_jax._jax.types import has_tangent


class ZeroInfo(NamedTuple):
    """What is known of a value."""

    is_zero: bool  # known to be zero if the inputs are zero
    depends: bool  # on the inputs
    reason: str = ""  # why a value that depends on the inputs may not be linear in them; ends "as ..."


Rule = Callable[[Any, list[ZeroInfo]], list[ZeroInfo]]

_ZERO, _UNKNOWN = ZeroInfo(True, False), ZeroInfo(False, False)
_RULES: dict[str, Rule] = {}


def why_not_linear(jaxpr: Any, inputs: Sequence[bool], consts: Sequence[Any] = ()) -> str:
    """Why a jaxpr may not be linear in the inputs that are set; empty if it is proved to be.

    `consts` are the values of its first inputs, as far as they are known.
    """
    facts = [ZeroInfo(True, True) if is_set else _UNKNOWN for is_set in inputs]
    reason = _reason_of(evaluate(jaxpr, facts))
    if reason and any(map(_is_concrete_zero, consts)):  # looked at only if the proof needs it
        facts[: len(consts)] = [_ZERO if _is_concrete_zero(c) else f for c, f in zip(consts, facts, strict=False)]
        reason = _reason_of(evaluate(jaxpr, facts))
    return reason


def _reason_of(outputs: Sequence[ZeroInfo]) -> str:
    for fact in outputs:
        if fact.reason:
            return fact.reason
    return "" if all(f.is_zero for f in outputs) else "it returns a gradient that does not depend on them"


def _is_concrete_zero(value: Any) -> bool:
    try:
        return not np.any(np.asarray(value))
    except Exception:  # a tracer, a key
        return False


def evaluate(jaxpr: Any, inputs: Sequence[ZeroInfo]) -> list[ZeroInfo]:
    """The facts of the outputs of a jaxpr, from those of its inputs."""
    facts: dict[Any, ZeroInfo] = dict(zip(jaxpr.invars, inputs, strict=True))
    facts |= dict.fromkeys(jaxpr.constvars, _UNKNOWN)

    def read(atom: Any) -> ZeroInfo:
        return (_ZERO if _is_concrete_zero(atom.val) else _UNKNOWN) if is_literal(atom) else facts[atom]

    for equation in jaxpr.eqns:
        operands = [read(a) for a in equation.invars]
        results = _RULES.get(equation.primitive.name, _unknown)(equation, operands)
        for result, fact in zip(equation.outvars, results, strict=True):
            facts[result] = _checked(equation, result, fact)
    return [read(a) for a in jaxpr.outvars]


def _checked(equation: Any, result: Any, fact: ZeroInfo) -> ZeroInfo:
    """The fact of one result of an equation, with the reason if there is one."""
    if not fact.depends or fact.reason:
        return fact
    name = equation.primitive.name
    if not has_tangent(result.aval):
        return fact._replace(
            reason=f"it has the operation {name!r}, whose result is of dtype {result.aval.dtype} and has no tangent"
        )
    if fact.is_zero:
        return fact
    if name in _RULES:
        # JAX has no transpose of a product of two such values, even if it is linear.
        hint = "; in place of [a, b] @ [b, a].T write a @ b.T + b @ a.T" if name in ("concatenate", "stack") else ""
        return fact._replace(reason=f"it adds a term that does not depend on them ({name}{hint})")
    return fact._replace(reason=f"it has the operation {name!r}")


# -- rules ----------------------------------------------------------------------------------------


def add_rule(name: str, rule: Rule) -> None:
    """Enter the rule of a primitive: from the facts of the operands to those of the results."""
    _RULES[name] = rule


def result_of(operands: Sequence[ZeroInfo], is_zero: bool) -> ZeroInfo:
    reason = next((f.reason for f in operands if f.reason), "")
    return ZeroInfo(is_zero, any(f.depends for f in operands), reason)


def _unknown(equation: Any, operands: list[ZeroInfo]) -> list[ZeroInfo]:
    return [result_of(operands, False)] * len(equation.outvars)


def _zero_if(which: Callable[[Any, list[ZeroInfo]], Sequence[ZeroInfo]]) -> Rule:
    """Zero if these operands are."""

    def rule(equation: Any, operands: list[ZeroInfo]) -> list[ZeroInfo]:
        is_zero = all(f.is_zero for f in which(equation, operands))
        return [result_of(operands, is_zero)] * len(equation.outvars)

    return rule


def _each(equation: Any, operands: list[ZeroInfo]) -> list[ZeroInfo]:
    """Each result is the operand at its position."""
    del equation
    return operands


# Zero if all operands are.
for _name in (
    "add", "add_any", "all_gather", "all_gather_invariant", "all_gather_reduced", "all_to_all", "broadcast_in_dim",
    "complex", "concatenate", "conj", "convert_element_type", "copy", "cumsum", "fft", "imag", "layout_constraint",
    "name", "neg", "pad", "pbroadcast", "ppermute", "preduced", "psum", "psum_invariant", "pvary", "real",
    "reduce_precision", "reduce_scatter", "reduce_sum", "reduce_window_sum", "reduced_vary_cast", "reshape", "reshard",
    "rev", "sharding_constraint", "slice", "split", "squeeze", "stack", "sub", "tile", "transpose", "unreduced_psum",
    "unreduced_reduce_scatter", "unstack", "vary_unreduced_cast", "with_memory_space_constraint",
):  # fmt: skip
    add_rule(_name, _zero_if(lambda _, operands: operands))


def _product(equation: Any, operands: list[ZeroInfo]) -> list[ZeroInfo]:
    """Zero if one of the two factors is; linear in one of them at a time."""
    a, b = operands[:2]
    fact = result_of(operands, a.is_zero or b.is_zero)
    if a.depends and b.depends and not fact.reason:
        name = equation.primitive.name
        fact = fact._replace(reason=f"it has a product of two terms that depend on them ({name})")
    return [fact]


for _name in ("mul", "dot_general", "conv_general_dilated", "ragged_dot_general"):
    add_rule(_name, _product)


def _linear_in(positions: Sequence[int], others: str) -> Rule:
    """Zero if the operands at these positions are; linear in these, and not in the others."""

    def rule(equation: Any, operands: list[ZeroInfo]) -> list[ZeroInfo]:
        fact = result_of(operands, all(operands[i].is_zero for i in positions))
        if not fact.reason and any(f.depends for i, f in enumerate(operands) if i not in positions):
            name = equation.primitive.name
            fact = fact._replace(reason=f"it has the operation {name!r}, whose {others} depends on them")
        return [fact] * len(equation.outvars)

    return rule


for _name, _positions, _others in (
    ("div", (0,), "divisor"),
    ("dynamic_slice", (0,), "index"),
    ("dynamic_update_slice", (0, 1), "index"),
    ("scatter-add", (0, 2), "index"),
    ("scatter-mul", (0,), "factor"),
    ("scatter-sub", (0, 2), "index"),
    ("select_and_gather_add", (0,), "choice"),
    ("select_and_scatter_add", (0,), "choice"),
    ("triangular_solve", (1,), "matrix"),
    ("tridiagonal_solve", (3,), "matrix"),
):
    add_rule(_name, _linear_in(_positions, _others))


def _linear_solve(equation: Any, operands: list[ZeroInfo]) -> list[ZeroInfo]:
    count = len(operands)
    return _linear_in(range(count - len(equation.outvars), count), "matrix")(equation, operands)


add_rule("custom_linear_solve", _linear_solve)


def _scatter(equation: Any, operands: list[ZeroInfo]) -> list[ZeroInfo]:
    # With a function for the updates, as in x.at[i].apply(f), it may compute anything.
    rule = _unknown if equation.params.get("update_jaxpr") is not None else _linear_in((0, 2), "index")
    return rule(equation, operands)


add_rule("scatter", _scatter)
add_rule("select_n", _zero_if(lambda _, operands: operands[1:]))
for _name in (
    "barrier", "device_put", "forbid_derivative", "optimization_barrier",
):  # fmt: skip
    add_rule(_name, _each)
add_rule("with_tangent", lambda _, operands: [result_of(operands, operands[1].is_zero)])
add_rule("map_all_outputs", lambda equation, operands: operands[-equation.params["count"] :])


def _gather(equation: Any, operands: list[ZeroInfo]) -> list[ZeroInfo]:
    # Without a fill value, an index that is out of bounds gives NaN, which everybody sees.
    fill = equation.params.get("fill_value")
    return [result_of(operands, operands[0].is_zero and (fill is None or fill == 0 or np.isnan(fill)))]


add_rule("gather", _gather)


# -- calls, branches, loops -----------------------------------------------------------------------


def call_of(jaxpr: Any, equation: Any, operands: list[ZeroInfo]) -> list[ZeroInfo]:
    """The results of a call: those of its jaxpr, whose last inputs are the operands."""
    inputs = [_UNKNOWN] * (len(jaxpr.invars) - len(operands)) + operands
    return evaluate(jaxpr, inputs)[: len(equation.outvars)]


def _call(equation: Any, operands: list[ZeroInfo]) -> list[ZeroInfo]:
    return call_of(inner_jaxprs(equation.params)[0], equation, operands)


for _name in ("jit", "closed_call", "custom_jvp_call", "remat2", "shard_map"):
    add_rule(_name, _call)
# JAX itself refuses to transpose a custom_vjp function, with an error that `transpose` explains.
add_rule("custom_vjp_call", _zero_if(lambda _, operands: operands))
add_rule(
    "call_hi_primitive",  # the same under jax_custom_vjp3, but other calls too
    _zero_if(lambda e, operands: operands if custom_function_name(e.primitive, e.params) else [_UNKNOWN]),
)


def _joined(one: Sequence[ZeroInfo], other: Sequence[ZeroInfo]) -> list[ZeroInfo]:
    return [
        ZeroInfo(a.is_zero and b.is_zero, a.depends or b.depends, a.reason or b.reason)
        for a, b in zip(one, other, strict=True)
    ]


def _cond(equation: Any, operands: list[ZeroInfo]) -> list[ZeroInfo]:
    index, *rest = operands
    branches = [evaluate(jaxpr_and_consts(b)[0], rest) for b in equation.params["branches"]]
    results = branches[0]
    for branch in branches[1:]:
        results = _joined(results, branch)
    return [_with_condition(f, index) for f in results]


def _with_condition(fact: ZeroInfo, condition: ZeroInfo) -> ZeroInfo:
    return fact._replace(depends=True, reason=fact.reason or condition.reason) if condition.depends else fact


def _scan(equation: Any, operands: list[ZeroInfo]) -> list[ZeroInfo]:
    consts, carries = scan_counts(equation.params)
    body = jaxpr_and_consts(equation.params["jaxpr"])[0]
    carry, per_iteration = operands[consts : consts + carries], operands[consts + carries :]
    while True:
        results = evaluate(body, [*operands[:consts], *carry, *per_iteration])
        joined = _joined(carry, results[:carries])
        if joined == carry:
            return [*carry, *results[carries:]]
        carry = joined


def _while(equation: Any, operands: list[ZeroInfo]) -> list[ZeroInfo]:
    of_cond, of_body = equation.params["cond_nconsts"], equation.params["body_nconsts"]
    condition, body = (jaxpr_and_consts(equation.params[k])[0] for k in ("cond_jaxpr", "body_jaxpr"))
    carry = operands[of_cond + of_body :]
    while True:
        joined = _joined(carry, evaluate(body, [*operands[of_cond : of_cond + of_body], *carry]))
        if joined == carry:
            (goes_on,) = evaluate(condition, [*operands[:of_cond], *carry])
            return [_with_condition(f, goes_on) for f in carry]
        carry = joined


add_rule("cond", _cond)
add_rule("scan", _scan)
add_rule("while", _while)
