"""`assert_equivalent`: the outputs and derivatives of a layer against those of a reference in plain JAX."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ._comparison import Comparison, MismatchError, mismatch_of
from ._flat_function import FlatFunction, flat_function
from ._variants import gradient_variants


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

    The reference defines the right gradients, even if they are not the derivatives of the outputs: for a
    straight-through `round` it is `lambda x: x + jax.lax.stop_gradient(jnp.round(x) - x)`. The derivatives are computed
    several times, as in `gradcheck`; also under `jax.jit`, unless the layer needs concrete values.

    Args:
        layer: a layer class, or a function of `args`.
        reference: a function of the same `args` that returns the same tensors, in any containers.
        args: any pytrees, as a tuple. The arrays must lie on devices of this process.
        orders: the orders of differentiation to compare, from 0 to 3: 0 compares outputs, 1 gradients, 2 gradients of
            gradients.
        rtol: relative tolerance; the square root of the machine epsilon by default.
        atol: absolute tolerance; by default the square root of the machine epsilon times the largest entry of the
            array.
        seed: seed of the cotangents.

    Raises:
        AssertionError: if the layer differs. The message names the output or argument, the index, and both values.
        TypeError, ValueError: if there is nothing to compare, or an argument lies on devices of other processes.
    """
    name, flat = flat_function("assert_equivalent", layer, args)
    flat_reference = flat_function("assert_equivalent", reference, args)[1]
    if not orders or any(order not in range(4) for order in orders):
        raise ValueError(f"assert_equivalent: expected orders from 0 to 3, got {tuple(orders)}.")
    for order in sorted(set(orders)):
        with mismatch_of(name, order):
            compare_with_reference(flat, flat_reference, order, rtol, atol, np.random.default_rng(seed))


def compare_with_reference(
    flat: FlatFunction,
    reference: FlatFunction,
    order: int,
    rtol: float | None,
    atol: float | None,
    rng: np.random.Generator,
) -> None:
    """Compare the outputs and, from order 1 on, all variants of the derivatives of that order.

    Raises:
        MismatchError: if they differ.
    """
    comparison = Comparison(rtol, atol, "the reference")
    outputs = _compare_outputs(flat, reference, comparison, "")
    for _ in range(1, order):
        cotangents = flat.random_cotangents(outputs, rng)
        flat, reference = flat.grad_function(cotangents), reference.grad_function(cotangents)
        outputs = _compare_outputs(flat, reference, comparison, "gradient ")
    if not order:
        return
    cotangents = flat.random_cotangents(outputs, rng)
    expected: dict[tuple[int, ...], list[Any]] = {}
    for found in gradient_variants(flat, cotangents):
        if found.leak:
            raise MismatchError(found.leak)
        if found.outputs not in expected:
            expected[found.outputs] = reference.grads({k: cotangents[k] for k in found.outputs})
        for j, gradient in found.by_argument.items():
            name = f"the gradient of {flat.names[j]}{found.label}"
            comparison.of_arrays(gradient, expected[found.outputs][j], name)


def _compare_outputs(flat: FlatFunction, reference: FlatFunction, comparison: Comparison, kind: str) -> list[Any]:
    outputs, expected = flat.outputs(flat.values), reference.outputs(reference.values)
    if len(outputs) != len(expected):
        raise MismatchError(f"{len(outputs)} tensors are returned, but {len(expected)} by {comparison.right}.")
    for i, pair in enumerate(zip(outputs, expected, strict=True)):
        comparison.of_arrays(*pair, f"{kind}output {i}")
    return outputs
