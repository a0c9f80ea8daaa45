"""Ready pairs of saved-tensor hooks. Use each like `saved_tensors_hooks`, as a block or as a decorator:

    with quantize_saved(bits=8):
        loss = model(params, x)

Integers, bools, complex numbers and PRNG keys pass unchanged, and so does what the predicate `only` is False for, as in
`cast_saved(only=lambda x: x.ndim > 1)`. Every tensor comes back with its dtype, sharding and weak type.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ._hooks.block import saved_tensors_hooks
from ._hooks.derived import Errors
from ._hooks.disk import File, folder_of
from ._jax import explicit_sharding, is_tracer, shard_counts

Only = Callable[[jax.Array], bool]

_NO_ERRORS = Errors(keep_offsets=True, shortest_scaled_row=0)

__all__ = ["cast_saved", "quantize_saved", "save_on_cpu", "save_on_disk"]


def _is_float(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jnp.floating)


class save_on_cpu(saved_tensors_hooks):  # noqa: N801 - the name in torch
    """Keep saved tensors in host memory.

    In eager mode a tensor becomes a NumPy array. In traced code it moves to the host memory space of its device
    (`jax.memory.Space.Host`), if the device has one; so does an array of several processes in eager mode.

    Args:
        pin_memory: in eager mode, keep tensors in page-locked memory. The transfer back is faster.
    """

    _errors = _NO_ERRORS

    def __init__(self, pin_memory: bool = False, *, only: Only | None = None) -> None:
        def pack(x: Any) -> Any:
            if not _is_float(x):
                return x
            if is_tracer(x):
                return _OnHost(_to_host(x), placed=True)
            # No process can read all of an array that is spread over several.
            if pin_memory or not x.is_fully_addressable:
                return _OnHost(_to_host(x), placed=x.committed)
            return np.asarray(x)

        def unpack(packed: Any) -> Any:
            if not isinstance(packed, _OnHost):
                return packed
            # A transfer commits an array to its device; only a NumPy array leaves the device open again.
            return _to_device(packed.array) if packed.placed else np.asarray(packed.array)

        super().__init__(pack, unpack, differentiable=True, only=only)


class _OnHost(NamedTuple):
    array: Any
    placed: bool  # True for traced and committed arrays: a transfer brings them back, not NumPy


# These functions are jitted because eager shard_map refuses the transfer itself.
@jax.jit
def _to_host(x: jax.Array) -> jax.Array:
    # Without `src`, the transpose would leave a cotangent on the host.
    return jax.device_put(x, jax.memory.Space.Host, src=jax.memory.Space.Device)


@jax.jit
def _to_device(x: jax.Array) -> jax.Array:
    return jax.device_put(x, jax.memory.Space.Device)


class cast_saved(saved_tensors_hooks):  # noqa: N801 - as save_on_cpu
    """Keep saved tensors in a narrower floating-point type.

    Tensors of this width or a smaller one pass unchanged. With bfloat16 a value changes by at most 1 part in 256.

    Args:
        dtype: the floating-point type of the kept tensors.

    Raises:
        TypeError: if `dtype` is not a floating-point type.
    """

    _errors = Errors(shortest_scaled_row=0)

    def __init__(self, dtype: Any = jnp.bfloat16, *, only: Only | None = None) -> None:
        narrow = jnp.dtype(dtype)
        if not jnp.issubdtype(narrow, jnp.floating):
            raise TypeError(f"cast_saved: dtype must be a floating-point type such as jnp.bfloat16, got {narrow}.")

        def pack(x: Any) -> Any:
            return _Cast(x.astype(narrow), x.dtype) if _is_float(x) and x.dtype.itemsize > narrow.itemsize else x

        def unpack(packed: Any) -> Any:
            return packed.array.astype(packed.dtype) if isinstance(packed, _Cast) else packed

        super().__init__(pack, unpack, differentiable=True, only=only)


class _Cast(NamedTuple):
    array: Any
    dtype: Any


class quantize_saved(saved_tensors_hooks):  # noqa: N801 - as save_on_cpu
    """Keep saved tensors as small integers, with a scale and an offset for each block of values.

    A value v of a block with finite values from a to b is kept as (v - a) / s, s = (b - a) / (2^bits - 2), rounded to
    an integer. It therefore changes by at most s / 2 (by less than s if rounding is stochastic), and by the rounding of
    this arithmetic, which is at most 4 machine epsilons of the largest of the block. A block that spans less than
    2^bits times the smallest normal number comes back as its smallest value. This is uniform quantization by group, as
    in Chen et al., "ActNN: Reducing Training Memory Footprint via 2-Bit Activation Compressed Training" (2021). Finite
    values come back from a to b. Infinities and NaN come back as NaN and do not change the other values of their block.
    A tensor passes unchanged if it would not become smaller, and if it has one value per row (shape [..., 1]), as a
    mean or a scale has.

    A block lies within a row along the last axis, or holds whole short rows. It lies within a shard, so that nothing is
    communicated. Where only the compiler knows the sharding, blocks are as short as shards could be if each axis is cut
    along one mesh axis; they are longer with explicit axes, where the type of a tensor tells.

    Args:
        bits: bits per value, 8 or 4.
        block_size: the largest number of values that share a scale.
        stochastic: round up with the probability that leaves no bias, by a hash of the value and its place in the
            block: one program packs the same tensor the same way each time. By default with 4 bits only, where training
            suffers from a bias; with 8 bits the nearest integer is closer.

    Raises:
        ValueError: if `bits` is not 8 or 4, or `block_size` is not a positive even number.
    """

    def __init__(
        self, bits: int = 8, block_size: int = 128, stochastic: bool | None = None, *, only: Only | None = None
    ) -> None:
        if bits not in (8, 4):
            raise ValueError(f"quantize_saved: bits must be 8 or 4, got {bits!r}.")
        if block_size < 2 or block_size % 2:
            raise ValueError(f"quantize_saved: block_size must be a positive even number, got {block_size!r}.")

        # Shorter rows share a block.
        self._errors = Errors(keep_offsets=True, shortest_scaled_row=block_size // 2 + 1)
        rounds_stochastically = bits == 4 if stochastic is None else bool(stochastic)

        def pack(x: Any) -> Any:
            if not _is_float(x) or not x.size or x.shape[-1:] in ((), (1,)):
                return x
            blocks = _Blocks.of(x, block_size)
            if not blocks.is_smaller(bits, x.dtype.itemsize):
                return x
            values, low, high = _quantize(x, bits, rounds_stochastically, blocks)
            return _Quantized(values, low, high, blocks, x.dtype)

        def unpack(packed: Any) -> Any:
            if not isinstance(packed, _Quantized):
                return packed
            return _dequantize(*packed[:3], packed.dtype, bits, packed.blocks)

        super().__init__(pack, unpack, only=only)


class _Blocks(NamedTuple):
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
    def of(cls, x: Any, largest: int) -> _Blocks:
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


class _Quantized(NamedTuple):
    values: Any
    low: Any  # the smallest and the largest value of each block
    high: Any
    blocks: _Blocks
    dtype: Any


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _quantize(x: jax.Array, bits: int, stochastic: bool, blocks: _Blocks) -> tuple[jax.Array, jax.Array, jax.Array]:
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
def _dequantize(
    values: jax.Array, low: jax.Array, high: jax.Array, dtype: Any, bits: int, blocks: _Blocks
) -> jax.Array:
    if bits == 4:
        values = jnp.stack([values & 15, values >> 4], axis=-1).reshape(*values.shape[:-1], -1)[..., : blocks.block]
    x = values.astype(low.dtype)
    half, low, high = (_in_blocks(numbers, x) for numbers in (_half_step(low, high, bits), low, high))
    # Rounding must not lead out of the block: what was positive, or less than 1, stays so.
    x = jax.lax.clamp(low, low + x * half + x * half, high)
    x = jax.lax.select(values == 2**bits - 1, jnp.full_like(x, jnp.nan), x)
    return blocks.joined(x).astype(dtype)


class save_on_disk(saved_tensors_hooks):  # noqa: N801 - as save_on_cpu
    """Keep saved tensors in files, one file per tensor, also in compiled programs.

    Of a tensor that several devices hold, each process writes its own shards: see `host` of `saved_tensors_hooks`.

    A file is written under a temporary name and then renamed; therefore no half-written file is ever read. The process
    keeps a checksum of each file. A file is removed when nothing can read it any more: in eager mode together with the
    function that `jax.vjp` returned, in a compiled program when the same call of the layer saves again. On `close()`
    the files of compiled programs are removed, but not what a function of eager `jax.vjp` still holds. When the process
    ends, all of them are; the files of a process that was killed, by the next one that uses the directory (not on
    Windows).

    Args:
        directory: the files are written to a folder of this process in this directory. It is made if it does not exist.

    Raises:
        OSError: if the directory cannot be written to; if it is full, in the forward pass. The unfinished file is
            removed, and tensors that were saved before stay readable. In the backward pass, if a file was deleted or
            changed, or cannot be read.
    """

    _errors = _NO_ERRORS

    def __init__(self, directory: str | os.PathLike[str], *, only: Only | None = None) -> None:
        folder = folder_of(os.path.abspath(os.fspath(directory)))

        def pack(x: Any) -> Any:
            return folder.write(x) if _is_float(x) else x

        def unpack(packed: Any) -> Any:
            return packed.read() if isinstance(packed, File) else packed

        super().__init__(pack, unpack, host=True, only=only)
