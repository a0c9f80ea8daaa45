"""`gradcheck` and `gradgradcheck`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ._central_differences import Settings
from ._comparison import MismatchError, error_of
from ._flat_function import FlatFunction, flat_function
from ._numerical_gradients import compare_numerically
from ._runs import every_run

__tracebackhide__ = True  # pytest hides the frames of this module


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

    The gradients are computed in float64, and in the dtypes of `args`; for `args`, and for random other values if `fun`
    takes these. In the dtypes of `args` they are computed several times: for all outputs and arguments at once, for
    each output only, for each argument only, a second time, after `fun` ran on other values, with cotangents of the
    other sign, large ones and small ones, and under `jax.jit` unless `fun` needs concrete values. Other values remain
    positive, in [-1, 1], or sorted along the last axis if `args` are; where only such as symmetric matrices are right,
    check a function that makes them: `lambda a: Layer.apply((a + a.T) / 2)`.
    Arguments that are integers, booleans or keys are not differentiated. Outputs without a gradient are ignored:
    integers, and outputs marked as not differentiable. Choose arguments away from kinks, because the derivative is not
    the limit of central differences there.

    Args:
        fun: a layer class, or a function of `args` that returns any pytree with tensors.
        args: any pytrees, as a tuple. `fun` gets statics unchanged. The arrays must lie on devices of this process.
        rtol: relative tolerance; by default the cube root of the machine epsilon against numerical derivatives of the
            same dtype, and its square root against those in float64.
        atol: absolute tolerance; by default the square root of the machine epsilon times the largest derivative of the
            argument.
        step: the distance by which an entry is perturbed, times the size of the entry if that is above 1; the cube root
            of the machine epsilon by default, and for a small entry perhaps that times its size or that of the largest.
        limit: arrays with at most this many entries are perturbed entry by entry; larger arrays at this many random
            entries and along one random direction.
        seed: seed of the weights with which the outputs are summed, and of the random entries and directions.
        float64: compute numerical derivatives in float64 and complex128 if `fun` accepts these dtypes. Otherwise, and
            if `float64` is False, compute them in the dtypes of `args` with wider tolerances. Pass False if `fun`
            rounds to a narrower dtype internally.

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
        try:
            compare_numerically(flat, order, settings, every_run)
        except MismatchError as error:
            raise error_of(name, order, error) from None
    return True
