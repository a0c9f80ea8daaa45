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

from pylayer_jax._jax import (
    PrimitiveWithObject,
    batch_axis_to_front,
    computing_only,
    custom_function_in,
    eval_jaxpr,
    has_forward_mode,
    has_tangent,
    held_object,
    is_named,
    kernels_may_run,
    kernels_of_outputs,
    mapped_type,
    merge,
    one_hot,
    prune,
    register,
    select,
    tangent_type,
    typeof,
    vmap_over,
    zeros_of,
)
from pylayer_jax._methods.once_differentiable import OnceDifferentiableError

from .errors import KernelInForward, NotDerivableError
from .linearity import ZeroInfo, add_rule


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
    second_derivative_error: Callable[[], Exception | None],
) -> list[Any]:
    """The tangents of the results of a jaxpr that are wanted, from `tangents` of the primals that are `nonzero`."""
    kernels = kernels_of_outputs(jaxpr, nonzero) if kernels_may_run() else [None] * len(wanted)
    # The tangent by a kernel, which may be none, is an equation of its own.
    parts = [[w and k is None for w, k in zip(wanted, kernels, strict=True)]]
    parts += [one_hot(i, len(wanted)) for i, kernel in enumerate(kernels) if wanted[i] and kernel is not None]
    found: list[Any] = [None] * len(wanted)
    for part in filter(any, parts):
        code = _code_of(layer, computing_only(jaxpr, part), nonzero)
        if (kernel := next((k for k in select(kernels, part) if k is not None), None)) is not None:
            code.kernel_error = functools.partial(_kernel_error, layer, kernel, second_derivative_error)
            code.has_forward_mode = has_forward_mode(jaxpr, nonzero)
        found = merge(part, code_tangent_p.bind(*primals, *tangents, code=code), found)
    return select(found, wanted)


def _code_of(layer: str, jaxpr: Any, nonzero: Sequence[bool]) -> Code:
    def function(used: Sequence[bool], *primals: Any) -> list[Any]:
        pruned, is_read = prune(jaxpr, used)  # within loops and calls too
        return eval_jaxpr(pruned, (), *select(primals, is_read))

    return Code(layer, function, tuple(nonzero), [v.aval for v in jaxpr.outvars], custom_function_in(jaxpr))


def _kernel_error(layer: str, kernel: str, second_derivative_error: Callable[[], Exception | None]) -> Exception:
    return second_derivative_error() or KernelInForward(layer)(kernel)


@dataclasses.dataclass(eq=False, repr=False)
class Code:
    """A function that captures no tracer, as a part of `forward` is, to be differentiated for some of its primals."""

    layer: str
    function: Callable[..., list[Any]]  # of a mask of the results that are used, and the primals, to these results
    nonzero: tuple[bool, ...]  # the primals that have a tangent
    types: list[Any]  # of all results
    applied: str | None = None  # a custom_vjp function, which has no forward mode, that the code applies
    kernel_error: Callable[[], Exception] | None = None  # JAX derives not every kernel, and none in reverse mode
    has_forward_mode: bool = True

    def __repr__(self) -> str:
        return self.layer  # as jaxprs show it

    def push(self, used: Sequence[bool], *args: Any) -> list[Any]:
        """The tangents of the results that are used, from the primals and the tangents that they have."""
        count = len(self.nonzero)
        if not self.has_forward_mode and self.kernel_error is not None:
            raise self.kernel_error()
        try:
            function, perturbed = self._of_nonzero(used, args[:count])
            return list(jax.jvp(function, perturbed, list(args[count:]))[1])
        except (NotDerivableError, OnceDifferentiableError):
            raise
        except Exception as error:
            if self.applied is not None and isinstance(error, TypeError):
                raise self._needs_forward_mode_error() from error
            if self.kernel_error is not None:
                raise self.kernel_error() from error
            raise

    def pull(self, used: Sequence[bool], primals: Sequence[Any], cotangents: Sequence[Any]) -> list[Any]:
        """The cotangents of the primals that have a tangent, from those of the results that are used."""
        if self.kernel_error is not None:
            raise self.kernel_error()
        function, perturbed = self._of_nonzero(used, primals)
        _, pullback = jax.vjp(function, *perturbed)
        return list(pullback(list(cotangents)))

    def _of_nonzero(self, used: Sequence[bool], primals: Sequence[Any]) -> tuple[Callable[..., list[Any]], list[Any]]:
        def function(*perturbed: Any) -> list[Any]:
            return self.function(used, *merge(self.nonzero, perturbed, primals))

        return function, select(primals, self.nonzero)

    def derivative(self, moving: Sequence[bool]) -> Code:
        """The tangents as code of their own, for the primals and tangents that move."""
        types = [tangent_type(t) for t in self.types]
        facts = (self.applied, self.kernel_error, self.kernel_error is None)
        return Code(self.layer, self.push, tuple(moving), types, *facts)

    def batched(self, axis: Any, dims: Sequence[Any]) -> Code:
        """The same for a batch of examples, whose results have the mapped axis in front; `dims` are of the primals."""

        def function(used: Sequence[bool], *primals: Any) -> list[Any]:
            return vmap_over(axis, functools.partial(self.function, used), tuple(dims), 0)(*primals)

        types = [mapped_type(axis, t) for t in self.types]
        return dataclasses.replace(self, function=function, types=types)

    def _needs_forward_mode_error(self) -> NotDerivableError:
        return NotDerivableError(
            f"{self.layer}.forward saved a tensor that a function with a custom gradient ({self.applied}) computed "
            "within it, and that is neither an input nor an output. Its second derivative by forward-mode over reverse "
            f"(jax.hessian, jax.jvp of jax.grad) needs forward mode of {self.applied}: make it a layer with "
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
    count = len(held_object(equation).nonzero)
    tangents = operands[count:]
    problem = next((f.problem for f in operands if f.problem), "")
    if any(f.depends for f in operands[:count]):
        problem = problem or "it differentiates a layer at values that depend on them"
    return [ZeroInfo(all(f.is_zero for f in tangents), any(f.depends for f in operands), problem)] * len(
        equation.outvars
    )


add_rule(code_tangent_p.name, _facts)
