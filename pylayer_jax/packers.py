"""Provides ready pairs of saved-tensor hooks. Use a pair like `saved_tensors_hooks`, as a block or as a decorator:

    >>> @quantize_saved(bits=8)
    ... def loss(w, x):
    ...     return jnp.sum(jnp.tanh(x @ w) ** 2)
    >>> jax.grad(loss)(jnp.ones((64, 2)), jnp.ones((128, 64))).shape
    (64, 2)

Put the block around the whole loss: a pair packs the residuals that are computed inside it. Integers, complex numbers
and PRNG keys are not packed. Unpacking restores the dtype, the sharding and the weak type of every tensor.

Arguments of the ready pairs: with `recompute=False`, backward keeps what it would compute again. `arguments` also packs
weights, inputs, and their slices, reshapes and casts. `only` gets an array, or an array and its origin (see
`saved_tensors_hooks`): `cast_saved(only=lambda x: x.ndim > 1)` leaves out vectors and scalars.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import math
import os
import shutil
import tempfile
import weakref
import zlib
from collections.abc import Callable, Mapping
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jax.tree_util import Partial

from ._hooks.block import predicate, saved_tensors_hooks
from ._hooks.pack import Hook, Step, key_of, restored
from ._hooks.primitives import EXACT, FACTS, Error, Rounding
from ._jax.traces import is_tracer
from ._jax.types import explicit_sharding, has_tangent, shard_counts, unchecked
from ._messages import bytes_of

Only = Callable[..., Any] | None  # the argument `only` of a pair

__all__ = [
    "by_name",
    "cast_saved",
    "chain",
    "products_and_decisions",
    "quantize_saved",
    "recompute_saved",
    "save_on_cpu",
    "save_on_disk",
]


class _ReadyPair(saved_tensors_hooks):
    """Base class of the ready pairs, whose pack hooks return an array, or a function without arguments as a pytree."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        if args and callable(args[0]) and not isinstance(args[0], type):
            name, packer = getattr(args[0], "__name__", "the function"), cls.__name__
            raise TypeError(
                f"{packer} got {name} itself. Write it with parentheses, as in @{packer}() above a function."
            )
        return super().__new__(cls, *args, **kwargs)

    def __init__(
        self, owner: type[Any], settings: tuple[Any, ...], step: Step, recompute: bool, arguments: bool, only: Only
    ) -> None:
        key = *settings, bool(recompute), bool(arguments), key_of(only)  # pairs with equal keys are equal
        condition = predicate(type(self).__name__, only)
        step = step._replace(pack=unchecked(step.pack), unpack=unchecked(step.unpack), only=condition)
        self._set_up(owner, key, [step], recomputes_elementwise=bool(recompute), packs_arguments=bool(arguments))


def _n_bytes(x: Any) -> float:
    has_bits = x.dtype == np.bool_ and any(isinstance(length, int) and length % 8 == 0 for length in x.shape)
    return math.prod(x.shape) * (1 / 8 if has_bits else x.dtype.itemsize)


def _step_to_host(pack: Hook, unpack: Hook, **options: Any) -> Step:
    # Of two tensors of one size, a plan keeps that on the host.
    size = lambda x: 0.99 * _n_bytes(x)
    is_float = lambda x: jnp.issubdtype(x.dtype, jnp.floating)
    return Step(pack, unpack, takes=is_float, rounding=lambda _: EXACT, size=size, **options)


class recompute_saved(_ReadyPair):  # noqa: N801 - as save_on_cpu
    """Compute cheap operations again in backward, from the tensors that are kept. The gradient stays exact.

        >>> loss = recompute_saved()(lambda w, x: jnp.sum(jax.nn.gelu(x @ w) ** 2))
        >>> report = saved_tensors_report(loss, jnp.ones((64, 64)), jnp.ones((256, 64)))
        >>> report.total_bytes < report.total_unpacked_bytes / 4
        True

    Elementwise operations, such as a gelu, a normalization or a product with a mask, are computed again, as the other
    ready pairs do too. The results of all others are kept: matrix products, convolutions, reductions, comparisons,
    loops, `jax.custom_vjp` functions, ...

    With a `limit`, bool arrays are kept as bits, and backward also repeats costly operations until what the function
    keeps fits, those first that save most bytes for an operation: matrix products, convolutions, reductions, slices,
    gathers, scatters that add, FFTs, random bits and masks that follow from keys and integers. Never repeated are
    decisions by floats, loops, collectives, kernels, effects and `jax.custom_vjp` functions. Backward then runs in
    segments, as with a `jax.checkpoint` of each layer, and repeats a product in at most three of them. The smallest
    limit is not the one with the lowest peak; `compare_programs(...).within("2 GiB")` finds one that fits. Such a pair
    decorates a function; it is no block.

        >>> smaller = recompute_saved(limit="16 KiB")(lambda w, x: jnp.sum(jax.nn.gelu(x @ w) ** 2))
        >>> jax.grad(smaller)(jnp.ones((64, 64)), jnp.ones((256, 64))).shape
        (64, 64)

    Args:
        arguments: whether to compute again what follows from values outside the block.
        only: a predicate that selects the tensors that may be computed again; see `pylayer_jax.packers`.
        limit: the bytes that backward may keep on one device, beside what came from outside: a number, or a text such
            as "64 MiB". It is for all iterations of a loop together, and for one example under `jax.vmap`. What other
            hooks inside the function keep counts too, and stays as it is.

    Warns:
        UserWarning: if the least that can be kept is more than the limit.

    Raises:
        ValueError: if `limit` is no number of bytes.
        TypeError: in a `with` block with a limit; or if the function changes an argument in place, as modules of
            flax.nnx may, or gets a `jax.Ref`.
    """

    def __init__(self, *, arguments: bool = False, only: Only = None, limit: float | str | None = None) -> None:
        n_bytes = None if limit is None else bytes_of(limit, "recompute_saved")
        masks = Step(_pack_bits, restored, takes=lambda x: x.dtype == np.bool_, rounding=lambda _: EXACT, size=_n_bytes)
        self._set_up(
            recompute_saved,
            (n_bytes, bool(arguments), key_of(only)),
            () if limit is None else (masks,),
            recomputes_elementwise=True,
            packs_arguments=bool(arguments),
            only=predicate(type(self).__name__, only),
            limit=n_bytes,
        )


class save_on_cpu(_ReadyPair):  # noqa: N801 - the name in torch
    """Keep saved tensors in host memory.

        >>> print(jax.grad(save_on_cpu()(jnp.sin))(0.0))
        1.0

    Traced code moves each tensor to the host memory space of its device (`jax.memory.Space.Host`), if the device has
    one. So does eager mode with `pin_memory`, or if the array is spread over several processes. Otherwise it keeps a
    NumPy array. `pylayer_jax.packers` tells of the other arguments.

    Args:
        pin_memory: whether eager mode keeps tensors in page-locked memory, which makes the transfer back faster.
    """

    def __init__(
        self, pin_memory: bool = False, *, recompute: bool = True, arguments: bool = False, only: Only = None
    ) -> None:
        def move(x: Any) -> Any:
            if is_tracer(x):
                return Partial(_to_device, _to_host(x))
            # NumPy cannot read an array that is spread over several processes. It can read a constant in an internal
            # array class of JAX, which has no attribute `committed`.
            if hasattr(x, "committed") and (pin_memory or not x.is_fully_addressable):
                # `jax.device_put` would commit an uncommitted array to a device. JAX makes an uncommitted array from a
                # NumPy array.
                return Partial(_to_device if x.committed else np.asarray, _to_host(x))
            return np.asarray(x)

        step = _step_to_host(move, restored, differentiable=True, is_in_host_memory=True)
        super().__init__(save_on_cpu, (bool(pin_memory),), step, recompute, arguments, only)


# Jitted, because eager shard_map refuses a transfer that is not jitted.
@jax.jit
def _to_host(x: jax.Array) -> jax.Array:
    # Without `src`, the transpose of `jax.device_put` would leave the cotangent on the host.
    return jax.device_put(x, jax.memory.Space.Host, src=jax.memory.Space.Device)


@jax.jit
def _to_device(x: jax.Array) -> jax.Array:
    return jax.device_put(x, jax.memory.Space.Device)


class cast_saved(_ReadyPair):  # noqa: N801 - as save_on_cpu
    """Keep saved tensors in a narrower floating-point dtype, and bool arrays as bits.

        >>> loss = cast_saved()(lambda w, x: jnp.sum(jnp.tanh(x @ w)))
        >>> report = saved_tensors_report(loss, jnp.ones((8, 4)), jnp.ones((2, 8)))
        >>> report.total_bytes <= report.total_unpacked_bytes / 2
        True

    Only floating-point tensors wider than `dtype` are cast. bfloat16 has the range of float32, and changes a value by
    at most 1 part in 256. float16 is more exact, but values above 65504 become infinity. `pylayer_jax.packers`
    tells of the other arguments.

    Args:
        dtype: the floating-point dtype in which tensors are kept, of at least 16 bits.

    Raises:
        TypeError: for another dtype.
    """

    def __init__(
        self, dtype: Any = jnp.bfloat16, *, recompute: bool = True, arguments: bool = False, only: Only = None
    ) -> None:
        narrow = dtype
        with contextlib.suppress(TypeError):  # it is no dtype
            narrow = None if dtype is None else jnp.dtype(dtype)  # that of None is float64
        if not (isinstance(narrow, np.dtype) and jnp.issubdtype(narrow, jnp.floating)):
            raise TypeError(f"cast_saved: dtype must be a floating-point type such as jnp.bfloat16, got {narrow!r}.")
        if narrow.itemsize < 2:
            raise TypeError(
                f"cast_saved: the range of {narrow} is too small for saved tensors (float8_e4m3fn ends at 448; larger "
                "values become NaN). Use quantize_saved(8), which scales each block of values."
            )

        is_narrowed = lambda x: jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize > narrow.itemsize

        def pack(x: Any) -> Any:
            if x.dtype == np.bool_:
                return _pack_bits(x)
            return Partial(jax.lax.convert_element_type, x.astype(narrow), x.dtype) if is_narrowed(x) else x

        info = jnp.finfo(narrow)
        has_range = info.maxexp >= jnp.finfo(jnp.float32).maxexp  # else a value may overflow where its results do not
        error = Rounding(Error.RELATIVE if has_range else Error.OVERFLOWING, float(info.eps) / 2)
        step = Step(
            pack,
            restored,
            differentiable=True,
            rounding=lambda x: error if is_narrowed(x) else EXACT,
            size=lambda x: math.prod(x.shape) * narrow.itemsize if is_narrowed(x) else _n_bytes(x),
        )
        super().__init__(cast_saved, (narrow,), step, recompute, arguments, only)


class quantize_saved(_ReadyPair):  # noqa: N801 - as save_on_cpu
    """Keep saved tensors as 8-bit or 4-bit integers with a scale and an offset per block, and bool arrays as bits.

        >>> loss = quantize_saved(bits=8)(lambda x: jnp.sum(jnp.sin(jnp.cumsum(x, 1))))
        >>> report = saved_tensors_report(loss, jnp.ones((8, 128)))
        >>> report.total_unpacked_bytes, report.total_bytes
        (4096, 1120)

    The smallest value of a block is exact, -inf too, so that `jnp.where(mask, scores, -1e9)` does not harm the other
    scores. If the other finite values of the block range from a to b, a value v is kept as (v - a) / s, rounded to an
    integer, where s = (b - a) / (2^bits - 3): uniform quantization by group (Chen et al., "ActNN", 2021). Rounding to
    the nearest integer changes a value by at most s / 2, and stochastic rounding by less than s. Floating-point errors
    add at most 4 times the machine epsilon times max(|a|, |b|). If b - a is less than about 2^(bits + 1) times the
    smallest normal number, all values from a to b become a. NaN and inf become NaN, and do not affect other values.

    The blocks cover the last axis of each shard exactly, so that packing needs no padding, and no communication between
    devices. A tensor that packing would not make smaller is not packed. `pylayer_jax.packers` tells of the other
    arguments.

    Args:
        bits: the number of bits per value, 8 or 4.
        block_size: the largest number of values that share a scale. The length of a block divides the length of the
            axis, and is larger than `block_size` if no divisor is near it, as for a large prime length.
        stochastic: whether to round up or down at random, without bias. The random numbers are a hash of the value and
            of its position in the block. The default is True for 4 bits, where biased rounding harms training.

    Raises:
        ValueError: for other `bits`, or if `block_size` is not a positive even number.
    """

    def __init__(
        self,
        bits: int = 8,
        block_size: int = 128,
        stochastic: bool | None = None,
        *,
        recompute: bool = True,
        arguments: bool = False,
        only: Only = None,
    ) -> None:
        if bits not in (8, 4):
            raise ValueError(f"quantize_saved: bits must be 8 or 4, got {bits!r}.")
        if block_size < 2 or block_size % 2:
            raise ValueError(f"quantize_saved: block_size must be a positive even number, got {block_size!r}.")
        rounds_stochastically = bits == 4 if stochastic is None else bool(stochastic)
        n_bytes_of_block = lambda length, dtype: 3 * max(4, dtype.itemsize) + math.ceil(length * bits / 8)

        def block_length(x: Any, n_shards: int = 1) -> int:
            """Return 0 for what stays as it is: `jax.export` makes symbolic lengths."""
            is_float = jnp.issubdtype(x.dtype, jnp.floating)
            if not (is_float and x.ndim and isinstance(x.shape[-1], int) and x.shape[-1]):
                return 0
            length = _divisor_near(x.shape[-1] // n_shards, block_size)
            return length if n_bytes_of_block(length, x.dtype) < length * x.dtype.itemsize else 0

        def pack(x: Any) -> Any:
            if x.dtype == np.bool_:
                return _pack_bits(x)
            length = block_length(x) and block_length(x, shard_counts(x)[-1])
            if not length:
                return x
            sharding = explicit_sharding(x)
            packed = _quantize(x, bits, rounds_stochastically, length, sharding)
            return Partial(_dequantize, packed, bits, length, x.dtype, sharding)

        error = Rounding(Error.RANGE, 0.5 / (2**bits - 3))

        def size(x: Any) -> float:
            length = block_length(x)
            return math.prod(x.shape) * n_bytes_of_block(length, x.dtype) / length if length else _n_bytes(x)

        settings = bits, block_size, rounds_stochastically
        step = Step(pack, restored, rounding=lambda x: error if block_length(x) else EXACT, size=size)
        super().__init__(quantize_saved, settings, step, recompute, arguments, only)


def products_and_decisions(primitive: Any, *types: Any, **params: Any) -> bool:
    """Save matrix products without batch axes, convolutions, and what decides: a policy of `jax.checkpoint`.

        >>> layer = jax.checkpoint(lambda x, w: jax.nn.relu(x @ w), policy=products_and_decisions)
        >>> loss = quantize_saved(8)(lambda x, w: jnp.sum(layer(x, w) ** 2))

    Inside a block of hooks that round, a checkpoint computes everything else again from rounded products. So results
    that change by leaps (a comparison of floats, `sign`, `round`, a cast to integers, a sort, an argmax) are saved too.
    The policy cannot see which operand a max pooling compares: give it a name with `checkpoint_name`, and combine this
    policy with `jax.checkpoint_policies.save_only_these_names` by `save_from_both_policies`.
    """
    row = FACTS.get(primitive.name)
    if row is None:
        return False
    if row.is_product:
        return primitive.name != "dot_general" or not params["dimension_numbers"][1][0]
    is_rounding = primitive.name == "convert_element_type" and not jnp.issubdtype(params["new_dtype"], jnp.inexact)
    return (row.decides or is_rounding) and any(map(has_tangent, types))


# -- bits ------------------------------------------------------------------------------------------------


def _pack_bits(x: Any) -> Any:
    """Pack 8 bools into a byte, along the last axis whose length in each shard is a multiple of 8, if there is one."""
    for axis in reversed(range(x.ndim)):
        length = x.shape[axis]
        if isinstance(length, int) and length and (length // shard_counts(x)[axis]) % 8 == 0:
            return Partial(_unpack_bits, jnp.packbits(x, axis), axis)
    return x


def _unpack_bits(packed: jax.Array, axis: int) -> jax.Array:
    return jnp.unpackbits(packed, axis).astype(bool)


# -- quantization ----------------------------------------------------------------------------------------


@functools.cache
def _divisor_near(in_shard: int, largest: int) -> int:
    """Return the greatest divisor up to `largest`, or a larger one if it is far smaller: 1000 -> 125, 262 -> 131."""
    small = [n for n in range(1, math.isqrt(in_shard) + 1) if in_shard % n == 0]
    divisors = [*small, *(in_shard // n for n in small)]
    fitting = max(n for n in divisors if n <= largest)
    return fitting if fitting >= min(in_shard, largest // 8) else min(n for n in divisors if n > largest)


@functools.partial(jax.jit, static_argnums=(1, 2, 3, 4))
def _quantize(x: jax.Array, bits: int, stochastic: bool, length: int, sharding: Any) -> tuple[jax.Array, ...]:
    """Return uint8 codes [..., blocks, length], for 4 bits two in each uint8, and three numbers of each block.

    These are the smallest value; the smallest of the larger ones, or the largest finite one if there are none; and the
    largest finite value.
    """
    x = x.astype(jnp.float64 if x.dtype == jnp.float64 else jnp.float32)
    if sharding is not None:
        sharding = NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec, None))
    x = jnp.reshape(x, (*x.shape[:-1], x.shape[-1] // length, length), out_sharding=sharding)
    smallest, second, high = _ends(x)
    # JAX would move the broadcast of a constant out of a scan, and keep an array of the shape of `x`. Behind this
    # barrier, the constants depend on `x`. tests: test_a_scan_keeps_no_constant_of_the_quantizer
    constants = jnp.uint8(2**bits - 2), jnp.uint8(2**bits - 1), jnp.arange(length, dtype=jnp.uint32)
    high, smallest_code, nan_code, position = jax.lax.optimization_barrier((high, *constants))
    low = jnp.minimum(second, high)
    half = _half_step(low, high, bits)
    inverse = jnp.where(half >= jnp.finfo(x.dtype).tiny, 0.5 / half, 0)
    exact = x * _in_blocks(inverse, x) - _in_blocks(low * inverse - (0 if stochastic else 0.5), x)
    exact = exact + _dither(x, position) if stochastic else exact
    # The clamp also covers rounding errors. The cast rounds down.
    codes = jax.lax.clamp(jnp.zeros((), x.dtype), exact, jnp.asarray(2**bits - 3, x.dtype)).astype(jnp.uint8)
    # XLA may compute x a second time, with another rounding error, which could change the result of a comparison with
    # `smallest` or `low` itself. Therefore compare with the middle.
    middle = low - (low * 0.5 - smallest * 0.5)  # XLA would compute the sum of the halves as (a + b) / 2: an overflow
    codes = jnp.where(x <= _in_blocks(middle, x), smallest_code, codes)
    codes = jnp.where(x < jnp.inf, codes, nan_code)
    smallest = jnp.where(smallest < jnp.inf, smallest, low)  # `jax.debug_infs` would report inf in a block of NaN
    if bits == 4:
        if length % 2:
            codes = jnp.pad(codes, [(0, 0)] * (codes.ndim - 1) + [(0, 1)])
        codes = codes[..., ::2] | (codes[..., 1::2] << 4)
    return codes, smallest, low, high


def _in_blocks(numbers: jax.Array, x: jax.Array) -> jax.Array:
    """Broadcast numbers, one per block, to the shape of `x`, whose last axis runs through a block."""
    return jax.lax.broadcast_in_dim(numbers, x.shape, range(x.ndim - 1))


def _dither(x: jax.Array, position: jax.Array) -> jax.Array:
    """Hash each value and its position in the block to a number from 0 to 1."""
    # `salt` gets the rank of x, because jax_numpy_rank_promotion="raise" forbids operands of different ranks.
    salt = jnp.expand_dims(position * jnp.uint32(0x9E3779B9), range(x.ndim - 1))
    mixed = (jax.lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32) ^ salt) * jnp.uint32(0x85EBCA6B)
    mixed = (mixed ^ (mixed >> 15)) * jnp.uint32(0xC2B2AE35)
    return ((mixed ^ (mixed >> 13)) >> 8).astype(x.dtype) * 2.0**-24


def _ends(x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the smallest value of each block, the smallest of the larger ones or inf, and the largest finite one."""
    # The minimum of no elements is inf. As a function of x, it is not moved out of a scan: see `_quantize`.
    inf = _in_blocks(jnp.min(x[..., :0], axis=-1, initial=jnp.inf), x)
    is_number = x < jnp.inf  # False for NaN

    def reducer(a: Any, b: Any) -> Any:
        smallest, larger = jnp.minimum(a[0], b[0]), jnp.maximum(a[0], b[0])
        second = jnp.minimum(jnp.minimum(a[1], b[1]), jnp.where(larger > smallest, larger, jnp.inf))
        return smallest, second, jnp.maximum(a[2], b[2])

    # If separate reductions computed these, XLA would compute and keep their operand more than once.
    ends = jnp.inf, jnp.inf, jnp.finfo(x.dtype).min  # finite even if -inf alone is in a block
    operands = jnp.where(is_number, x, inf), inf, jnp.where(is_number, x, -inf)
    return jax.lax.reduce(operands, tuple(jnp.asarray(end, x.dtype) for end in ends), reducer, (x.ndim - 1,))


def _half_step(low: jax.Array, high: jax.Array, bits: int) -> jax.Array:
    # `high - low` may overflow; the difference of the halves does not.
    return (high * 0.5 - low * 0.5) / (2**bits - 3)


@functools.partial(jax.jit, static_argnums=(1, 2, 3, 4))
def _dequantize(packed: tuple[jax.Array, ...], bits: int, length: int, dtype: Any, sharding: Any) -> jax.Array:
    codes, smallest, low, high = packed
    if bits == 4:
        codes = jnp.stack([codes & 15, codes >> 4], axis=-1).reshape(*codes.shape[:-1], -1)[..., :length]
    high, nan = jax.lax.optimization_barrier((high, jnp.asarray(jnp.nan, high.dtype)))  # as in `_quantize`
    x = codes.astype(high.dtype)
    half = _half_step(low, high, bits)
    half, smallest, low, high = (_in_blocks(numbers, x) for numbers in (half, smallest, low, high))
    # A rounding error could move a value out of the range of the block, or make a positive value negative. Therefore
    # clamp. `2 * half` may overflow, so `x * half` is added twice.
    x = jax.lax.clamp(low, low + x * half + x * half, high)
    x = jnp.where(codes < 2**bits - 2, x, jnp.where(codes == 2**bits - 1, nan, smallest))
    return jnp.reshape(x, (*x.shape[:-2], -1), out_sharding=sharding).astype(dtype)


# -- files -----------------------------------------------------------------------------------------------


class save_on_disk(_ReadyPair):  # noqa: N801 - as save_on_cpu
    """Keep each saved tensor in a file, in eager mode and in compiled programs.

        >>> print(jax.grad(save_on_disk(folder)(jnp.sin))(0.0))
        1.0

    In eager mode, a file is removed when Python deletes the function that `jax.vjp` returned. In a compiled program, it
    is removed when the operation that wrote it runs again after backward has read it. `close()` and the end of the
    process remove all files. Pairs with the same directory share compiled programs, whose files the last `close()`
    removes. A killed process leaves its files in a folder named saved_tensors-*. `pylayer_jax.packers` tells of the
    other arguments.

    Args:
        directory: where the pair creates a folder for its files. It is created if needed.

    Raises:
        OSError: if the directory cannot be written to, or is full (complete files stay readable); in backward, if a
            file cannot be read, or has another checksum.
    """

    def __init__(
        self, directory: str | os.PathLike[str], *, recompute: bool = True, arguments: bool = False, only: Only = None
    ) -> None:
        path = os.path.abspath(directory)
        save = functools.partial(_File, _Folder(path))
        step = _step_to_host(save, _File.restored, host=True)
        super().__init__(save_on_disk, (path,), step, recompute, arguments, only)


class _Folder:
    def __init__(self, directory: str) -> None:
        try:
            os.makedirs(directory, exist_ok=True)
            self.path = tempfile.mkdtemp(prefix="saved_tensors-", dir=directory)
        except OSError as error:
            raise _unwritable_error(error, directory, "a folder") from error
        weakref.finalize(self, _in_process, os.getpid(), shutil.rmtree, self.path, True)


class _File:
    def __init__(self, folder: _Folder, x: np.ndarray) -> None:
        self._folder = folder  # this reference keeps the folder as long as its files
        self._shape, self._dtype = x.shape, x.dtype
        content = np.ascontiguousarray(x).reshape(-1).view(np.uint8).data
        self._checksum = zlib.crc32(content)
        try:
            handle, self._path = tempfile.mkstemp(dir=folder.path)
            weakref.finalize(self, _in_process, os.getpid(), os.unlink, self._path)
            with os.fdopen(handle, "wb") as file:
                file.write(content)
        except OSError as error:
            raise _unwritable_error(error, folder.path, f"{x.nbytes} bytes") from error

    def restored(self) -> np.ndarray:
        try:
            content = np.fromfile(self._path, dtype=np.uint8)
            if zlib.crc32(content.data) != self._checksum:
                raise OSError(errno.EIO, "it holds other bytes than those that were written")
        except OSError as error:
            text = (
                f"save_on_disk: the file of a tensor of dtype {self._dtype} and shape {self._shape} cannot be used "
                f"({error.strerror}). Something else changed it; give save_on_disk a directory of its own"
            )
            raise OSError(error.errno, text, self._path) from error
        return content.view(self._dtype).reshape(self._shape)


def _in_process(process: int, remove: Any, *args: Any) -> None:
    if os.getpid() == process:  # a forked process inherits the finalizers, but the files belong to its parent
        with contextlib.suppress(OSError):  # the folder of a file may have been removed before
            remove(*args)


def _unwritable_error(error: OSError, directory: str, what: str) -> OSError:
    advice = "Choose a directory that is writable and has room"
    return OSError(error.errno, f"save_on_disk could not write {what} ({error.strerror}). {advice}", directory)


def _why_not_inside(hooks: Any) -> str:
    """Return why this cannot be a pair inside another one, or ""."""
    if not isinstance(hooks, saved_tensors_hooks):
        return "it is no pair of hooks"
    reasons = {
        "a by_name gets chains, as in by_name({name: chain(...)})": hooks._pair.by_name,
        "a limit is for a whole function, so decorate the function with this pair alone": hooks._pair.limit,
        "its `only` is for all of its steps, so give it to the outer pair": hooks._pair.only,
    }
    return next((reason for reason, option in reasons.items() if option is not None), "")


class chain(saved_tensors_hooks):  # noqa: N801 - as save_on_cpu
    """Pack tensors with the first pair, pack the results with the second pair, and so on; unpack in reverse order.

        >>> pair = chain(quantize_saved(8), save_on_cpu())
        >>> jax.grad(pair(lambda x: jnp.sum(jnp.sin(x + x))))(jnp.ones((8, 128))).shape
        (8, 128)

    The second pair packs the arrays that the first pair returns, and the tensors that it leaves unpacked. Here,
    `quantize_saved` packs a float32 tensor of shape [1024, 1024] as four arrays: integers of shape [1024, 8, 128], and
    three numbers for each block, each of shape [1024, 8]. `save_on_cpu` and `save_on_disk` move these four, and no
    other integers.

    A chain is `differentiable` (an argument of `saved_tensors_hooks`), packs values from outside the block, and
    computes cheap operations again, if every pair does.

    Args:
        pairs: ready pairs, `saved_tensors_hooks`, or chains. `save_on_cpu`, `save_on_disk` and other pairs with
            `host=True` must come last. The predicate `only` of a pair gets the arrays that this pair would pack.
        only: a predicate of each saved tensor, before any pair of the chain packs it.

    Raises:
        TypeError: if an argument is not a pair, or if there are no arguments.
        ValueError: for a pair in the wrong place, a `by_name`, a pair with a limit, or a chain with `only`.
    """

    def __init__(self, *pairs: saved_tensors_hooks, only: Only = None) -> None:
        if not pairs:
            raise TypeError("chain takes one pair of hooks or more, got none.")
        steps: list[Step] = []
        for number, hooks in enumerate(list[Any](pairs), 1):
            if not isinstance(hooks, saved_tensors_hooks):
                hint = " Write it with parentheses." if isinstance(hooks, type) else ""
                raise TypeError(f"chain: argument {number} must be a pair of hooks, got {hooks!r}.{hint}")
            if reason := _why_not_inside(hooks):
                raise ValueError(f"chain: argument {number}, {hooks!r}, cannot be in a chain: {reason}.")
            if steps and (steps[-1].host or steps[-1].is_in_host_memory):
                raise ValueError(
                    f"chain: {pairs[number - 2]!r} must come last, since it packs to the host, where "
                    f"{hooks!r} could not pack it in a compiled program. Change the order."
                )
            own = f"pair {number} of the chain, {hooks!r}"
            steps += [step._replace(name=f"{step.name} in {own}" if step.name else own) for step in hooks._pair.steps]
        self._set_up(
            chain,
            (*[hooks._pair.key for hooks in pairs], key_of(only)),
            steps,
            recomputes_elementwise=all(hooks._pair.recomputes_elementwise for hooks in pairs),
            packs_arguments=all(hooks._pair.packs_arguments for hooks in pairs),
            only=predicate("chain", only),
        )


class by_name(saved_tensors_hooks):  # noqa: N801 - as save_on_cpu
    """Pack each tensor with the pair that a dict holds for the name of the tensor.

        >>> pair = by_name({"tanh": cast_saved(), ...: quantize_saved(8)})
        >>> jax.grad(pair(lambda x: jnp.sum(jnp.tanh(x))))(jnp.ones((8, 128))).shape
        (8, 128)

    Of the names in a tensor's origin (see `saved_tensors_hooks`), the first that is a key decides: `info.name`,
    `info.layer`, `info.operation`, then those in `info.inside`, innermost first. So the class name of a module selects
    the tensors that it computes: `{"Attention": save_on_cpu(), ...: None}`. The key `...` is for all others.
    `saved_tensors_report` prints a name of each tensor. Such a pair decorates a function; it is no block.

    Backward computes cheap operations again, and values from outside the block are packed, only if all pairs say so.

    Args:
        pairs: a dict from a name, or Ellipsis, to a pair of hooks, a chain, or None: such tensors, and those without a
            key, are not packed.

    Raises:
        TypeError: if `pairs` is not a mapping from names to pairs, or contains a `by_name`, a pair with a limit, or a
            chain with `only`.

    Warns:
        UserWarning: if a key is the name of no tensor that is kept, although others are; once per pair.
    """

    def __init__(self, pairs: Mapping[Any, saved_tensors_hooks | None]) -> None:
        given: Any = pairs
        if not isinstance(given, Mapping) or not given:
            raise TypeError(f"by_name takes a dict from names to pairs of hooks, got {pairs!r}.")
        for key, hooks in given.items():
            reason = "" if hooks is None else _why_not_inside(hooks)
            if reason or not (key is ... or isinstance(key, str)):
                raise TypeError(
                    "by_name: expected a name or the Ellipsis `...`, with a pair of hooks or None; got "
                    f"{key!r}: {hooks!r}{reason and f' ({reason})'}."
                )
        self._made_with = ((dict(pairs),), {})  # a later change of the caller's dict does not change `repr` and copies
        pair_of = {key: None if hooks is None else hooks._pair for key, hooks in pairs.items()}
        present = [pair for pair in pair_of.values() if pair is not None]
        self._set_up(
            by_name,
            (frozenset((key, pair and pair.key) for key, pair in pair_of.items()),),
            (),
            recomputes_elementwise=all(pair.recomputes_elementwise for pair in present),
            packs_arguments=all(pair.packs_arguments for pair in present),
            by_name={key: () if pair is None else pair.steps for key, pair in pair_of.items()},
        )
