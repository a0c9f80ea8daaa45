"""Tangents of intermediates: the tensors that `forward` saved and that are neither inputs nor outputs.

An intermediate is differentiated through the code of `forward`. Its tangent is one equation

    code_tangent:  primals, tangents  ->  tangents of the results

which holds this code as a function, and derives it only where somebody asks: forward mode evaluates the equation by
`jax.jvp` of the function, reverse mode transposes it by `jax.vjp`, and a first derivative, which needs neither, does
neither. Thus code that JAX derives in one mode only (a kernel, a Ref) is no obstacle in the other.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax

from pylayer_jax._jax.custom_vjp import custom_function_in
from pylayer_jax._jax.imports import eval_jaxpr
from pylayer_jax._jax.jaxprs import computing_only, prune
from pylayer_jax._jax.masks import merge, select
from pylayer_jax._jax.primitives import (
    PrimitiveWithObject,
    batch_axis_to_front,
    held_object,
    is_named,
    register,
    vmap_over,
)
from pylayer_jax._jax.types import has_tangent, mapped_type, tangent_type, typeof, zeros_of
from pylayer_jax._trees.messages import add_note

from .errors import NotDerivableError
from .linearity import ZeroInfo, add_rule, linear_in_tangents


def nonzero_tangents(primals: Sequence[Any], tangents: Sequence[Any]) -> list[bool]:
    """A mask of the primals whose tangent is not zero."""
    return [t is not None and has_tangent(typeof(p)) for p, t in zip(primals, tangents, strict=True)]


def intermediate_tangents(
    layer: str,
    jaxpr: Any,
    wanted: Sequence[bool],
    nonzero: Sequence[bool],
    primals: Sequence[Any],
    tangents: Sequence[Any],
) -> list[Any]:
    """The tangents of the results of a jaxpr that are wanted, from `tangents` of the primals that are `nonzero`."""
    computed = computing_only(jaxpr, wanted)

    def function(used: Sequence[bool], *primals: Any) -> list[Any]:
        pruned, is_read = prune(computed, used)  # within loops and calls too
        return eval_jaxpr(pruned, (), *select(primals, is_read))

    types = [v.aval for v in computed.outvars]
    code = Code(layer, function, tuple(nonzero), types, custom_function_in(computed))
    return code_tangent_p.bind(*primals, *tangents, code=code)


@dataclasses.dataclass(eq=False, repr=False)
class Code:
    """A function that captures no tracer, as a part of `forward` is, to be differentiated for some of its primals."""

    layer: str
    function: Callable[..., list[Any]]  # of a mask of the results that are used, and the primals, to these results
    nonzero: tuple[bool, ...]  # the primals that have a tangent
    types: list[Any]  # of all results
    applied: str | None = None  # a custom_vjp function, which has no forward mode, that the code applies

    def __repr__(self) -> str:
        return self.layer  # as jaxprs show it

    def push(self, used: Sequence[bool], *args: Any) -> list[Any]:
        """The tangents of the results that are used, from the primals and the tangents that they have."""
        count = len(self.nonzero)
        function, perturbed = self._of_nonzero(used, args[:count])
        try:
            return list(jax.jvp(function, perturbed, list(args[count:]))[1])
        except Exception as error:
            if self.applied and isinstance(error, TypeError) and not isinstance(error, NotDerivableError):
                raise self._needs_forward_mode_error(self.applied) from error
            add_note(error, self.layer, "forward")
            raise

    def pull(self, used: Sequence[bool], primals: Sequence[Any], cotangents: Sequence[Any]) -> list[Any]:
        """The cotangents of the primals that have a tangent, from those of the results that are used."""
        function, perturbed = self._of_nonzero(used, primals)
        try:
            _, pullback = jax.vjp(function, *perturbed)
            return list(pullback(list(cotangents)))
        except Exception as error:
            add_note(error, self.layer, "forward")
            raise

    def _of_nonzero(self, used: Sequence[bool], primals: Sequence[Any]) -> tuple[Callable[..., list[Any]], list[Any]]:
        def function(*perturbed: Any) -> list[Any]:
            return self.function(used, *merge(self.nonzero, perturbed, primals))

        return function, select(primals, self.nonzero)

    def derivative(self, moving: Sequence[bool]) -> Code:
        """The tangents as code of their own, for the primals and tangents that move."""
        types = [tangent_type(t) for t in self.types]
        return Code(self.layer, self.push, tuple(moving), types, self.applied)

    def batched(self, axis: Any, dims: Sequence[Any]) -> Code:
        """The same for a batch of examples, whose results have the mapped axis in front; `dims` are of the primals."""

        def function(used: Sequence[bool], *primals: Any) -> list[Any]:
            return vmap_over(axis, functools.partial(self.function, used), tuple(dims), 0)(*primals)

        types = [mapped_type(axis, t) for t in self.types]
        return dataclasses.replace(self, function=function, types=types)

    def _needs_forward_mode_error(self, applied: str) -> NotDerivableError:
        return NotDerivableError(
            f"{self.layer}.forward saved a tensor that a function with a custom gradient ({applied}) computed "
            "within it, and that is neither an input nor an output. Its second derivative by forward-mode over reverse "
            f"(jax.hessian, jax.jvp of jax.grad) needs forward mode of {applied}: make it a layer with "
            "forward_mode = True. Or save inputs and outputs, or use reverse over reverse: jax.jacrev(jax.grad(f))."
        )


# -- code_tangent: primals, tangents -> tangents ---------------------------------------------------

code_tangent_p = PrimitiveWithObject("code_tangent", "code")


def _jvp(primals: Sequence[Any], tangents: Sequence[Any], *, code: Code) -> tuple[list[Any], list[Any]]:
    count = len(code.nonzero)
    values = code_tangent_p.bind(*primals, code=code)
    if all(t is None for t in tangents[:count]):
        # Linear in the tangents; still an equation, so that reverse mode can transpose it.
        pairs = zip(primals[count:], tangents[count:], strict=True)
        full = [zeros_of(tangent_type(typeof(p))) if t is None else t for p, t in pairs]
        return values, code_tangent_p.bind(*primals[:count], *full, code=code)
    moving = nonzero_tangents(primals, tangents)
    return values, code_tangent_p.bind(*primals, *select(tangents, moving), code=code.derivative(moving))


def _transpose(cotangents: Sequence[Any], *args: Any, code: Code) -> list[Any]:
    count, used = len(code.nonzero), [c is not None for c in cotangents]
    if not any(used):
        return [None] * len(args)
    return [*[None] * count, *code.pull(used, args[:count], select(cotangents, used))]


def _batch(axis: Any, args: Sequence[Any], dims: Sequence[Any], *, code: Code) -> tuple[list[Any], list[int]]:
    count = len(code.nonzero)
    tangent_dims = iter(dims[count:])
    # A primal and its tangent have the mapped axis at one place.
    is_one = [not moves or next(tangent_dims) == d for moves, d in zip(code.nonzero, dims, strict=False)]
    stays = is_one + select(is_one, code.nonzero)
    moved = [x if s else batch_axis_to_front(axis, x, d) for x, s, d in zip(args, stays, dims, strict=True)]
    primal_dims = [d if s else 0 for s, d in zip(is_one, dims, strict=False)]
    values = code_tangent_p.bind(*moved, code=code.batched(axis, primal_dims))
    return values, [0] * len(values)


register(
    code_tangent_p,
    evaluate=lambda *args, code: code.push([True] * len(code.types), *args),
    abstract=lambda *_, code: ([tangent_type(t) for t in code.types], frozenset()),
    jvp=_jvp,
    transpose=_transpose,
    batch=_batch,
    uses_axis=is_named,  # the code may communicate along the axis
)


def _facts(equation: Any, operands: list[ZeroInfo]) -> list[ZeroInfo]:
    problem = "it differentiates a layer at values that depend on them"
    return linear_in_tangents(equation, operands, len(held_object(equation).nonzero), problem)


add_rule(code_tangent_p.name, _facts)
