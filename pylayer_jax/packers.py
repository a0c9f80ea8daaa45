"""Ready pairs of saved-tensor hooks. Use each like `saved_tensors_hooks`, as a block or as a decorator:

    with quantize_saved(bits=8):
        loss = model(params, x)

Integers, bools, complex numbers and PRNG keys pass unchanged. Every tensor comes back with its dtype, sharding and weak
type.
"""

from __future__ import annotations

import functools
import math
import os
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ._hooks.block import saved_tensors_hooks
from ._hooks.disk import File, folder_of
from ._jax import is_sharded_explicitly, is_tracer

__all__ = ["cast_saved", "quantize_saved", "save_on_cpu", "save_on_disk"]


def _is_float(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jnp.floating)


class save_on_cpu(saved_tensors_hooks):  # noqa: N801 - the name in torch
    """Keep saved tensors in host memory.

    In eager mode a tensor becomes a NumPy array. In traced code it moves to the host memory space of its device
    (`jax.memory.Space.Host`), if the device has one.

    Args:
        pin_memory: in eager mode, keep tensors in page-locked memory. The transfer back is faster.
    """

    def __init__(self, pin_memory: bool = False) -> None:
        def pack(x: Any) -> Any:
            if not _is_float(x):
                return x
            if is_tracer(x):
                return _OnHost(_to_host(x), placed=True)
            return _OnHost(_to_host(x), placed=x.committed) if pin_memory else np.asarray(x)

        def unpack(packed: Any) -> Any:
            if not isinstance(packed, _OnHost):
                return packed
            # A transfer commits an array to its device; only a NumPy array leaves the device open again.
            return _to_device(packed.array) if packed.placed else np.asarray(packed.array)

        super().__init__(pack, unpack, differentiable=True)


class _OnHost(NamedTuple):
    array: Any
    placed: bool  # True for traced and committed arrays: a transfer brings them back, not NumPy


# These functions are jitted because eager shard_map refuses the transfer itself.
@jax.jit
def _to_host(x: jax.Array) -> jax.Array:
    return jax.device_put(x, jax.memory.Space.Host)


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

    def __init__(self, dtype: Any = jnp.bfloat16) -> None:
        narrow = jnp.dtype(dtype)
        if not jnp.issubdtype(narrow, jnp.floating):
            raise TypeError(f"cast_saved: dtype must be a floating-point type such as jnp.bfloat16, got {narrow}.")

        def pack(x: Any) -> Any:
            return _Cast(x.astype(narrow), x.dtype) if _is_float(x) and x.dtype.itemsize > narrow.itemsize else x

        def unpack(packed: Any) -> Any:
            return packed.array.astype(packed.dtype) if isinstance(packed, _Cast) else packed

        super().__init__(pack, unpack, differentiable=True)


class _Cast(NamedTuple):
    array: Any
    dtype: Any


class quantize_saved(saved_tensors_hooks):  # noqa: N801 - as save_on_cpu
    """Keep saved tensors as small integers, with a scale and an offset for each block of values.

    A value v of a block with finite values from a to b is kept as round((v - a) / s), s = (b - a) / (2^bits - 2).
    It therefore changes by at most s / 2, and by the rounding of this arithmetic, which is at most 4 machine
    epsilons of the largest of the block. A block that spans less than 2^bits times the smallest normal number comes
    back as its smallest value. This is uniform quantization by group, as in Chen et al., "ActNN: Reducing Training
    Memory Footprint via 2-Bit Activation Compressed Training" (2021), but rounded to nearest. Finite values stay
    finite. Infinities and NaN come back as NaN and do not change the other values of their block. A tensor passes
    unchanged if it would not become smaller.

    Args:
        bits: bits per value, 8 or 4.
        block_size: number of values that share a scale. Arrays with explicit sharding have one scale per row instead.

    Raises:
        ValueError: if `bits` is not 8 or 4, or `block_size` is not a positive even number.
    """

    def __init__(self, bits: int = 8, block_size: int = 128) -> None:
        if bits not in (8, 4):
            raise ValueError(f"quantize_saved: bits must be 8 or 4, got {bits!r}.")
        if block_size < 2 or block_size % 2:
            raise ValueError(f"quantize_saved: block_size must be a positive even number, got {block_size!r}.")

        def pack(x: Any) -> Any:
            if not _is_float(x) or _quantized_size(x, bits, block_size) >= x.size * x.dtype.itemsize:
                return x
            block = None if is_sharded_explicitly(x) else min(block_size, x.size + x.size % 2)
            values, scales, offsets = _quantize(x, bits, block)
            return _Quantized(values, scales, offsets, x.shape, x.dtype, block)

        def unpack(packed: Any) -> Any:
            if not isinstance(packed, _Quantized):
                return packed
            return _dequantize(*packed[:3], packed.shape, packed.dtype, bits, packed.block)

        super().__init__(pack, unpack)


class _Quantized(NamedTuple):
    values: Any
    scales: Any
    offsets: Any
    shape: tuple[int, ...]
    dtype: Any
    block: int | None  # None: one scale per row, in the shape of the tensor


def _quantized_size(x: Any, bits: int, block: int) -> int:
    blocks = -(-x.size // block)
    return blocks * 8 + (x.size * bits + 7) // 8


@functools.partial(jax.jit, static_argnums=(1, 2))
def _quantize(x: jax.Array, bits: int, block: int | None) -> tuple[jax.Array, jax.Array, jax.Array]:
    x = x.astype(jnp.float64 if x.dtype == jnp.float64 else jnp.float32)
    if block is not None:
        flat = x.reshape(-1)
        x = jnp.pad(flat, (0, -flat.size % block), mode="edge").reshape(-1, block)
    finite = jnp.isfinite(x)
    present = jnp.any(finite, axis=-1, keepdims=True)
    low = jnp.where(present, jnp.min(jnp.where(finite, x, jnp.inf), axis=-1, keepdims=True), 0)
    high = jnp.where(present, jnp.max(jnp.where(finite, x, -jnp.inf), axis=-1, keepdims=True), 0)
    # Differences may be more than the largest finite number; their halves are not.
    scales = high / (2**bits - 2) - low / (2**bits - 2)
    steps = jnp.clip(jnp.round((x / 2 - low / 2) / jnp.where(scales > 0, scales / 2, 1)), 0, 2**bits - 2)
    values = jnp.where(finite, steps, 2**bits - 1).astype(jnp.uint8)  # the largest number stands for NaN
    if bits == 4 and values.shape[-1] % 2 == 0:
        values = values[..., ::2] | (values[..., 1::2] << 4)
    return values, scales, low


@functools.partial(jax.jit, static_argnums=(3, 4, 5, 6))
def _dequantize(
    values: jax.Array,
    scales: jax.Array,
    offsets: jax.Array,
    shape: tuple[int, ...],
    dtype: Any,
    bits: int,
    block: int | None,
) -> jax.Array:
    width = shape[-1] if block is None else block
    if bits == 4 and width % 2 == 0:
        values = jnp.stack([values & 15, values >> 4], axis=-1).reshape(*values.shape[:-1], width)
    half = values.astype(scales.dtype) * (scales / 2)
    limit = float(jnp.finfo(dtype).max)  # rounding might exceed it
    x = jnp.where(values == 2**bits - 1, jnp.nan, jnp.clip(offsets + half + half, -limit, limit))
    if block is not None:
        x = x.reshape(-1)[: math.prod(shape)].reshape(shape)
    return x.astype(dtype)


class save_on_disk(saved_tensors_hooks):  # noqa: N801 - as save_on_cpu
    """Keep saved tensors in files, one file per tensor, also in compiled programs.

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

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        folder = folder_of(os.path.abspath(os.fspath(directory)))

        def pack(x: Any) -> Any:
            return folder.write(x) if _is_float(x) else x

        def unpack(packed: Any) -> Any:
            return packed.read() if isinstance(packed, File) else packed

        super().__init__(pack, unpack, host=True)
