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

    Gradients are taken all at once, for each output and each argument alone, again, after `fun` ran on other values,
    and under `jax.jit` unless `fun` needs concrete values. Skipped are integer, boolean and key arguments, and outputs
    without a gradient: integers, and what is marked as not differentiable. Arguments should be away from kinks, where
    the derivative is not the limit of differences.

    Args:
        fun: a layer class, or a function of `args` that returns any pytree with tensors.
        args: any pytrees, as a tuple. Statics are passed through.
        rtol: relative tolerance; the cube root of the machine epsilon by default.
        atol: absolute tolerance; the square root of the machine epsilon by default.
        step: how far arguments move, times their size where that is above 1; the cube root of the epsilon by default.
        limit: the most entries of each array that are moved one by one. Of a larger one that many are chosen, and all
            entries are moved along one random direction.
        seed: of the cotangents that sum the outputs up, and of these choices.
        float64: compute in float64 and complex128 whatever the dtypes of `args`, where `fun` can; where it cannot, in
            the dtypes given, with the wider tolerances that these need. Pass False for a `fun` that rounds to
            narrower dtypes within.

    Returns:
        True, so that `assert gradcheck(...)` reads as in torch.

    Raises:
        AssertionError: names the argument and the index that are most wrong, both values and the tolerance.
        TypeError, ValueError: where there is nothing to check.
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
    """`gradcheck`, and then the same for the gradients: second derivatives by reverse over reverse.

    Gradients are functions of the arguments and of the cotangents, so that both are moved. All else is as in
    `gradcheck`.
    """
    settings = Settings(rtol, atol, step, limit, seed, float64)
    return _gradcheck(*flat_function("gradgradcheck", fun, args), (1, 2), settings)


def _gradcheck(name: str, flat: FlatFunction, orders: Sequence[int], settings: Settings) -> bool:
    for order in orders:
        with mismatch_of(name, order):
            compare_numerically(flat, order, settings)
    return True
