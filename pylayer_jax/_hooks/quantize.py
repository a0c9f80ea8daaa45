"""Uniform quantization of a tensor by blocks, each of which lies within a shard."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pylayer_jax._jax.types import explicit_sharding, shard_counts


class Blocks(NamedTuple):
    """How a tensor is divided into blocks, which lie within shards, so that no device needs what another one has.

    Axis `axis` is cut into `shards`, and each of these into `pieces` of `length` positions, of which the last is
    padded. A block is such a piece with all of the axes behind it. The axes before it are joined where none of them is
    cut: XLA then needs less memory.
    """

    shape: tuple[int, ...]
    axis: int
    shards: int
    pieces: int
    length: int
    rows: tuple[int, ...]  # the axes of the blocks
    sharding: Any  # of the tensor, if its axes are explicit
    row_names: tuple[Any, ...]  # the explicit mesh axes of `rows`

    @classmethod
    def of(cls, x: Any, largest: int) -> Blocks:
        cuts, sharding = shard_counts(x), explicit_sharding(x)
        names = [None] * x.ndim if sharding is None else [*sharding.spec, *[None] * x.ndim][: x.ndim]
        axis, inner = x.ndim - 1, 1
        while axis > 0 and cuts[axis] == 1 and _is_known(x.shape[axis]) and 2 * inner * x.shape[axis] <= largest:
            inner *= x.shape[axis]
            axis -= 1
        positions = x.shape[axis] // cuts[axis]  # of a shard
        pieces = -(-positions // (largest // inner))
        rows, row_names = [1], [None]
        for size, cut, name in zip((*x.shape[:axis], cuts[axis] * pieces), cuts, names, strict=False):
            if cut == 1 or rows == [1]:
                rows[-1] *= size
                row_names[-1] = name if cut > 1 else row_names[-1]
            else:
                rows.append(size)
                row_names.append(name)
        length = -(-positions // pieces) if _is_known(positions) else largest // inner
        return cls(x.shape, axis, cuts[axis], pieces, length, tuple(rows), sharding, tuple(row_names))

    @property
    def block(self) -> int:
        """Values in a block."""
        return self.length * math.prod(self.shape[self.axis + 1 :])

    @property
    def _positions(self) -> int:
        """Positions of a shard along the axis."""
        return self.shape[self.axis] // self.shards

    @property
    def _padding(self) -> int:
        """Positions that are added to those of a shard."""
        return self.pieces * self.length - self._positions

    def is_smaller(self, bits: int, itemsize: int) -> bool:
        """Whether the packed tensor is smaller than the tensor, of elements of `itemsize` bytes."""
        inner = math.prod(self.shape[self.axis + 1 :])
        pieces, positions = (self.pieces, self._positions) if _is_known(self.pieces) else (1, self.length)
        return pieces * (8 + -(-self.block * bits // 8)) < positions * inner * itemsize

    def divided(self, x: jax.Array) -> jax.Array:
        """The tensor as [*rows, block]."""
        if self._padding:
            x = self._reshaped(x, *self._by_shard(self._positions))
            # NaN has no part in the scale of a block.
            ends = [(0, self._padding if i == self.axis + 1 else 0, 0) for i in range(x.ndim)]
            x = jax.lax.pad(x, jnp.asarray(jnp.nan, x.dtype), ends)
        return self._reshaped(x, (*self.rows, self.block), self.row_names)

    def joined(self, x: jax.Array) -> jax.Array:
        """The tensor from [*rows, block]."""
        if self._padding:
            x = self._reshaped(x, *self._by_shard(self._positions + self._padding))
            x = jax.lax.slice_in_dim(x, 0, self._positions, axis=self.axis + 1)
        return self._reshaped(x, self.shape, () if self.sharding is None else self.sharding.spec)

    def _by_shard(self, positions: int) -> tuple[tuple[int, ...], tuple[Any, ...]]:
        """The shape with shards and their positions as axes of their own, and the mesh axes of each."""
        names = () if self.sharding is None else (*self.sharding.spec, *[None] * len(self.shape))[: self.axis + 1]
        return (*self.shape[: self.axis], self.shards, positions, *self.shape[self.axis + 1 :]), names

    def _reshaped(self, x: jax.Array, shape: Sequence[int], names: Sequence[Any]) -> jax.Array:
        if self.sharding is None:
            return jnp.reshape(x, shape)
        spec = jax.sharding.PartitionSpec(*names)
        return jnp.reshape(x, shape, out_sharding=jax.sharding.NamedSharding(self.sharding.mesh, spec))


def _is_known(length: Any) -> bool:
    """Whether the length of an axis is a number; in `jax.export` it may be a symbol, which cannot be compared."""
    return isinstance(length, int)


class Quantized(NamedTuple):
    values: Any
    low: Any  # the smallest and the largest value of each block
    high: Any
    blocks: Blocks
    dtype: Any


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def quantize(x: jax.Array, bits: int, stochastic: bool, blocks: Blocks) -> tuple[jax.Array, jax.Array, jax.Array]:
    # XLA would quantize a constant while it compiles, for seconds.
    x = jax.lax.optimization_barrier(x)
    x = blocks.divided(x.astype(jnp.float64 if x.dtype == jnp.float64 else jnp.float32))
    finite = jnp.isfinite(x)
    low, high = _smallest_and_largest(x, finite)
    steps, half = 2**bits - 2, _half_step(low, high, bits)
    inverse = jnp.where(half >= jnp.finfo(x.dtype).tiny, 1 / half, 0)
    exact = (x * 0.5 - _in_blocks(low * 0.5, x)) * _in_blocks(inverse, x)
    # Rounding may lead to the next larger integer.
    values = jnp.minimum(jnp.floor(exact + _dither(x)) if stochastic else jax.lax.round(exact, _TO_EVEN), steps)
    values = jax.lax.select(finite, values, jnp.full_like(x, steps + 1)).astype(jnp.uint8)  # the largest means NaN
    if bits == 4:
        if blocks.block % 2:
            values = jnp.pad(values, [(0, 0)] * (values.ndim - 1) + [(0, 1)])
        values = values[..., ::2] | (values[..., 1::2] << 4)
    return values, low, high


_TO_EVEN = jax.lax.RoundingMethod.TO_NEAREST_EVEN


def _in_blocks(numbers: jax.Array, x: jax.Array) -> jax.Array:
    """One number for each block, for all values of the block."""
    return jax.lax.broadcast_in_dim(numbers, x.shape, range(x.ndim - 1))


def _dither(x: jax.Array) -> jax.Array:
    """A number from 0 to 1 for each value, from a hash of the value and of its place in the block."""
    # Of the rank of x, since jax_numpy_rank_promotion may forbid another one.
    place = jax.lax.broadcasted_iota(jnp.uint32, (*(1 for _ in x.shape[:-1]), x.shape[-1]), x.ndim - 1)
    place = place * jnp.uint32(0x9E3779B9)
    mixed = (jax.lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32) ^ place) * jnp.uint32(0x85EBCA6B)
    mixed = (mixed ^ (mixed >> 15)) * jnp.uint32(0xC2B2AE35)
    return ((mixed ^ (mixed >> 13)) >> 8).astype(x.dtype) * 2.0**-24


def _smallest_and_largest(x: jax.Array, finite: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Of the finite values in each row; inf and -inf in a row without any, whose values are all kept as NaN."""
    # One reduction with two results: XLA would compute, and keep, what it reads for each of two.
    ends = jnp.asarray(jnp.inf, x.dtype), jnp.asarray(-jnp.inf, x.dtype)
    return jax.lax.reduce(
        tuple(jax.lax.select(finite, x, jnp.full_like(x, end)) for end in ends),
        ends,
        lambda a, b: (jnp.minimum(a[0], b[0]), jnp.maximum(a[1], b[1])),
        (x.ndim - 1,),
    )


def _half_step(low: jax.Array, high: jax.Array, bits: int) -> jax.Array:
    # The difference of two values may be more than the largest finite number; that of their halves is not.
    return (high * 0.5 - low * 0.5) / (2**bits - 2)


@functools.partial(jax.jit, static_argnums=(3, 4, 5))
def dequantize(values: jax.Array, low: jax.Array, high: jax.Array, dtype: Any, bits: int, blocks: Blocks) -> jax.Array:
    if bits == 4:
        values = jnp.stack([values & 15, values >> 4], axis=-1).reshape(*values.shape[:-1], -1)[..., : blocks.block]
    x = values.astype(low.dtype)
    half, low, high = (_in_blocks(numbers, x) for numbers in (_half_step(low, high, bits), low, high))
    # Rounding must not lead out of the block: what was positive, or less than 1, stays so.
    x = jax.lax.clamp(low, low + x * half + x * half, high)
    x = jax.lax.select(values == 2**bits - 1, jnp.full_like(x, jnp.nan), x)
    return blocks.joined(x).astype(dtype)
