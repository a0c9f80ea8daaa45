"""The transpose of a pullback, and the errors if it has none."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from pylayer_jax._jax import (
    NEEDS_VALUES,
    custom_function_name,
    dependence,
    eval_jaxpr,
    has_transpose,
    inner_jaxprs,
    is_literal,
    merge,
    select,
    stage,
    without_stopped_selections,
)

from .refusals import NotDerivableError

_SUMS = frozenset({"add", "add_any", "sub"})
_KEEP_ZERO = frozenset({"broadcast_in_dim", "convert_element_type", "copy", "mul", "neg", "reshape", "squeeze"})
_PRODUCTS = frozenset({"mul", "dot_general", "conv_general_dilated"})  # linear in one operand at a time
_LINEAR_IN = {"div": (0,), "select_n": (1, 2)}  # which operands may depend on what is transposed


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
        NotDerivableError: if `pull` is not linear, or JAX cannot transpose it.
    """

    def nonzero_gradients(*cotangents: Any) -> tuple[list[Any], list[bool]]:
        gradients = pull(*cotangents)
        nonzero = [g is not None for g in gradients]
        return select(gradients, nonzero), nonzero

    def not_linear(reason: str) -> NotDerivableError:
        return _not_transposed_error(
            f"{layer}.backward is not linear in its cotangents, as {reason}. ", layer, forward_mode
        )

    # Staged first, as its equations tell whether it is linear; an error of the user's own surfaces here.
    try:
        jaxpr, consts, nonzero = stage(nonzero_gradients, types, f"backward of {layer}")
    except NEEDS_VALUES as error:
        error.add_note(
            f"Forward mode transposes {layer}.backward, which is traced for that and sees no numbers. Write it with "
            f"jax.numpy, or give {layer} a static jvp(ctx, *tangents), which sees them."
        )
        raise
    jaxpr = without_stopped_selections(jaxpr)
    is_cotangent = [False] * len(consts) + [True] * len(types)
    if reason := _affine_term(jaxpr, is_cotangent):
        raise not_linear(reason)
    try:
        transposed = jax.linear_transpose(lambda *c: eval_jaxpr(jaxpr, (), *consts, *c), *types)
        return list(transposed(select(tangents, nonzero)))
    except NonlinearLayerError as error:
        raise not_linear(f"it applies the layer {error.layer}, whose forward is not, as {error.reason}") from None
    except Exception as error:
        applied = next((name for e in jaxpr.eqns if (name := custom_function_name(e)) is not None), None)
        if applied is not None:
            raise _needs_forward_mode_error(layer, applied) from error
        operation = _nonlinear_operation(jaxpr, is_cotangent)
        message = next(iter(str(error).splitlines()), "")
        if operation:
            raise not_linear(f"it has {operation}") from error
        raise _not_transposed_error(
            f"{layer}.backward cannot be transposed by JAX ({type(error).__name__}: {message}). ", layer, forward_mode
        ) from error


class NonlinearLayerError(Exception):
    """A layer that is applied to a transposed value is not linear."""

    def __init__(self, layer: str, reason: str) -> None:
        super().__init__(layer, reason)
        self.layer = layer
        self.reason = reason


def check_linear(layer: str, jaxpr: Any, transposed: Sequence[bool]) -> None:
    """Raise NonlinearLayerError unless the `forward` of a layer is linear in the inputs that are set."""
    if reason := _affine_term(jaxpr, transposed):
        raise NonlinearLayerError(layer, reason)
    avals = [v.aval for v in jaxpr.invars]
    fixed = [not t for t in transposed]

    def apply_transpose(fixed_values: list[Any], cotangents: list[Any]) -> Any:
        full = merge(fixed, fixed_values, avals)

        def forward(*values: Any) -> list[Any]:
            return eval_jaxpr(jaxpr, (), *merge(transposed, values, full))

        return jax.linear_transpose(forward, *select(avals, transposed))(cotangents)

    try:
        jax.eval_shape(apply_transpose, select(avals, fixed), [v.aval for v in jaxpr.outvars])
    except Exception as error:
        raise NonlinearLayerError(layer, f"it has {_nonlinear_operation(jaxpr, transposed) or error}") from None


def _nonlinear_operation(jaxpr: Any, inputs: Sequence[bool]) -> str | None:
    """An operation that is not linear in the inputs that are set, as a message names it."""
    for equation, depends in zip(jaxpr.eqns, dependence(jaxpr, inputs)[0], strict=True):
        if not any(depends):
            continue
        name = equation.primitive.name
        if name in ("jit", "custom_jvp_call"):
            (inner,) = inner_jaxprs(equation.params)
            if reason := _nonlinear_operation(inner, depends):
                return reason
        elif name in _PRODUCTS and sum(depends) > 1:
            return f"a product of two terms that depend on them ({name})"
        elif any(d and i not in _LINEAR_IN.get(name, (i,)) for i, d in enumerate(depends)):
            return f"the operation {name!r}, whose {'divisor' if name == 'div' else 'condition'} depends on them"
        elif not has_transpose(equation.primitive):
            return f"the operation {custom_function_name(equation) or name!r}"
    return None


def _affine_term(jaxpr: Any, inputs: Sequence[bool]) -> str | None:
    # Transposing `c -> c + 1` gives the identity without complaint, and `c -> 1` gives zero: both would
    # be wrong numbers. Everything else that is not linear has no transpose rule, and JAX says so.
    zeros: set[Any] = set()

    def is_zero(atom: Any) -> bool:
        return not np.any(atom.val) if is_literal(atom) else atom in zeros

    operands, outputs = dependence(jaxpr, inputs)
    for equation, depends in zip(jaxpr.eqns, operands, strict=True):
        name = equation.primitive.name
        if any(depends):
            if name in _SUMS and not all(d or is_zero(a) for a, d in zip(equation.invars, depends, strict=True)):
                return f"it adds a term that does not depend on them ({name})"
        elif name in _KEEP_ZERO and all(map(is_zero, equation.invars)):
            zeros.update(equation.outvars)
    if any(not d and not is_zero(atom) for atom, d in zip(jaxpr.outvars, outputs, strict=True)):
        return "it returns a gradient that does not depend on them"
    return None


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
