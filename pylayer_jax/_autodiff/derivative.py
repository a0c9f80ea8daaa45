"""The derivative of one application of a layer, as one linear operation.

With a pullback B (the layer's `backward`, linear in the cotangents c) and residuals r, the tangent map of the
outputs is the transpose of B,

    c . (B^T(r) t)  =  B(r)(c) . t        for all tangents t and cotangents c,

unless the layer gives that map itself, as its `jvp`. Either is the primitive

    apply_rule:  residuals, input tangents  ->  output tangents.

Reverse mode transposes apply_rule, which gives B back: `backward` is simply called, so it may be anything.
Only forward mode evaluates apply_rule, and then B itself is transposed and has to be linear.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pylayer_jax._jax.names import (
    Primitive,
    Zero,
    instantiate,
    is_named,
    is_undefined,
    mapped_type,
    register,
    tangent_type,
    vmap_like,
)
from pylayer_jax._methods.arguments import as_array

from .transpose import transpose

# (needed inputs, residuals, cotangents of all outputs) -> gradients of all inputs; None is zero.
Pullback = Callable[[Sequence[bool], Sequence[Any], Sequence[Any]], list[Any]]

# (needed inputs, residuals, tangents of all inputs) -> tangents of the outputs that have one; None is zero.
Pushforward = Callable[[Sequence[bool], Sequence[Any], Sequence[Any]], list[Any]]


# (kept arrays, what backward waits for) -> residuals, where hooks packed some of them.
Unpack = Callable[[Sequence[Any], Sequence[Any]], Sequence[Any]]


@dataclasses.dataclass(eq=False, repr=False, slots=True, weakref_slot=True)
class Derivative:
    """Both directions of the derivative of one application. Holds no array.

    Compared by identity, since it is a parameter of equations.
    """

    name: str
    output_types: list[Any]
    has_tangent: tuple[bool, ...]  # per output: neither marked non-differentiable nor of an integer type
    residuals: int
    pullback: Pullback  # of unpacked residuals, as the next
    pushforward: Pushforward | None = None  # the layer's own; else the pullback is transposed
    forward_mode: bool = False  # whether the layer claims to have one
    refusal: Callable[[], Exception] | None = None  # of the derivative of the transposed pullback
    unpack: Unpack | None = None

    def __repr__(self) -> str:
        return self.name  # as jaxprs show it

    def opened(self, residuals: Sequence[Any], waiting: Sequence[Any] = ()) -> Sequence[Any]:
        return residuals if self.unpack is None else self.unpack(residuals, waiting)

    def gradients(self, needed: Sequence[bool], residuals: Sequence[Any], cotangents: Sequence[Any]) -> list[Any]:
        """Gradients of all inputs from cotangents of all outputs; None is zero."""
        cotangents = [as_array(c, a) for c, a in zip(cotangents, self.output_types, strict=True)]
        return self.pullback(needed, self.opened(residuals, cotangents), cotangents)

    @property
    def tangent_types(self) -> list[Any]:
        return [tangent_type(a) for a, has in zip(self.output_types, self.has_tangent, strict=True) if has]

    def tangents(self, needed: Sequence[bool], residuals: Sequence[Any], moved: Sequence[Any]) -> list[Any]:
        """Tangents of all outputs (a symbolic zero where there is none), from those of the needed inputs."""
        pushed = iter(apply_rule_p.bind(*residuals, *moved, derivative=self, needed=tuple(needed)))
        return [
            next(pushed) if has else Zero(tangent_type(a))
            for a, has in zip(self.output_types, self.has_tangent, strict=True)
        ]

    def batched(
        self, axis: Any, output_types: list[Any], residual_dims: Sequence[Any], input_dims: Sequence[Any]
    ) -> Derivative:
        """The same for a batch of examples; every output has the mapped axis in front."""
        unpack = self.unpack and _batched_unpack(self.unpack, axis, residual_dims)
        dims = None if unpack is not None else residual_dims
        return dataclasses.replace(
            self,
            output_types=output_types,
            pullback=_batched_pullback(self, axis, dims, input_dims),
            pushforward=self.pushforward and _batched_pushforward(self.pushforward, axis, dims, input_dims),
            unpack=unpack,
        )


apply_rule_p = Primitive("pylayer_rule")


def _apply_rule(*args: Any, derivative: Derivative, needed: tuple[bool, ...]) -> list[Any]:
    residuals, tangents = derivative.opened(args[: derivative.residuals]), args[derivative.residuals :]
    if derivative.pushforward is not None:
        pushed = derivative.pushforward(needed, residuals, spread(tangents, needed))
        return [instantiate(a) if t is None else t for a, t in zip(derivative.tangent_types, pushed, strict=True)]

    def pull(*cotangents: Any) -> list[Any]:
        gradients = derivative.pullback(needed, residuals, spread(cotangents, derivative.has_tangent))
        return [g for g, n in zip(gradients, needed, strict=True) if n]

    return transpose(derivative.name, pull, derivative.tangent_types, tangents, derivative.forward_mode)


def _apply_rule_types(*_: Any, derivative: Derivative, needed: tuple[bool, ...]) -> tuple[list[Any], Any]:
    del needed
    return derivative.tangent_types, frozenset()


def _apply_rule_jvp(
    primals: Sequence[Any], tangents: Sequence[Any], *, derivative: Derivative, needed: tuple[bool, ...]
) -> tuple[list[Any], list[Any]]:
    count = derivative.residuals
    if all(type(t) is Zero for t in tangents[:count]):
        # Linear in the rest; left as it is, so that reverse mode can still transpose it.
        moved = [instantiate(t.aval) if type(t) is Zero else t for t in tangents[count:]]
        return (
            apply_rule_p.bind(*primals, derivative=derivative, needed=needed),
            apply_rule_p.bind(*primals[:count], *moved, derivative=derivative, needed=needed),
        )
    if derivative.refusal is not None and derivative.pushforward is None:
        raise derivative.refusal()  # transposed, the pullback does not run as it stands, and cannot say so itself
    moving = [type(t) is not Zero for t in tangents]

    def expanded(*perturbed: Any) -> list[Any]:
        rest = iter(perturbed)
        full = [next(rest) if m else p for p, m in zip(primals, moving, strict=True)]
        return _apply_rule(*full, derivative=derivative, needed=needed)

    chosen = [(p, t) for p, t, m in zip(primals, tangents, moving, strict=True) if m]
    out, moved = jax.jvp(expanded, [p for p, _ in chosen], [t for _, t in chosen])
    return out, moved


def _apply_rule_transpose(
    cotangents: Sequence[Any], *args: Any, derivative: Derivative, needed: tuple[bool, ...]
) -> list[Any]:
    count = derivative.residuals
    given = [None if type(c) is Zero else c for c in cotangents]
    gradients = derivative.gradients(needed, args[:count], spread(given, derivative.has_tangent))
    picked = [g for g, n in zip(gradients, needed, strict=True) if n]
    return [None] * count + [
        (Zero(x.aval) if g is None else g) if is_undefined(x) else None
        for g, x in zip(picked, args[count:], strict=True)
    ]


def _apply_rule_batch(
    axis: Any, args: Sequence[Any], dims: Sequence[Any], *, derivative: Derivative, needed: tuple[bool, ...]
) -> tuple[list[Any], list[Any]]:
    # JAX asks in this case too; a rule may ask for the index along the axis.
    if all(d is None for d in dims) and not is_named(axis):
        out = apply_rule_p.bind(*args, derivative=derivative, needed=needed)
        return out, [None] * len(out)
    count = derivative.residuals
    types = [mapped_type(axis, t) for t in derivative.output_types]
    batched = derivative.batched(axis, types, dims[:count], spread(dims[count:], needed))
    out = apply_rule_p.bind(*args, derivative=batched, needed=needed)
    return out, [0] * len(out)


register(
    apply_rule_p,
    evaluate=_apply_rule,
    abstract=_apply_rule_types,
    jvp=_apply_rule_jvp,
    batch=_apply_rule_batch,
    transpose=_apply_rule_transpose,
)


# -- batching -------------------------------------------------------------------------------------

# Where each residual has the mapped axis; None: in front, all of them.
ResidualDims = Sequence[Any] | None


def _batched_pullback(
    derivative: Derivative, axis: Any, residual_dims: ResidualDims, input_dims: Sequence[Any]
) -> Pullback:
    def pullback(needed: Sequence[bool], residuals: Sequence[Any], cotangents: Sequence[Any]) -> list[Any]:
        present = [c is not None for c in cotangents]
        given: list[bool] = []

        def one(residuals: Sequence[Any], cotangents: Sequence[Any]) -> list[Any]:
            gradients = derivative.pullback(needed, residuals, spread(cotangents, present))
            given[:] = [g is not None for g in gradients]
            return [g for g in gradients if g is not None]

        if not any(present):
            return [None] * len(input_dims)
        mapped = vmap_like(one, axis, (_dims(residual_dims), 0), 0)
        out = iter(mapped(list(residuals), [c for c in cotangents if c is not None]))
        return [_undo(next(out), dim) if g else None for g, dim in zip(given, input_dims, strict=True)]

    return pullback


def _batched_pushforward(
    pushforward: Pushforward, axis: Any, residual_dims: ResidualDims, input_dims: Sequence[Any]
) -> Pushforward:
    def batched(needed: Sequence[bool], residuals: Sequence[Any], tangents: Sequence[Any]) -> list[Any]:
        present = [t is not None for t in tangents]
        given: list[bool] = []

        def one(residuals: Sequence[Any], tangents: Sequence[Any]) -> list[Any]:
            pushed = pushforward(needed, residuals, spread(tangents, present))
            given[:] = [t is not None for t in pushed]
            return [t for t in pushed if t is not None]

        dims = [d for d, p in zip(input_dims, present, strict=True) if p]
        args = list(residuals), [t for t in tangents if t is not None]
        return spread(vmap_like(one, axis, (_dims(residual_dims), dims), 0)(*args), given)

    return batched


def _batched_unpack(unpack: Unpack, axis: Any, dims: Sequence[Any]) -> Unpack:
    def batched(arrays: Sequence[Any], _: Sequence[Any]) -> Sequence[Any]:
        return vmap_like(lambda arrays: list(unpack(arrays, ())), axis, (list(dims),), 0)(list(arrays))

    return batched


def _dims(dims: ResidualDims) -> Any:
    return 0 if dims is None else list(dims)


def _undo(gradient: Any, dim: int | None) -> Any:
    # An input that all examples share gets the sum of their gradients.
    return jnp.sum(gradient, axis=0) if dim is None else jnp.moveaxis(gradient, 0, dim)


def spread(values: Sequence[Any], mask: Sequence[bool]) -> list[Any]:
    """The values at the places that are set, None elsewhere."""
    rest = iter(values)
    return [next(rest) if m else None for m in mask]
