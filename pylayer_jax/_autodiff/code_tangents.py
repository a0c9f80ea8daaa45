"""Tangents of code: of the tensors that `forward` saved and that are neither inputs nor outputs.

An intermediate is differentiated through the code of `forward`: forward mode by `jax.jvp` of this code, reverse mode by
`jax.vjp`. A first derivative needs neither, and runs neither. Thus code that JAX derives in one mode only (a kernel, a
Ref) is no obstacle in the other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from pylayer_jax._jax import linear_map
from pylayer_jax._jax.custom_vjp import custom_function_in
from pylayer_jax._jax.imports import eval_jaxpr
from pylayer_jax._jax.jaxprs import computing_only, prune
from pylayer_jax._jax.linear_map import LinearMap
from pylayer_jax._jax.masks import merge, select
from pylayer_jax._jax.rule_function import nonzero_tangents
from pylayer_jax._jax.types import tangent_type
from pylayer_jax._trees.messages import add_note

from .transpose_backward import NotDerivableError


def code_tangents(
    layer: str, jaxpr: Any, wanted: Sequence[bool], primals: Sequence[Any], tangents: Sequence[Any]
) -> list[Any]:
    """The tangents of the results of a jaxpr that are wanted; None is the zero tangent of a primal."""
    computed = computing_only(jaxpr, wanted)
    computed, is_read = prune(computed, [True] * len(computed.outvars))
    primals, tangents = select(primals, is_read), select(tangents, is_read)

    def function(used: Sequence[bool], *primals: Any) -> list[Any]:
        pruned, is_read = prune(computed, used)  # within loops and calls too
        return eval_jaxpr(pruned, (), *select(primals, is_read))

    nonzero = nonzero_tangents(primals, tangents)
    types = [tangent_type(v.aval) for v in computed.outvars]
    code = CodeTangent(layer, function, nonzero, types, custom_function_in(computed))
    return linear_map.call(code, primals, select(tangents, nonzero))


class CodeTangent(LinearMap):
    """primals, tangents of those that are `nonzero` -> tangents of the results of a function.

    The function captures no tracer. It takes a mask of the results that are used, and the primals, and returns these
    results.
    """

    why_not_linear = "it differentiates a layer at values that depend on them"

    def __init__(
        self,
        name: str,
        function: Callable[..., list[Any]],
        nonzero: Sequence[bool],
        types: list[Any],
        applied: str | None,
    ) -> None:
        self.name = name
        self.function = function
        self.nonzero = list(nonzero)
        self.constants = len(self.nonzero)
        self.types = types
        self.applied = applied  # a custom_vjp function, which has no forward mode, that the code applies

    def push(self, constants: Sequence[Any], tangents: Sequence[Any]) -> list[Any]:
        __tracebackhide__ = True
        return self._push([True] * len(self.types), *constants, *tangents)

    def _push(self, used: Sequence[bool], *args: Any) -> list[Any]:
        """The tangents of the results that are used, from the primals and the tangents that they have."""
        function, perturbed = self._of_nonzero(used, args[: self.constants])
        try:
            return list(jax.jvp(function, perturbed, list(args[self.constants :]))[1])
        except Exception as error:
            if self.applied and isinstance(error, TypeError) and not isinstance(error, NotDerivableError):
                raise self._needs_forward_mode_error(self.applied) from error
            add_note(error, self.name, "forward")
            raise

    def pull(self, constants: Sequence[Any], cotangents: Sequence[Any]) -> list[Any]:
        __tracebackhide__ = True
        used = [c is not None for c in cotangents]
        function, perturbed = self._of_nonzero(used, constants)
        try:
            _, pullback = jax.vjp(function, *perturbed)
            return list(pullback(select(cotangents, used)))
        except Exception as error:
            add_note(error, self.name, "forward")
            raise

    def jvp(self, primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        __tracebackhide__ = True
        values = linear_map.call(self, primals[: self.constants], primals[self.constants :])
        moving = nonzero_tangents(primals, tangents)
        # The tangents are code of their own, of the primals and tangents that move.
        derivative = CodeTangent(self.name, self._push, moving, [*map(tangent_type, self.types)], self.applied)
        return values, linear_map.call(derivative, primals, select(tangents, moving))

    def _of_nonzero(self, used: Sequence[bool], primals: Sequence[Any]) -> tuple[Callable[..., list[Any]], list[Any]]:
        def function(*perturbed: Any) -> list[Any]:
            return self.function(used, *merge(self.nonzero, perturbed, primals))

        return function, select(primals, self.nonzero)

    def _needs_forward_mode_error(self, applied: str) -> NotDerivableError:
        return NotDerivableError(
            f"{self.name}.forward saved a tensor that a function with a custom gradient ({applied}) computed "
            "within it, and that is neither an input nor an output. Its second derivative by forward-mode over reverse "
            f"(jax.hessian, jax.jvp of jax.grad) needs forward mode of {applied}: make it a layer with "
            "forward_mode = True. Or save inputs and outputs, or use reverse over reverse: jax.jacrev(jax.grad(f))."
        )
