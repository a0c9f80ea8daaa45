"""Provides `gradcheck`, `gradgradcheck` and `assert_equivalent`, which run some of the checks of `check_layer`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ._compare import MismatchError
from ._gradients import gradients, outputs
from ._runs import arguments, cotangents, leaks, linear, repeatable
from ._subject import Options, Subject, run_check
from ._tensor_function import name_of, tensor_function

__tracebackhide__ = True  # pytest hides the frames of this module

_CHECKS = (gradients, repeatable, cotangents, arguments, linear, leaks)
_ORDERS = ("values", "first order", "second order", "third order")


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
    """Compare the gradients of a layer, or of a function that applies layers, with central differences.

        >>> gradcheck(Tanh, (x,))
        True
        >>> gradcheck(lambda x, w: Tanh.apply(x @ w), (x, w))
        True

    Gradients in float64 are compared with central differences, and gradients in the dtypes of `args` with gradients in
    float64. The gradients must be the same if only one output or argument is used, in a second run, after `fun` ran on
    other values, and under `jax.jit` unless `fun` needs concrete values. The gradients must also be linear in the
    cotangents. If `fun` accepts random values, its gradients at random values are compared too. Random values are
    positive, in [-1, 1], or sorted along the last axis if `args` are. If `fun` needs special values such as symmetric
    matrices, check a function that makes these values: `lambda a: Layer.apply((a + a.T) / 2)`. Choose arguments away
    from kinks, where even a right gradient may differ from the central difference.

    Args:
        fun: a layer class, or a function of `args` that returns any pytree with tensors.
        args: a tuple of any pytrees. JAX differentiates with respect to the floating-point and complex arrays in them.
        rtol: relative tolerance. The default is the cube root of the machine epsilon for comparisons with central
            differences, and the square root of the machine epsilon for other comparisons.
        atol: absolute tolerance. The default is `sqrt(eps) * max(abs(gradient))`, where `eps` is the machine epsilon.
            The estimated rounding errors are added to both tolerances.
        step: the distance by which an entry is perturbed, times the size of the entry if this size is above 1. The
            default is the cube root of the machine epsilon, or less for small entries.
        limit: the largest number of entries of an array that are perturbed one by one. In a larger array, this number
            of random entries and one random direction are perturbed.
        seed: seed of the weights with which the outputs are summed, and of the random entries and directions.
        float64: compute numerical derivatives in float64 and complex128 if `fun` accepts these dtypes. Pass False if
            `fun` rounds to a narrower dtype internally; the tolerances are then wider.

    Raises:
        AssertionError: if a gradient is wrong; otherwise `gradcheck` returns True, as in torch. The message names the
            argument and the index with the largest error, both values and the tolerance.
        TypeError, ValueError: if there is nothing to check, or an argument lies on devices of other processes.
    """
    _check("gradcheck", fun, None, args, [1], Options(rtol, atol, step, limit, seed, float64))
    return True


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
    """Run `gradcheck`, and then compare second derivatives (reverse over reverse) with central differences.

        >>> gradgradcheck(Tanh, (x,))
        True

    Gradients are functions of the arguments and of the cotangents, so both are perturbed. `gradcheck` describes the
    parameters and the errors.
    """
    _check("gradgradcheck", fun, None, args, [1, 2], Options(rtol, atol, step, limit, seed, float64))
    return True


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
    """Compare the outputs and the reverse-mode derivatives of a layer with those of a function in plain JAX.

        >>> assert_equivalent(Round, lambda x: x + jax.lax.stop_gradient(jnp.round(x) - x), (x,))

    The reference defines the right gradients, even if they are not the derivatives of the outputs, as in this example.
    `assert_equivalent` runs the same checks as `gradcheck`, also for random values.

    A layer may run on several devices. The reference then runs on one device, and is compared with each copy of an
    output or of a gradient. The error says if all entries are wrong by one factor, such as the number of devices. Pass
    arguments whose entries differ, because equal shards hide mistakes.

    Args:
        layer: a layer class, or a function of `args`, such as a `jax.shard_map` or a jitted function of sharded arrays.
        reference: a function of the same `args` that returns the same tensors, in any containers. If the reference also
            returns other objects, the layer must return equal objects.
        args: a tuple of any pytrees.
        orders: the orders of the derivatives to compare: 0 for outputs, 1 for gradients, 2 and 3 for second and
            third derivatives.
        rtol: relative tolerance. The default is the square root of the machine epsilon.
        atol: absolute tolerance, as in `gradcheck`.
        seed: seed of the random cotangents.

    Raises:
        AssertionError: if a result of the layer is wrong. The message names the output or argument, the index with the
            largest error, and both values.
        TypeError, ValueError: if there is nothing to compare, or an argument lies on devices of other processes.
    """
    if not orders or any(order not in range(4) for order in orders):
        raise ValueError(f"assert_equivalent: expected orders from 0 to 3, got {tuple(orders)}.")
    _check("assert_equivalent", layer, reference, args, orders, Options(rtol, atol, seed=seed))


def _check(checker: str, fun: Any, reference: Any, args: Any, orders: Sequence[int], options: Options) -> None:
    right = None if reference is None else tensor_function(checker, reference, args, on_one_device=True)
    subject = Subject(tensor_function(checker, fun, args), right, options)
    for order in range(max(orders) + 1):
        if order > 1:
            subject = subject.derivative
        try:
            for check in () if order not in orders else _CHECKS if order else (outputs,):
                run_check(check(subject))
        except MismatchError as error:
            raise AssertionError(f"{checker} of {name_of(fun)}, {_ORDERS[order]}: {error}") from None
