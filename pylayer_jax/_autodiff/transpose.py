"""The transpose of a pullback, and the errors where it has none."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from pylayer_jax._jax.names import (
    NEEDS_VALUES,
    eval_jaxpr,
    has_transpose,
    inner_jaxprs,
    is_literal,
    layer_of,
    stage,
    without_stopped_selections,
)

_SUMS = frozenset({"add", "add_any", "sub"})
_KEEP_ZERO = frozenset({"broadcast_in_dim", "convert_element_type", "copy", "mul", "neg", "reshape", "squeeze"})
_PRODUCTS = frozenset({"mul", "dot_general", "conv_general_dilated"})  # linear in either operand alone
_LINEAR_IN = {"div": (0,), "select_n": (1, 2)}  # which operands may depend on what is transposed


def transpose(
    layer: str,
    pull: Callable[..., Sequence[Any]],
    types: Sequence[Any],
    tangents: Sequence[Any],
    forward_mode: bool,
) -> list[Any]:
    """The transpose of `pull` at `tangents`: one array per cotangent of `pull`, whose types are given.

    `pull` returns one gradient per tangent, or None for zero. `forward_mode`: whether the layer claims to have
    one, for the advice in the errors.

    Raises:
        TypeError: where `pull` is not linear, or JAX cannot transpose it.
    """
    given: list[int] = []

    def nonzero(*cotangents: Any) -> list[Any]:
        gradients = pull(*cotangents)
        given[:] = [i for i, g in enumerate(gradients) if g is not None]
        return [gradients[i] for i in given]

    def refuse(reason: str) -> TypeError:
        return _not_linear(layer, reason, forward_mode)

    # Staged first, as its equations tell whether it is linear; an error of the user's own surfaces here.
    try:
        jaxpr, consts = stage(nonzero, types, f"backward of {layer}")
    except NEEDS_VALUES as error:
        error.add_note(
            f"Forward mode transposes {layer}.backward, which is traced for that and sees no numbers. Write it with "
            f"jax.numpy, or give {layer} a static jvp(ctx, *tangents), which sees them."
        )
        raise
    jaxpr = without_stopped_selections(jaxpr)
    inputs = [False] * len(consts) + [True] * len(types)
    if reason := _affine_term(jaxpr, inputs):
        raise refuse(reason)
    try:
        transposed = jax.linear_transpose(lambda *c: eval_jaxpr(jaxpr, (), *consts, *c), *types)
        return list(transposed([tangents[i] for i in given]))
    except NonlinearLayerError as error:
        raise refuse(f"it applies the layer {error.layer}, whose forward is not, as {error.reason}") from None
    except Exception as error:
        applied = next((name for equation in jaxpr.eqns if (name := layer_of(equation)) is not None), None)
        if applied is not None:
            raise _needs_forward_mode(layer, applied) from error
        operation = _nonlinear_operation(jaxpr, inputs)
        said = next(iter(str(error).splitlines()), "")
        if operation:
            raise refuse(f"it has {operation}") from error
        raise _not_transposed(
            f"{layer}.backward cannot be transposed by JAX ({type(error).__name__}: {said}). ", layer, forward_mode
        ) from error


class NonlinearLayerError(Exception):
    """A layer applied to what is transposed is not linear."""

    def __init__(self, layer: str, reason: str) -> None:
        super().__init__(layer, reason)
        self.layer = layer
        self.reason = reason


def check_linear(layer: str, jaxpr: Any, transposed: Sequence[bool]) -> None:
    """Raise NonlinearLayerError where the `forward` of a layer is not linear in the inputs that are set."""
    if reason := _affine_term(jaxpr, transposed):
        raise NonlinearLayerError(layer, reason)
    avals = [v.aval for v in jaxpr.invars]
    types = [a for a, t in zip(avals, transposed, strict=True) if t]

    def turned(fixed: list[Any], cotangents: list[Any]) -> Any:
        def forward(*chosen: Any) -> list[Any]:
            rest, others = iter(chosen), iter(fixed)
            return eval_jaxpr(jaxpr, (), *(next(rest if t else others) for t in transposed))

        return jax.linear_transpose(forward, *types)(cotangents)

    try:
        jax.eval_shape(
            turned, [a for a, t in zip(avals, transposed, strict=True) if not t], [v.aval for v in jaxpr.outvars]
        )
    except Exception as error:
        raise NonlinearLayerError(layer, f"it has {_nonlinear_operation(jaxpr, transposed) or error}") from None


def _nonlinear_operation(jaxpr: Any, inputs: Sequence[bool]) -> str | None:
    """An operation that is not linear in the inputs that are set, as a message names it."""
    live = {v for v, is_set in zip(jaxpr.invars, inputs, strict=True) if is_set}
    for equation in jaxpr.eqns:
        chosen = [not is_literal(v) and v in live for v in equation.invars]
        if not any(chosen):
            continue
        live.update(equation.outvars)
        name = equation.primitive.name
        if name in ("jit", "custom_jvp_call"):
            (inner,) = inner_jaxprs(equation.params)
            if reason := _nonlinear_operation(inner, chosen):
                return reason
        elif name in _PRODUCTS and sum(chosen) > 1:
            return f"a product of two terms that depend on them ({name})"
        elif any(c and i not in _LINEAR_IN.get(name, (i,)) for i, c in enumerate(chosen)):
            return f"the operation {name!r}, whose {'divisor' if name == 'div' else 'condition'} depends on them"
        elif not has_transpose(equation.primitive):
            return f"the operation {layer_of(equation) or name!r}"
    return None


def _affine_term(jaxpr: Any, inputs: Sequence[bool]) -> str | None:
    # Transposing `c -> c + 1` gives the identity without complaint, and `c -> 1` gives zero: both would
    # be wrong numbers. Everything else that is not linear has no transpose rule, and JAX says so.
    live = {v for v, is_set in zip(jaxpr.invars, inputs, strict=True) if is_set}
    zeros: set[Any] = set()

    def is_live(atom: Any) -> bool:
        return not is_literal(atom) and atom in live

    def is_zero(atom: Any) -> bool:
        return not np.any(atom.val) if is_literal(atom) else atom in zeros

    for equation in jaxpr.eqns:
        operands, name = equation.invars, equation.primitive.name
        if any(map(is_live, operands)):
            live.update(equation.outvars)
            if name in _SUMS and not all(is_live(a) or is_zero(a) for a in operands):
                return f"it adds a term that does not depend on them ({name})"
        elif name in _KEEP_ZERO and all(map(is_zero, operands)):
            zeros.update(equation.outvars)
    if any(not is_live(atom) and not is_zero(atom) for atom in jaxpr.outvars):
        return "it returns a gradient that does not depend on them"
    return None


def _needs_forward_mode(layer: str, applied: str) -> TypeError:
    return TypeError(
        f"{layer}.backward applies a layer with a custom gradient ({applied}). Forward mode (jax.jvp, jax.jacfwd, "
        f"jax.hessian) transposes backward, which needs forward mode of {applied}: make it a layer with "
        "forward_mode = True, or give it a jvp(ctx, *tangents). Or use reverse over reverse: jax.jacrev(jax.grad(f))."
    )


def _not_linear(layer: str, reason: str, forward_mode: bool) -> TypeError:
    return _not_transposed(f"{layer}.backward is not linear in its cotangents, as {reason}. ", layer, forward_mode)


def _not_transposed(message: str, layer: str, forward_mode: bool) -> TypeError:
    if forward_mode:
        return TypeError(
            f"{message}forward_mode = True derives the tangent map by transposing a linear backward. Give "
            f"{layer} a static jvp(ctx, *tangents) instead, or use reverse mode: jax.vjp, jax.grad, jax.jacrev."
        )
    return TypeError(
        f"{message}Forward mode over reverse (jax.hessian, jax.jvp of jax.grad) transposes a linear "
        "backward. Use reverse over reverse: jax.jacrev(jax.grad(f)); or give the layer a static jvp(ctx, *tangents)."
    )
