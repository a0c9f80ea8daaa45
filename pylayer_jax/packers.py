"""Ready pairs of saved-tensor hooks: each is used as `saved_tensors_hooks` is, as a block or a decorator.

    with quantize_saved(bits=8):
        loss = model(params, x)

Integers, bools, complex numbers and PRNG keys pass untouched. Dtype, sharding and weak type come back as they were.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import shutil
import tempfile
import threading
import weakref
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ._hooks.block import saved_tensors_hooks
from ._jax import is_sharded_explicitly, is_tracer

__all__ = ["cast_saved", "quantize_saved", "save_on_cpu", "save_on_disk"]


def _is_float(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jnp.floating)


class save_on_cpu(saved_tensors_hooks):  # noqa: N801 - the name in torch
    """Keep saved tensors in host memory.

    In eager mode a tensor becomes a NumPy array; in traced code it moves to the host memory space of its
    device (`jax.memory.Space.Host`), where the device has one.

    Args:
        pin_memory: in eager mode, keep it in page-locked memory, from which it returns faster.
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
            # A transfer binds an array to its device, from which only NumPy brings it back.
            return _to_device(packed.array) if packed.placed else np.asarray(packed.array)

        super().__init__(pack, unpack, differentiable=True)


class _OnHost(NamedTuple):
    array: Any
    placed: bool  # whether the array was bound to its devices, or JAX may place it where it likes


# Jitted, since in eager shard_map the transfer itself is refused.
@jax.jit
def _to_host(x: jax.Array) -> jax.Array:
    return jax.device_put(x, jax.memory.Space.Host)


@jax.jit
def _to_device(x: jax.Array) -> jax.Array:
    return jax.device_put(x, jax.memory.Space.Device)


class cast_saved(saved_tensors_hooks):  # noqa: N801 - beside its kin
    """Keep saved tensors in a narrower floating-point type.

    Tensors that are as narrow already pass untouched. With bfloat16 a value changes by at most 1 part in 256.

    Args:
        dtype: the type to keep them in.

    Raises:
        TypeError: for a type that is not a floating-point type.
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


class quantize_saved(saved_tensors_hooks):  # noqa: N801 - beside its kin
    """Keep saved tensors as small integers, with a scale and an offset for each block of values.

    A block with values from a to b is kept as round((v - a) / s) with s = (b - a) / (2^bits - 2), so that a value
    changes by at most s / 2: uniform quantization by group, as in Chen et al., "ActNN: Reducing Training Memory
    Footprint via 2-Bit Activation Compressed Training" (2021), but rounded to nearest. Infinities and NaN come
    back as NaN and do not touch the others of their block. A tensor that would not become smaller passes
    untouched.

    Args:
        bits: of one value, 8 or 4.
        block_size: how many values share a scale. Arrays with explicit sharding have one scale per row instead.

    Raises:
        ValueError: for another number of bits, or a block size that is not a positive even number.
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
    scales = (high - low) / (2**bits - 2)
    steps = jnp.round((x - low) / jnp.where(scales > 0, scales, 1))
    values = jnp.where(finite, steps, 2**bits - 1).astype(jnp.uint8)  # the one number that is left stands for NaN
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
    x = jnp.where(values == 2**bits - 1, jnp.nan, offsets + values.astype(scales.dtype) * scales)
    if block is not None:
        x = x.reshape(-1)[: math.prod(shape)].reshape(shape)
    return x.astype(dtype)


class save_on_disk(saved_tensors_hooks):  # noqa: N801 - beside its kin
    """Keep saved tensors in files, one for each, also in compiled programs.

    A file is written under a temporary name and then renamed, so that no half-written one is ever read. It is
    removed when nothing can ask for it any more (with the function that `jax.vjp` returned; in a compiled
    program when the same place saves again), and all are removed on `close()` and when the process ends.

    Args:
        directory: where the files go, in a folder of this process; made if it does not exist.

    Raises:
        OSError: where the directory cannot be written to, here or, where it is full, in the forward pass. The file
            that was begun is removed, and the tensors saved before it stay readable.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        folder = _folder_of(os.path.abspath(os.fspath(directory)))

        def pack(x: Any) -> Any:
            return folder.write(x) if _is_float(x) else x

        def unpack(packed: Any) -> Any:
            return packed.read() if isinstance(packed, _File) else packed

        super().__init__(pack, unpack, host=True)


class _Folder:
    """A folder of this process in the directory that the user gave; removed with its last user."""

    def __init__(self, directory: str) -> None:
        try:
            os.makedirs(directory, exist_ok=True)
            self.path = tempfile.mkdtemp(prefix="saved_tensors-", dir=directory)
        except OSError as error:
            raise _unwritable(error, directory, "a folder") from error
        weakref.finalize(self, _in_process(os.getpid(), shutil.rmtree), self.path, ignore_errors=True)

    def write(self, x: np.ndarray) -> _File:
        temporary = ""
        try:
            handle, temporary = tempfile.mkstemp(suffix=".part", dir=self.path)
            with os.fdopen(handle, "wb") as file:
                file.write(np.ascontiguousarray(x).reshape(-1).view(np.uint8).data)
            path = temporary.removesuffix(".part")
            os.replace(temporary, path)
        except OSError as error:
            if temporary:
                os.unlink(temporary)
            raise _unwritable(error, self.path, f"{x.nbytes} bytes") from error
        return _File(self, path, x.shape, x.dtype)


class _File:
    """One tensor in a file, which goes with this object."""

    __slots__ = ("__weakref__", "dtype", "folder", "path", "shape")

    def __init__(self, folder: _Folder, path: str, shape: tuple[int, ...], dtype: np.dtype) -> None:
        self.folder = folder
        self.path = path
        self.shape = shape
        self.dtype = dtype
        weakref.finalize(self, _in_process(os.getpid(), _unlink), path)

    def read(self) -> np.ndarray:
        content = np.fromfile(self.path, dtype=np.uint8)
        expected = math.prod(self.shape) * self.dtype.itemsize
        if content.size != expected:
            raise OSError(
                f"save_on_disk: {self.path} holds {content.size} bytes, but {expected} were written. Something else "
                "changed it; give save_on_disk a directory of its own."
            )
        return content.view(self.dtype).reshape(self.shape)


_folders: weakref.WeakValueDictionary[str, _Folder] = weakref.WeakValueDictionary()
_folders_lock = threading.Lock()


def _folder_of(directory: str) -> _Folder:
    with _folders_lock:
        folder = _folders.get(directory)
        if folder is None or not os.path.isdir(folder.path):
            folder = _folders[directory] = _Folder(directory)
        return folder


def _unlink(path: str) -> None:
    with contextlib.suppress(OSError):  # the folder may be gone before
        os.unlink(path)


def _in_process(process: int, action: Any) -> Any:
    # A forked child inherits the finalizers, but not the files.
    return lambda *args, **kwargs: action(*args, **kwargs) if os.getpid() == process else None


def _unwritable(error: OSError, directory: str, what: str) -> OSError:
    return OSError(
        error.errno,
        f"save_on_disk could not write {what} ({error.strerror}). Choose a directory that is writable and has room; no "
        "tensor was lost, and those saved before stay readable",
        directory,
    )
