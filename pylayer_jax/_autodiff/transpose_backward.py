"""The transpose of a `backward`, or of a `forward` that a `backward` applies; the errors if there is none."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from pylayer_jax._jax.custom_vjp import custom_function_in
from pylayer_jax._jax.define_primitive import held_object
from pylayer_jax._jax.imports import eval_jaxpr
from pylayer_jax._jax.jaxprs import stage, without_select_of_stop_gradient
from pylayer_jax._jax.masks import select
from pylayer_jax._jax.rule_function import RuleFunction, jaxpr_of, rule_function_p, transpose_jaxpr
from pylayer_jax._jax.tracers import NEEDS_VALUES

from .linearity import ZeroInfo, add_rule, call_of, why_not_linear


class NoForwardModeError(TypeError):
    """A layer has no rule for forward mode."""

    def __init__(self, layer: str, refs: Sequence[str] = ()) -> None:
        reason = (
            "it defines backward alone. Add forward_mode = True to the class, which derives the rule from a backward "
            "that is linear in its cotangents; or a static jvp(ctx, *tangents)."
        )
        if refs:
            reason = (
                f"the call takes a jax.Ref ({', '.join(refs)}). If the layer only reads it, pass its value: ref[...]."
            )
        super().__init__(
            f"{layer} has no rule for forward-mode differentiation (jax.jvp, jax.jacfwd, jax.linearize): {reason} "
            "Or use reverse mode: jax.vjp, jax.grad, jax.jacrev."
        )
        self.layer = layer


class NotDerivableError(TypeError):
    """Forward mode, or forward mode over reverse mode, cannot be derived from the methods of a layer."""


def transpose(
    layer: str,
    pull: Callable[..., Sequence[Any]],
    types: Sequence[Any],
    tangents: Sequence[Any],
    forward_mode: bool,
) -> list[Any]:
    """The transpose of `pull` at `tangents`: one array per cotangent of `pull`, whose types are given.

    `pull` returns one gradient per tangent, or None for zero. `forward_mode` says whether the class declares forward
    mode, which changes the advice in the errors.

    Raises:
        NotDerivableError: if `pull` is not linear, or JAX cannot transpose it, for example since it runs a kernel.
    """

    __tracebackhide__ = True

    def nonzero_gradients(*cotangents: Any) -> tuple[list[Any], list[bool]]:
        __tracebackhide__ = True
        gradients = pull(*cotangents)
        nonzero = [g is not None for g in gradients]
        return select(gradients, nonzero), nonzero

    # Staged first, as its equations tell whether it is linear; an error of the user's own surfaces here.
    try:
        jaxpr, consts, nonzero = stage(nonzero_gradients, types, f"backward of {layer}")
    except NEEDS_VALUES as error:
        error.add_note(
            f"Forward mode transposes {layer}.backward, which is traced for that and sees no numbers. Write it with "
            f"jax.numpy, or give {layer} a static jvp(ctx, *tangents), which sees them."
        )
        raise
    jaxpr = without_select_of_stop_gradient(jaxpr)
    is_cotangent = [False] * len(consts) + [True] * len(types)
    if reason := why_not_linear(jaxpr, is_cotangent, consts):
        raise _not_transposed_error(
            f"{layer}.backward is not linear in its cotangents, as {reason}. ", layer, forward_mode
        )
    try:
        transposed = jax.linear_transpose(lambda *c: eval_jaxpr(jaxpr, (), *consts, *c), *types)
        return list(transposed(select(tangents, nonzero)))
    except Exception as error:
        if (applied := custom_function_in(jaxpr)) is not None:
            raise _needs_forward_mode_error(layer, applied) from error
        message = next(iter(str(error).splitlines()), "")
        raise _not_transposed_error(
            f"{layer}.backward cannot be transposed by JAX ({type(error).__name__}: {message}). ", layer, forward_mode
        ) from error


def transpose_forward(layer: str, jaxpr: Any, args: Sequence[Any], cotangents: Sequence[Any]) -> list[Any]:
    """The transpose of the `forward` of a layer, as the linear map that its jaxpr is: one value per unknown argument.

    An unknown argument is None. The rule of the layer itself plays no part.

    Raises:
        NotDerivableError: unless the jaxpr is linear in the unknown arguments.
    """
    unknown = [x is None for x in args]
    if reason := why_not_linear(jaxpr, unknown):
        raise NotDerivableError(f"{layer}.forward cannot be transposed: it is not linear, as {reason}.")
    return transpose_jaxpr(jaxpr, args, cotangents)


def _needs_forward_mode_error(layer: str, applied: str) -> NotDerivableError:
    return NotDerivableError(
        f"{layer}.backward applies a layer with a custom gradient ({applied}). Forward mode (jax.jvp, jax.jacfwd, "
        f"jax.hessian) transposes backward, which needs forward mode of {applied}: make it a layer with "
        "forward_mode = True, or give it a jvp(ctx, *tangents). Or use reverse over reverse: jax.jacrev(jax.grad(f))."
    )


def _not_transposed_error(message: str, layer: str, forward_mode: bool) -> NotDerivableError:
    if forward_mode:
        return NotDerivableError(
            f"{message}forward_mode = True derives the tangent map by transposing a linear backward. Give "
            f"{layer} a static jvp(ctx, *tangents) instead, or use reverse mode: jax.vjp, jax.grad, jax.jacrev."
        )
    return NotDerivableError(
        f"{message}Forward mode over reverse (jax.hessian, jax.jvp of jax.grad) transposes a linear "
        "backward. Use reverse over reverse: jax.jacrev(jax.grad(f)); or give the layer a static jvp(ctx, *tangents)."
    )


def _zero_info(equation: Any, operands: list[ZeroInfo]) -> list[ZeroInfo]:
    function: RuleFunction = held_object(equation)
    facts = call_of(jaxpr_of(function, [v.aval for v in equation.invars]), equation, operands)
    return [
        f._replace(reason=f"it applies the {function.kind} {function.name}, which is not, as {f.reason}")
        if f.reason and not any(o.reason for o in operands)
        else f
        for f in facts
    ]


add_rule(rule_function_p.name, _zero_info)
