"""`gradcheck` and `gradgradcheck`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ._comparison import mismatch_of
from ._flat_function import FlatFunction, flat_function
from ._numerical import Settings, compare_numerically


def gradcheck(
    fun: Callable[..., Any],
    args: Sequence[Any],
    *,
    rtol: float | None = None,
    atol: float | None = None,
    step: float | None = None,
    limit: int = 200,
    seed: int = 0,
    float64: bool = True,
) -> bool:
    """Compare the gradients of a layer, or of a function of layers, with central differences.

    The gradients are computed several times: for all outputs and arguments at once, for each output only, for each
    argument only, a second time, after `fun` ran on other values, and under `jax.jit` unless `fun` needs concrete
    values. Arguments that are integers, booleans or keys are not differentiated. Outputs without a gradient are
    ignored: integers, and outputs marked as not differentiable. Choose arguments away from kinks, because the
    derivative is not the limit of central differences there.

    Args:
        fun: a layer class, or a function of `args` that returns any pytree with tensors.
        args: any pytrees, as a tuple. `fun` gets statics unchanged. The arrays must lie on devices of this process.
        rtol: relative tolerance; the cube root of the machine epsilon by default.
        atol: absolute tolerance; the square root of the machine epsilon by default.
        step: the distance by which an entry is perturbed, times the size of the entry if that is above 1; the cube root
            of the machine epsilon by default.
        limit: arrays with at most this many entries are perturbed entry by entry; larger arrays at this many random
            entries and along one random direction.
        seed: seed of the weights with which the outputs are summed, and of the random entries and directions.
        float64: compute in float64 and complex128 if `fun` accepts these dtypes. Otherwise, and if `float64` is False,
            compute in the dtypes of `args` with wider tolerances. Pass False if `fun` rounds to a narrower dtype
            internally.

    Returns:
        True; `assert gradcheck(...)` therefore reads as in torch.

    Raises:
        AssertionError: if a gradient is wrong. The message names the argument and the index with the largest error,
            both values and the tolerance.
        TypeError, ValueError: if there is nothing to check, or an argument lies on devices of other processes.
    """
    settings = Settings(rtol, atol, step, limit, seed, float64)
    return _gradcheck(*flat_function("gradcheck", fun, args), (1,), settings)


def gradgradcheck(
    fun: Callable[..., Any],
    args: Sequence[Any],
    *,
    rtol: float | None = None,
    atol: float | None = None,
    step: float | None = None,
    limit: int = 200,
    seed: int = 0,
    float64: bool = True,
) -> bool:
    """Run `gradcheck`, and then compare the second derivatives, by reverse over reverse, with central differences.

    Gradients are functions of the arguments and of the cotangents; both are therefore perturbed. For everything else
    see `gradcheck`.
    """
    settings = Settings(rtol, atol, step, limit, seed, float64)
    return _gradcheck(*flat_function("gradgradcheck", fun, args), (1, 2), settings)


def _gradcheck(name: str, flat: FlatFunction, orders: Sequence[int], settings: Settings) -> bool:
    for order in orders:
        with mismatch_of(name, order):
            compare_numerically(flat, order, settings)
    return True
