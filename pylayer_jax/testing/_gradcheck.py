"""`gradcheck`, `gradgradcheck` and `assert_equivalent`: some rows of the table, on a function or on its gradient."""

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
    """Compare the gradients of a layer, or of a function of layers, with central differences.

        >>> gradcheck(Tanh, (x,))
        True
        >>> gradcheck(lambda x, w: Tanh.apply(x @ w), (x, w))
        True

    Gradients in float64 are compared with central differences, and gradients in the dtypes of `args` with those in
    float64. They must be the same if only one output or argument is used, in a second run, after `fun` ran on other
    values, with negative, large and small cotangents, and under `jax.jit` unless `fun` needs concrete values. All this
    is also compared for other, random values, if `fun` takes these. They are positive, in [-1, 1], or sorted along the
    last axis if `args` are. If `fun` takes only special values such as symmetric matrices, check a function that makes
    them: `lambda a: Layer.apply((a + a.T) / 2)`. Choose arguments away from kinks, where even a right gradient may
    differ from the central difference.

    Args:
        fun: a layer class, or a function of `args` that returns any pytree with tensors.
        args: any pytrees, as a tuple. Arrays of floating-point and complex numbers are differentiated.
        rtol: relative tolerance; by default the cube root of the machine epsilon against central differences, and the
            square root of it elsewhere.
        atol: absolute tolerance; by default the square root of the machine epsilon times the largest entry of the
            gradient. The effect of rounding errors is added to both.
        step: the distance by which an entry is perturbed, times the size of the entry if this is above 1. The default
            is the cube root of the machine epsilon, or less for small entries.
        limit: arrays with at most this many entries are perturbed entry by entry; larger arrays at this many random
            entries and along one random direction.
        seed: seed of the weights with which the outputs are summed, and of the random entries and directions.
        float64: compute numerical derivatives in float64 and complex128 if `fun` accepts these dtypes. Pass False if
            `fun` rounds to a narrower dtype internally; tolerances are then wider.

    Raises:
        AssertionError: if a gradient is wrong; otherwise True is returned, as in torch. The message names the argument
            and the index with the largest error, both values and the tolerance.
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
    """Run `gradcheck`, and then compare the second derivatives, by reverse over reverse, with central differences.

        >>> gradgradcheck(Tanh, (x,))
        True

    Gradients are functions of the arguments and of the cotangents; both are therefore perturbed. For everything else
    see `gradcheck`.
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
    """Compare the outputs of a layer, and its derivatives by reverse mode, with those of a function in plain JAX.

        >>> assert_equivalent(Round, lambda x: x + jax.lax.stop_gradient(jnp.round(x) - x), (x,))

    The reference defines the right gradients, even if they are not the derivatives of the outputs, as in this example.
    The derivatives are computed in the ways of `gradcheck`, and for other values too.

    If a layer runs on several devices, the reference runs on one device, and every copy of an output or of a gradient
    is compared. The error says if all entries are wrong by one factor, such as the number of devices. Take arguments
    that differ from entry to entry, since equal shards hide mistakes.

    Args:
        layer: a layer class, or a function of `args`; a `jax.shard_map` or a jitted function of sharded arrays, too.
        reference: a function of the same `args` that returns the same tensors, in any containers. If it returns
            statics, they have to be those of the layer.
        args: any pytrees, as a tuple.
        orders: the orders of differentiation to compare, from 0 to 3: 0 compares outputs, 1 gradients, 2 gradients of
            gradients.
        rtol: relative tolerance; the square root of the machine epsilon by default.
        atol: absolute tolerance; as in `gradcheck`.
        seed: seed of the cotangents.

    Raises:
        AssertionError: if the layer differs. The message names the output or argument, the index, and both values.
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
