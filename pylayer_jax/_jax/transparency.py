"""Rules with which JAX looks into a `rule_function`: checkpoints, dead code, and `checkify`.

`jax.checkpoint` saves some values of a function and computes the others again for the backward pass. Its policy decides
about each operation. This module divides a `rule_function` with these operations into two, as JAX divides a jitted
function. With a policy that saves matrix products,

    c = rule_function[call_jaxpr={ d = dot_general a b; c = tanh d }] a b

becomes an equation of the forward pass and one of the backward pass:

    c, d = rule_function[call_jaxpr={ d = dot_general a b; c = tanh d }] a b
    c    = rule_function[call_jaxpr={ c = tanh d }] d a b

Both have the derivative of the whole function with respect to its own operands, which therefore are operands of both.
The residual `d` has no tangent, since its value follows from the operands. tests: derivatives/test_checkpoint.py
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from .identities import Identity, forbid_derivative
from .imports import DebugInfo, eval_jaxpr, partial_eval
from .jaxprs import is_literal, jaxpr_and_consts, stage, uses_own_refs
from .masks import select
from .primitives import object_of
from .rule_function import RuleFunction, Values, apply, rule_function_p


class PartialFunction(RuleFunction):
    """Part of a function: other equations for some of its values, with the derivative of the whole function.

    The operands are `n_residuals` values that another part computes, and then the operands of the whole function. The
    results are values of the whole function, at `positions`, and then residuals for another part.
    """

    def __init__(self, whole: RuleFunction, jaxpr: Any, n_residuals: int, positions: Sequence[int]) -> None:
        debug = DebugInfo("pylayer_jax", f"part of {whole.name}", None, None)
        self.whole, self.name, self.jaxpr = whole, whole.name, jaxpr.replace(debug_info=debug)
        self.n_residuals, self.positions = n_residuals, list(positions)

    def mask_of_kept_operands(self) -> list[bool]:
        return [i >= self.n_residuals for i in range(len(self.jaxpr.invars))]

    def rule(self, primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Values, Values]:
        __tracebackhide__ = True
        n = self.n_residuals
        values = apply(self, primals)
        if all(t is None for t in tangents[n:]):
            return values, [None] * len(values)
        _, found = self.whole.rule(primals[n:], tangents[n:])
        return values, [*[found[i] for i in self.positions], *[None] * (len(values) - len(self.positions))]

    def transpose(self, args: Sequence[Any], cotangents: Sequence[Any]) -> Values:
        return self.whole.transpose_code(self.jaxpr, args, cotangents)


def _is_divisible(function: RuleFunction) -> bool:
    return function.is_divisible and not uses_own_refs(function.jaxpr)


def _with_function(equation: Any, function: RuleFunction, **changes: Any) -> Any:
    """Return a copy of an equation that holds another function."""
    return equation.replace(params=rule_function_p.params_of(function), effects=function.jaxpr.effects, **changes)


# -- jax.checkpoint ------------------------------------------------------------------------------------


def _divide(saveable: Callable[..., Any], unknown: Sequence[bool], instantiated: Sequence[bool], equation: Any) -> Any:
    """Divide an equation, as rules of `partial_eval_jaxpr_custom_rules` do.

    Returns:
        The equation of the forward pass, the equation of the backward pass, two masks of the results (known only in the
        backward pass; computed in the backward pass), and the variables that the backward pass needs from the forward
        pass.
    """
    function = object_of(equation)
    if any(unknown) or not _is_divisible(function):
        return _keep_whole(saveable, any(unknown), instantiated, equation)
    known, staged, unknown_out, instantiated_out, residuals = _divide_jitted(
        saveable, unknown, instantiated, equation, function.jaxpr
    )
    code, _ = jaxpr_and_consts(known.params["jaxpr"])
    first = PartialFunction(function, code, 0, range(len(equation.outvars)))
    forward = _with_function(equation, first, invars=known.invars, outvars=known.outvars)
    if not any(instantiated_out):
        missing = _variables(equation.invars, [not i for i in instantiated])
        return forward, None, unknown_out, instantiated_out, missing
    # JAX may leave an equation here that computes a saved value. Without it, a name in `forward` spares this operation.
    code, _ = jaxpr_and_consts(staged.params["jaxpr"])
    code, is_read = partial_eval.dce_jaxpr(code, [True] * len(code.outvars))
    read = select(staged.invars, is_read)
    code = code.replace(invars=[*code.invars, *function.jaxpr.invars])
    positions = [i for i, is_set in enumerate(instantiated_out) if is_set]
    second = PartialFunction(function, code, len(read), positions)
    backward = _with_function(equation, second, invars=[*read, *equation.invars], outvars=staged.outvars)
    return forward, backward, unknown_out, instantiated_out, [v for v in residuals if v in backward.invars]


def _divide_jitted(saveable: Any, unknown: Any, instantiated: Any, equation: Any, jaxpr: Any) -> Any:
    """Divide an equation of the same code in a jitted function, by JAX's own rule."""
    with equation.ctx.manager, jax.disable_jit(False):
        jitted = jax.jit(lambda *args: eval_jaxpr(jaxpr, (), *args))
        outer, _, _ = stage(lambda *args: (jitted(*args), None), [v.aval for v in equation.invars], "jit")
    (call,) = outer.eqns
    call = call.replace(invars=equation.invars, outvars=equation.outvars, source_info=equation.source_info)
    return partial_eval.partial_eval_jaxpr_custom_rules[call.primitive](saveable, unknown, instantiated, call)


def _keep_whole(saveable: Callable[..., Any], is_unknown: bool, instantiated: Sequence[bool], equation: Any) -> Any:
    """Save all results of an equation, or compute it again as a whole."""
    n = len(equation.outvars)
    operands = _variables(equation.invars, [not i for i in instantiated])
    if is_unknown:
        return None, equation, [True] * n, [True] * n, operands
    is_saved = saveable(equation.primitive, *[v.aval for v in equation.invars], **equation.params) is True
    if is_saved or equation.effects:
        return equation, None, [False] * n, [False] * n, []
    return equation, equation, [False] * n, [True] * n, operands


def _variables(atoms: Sequence[Any], mask: Sequence[bool]) -> list[Any]:
    return [a for a in select(atoms, mask) if not is_literal(a)]


partial_eval.partial_eval_jaxpr_custom_rules[rule_function_p] = _divide


# -- dead code -----------------------------------------------------------------------------------------


def _drop_unused(used: Sequence[bool], *rest: Any) -> tuple[list[bool], Any]:
    """Return the operands that an equation with fewer results uses, and this equation; None if all code is dead."""
    equation = rest[-1]  # since jax 0.12, a mask of the operands comes before
    keeps_all = [True] * len(equation.invars)
    if used and all(used):
        return keeps_all, equation
    function = object_of(equation)
    if not any(used):
        code, _ = partial_eval.dce_jaxpr(function.jaxpr, list(used))
        if not code.eqns:
            return [False] * len(equation.invars), None
    if isinstance(function, Identity) and function.may_drop_operands:  # each result is the operand at the same position
        function = function.of([v.aval for v in select(equation.outvars, used)])
        invars, outvars = select(equation.invars, used), select(equation.outvars, used)
        return list(used), _with_function(equation, function, invars=invars, outvars=outvars)
    if not _is_divisible(function):
        return keeps_all, equation
    code, is_read = partial_eval.dce_jaxpr(function.jaxpr, list(used), function.mask_of_kept_operands())
    n = function.n_residuals if isinstance(function, PartialFunction) else 0
    positions = [i for i, is_used in enumerate(used) if is_used]
    if isinstance(function, PartialFunction):
        positions = [function.positions[i] for i in positions if i < len(function.positions)]
        function = function.whole
    part = PartialFunction(function, code, sum(is_read[:n]), positions)
    invars, outvars = select(equation.invars, is_read), select(equation.outvars, used)
    return list(is_read), _with_function(equation, part, invars=invars, outvars=outvars)


partial_eval.dce_rules[rule_function_p] = _drop_unused


# -- checkify ------------------------------------------------------------------------------------------


def _evaluate_checked(function: RuleFunction, checked: Any, *args: Any) -> Values:
    __tracebackhide__ = True

    def error() -> Exception:
        return TypeError(
            f"{function.name}: jax.grad(checkify(jax.grad(f))) would ignore backward, and differentiate the operations "
            "of forward. Differentiate first, as in checkify(jax.grad(jax.grad(f)))."
        )

    return forbid_derivative(checked.call_wrapped(*args), error)


rule_function_p.evaluate_checked = _evaluate_checked
