"""`assert_equivalent`: the outputs and derivatives of a layer against those of a reference in plain JAX."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ._comparison import Comparison, MismatchError, error_of, rounded_otherwise, rounding_noise
from ._flat_function import FlatFunction, flat_function
from ._other_values import compare_at_other_values, sentence_of
from ._runs import at_once, every_run, times

__tracebackhide__ = True  # pytest hides the frames of this module


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
    several times, as in `gradcheck`; also for other values than `args`, if the layer takes these, and under `jax.jit`,
    unless the layer needs concrete values.

    Args:
        layer: a layer class, or a function of `args`.
        reference: a function of the same `args` that returns the same tensors, in any containers. If it returns
            statics, they have to be those of the layer.
        args: any pytrees, as a tuple. The arrays must lie on devices of this process.
        orders: the orders of differentiation to compare, from 0 to 3: 0 compares outputs, 1 gradients, 2 gradients of
            gradients.
        rtol: relative tolerance; the square root of the machine epsilon by default.
        atol: absolute tolerance; by default the square root of the machine epsilon times the largest entry of the
            array, and what rounding errors of the arguments change.
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
        try:
            compare_with_reference(flat, flat_reference, order, rtol, atol, seed)
        except MismatchError as error:
            raise error_of(name, order, error) from None


def compare_with_reference(
    flat: FlatFunction,
    reference: FlatFunction,
    order: int,
    rtol: float | None,
    atol: float | None,
    seed: int,
) -> str:
    """Compare the outputs and, from order 1 on, the derivatives of that order, computed in every way.

    Returns:
        A sentence about the comparison.

    Raises:
        MismatchError: if they differ.
    """
    comparison = Comparison(rtol, atol, flat.epsilon([]), "the reference")
    _compare_at(flat, reference, order, comparison, np.random.default_rng(seed), every_run)

    def compare(other: FlatFunction) -> None:
        there = reference.with_values(other.values)
        _compare_at(other, there, order, comparison, np.random.default_rng(seed), at_once)

    too, refusal = compare_at_other_values(flat, order, seed, compare)
    return sentence_of("as those of the reference", [too], refusal)


def _compare_at(
    flat: FlatFunction, reference: FlatFunction, order: int, comparison: Comparison, rng: np.random.Generator, runs: Any
) -> None:
    _compare_statics(flat, reference, comparison)
    outputs = _compare_outputs(flat, reference, comparison, "")
    for _ in range(1, order):
        cotangents = flat.random_cotangents(outputs, rng)
        flat, reference = flat.grad_function(cotangents), reference.grad_function(cotangents)
        outputs = _compare_outputs(flat, reference, comparison, "gradient ")
    if not order:
        return
    cotangents = flat.random_cotangents(outputs, rng)
    otherwise = reference.with_values(rounded_otherwise(reference.values))
    noise = rounding_noise(reference.grads(cotangents), otherwise.grads(cotangents))
    expected: dict[tuple[Any, ...], list[Any]] = {}
    for run in runs(flat, cotangents):
        key = (*run.cotangents, run.factor)
        if key not in expected:
            expected[key] = [times(1 / run.factor, g) for g in reference.grads(run.cotangents)]
        for j, gradient in run.gradients.items():
            name = f"the gradient of {flat.names[j]}{run.label}"
            comparison.of_arrays(gradient, expected[key][j], name, noise[j])


def _compare_outputs(flat: FlatFunction, reference: FlatFunction, comparison: Comparison, kind: str) -> list[Any]:
    outputs, expected = flat.run(), reference.run()
    if len(outputs) != len(expected):
        raise MismatchError(f"{len(outputs)} tensors are returned, but {len(expected)} by {comparison.right}.")
    noise = rounding_noise(expected, reference.outputs(rounded_otherwise(reference.values)))
    comparison.of_all(outputs, expected, [f"{kind}output {i}" for i in range(len(outputs))], "", noise)
    return outputs


def _compare_statics(flat: FlatFunction, reference: FlatFunction, comparison: Comparison) -> None:
    statics, expected = flat.run_with_statics()[1], reference.run_with_statics()[1]
    if not expected or (len(statics) == len(expected) and all(map(_is_same_static, statics, expected))):
        return
    raise MismatchError(f"the statics {statics!r} are returned, but {expected!r} by {comparison.right}.")


def _is_same_static(a: Any, b: Any) -> bool:
    if type(a) is not type(b) or type(a).__eq__ is object.__eq__:  # two runs may return two objects, such as functions
        return type(a) is type(b)
    try:
        return bool(a == b) or bool(a != a and b != b)  # NaN
    except Exception:  # a static need not be comparable
        return True
