"""Ready pairs of saved-tensor hooks. Use each like `saved_tensors_hooks`, as a block or as a decorator:

    with quantize_saved(bits=8):
        loss = model(params, x)

Integers, bools, complex numbers and PRNG keys pass unchanged, and so does what the predicate `only` is False for, as in
`cast_saved(only=lambda x: x.ndim > 1)`. Every tensor comes back with its dtype, sharding and weak type.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pylayer_jax._jax.tracers import is_tracer

from ._hooks.block import saved_tensors_hooks
from ._hooks.derived_residuals import Errors
from ._hooks.disk import File, folder_of
from ._hooks.pair import Step
from ._hooks.quantize import Blocks, Quantized, dequantize, quantize

Only = Callable[[jax.Array], bool]

_NO_ERRORS = Errors(error_is_absolute=True, shortest_scaled_row=0)

__all__ = ["cast_saved", "chain", "quantize_saved", "save_on_cpu", "save_on_disk"]


def _is_float(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jnp.floating)


def _refuse_function(packer: str, argument: Any) -> None:
    if callable(argument) and not isinstance(argument, type):
        name = getattr(argument, "__name__", "the function")
        raise TypeError(f"{packer} got {name} itself. Write it with parentheses, as in @{packer}() above a function.")


class save_on_cpu(saved_tensors_hooks):  # noqa: N801 - the name in torch
    """Keep saved tensors in host memory.

    In eager mode a tensor becomes a NumPy array. In traced code it moves to the host memory space of its device
    (`jax.memory.Space.Host`), if the device has one; so does an array of several processes in eager mode.

    Args:
        pin_memory: in eager mode, keep tensors in page-locked memory. The transfer back is faster.
    """

    _errors = _NO_ERRORS
    _is_last = True  # JAX computes on the device only

    def __init__(self, pin_memory: bool = False, *, only: Only | None = None) -> None:
        _refuse_function("save_on_cpu", pin_memory)

        def move(x: Any) -> Any:
            if is_tracer(x):
                return _OnHost(_to_host(x), placed=True)
            # No process can read all of an array that is spread over several. A constant of JAX's own is on no device.
            if hasattr(x, "committed") and (pin_memory or not x.is_fully_addressable):
                return _OnHost(_to_host(x), placed=x.committed)
            return np.asarray(x)

        def pack(x: Any) -> Any:
            return move(x) if _is_float(x) else x

        def unpack(packed: Any) -> Any:
            if not isinstance(packed, _OnHost):
                return packed
            # A transfer commits an array to its device; only a NumPy array leaves the device open again.
            return _to_device(packed.array) if packed.placed else np.asarray(packed.array)

        self._pack_part = move
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
        _refuse_function("cast_saved", dtype)
        try:
            narrow = jnp.dtype(dtype)
        except TypeError:
            narrow = None
        if narrow is None or not jnp.issubdtype(narrow, jnp.floating):
            got = repr(dtype) if narrow is None else narrow
            raise TypeError(f"cast_saved: dtype must be a floating-point type such as jnp.bfloat16, got {got}.")

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
        _refuse_function("quantize_saved", bits)
        if bits not in (8, 4):
            raise ValueError(f"quantize_saved: bits must be 8 or 4, got {bits!r}.")
        if block_size < 2 or block_size % 2:
            raise ValueError(f"quantize_saved: block_size must be a positive even number, got {block_size!r}.")

        # Shorter rows share a block.
        self._errors = Errors(error_is_absolute=True, shortest_scaled_row=block_size // 2 + 1)
        rounds_stochastically = bits == 4 if stochastic is None else bool(stochastic)

        def pack(x: Any) -> Any:
            if not _is_float(x) or not x.size or x.shape[-1:] in ((), (1,)):
                return x
            blocks = Blocks.of(x, block_size)
            if not blocks.is_smaller(bits, x.dtype.itemsize):
                return x
            values, low, high = quantize(x, bits, rounds_stochastically, blocks)
            return Quantized(values, low, high, blocks, x.dtype)

        def unpack(packed: Any) -> Any:
            if not isinstance(packed, Quantized):
                return packed
            return dequantize(*packed[:3], packed.dtype, bits, packed.blocks)

        super().__init__(pack, unpack, only=only)


class save_on_disk(saved_tensors_hooks):  # noqa: N801 - as save_on_cpu
    """Keep saved tensors in files, one file per tensor, also in compiled programs.

    Of a tensor that several devices hold, each process writes its own shards: see `host` of `saved_tensors_hooks`.

    The process keeps a checksum of each file. A file is removed when nothing can read it any more: in eager mode with
    the function that `jax.vjp` returned, in a compiled program when the same call of the layer saves again. On
    `close()` the files of compiled programs are removed, but not what a function of eager `jax.vjp` still holds.
    Objects with the same directory share the files of compiled programs, which stay until the last of them is closed.
    When the process ends, all files are removed; those of a process that was killed, by the next one that uses the
    directory (not on Windows).

    Args:
        directory: the files are written to a folder of this process in this directory. It is made if it does not exist.

    Raises:
        OSError: if the directory cannot be written to; if it is full, in the forward pass. The unfinished file is
            removed, and tensors that were saved before stay readable. In the backward pass, if a file was deleted or
            changed, or cannot be read.
    """

    _errors = _NO_ERRORS

    def __init__(self, directory: str | os.PathLike[str], *, only: Only | None = None) -> None:
        _refuse_function("save_on_disk", directory)
        folder = folder_of(os.path.abspath(os.fspath(directory)))

        def write(x: Any) -> Any:
            return File(folder, x)

        def pack(x: Any) -> Any:
            return write(x) if _is_float(x) else x

        def unpack(packed: Any) -> Any:
            return packed.read() if isinstance(packed, File) else packed

        self._pack_part = write
        super().__init__(pack, unpack, host=True, only=only)


class chain(saved_tensors_hooks):  # noqa: N801 - as save_on_cpu
    """Pack with the first pair, then pack what it returned with the second, and so on; unpack in reverse.

        chain(quantize_saved(8), save_on_cpu())
        chain(cast_saved(), save_on_disk("saved"))

    The second pair packs each array that the first one returned, wherever it is in a pytree; numbers, strings and other
    objects stay as they are, and so does an array that the second pair does not pack. From a float32 tensor of shape
    [1024, 1024], `quantize_saved(8)` makes three arrays: integers of shape [8192, 128], and the least and the largest
    value of each block, both of shape [8192]. `save_on_cpu` and `save_on_disk` move all three arrays. Without a pair
    before them they move no integer tensor, nor one that the pairs before them left unchanged. `cast_saved` halves the
    float32 arrays of a pair before it.

    To JAX a chain is one pair: blocks, nesting, caches and `close()` are as for any other. Each pair checks that it
    gets back the shape and dtype that it packed. The chain is `differentiable` if all of its pairs are.

    Args:
        pairs: ready ones, `saved_tensors_hooks`, or chains. A chain of one pair packs as this pair does. `save_on_cpu`,
            `save_on_disk` and other pairs with `host=True` come last. The predicate `only` of a pair sees what this
            pair would pack.
        only: a predicate of the tensor that is saved.

    Raises:
        TypeError: for an argument that is no pair, or for none; at the place of use, what the hooks of a pair raise,
            with its number and arguments in the message.
        ValueError: if another pair follows one that must come last, or if a chain with `only` is in another chain.
    """

    def __init__(self, *pairs: saved_tensors_hooks, only: Only | None = None) -> None:
        if not pairs:
            raise TypeError("chain takes one pair of hooks or more, got none.")
        if only is not None:
            self._check(only=only)
        steps = list[Step]()
        for number, pair in enumerate(list[Any](pairs), 1):
            if not isinstance(pair, saved_tensors_hooks):
                hint = " Write it with parentheses." if isinstance(pair, type) else ""
                raise TypeError(f"chain: argument {number} must be a pair of hooks, got {pair!r}.{hint}")
            if pair._only is not None:
                raise ValueError(
                    f"chain: argument {number}, {pair!r}, is a chain with only=. Pass its pairs one by one, and the "
                    "predicate to the outer chain or to one of the pairs."
                )
            if steps and steps[-1].is_last:
                raise ValueError(
                    f"chain: {pairs[number - 2]!r} must come last, since what it packs is on the host, where "
                    f"{pair!r} could not pack it in a compiled program. Change the order."
                )
            own = f"pair {number} of the chain, {pair!r}"
            steps += [step._replace(name=f"{step.name} in {own}" if step.name else own) for step in pair._steps]
        self._set_up(steps, only)

    def __repr__(self) -> str:
        args, kwargs = self._made_with
        return f"chain({', '.join([*map(repr, args), *(f'{k}={v!r}' for k, v in kwargs.items())])})"
