"""The derivative of one run of a layer, with the batches and the packing that were laid on it."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import jax.numpy as jnp

from pylayer_jax._hooks.packed_residuals import PackedResiduals, UnpackOnRead
from pylayer_jax._jax.masks import scatter, select
from pylayer_jax._jax.primitives import sum_over_batch, vmap_over
from pylayer_jax._jax.types import as_array, tangent_type
from pylayer_jax._trees.opaque import Static


class Run(Protocol):
    """One run of `forward`, with the rules of its class. Holds no array; None is a zero gradient or tangent."""

    @property
    def name(self) -> str: ...

    @property
    def forward_mode(self) -> bool:
        """Whether the class declares forward mode."""
        ...

    @property
    def has_pushforward(self) -> bool:
        """Whether the class has a `jvp`; otherwise its pullback is transposed."""
        ...

    def pull(self, needs_grad: Sequence[bool], residuals: Sequence[Any], cotangents: Sequence[Any]) -> list[Any]:
        """Gradients of all inputs from cotangents of all outputs."""
        ...

    def push(self, needs_grad: Sequence[bool], residuals: Sequence[Any], tangents: Sequence[Any]) -> list[Any]:
        """Tangents of the outputs that can have one, from tangents of all inputs; if the class has a `jvp`."""
        ...

    def second_derivative_error(self) -> Exception | None:
        """The error for a derivative of the transposed pullback, if the class forbids it."""
        ...


class Batch(NamedTuple):
    """A batch that was laid on a derivative; every output has the mapped axis in front."""

    axis: Any
    array_dims: Sequence[Any]  # where each array that is kept has the mapped axis, or None
    input_dims: Sequence[Any]  # likewise for the inputs


@dataclasses.dataclass(eq=False, repr=False)
class Derivative:
    """Both directions of the derivative of one run, or of a batch of them. Holds no array.

    `needs_grad` is a mask of the inputs. None is a zero gradient, cotangent or tangent. Compared by identity, since a
    derivative is a parameter of equations.
    """

    run: Run
    output_types: list[Any]
    has_tangent: tuple[bool, ...]  # per output: neither marked non-differentiable nor of an integer type
    residuals: int  # the number of arrays that are kept
    batches: tuple[Batch, ...] = ()  # the innermost first
    packed: PackedResiduals | None = None  # the first residuals, if they are packed
    packed_within: int = 0  # the number of batches that were there when they were packed

    def __repr__(self) -> str:
        return self.run.name  # as jaxprs show it

    def packing(self, packed: PackedResiduals) -> Derivative:
        """The same derivative, of which the first residuals are packed."""
        kept = self.residuals - len(packed.tensors) + packed.size
        return dataclasses.replace(self, residuals=kept, packed=packed, packed_within=len(self.batches))

    def batched(self, batch: Batch, output_types: list[Any]) -> Derivative:
        """The derivative for a batch of examples."""
        return dataclasses.replace(self, batches=(*self.batches, batch), output_types=output_types)

    def unpack(self, arrays: Sequence[Any], cotangents: Sequence[Any]) -> Sequence[Any]:
        """The residuals, from the arrays that are kept; in staged code not before the cotangents are there."""
        packed, outer = self.packed, self.batches[self.packed_within :]
        if packed is None:
            return arrays
        if not outer:
            return UnpackOnRead(packed, arrays, cotangents)

        def unpack(arrays: Sequence[Any]) -> list[Any]:
            return list(UnpackOnRead(packed, arrays, ()))  # a batch does not wait for the cotangents

        for batch in outer:
            unpack = vmap_over(batch.axis, unpack, (list(batch.array_dims),), 0)
        return unpack(list(arrays))

    def pull(self, needs_grad: Sequence[bool], residuals: Sequence[Any], cotangents: Sequence[Any]) -> list[Any]:
        """Gradients of all inputs from cotangents of all outputs."""
        __tracebackhide__ = True
        if not self.batches:
            return self.run.pull(needs_grad, residuals, cotangents)
        input_dims = self.batches[-1].input_dims
        if all(c is None for c in cotangents):
            return [None] * len(input_dims)
        pull_one = functools.partial(self._of_one_example().pull, needs_grad)
        gradients = self._mapped(pull_one, residuals, cotangents, [0] * len(cotangents))
        axis = self.batches[-1].axis
        return [None if g is None else _with_axis_at(axis, g, d) for g, d in zip(gradients, input_dims, strict=True)]

    def push(self, needs_grad: Sequence[bool], residuals: Sequence[Any], tangents: Sequence[Any]) -> list[Any]:
        """Tangents of the outputs that can have one, from tangents of all inputs; if the class has a `jvp`."""
        __tracebackhide__ = True
        if not self.batches:
            return self.run.push(needs_grad, residuals, tangents)
        push_one = functools.partial(self._of_one_example().push, needs_grad)
        return self._mapped(push_one, residuals, tangents, self.batches[-1].input_dims)

    def _of_one_example(self) -> Derivative:
        """The derivative without its last batch, for residuals that are unpacked already."""
        return dataclasses.replace(self, batches=self.batches[:-1])

    def _mapped(
        self,
        function: Callable[[Sequence[Any], Sequence[Any]], list[Any]],
        residuals: Sequence[Any],
        values: Sequence[Any],
        dims: Sequence[Any],
    ) -> list[Any]:
        """Map `function`, of residuals and values that may be None, over the last batch. Results have it in front."""
        __tracebackhide__ = True
        given, batch = [v is not None for v in values], self.batches[-1]

        def one(residuals: Sequence[Any], values: Sequence[Any]) -> tuple[list[Any], Static]:
            __tracebackhide__ = True
            results = function(residuals, scatter(values, given))
            nonzero = [r is not None for r in results]
            return select(results, nonzero), Static(nonzero)

        # What was unpacked within the batch has its axis in front.
        is_unpacked_within = self.packed is not None and self.packed_within < len(self.batches)
        residual_dims = 0 if is_unpacked_within else list(batch.array_dims)
        mapped = vmap_over(batch.axis, one, (residual_dims, select(dims, given)), 0)
        results, nonzero = mapped(list(residuals), select(values, given))
        return scatter(results, nonzero.value)

    def gradients(self, needs_grad: Sequence[bool], arrays: Sequence[Any], cotangents: Sequence[Any]) -> list[Any]:
        """Gradients of all inputs from the arrays that are kept and cotangents of all outputs."""
        __tracebackhide__ = True
        cotangents = [as_array(c, a) for c, a in zip(cotangents, self.output_types, strict=True)]
        return self.pull(needs_grad, self.unpack(arrays, cotangents), cotangents)

    @property
    def tangent_types(self) -> list[Any]:
        return [tangent_type(a) for a in select(self.output_types, self.has_tangent)]


def _with_axis_at(axis: Any, gradient: Any, dim: int | None) -> Any:
    return sum_over_batch(axis, gradient) if dim is None else jnp.moveaxis(gradient, 0, dim)
