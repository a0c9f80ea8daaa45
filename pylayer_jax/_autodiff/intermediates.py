"""Tangents of intermediates: the tensors that `forward` saved and that are neither inputs nor outputs.

An intermediate is differentiated through the jaxpr of `forward`. JAX derives a kernel in forward mode only, and not
every kernel. Therefore the tangent of an intermediate that a kernel computes is one equation, which is derived only
where its value is needed, and which reverse mode cannot transpose.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax

from pylayer_jax._jax import (
    HoldingPrimitive,
    computing_only,
    eval_jaxpr,
    has_forward_mode,
    has_tangent,
    is_missing_forward_mode,
    kernels_may_run,
    kernels_of_outputs,
    mapped_type,
    merge,
    one_hot,
    prune,
    register,
    scatter,
    select,
    tangent_type,
    typeof,
    vmap_over,
    zeros_of,
)
from pylayer_jax._methods.once_differentiable import OnceDifferentiableError

from .refusals import KernelInForward, NoForwardModeError, NotDerivableError


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
    plain = [w and k is None for w, k in zip(wanted, kernels, strict=True)]
    found = scatter(_derived(layer, computing_only(jaxpr, plain), nonzero, primals, tangents), plain)
    for i, kernel in enumerate(kernels):
        if wanted[i] and kernel is not None:
            part = computing_only(jaxpr, one_hot(i, len(wanted)))
            kernel_tangent = KernelTangent(layer, part, tuple(nonzero), kernel, second_derivative_error)
            (found[i],) = tangent_by_kernel_p.bind(*primals, *tangents, kernel_tangent=kernel_tangent)
    return select(found, wanted)


def _derived(
    layer: str, jaxpr: Any, nonzero: Sequence[bool], primals: Sequence[Any], tangents: Sequence[Any]
) -> list[Any]:
    """The tangents of the results of a jaxpr."""
    jaxpr, is_read = prune(jaxpr, [True] * len(jaxpr.outvars))  # within loops and calls too

    def compute(*perturbed: Any) -> list[Any]:
        return eval_jaxpr(jaxpr, (), *select(merge(nonzero, perturbed, primals), is_read))

    try:
        return list(jax.jvp(compute, select(primals, nonzero), list(tangents))[1])
    except TypeError as error:
        if not isinstance(error, NoForwardModeError) and not is_missing_forward_mode(error):
            raise
        raise NotDerivableError(
            f"{layer}.forward saved a tensor that another layer computed within it, and that is neither an input nor "
            "an output. Its second derivative by forward-mode over reverse (jax.hessian, jax.jvp of jax.grad) needs "
            "forward mode of that layer: give it forward_mode = True. Or save inputs and outputs, or use reverse over "
            "reverse: jax.jacrev(jax.grad(f))."
        ) from error


# -- tangent_by_kernel: primals, tangents -> tangent --------------------------------------------------


@dataclasses.dataclass(eq=False, repr=False)
class KernelTangent:
    """The tangent of the result of a jaxpr, which a kernel computes. Holds no array."""

    layer: str
    jaxpr: Any
    nonzero: tuple[bool, ...]  # the primals that have a tangent
    kernel: str
    second_derivative_error: Callable[[], Exception | None]

    def __repr__(self) -> str:
        return self.layer  # as jaxprs show it

    @property
    def type(self) -> Any:
        return tangent_type(self.jaxpr.outvars[0].aval)

    def derive(self, args: Sequence[Any]) -> list[Any]:
        """The tangent, from the primals and the tangents that they have."""
        count = len(self.nonzero)
        if not has_forward_mode(self.jaxpr, self.nonzero):
            raise self.error()
        try:
            return _derived(self.layer, self.jaxpr, self.nonzero, args[:count], args[count:])
        except (NotDerivableError, NoForwardModeError, OnceDifferentiableError):
            raise
        except Exception as error:
            raise self.error() from error

    def error(self) -> Exception:
        return self.second_derivative_error() or KernelInForward(self.layer)(self.kernel)


class BatchedKernelTangent(KernelTangent):
    """The same for a batch of examples, with the mapped axis in front."""

    def __init__(self, inner: KernelTangent, axis: Any, dims: Sequence[Any]) -> None:
        super().__init__(inner.layer, inner.jaxpr, inner.nonzero, inner.kernel, inner.second_derivative_error)
        self.inner, self.axis, self.dims = inner, axis, list(dims)

    @property
    def type(self) -> Any:
        return mapped_type(self.axis, self.inner.type)

    def derive(self, args: Sequence[Any]) -> list[Any]:
        return vmap_over(self.axis, self.inner.derive, (self.dims,), 0)(list(args))


tangent_by_kernel_p = HoldingPrimitive("tangent_by_kernel", "kernel_tangent")


def _jvp(
    primals: Sequence[Any], tangents: Sequence[Any], *, kernel_tangent: KernelTangent
) -> tuple[list[Any], list[Any]]:
    count = len(kernel_tangent.nonzero)
    if any(t is not None for t in tangents[:count]):
        raise kernel_tangent.error()
    # Linear in the tangents; still an equation, so that reverse mode meets its error.
    moved = [zeros_of(typeof(p)) if t is None else t for p, t in zip(primals[count:], tangents[count:], strict=True)]
    return (
        tangent_by_kernel_p.bind(*primals, kernel_tangent=kernel_tangent),
        tangent_by_kernel_p.bind(*primals[:count], *moved, kernel_tangent=kernel_tangent),
    )


def _transpose(cotangents: Sequence[Any], *args: Any, kernel_tangent: KernelTangent) -> list[Any]:
    if any(c is not None for c in cotangents):
        raise kernel_tangent.error()
    return [None] * len(args)


def _batch(
    axis: Any, args: Sequence[Any], dims: Sequence[Any], *, kernel_tangent: KernelTangent
) -> tuple[list[Any], list[int]]:
    batched = BatchedKernelTangent(kernel_tangent, axis, dims)
    return tangent_by_kernel_p.bind(*args, kernel_tangent=batched), [0]


register(
    tangent_by_kernel_p,
    evaluate=lambda *args, kernel_tangent: kernel_tangent.derive(args),
    abstract=lambda *_, kernel_tangent: ([kernel_tangent.type], frozenset()),
    jvp=_jvp,
    transpose=_transpose,
    batch=_batch,
)
