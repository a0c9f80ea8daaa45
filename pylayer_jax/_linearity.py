"""The transpose of a pullback, and the errors where it has none."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from ._compat import eval_jaxpr, is_literal, layer_of, stage

_SUMS = frozenset({"add", "add_any", "sub"})
_KEEP_ZERO = frozenset({"broadcast_in_dim", "convert_element_type", "copy", "mul", "neg", "reshape", "squeeze"})


def transpose(
    layer: str, pull: Callable[..., Sequence[Any]], types: Sequence[Any], tangents: Sequence[Any]
) -> list[Any]:
    """The transpose of `pull` at `tangents`: one array per cotangent of `pull`, whose types are given.

    `pull` returns one gradient per tangent, or None for zero.

    Raises:
        TypeError: where `pull` is not linear, or JAX cannot transpose it.
    """
    given: list[int] = []

    def nonzero(*cotangents: Any) -> list[Any]:
        gradients = pull(*cotangents)
        given[:] = [i for i, g in enumerate(gradients) if g is not None]
        return [gradients[i] for i in given]

    # Staged first, as its equations tell whether it is linear; an error of the user's own surfaces here.
    jaxpr, consts = stage(nonzero, types, f"backward of {layer}")
    _refuse_affine(layer, jaxpr, len(consts))
    try:
        transposed = jax.linear_transpose(lambda *c: eval_jaxpr(jaxpr, (), *consts, *c), *types)
        return list(transposed([tangents[i] for i in given]))
    except Exception as error:
        raise _explain(layer, jaxpr, error) from error


def _refuse_affine(layer: str, jaxpr: Any, consts: int) -> None:
    # Transposing `c -> c + 1` gives the identity without complaint, and `c -> 1` gives zero: both would
    # be wrong numbers. Everything else that is not linear has no transpose rule, and JAX says so.
    live = set(jaxpr.invars[consts:])
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
                raise _not_linear(layer, f"it adds a term that does not depend on them ({name})")
        elif name in _KEEP_ZERO and all(map(is_zero, operands)):
            zeros.update(equation.outvars)
    for atom in jaxpr.outvars:
        if not is_live(atom) and not is_zero(atom):
            raise _not_linear(layer, "it returns a gradient that does not depend on them")


def _explain(layer: str, jaxpr: Any, error: Exception) -> TypeError:
    applied = next((name for equation in jaxpr.eqns if (name := layer_of(equation)) is not None), None)
    if applied is not None:
        return TypeError(
            f"{layer}.backward applies a layer with a custom gradient ({applied}). Forward mode over reverse "
            f"(jax.hessian, jax.jvp of jax.grad) needs the forward mode of {applied}, which it does not have. Use "
            "reverse over reverse: jax.jacrev(jax.grad(f))."
        )
    said = next(iter(str(error).splitlines()), "")
    return _not_linear(layer, f"far as JAX can transpose it ({type(error).__name__}: {said})")


def _not_linear(layer: str, reason: str) -> TypeError:
    return TypeError(
        f"{layer}.backward is not linear in its cotangents, as {reason}. Forward mode over reverse (jax.hessian, "
        "jax.jvp of jax.grad) transposes backward and needs it to be. Use reverse over reverse: "
        "jax.jacrev(jax.grad(f))."
    )
