"""A linear map with its transpose: what is linear in tangents is given as two Python functions.

A `LinearMap` is one equation

    linear_map:  constants, tangents  ->  tangents of the results

which forward mode evaluates by `push` and reverse mode transposes by `pull`. Neither runs before somebody asks: a map
that has one of the two alone is no obstacle to the other. This module knows nothing of layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .define_primitive import PrimitiveWithObject, batch_axis_to_front, register, vmap_over
from .mapped_axes import is_named
from .types import mapped_type, tangent_type, typeof, zeros_of

Values = list[Any]


class LinearMap:
    """A map of tangents, linear in them, that also depends on constants. Holds no array; compared by identity.

    None is a zero cotangent.
    """

    name: str  # as jaxprs show it
    constants: int  # the number of the first operands, in which the map need not be linear
    types: Sequence[Any]  # of the results
    why_not_linear: str = ""  # why the map is not linear in its constants, for `linearity`; ends "as ..."

    def __repr__(self) -> str:
        return self.name

    def push(self, constants: Sequence[Any], tangents: Sequence[Any]) -> Values:
        """The tangents of the results."""
        raise NotImplementedError

    def pull(self, constants: Sequence[Any], cotangents: Sequence[Any]) -> Values:
        """The cotangents of the tangents, from those of the results."""
        raise NotImplementedError

    def jvp(self, primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Values, Values]:
        """The results, and their tangents where constants move; None is a zero tangent."""
        raise NotImplementedError


class BatchedMap(LinearMap):
    """A map for a batch of examples: its tangents and its results have the mapped axis in front."""

    def __init__(self, inner: LinearMap, axis: Any, dims: Sequence[Any]) -> None:
        self.inner = inner
        self.axis = axis
        self.dims = list(dims)  # where each constant has the mapped axis, or None
        self.name, self.constants, self.why_not_linear = inner.name, inner.constants, inner.why_not_linear
        self.types = [mapped_type(axis, t) for t in inner.types]

    def push(self, constants: Sequence[Any], tangents: Sequence[Any]) -> Values:
        __tracebackhide__ = True
        return vmap_over(self.axis, self.inner.push, (self.dims, 0), 0)(list(constants), list(tangents))

    def pull(self, constants: Sequence[Any], cotangents: Sequence[Any]) -> Values:
        __tracebackhide__ = True
        return vmap_over(self.axis, self.inner.pull, (self.dims, 0), 0)(list(constants), list(cotangents))

    def jvp(self, primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Values, Values]:
        __tracebackhide__ = True
        dims = self.dims + [0] * (len(primals) - self.constants)
        return vmap_over(self.axis, self.inner.jvp, (dims, dims), 0)(list(primals), list(tangents))


linear_map_p = PrimitiveWithObject("linear_map", "linear")


def call(linear: LinearMap, constants: Sequence[Any], tangents: Sequence[Any]) -> Values:
    __tracebackhide__ = True
    return linear_map_p.bind(*constants, *tangents, linear=linear)


def _evaluate(*args: Any, linear: LinearMap) -> Values:
    __tracebackhide__ = True
    return linear.push(args[: linear.constants], args[linear.constants :])


def _jvp(primals: Sequence[Any], tangents: Sequence[Any], *, linear: LinearMap) -> tuple[Values, Values]:
    __tracebackhide__ = True
    count = linear.constants
    if any(t is not None for t in tangents[:count]):
        return linear.jvp(primals, tangents)
    # Linear in the other operands; still an equation, so that reverse mode can transpose it.
    pairs = zip(primals[count:], tangents[count:], strict=True)
    full = [zeros_of(tangent_type(typeof(p))) if t is None else t for p, t in pairs]
    return call(linear, primals[:count], primals[count:]), call(linear, primals[:count], full)


def _transpose(cotangents: Sequence[Any], *args: Any, linear: LinearMap) -> Values:
    __tracebackhide__ = True
    tangents = len(args) - linear.constants
    if all(c is None for c in cotangents):
        return [None] * len(args)
    return [*[None] * (len(args) - tangents), *linear.pull(args[: linear.constants], cotangents)]


def _batch(axis: Any, args: Sequence[Any], dims: Sequence[Any], *, linear: LinearMap) -> tuple[Values, list[int]]:
    __tracebackhide__ = True
    count = linear.constants
    # A tangent that all examples share is repeated: the transpose of this sums the cotangents of the examples.
    moved = [batch_axis_to_front(axis, x, d) for x, d in zip(args[count:], dims[count:], strict=True)]
    values = call(BatchedMap(linear, axis, dims[:count]), args[:count], moved)
    return values, [0] * len(values)


register(
    linear_map_p,
    evaluate=_evaluate,
    abstract=lambda *_, linear: (list(linear.types), frozenset()),
    jvp=_jvp,
    transpose=_transpose,
    batch=_batch,
    uses_axis=is_named,  # the map may communicate along the axis
)
