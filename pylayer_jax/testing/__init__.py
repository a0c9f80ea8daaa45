"""Checks of layers for a test suite: against numerical gradients, a reference, and every way to run a layer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ._check_layer import PROPERTIES, LayerReport, row_of
from ._comparison import Comparison
from ._flat_function import Flat, MismatchError, flat_of, name_of
from ._layer_under_test import Subject
from ._numerical import Settings, compare_numerically

__all__ = ["assert_equivalent", "check_layer", "gradcheck", "gradgradcheck"]


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
        seed: of the weights that sum the outputs up, and of these choices.
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
    return _gradcheck(*flat_of("gradcheck", fun, args), (1,), settings)


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
    return _gradcheck(*flat_of("gradgradcheck", fun, args), (1, 2), settings)


def assert_equivalent(
    layer: Callable[..., Any],
    reference: Callable[..., Any],
    args: Sequence[Any],
    *,
    orders: Sequence[int] = (0, 1, 2),
    rtol: float | None = None,
    atol: float | None = None,
    seed: int = 0,
) -> None:
    """Compare the outputs of a layer, and its derivatives by reverse mode, with those of a function in plain JAX.

    The reference says what the gradients are meant to be, also where they are not those of the outputs: for a
    straight-through `round` it is `lambda x: x + jax.lax.stop_gradient(jnp.round(x) - x)`. Derivatives are taken in all
    the ways of `gradcheck`, `jax.jit` included, unless the layer needs concrete values.

    Args:
        layer: a layer class, or a function of `args`.
        reference: a function of the same `args` that returns the same tensors, in any containers.
        args: any pytrees, as a tuple.
        orders: which are compared: 0 for outputs, 1 for gradients, 2 for the gradients of these, and so on.
        rtol: relative tolerance; the square root of the machine epsilon by default.
        atol: absolute tolerance; by default the same times the largest entry of the array.
        seed: of the cotangents.

    Raises:
        AssertionError: names the output or argument, the index, and both values.
        TypeError, ValueError: where there is nothing to compare.
    """
    name, flat = flat_of("assert_equivalent", layer, args)
    plain = flat_of("assert_equivalent", reference, args)[1]
    if not orders or any(order not in range(4) for order in orders):
        raise ValueError(f"assert_equivalent: expected orders from 0 to 3, got {tuple(orders)}.")
    for order in sorted(set(orders)):
        try:
            Comparison(rtol, atol, "the reference").of_order(order, flat, plain, np.random.default_rng(seed))
        except MismatchError as error:
            raise AssertionError(f"{name}, {_ORDERS[order]}: {error}") from error


def check_layer(
    layer: Callable[..., Any],
    *args: Any,
    reference: Callable[..., Any] | None = None,
    skip: Sequence[str] = (),
    rtol: float | None = None,
    atol: float | None = None,
    seed: int = 0,
    float64: bool = True,
    raises: bool = True,
) -> LayerReport:
    """Check a layer in every way in which JAX may run it.

    The properties are, by their names in the report:

    - eager: outputs and gradients can be computed;
    - jit, vmap, scan, cond, remat, shard_map: these give the same outputs and gradients. vmap and scan of several
      examples, of integer, boolean and key arguments too where the layer takes these mapped; shard_map on all devices
      there are, with replicated arguments, or in the mesh of `jax.set_mesh`;
    - gradients, second order: as numerically, or as those of `reference`;
    - forward mode: `jax.jvp` agrees with reverse mode (and with the `reference`), under jit and of vmap too. A layer
      that has none passes;
    - forward over reverse: `jax.jvp` of the gradients agrees with their reverse mode, and with forward over forward
      where there is one. A layer that refuses it passes, with the reason;
    - arguments: each argument alone has the same gradient as beside the others;
    - cotangents: a missing cotangent (None, after `ctx.set_materialize_grads(False)`) counts as zero;
    - repeatable: gradients do not depend on what ran before or in between, on other values, statics or shapes;
    - leaks: no traced value outlives its trace;
    - saved: how many arrays are kept for backward, and how many bytes.

    A global that backward reads and that only code outside of the layer changes is a constant to these checks.

    Args:
        layer: a layer class, or a function of `args` that applies one.
        *args: any pytrees. Floating-point and complex arrays are differentiated, statics passed through.
        reference: a function of the same arguments in plain JAX whose outputs and derivatives are right, for a layer
            whose backward is not the gradient of its forward. As in `assert_equivalent`.
        skip: names of properties that the layer is not meant to have.
        rtol: relative tolerance; by default the square root of the machine epsilon, and numerically as in `gradcheck`.
        atol: absolute tolerance; the same.
        seed: of the cotangents and tangents.
        float64: compare numerically in float64 and complex128 where the layer can, as in `gradcheck`.
        raises: whether a property that fails, or that could not be tested, is an error.

    Raises:
        AssertionError: with the whole report, unless `raises` is False.
        TypeError, ValueError: where there is nothing to check, or `skip` has an unknown name.
    """
    _, flat = flat_of("check_layer", layer, args)
    plain = None if reference is None else flat_of("check_layer", reference, args)[1]
    if unknown := [name for name in skip if name not in PROPERTIES]:
        raise ValueError(f"check_layer: skip={unknown}: expected names among {', '.join(PROPERTIES)}.")
    subject = Subject(flat, plain, rtol, atol, seed, float64)
    rows = [row_of("eager", subject.run)]
    if rows[0].passed:
        rows += [row_of(name, lambda of=of: of(subject)) for name, of in PROPERTIES.items() if name not in skip]
    report = LayerReport(name_of(layer), tuple(rows))
    if raises and not report.passed:
        raise AssertionError(f"check_layer of {report}")
    return report


def _gradcheck(name: str, flat: Flat, orders: Sequence[int], settings: Settings) -> bool:
    for order in orders:
        try:
            compare_numerically(flat, order, settings)
        except MismatchError as error:
            raise AssertionError(f"{name}, {_ORDERS[order]}: {error}") from error
    return True


_ORDERS = ("values", "first order", "second order", "third order")
