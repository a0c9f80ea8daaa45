"""The gradients that `backward` returned, matched to the arguments of `forward`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pylayer_jax._jax import as_arrays, has_tangent, is_key, typeof, varying_axes
from pylayer_jax._trees import LEAF, collect_like, describe, is_box, is_tensor, plural, unboxed

from .arguments import Argument, Arguments

__tracebackhide__ = True  # for pytest: errors raised here are about values of the user


def match_gradients(
    result: Any, arguments: Arguments, needs_grad: Sequence[bool], per_argument: bool, is_exact: bool
) -> list[Any]:
    """One gradient (or None for zero) per tensor of the call, in the dtype and shape of that tensor.

    `needs_grad` says which tensors need a gradient; gradients of the others are dropped. If `is_exact` is False, some
    of them may not need one, and a gradient that `backward` leaves out is zero. With `per_argument`, as in torch,
    `backward` returns one entry for every argument of the call, and Nones may follow.

    Raises:
        ValueError: for a wrong count, structure, type or shape; it names the layer and the argument.
    """
    if isinstance(result, Iterator):
        raise ValueError(
            f"{arguments.layer}.backward returned {describe(result)}; expected its gradients in a tuple. Does it yield "
            "them? Return them: return g0, g1."
        )
    gradients: list[Any] = [None] * len(needs_grad)
    pairs = (
        _pair_all(result, arguments)
        if per_argument
        else _pair(result, arguments, needs_grad if is_exact else [False] * len(needs_grad))
    )
    for argument, entry in pairs:
        if any(needs_grad[argument.span]):
            gradients[argument.span] = _fit_argument(entry, argument, arguments, needs_grad)
    return gradients


def _pair(result: Any, arguments: Arguments, needs_grad: Sequence[bool]) -> list[tuple[Argument, Any]]:
    slots = arguments.slots
    entries = _entries(result, slots)
    if len(entries) == len(slots):
        return list(zip(slots, entries, strict=True))
    if len(entries) == len(arguments.arguments):
        return _pair_tensors(entries, arguments)
    left_out = slots[len(entries) :]
    if len(entries) < len(slots) and not any(any(needs_grad[a.span]) for a in left_out):
        return list(zip(slots, entries, strict=False))
    message = _count_message(entries, slots, arguments, [a for a in left_out if any(needs_grad[a.span])])
    raise ValueError(message if result is not None else f"{message} Did you forget return?")


def _pair_all(result: Any, arguments: Arguments) -> list[tuple[Argument, Any]]:
    entries, count = list(result) if isinstance(result, tuple) else [result], len(arguments.arguments)
    if len(entries) < count or any(e is not None for e in entries[count:]):
        names = ", ".join(a.name for a in arguments.arguments)
        hint = "; a list is one gradient, return a tuple" if isinstance(result, list) else ""
        hint += ". Did you forget return?" if result is None else "."
        raise ValueError(
            f"{arguments.layer}.backward returned {plural(len(entries), 'gradient', 'gradients')}; expected {count}, "
            f"one per argument passed ({names}), of which None is zero{hint}"
        )
    return _pair_tensors(entries[:count], arguments)


def _pair_tensors(entries: list[Any], arguments: Arguments) -> list[tuple[Argument, Any]]:
    for argument, entry in zip(arguments.arguments, entries, strict=True):
        if entry is not None and not argument.skeleton.size:
            raise ValueError(
                f"{arguments.layer}.backward returned a gradient ({describe(entry)}) for argument {argument.name!r}, "
                "which holds no tensor. Return None in its place."
            )
    return [(a, e) for a, e in zip(arguments.arguments, entries, strict=True) if a.skeleton.size]


def _entries(result: Any, slots: list[Argument]) -> list[Any]:
    if isinstance(result, tuple):
        return list(result)
    if isinstance(result, list) and len(slots) != 1:  # for a single argument the list is that argument's gradient
        return result
    return [result]


def _count_message(entries: list[Any], slots: list[Argument], arguments: Arguments, missing: list[Argument]) -> str:
    def listed(items: list[Argument]) -> str:
        return ", ".join(a.name for a in items) or "none"

    message = (
        f"{arguments.layer}.backward returned {plural(len(entries), 'gradient', 'gradients')}; expected "
        f"{len(slots)}, one per argument that holds a tensor ({listed(slots)})"
    )
    if len(slots) != len(arguments.arguments):
        message += f", or {len(arguments.arguments)}, one per argument passed ({listed(arguments.arguments)})"
    if missing:
        message += f". Missing: {listed(missing)}; return None where the gradient is zero"
    elif len(slots) == 1 and len(entries) > 1:
        message += ". For one argument that is a tuple, return its gradients as one entry: ((g0, g1),)"
    return message + "."


def _fit_argument(entry: Any, argument: Argument, arguments: Arguments, needs_grad: Sequence[bool]) -> list[Any]:
    layer = arguments.layer
    if argument.skeleton is LEAF:
        return [_fit(entry, arguments.avals[argument.first], layer, argument.name)]
    avals = arguments.avals[argument.span]
    found = collect_like(entry, argument.skeleton, _gradient_of(layer, argument.name))
    return [
        _fit(leaf, aval, layer, argument.name + path) if need else None
        for leaf, aval, path, need in zip(
            found, avals, argument.skeleton.tensor_paths(), needs_grad[argument.span], strict=True
        )
    ]


def _gradient_of(layer: str, name: str) -> str:
    return f"{layer}.backward, gradient of {name!r}"


def _fit(gradient: Any, aval: Any, layer: str, name: str) -> Any:
    if gradient is None or not has_tangent(aval):
        return None
    if not is_tensor(gradient) or is_key(gradient):
        if is_box(gradient):
            return _fit(unboxed(gradient), aval, layer, name)
        raise ValueError(
            f"{_gradient_of(layer, name)}: expected an array of dtype {aval.dtype} and shape {tuple(aval.shape)}, or "
            f"None for zero; got {describe(gradient)}."
        )
    (gradient,) = as_arrays([gradient])
    if gradient.shape != aval.shape:
        if not _broadcasts(aval.shape, gradient.shape):
            raise ValueError(
                f"{_gradient_of(layer, name)}: expected shape {tuple(aval.shape)} (or one that it broadcasts to, which "
                f"is summed), got {tuple(gradient.shape)}."
            )
        gradient = _sum_to(gradient, aval.shape)
    if gradient.dtype != aval.dtype:
        if _is_complex(gradient.dtype) and not _is_complex(aval.dtype):
            raise ValueError(
                f"{_gradient_of(layer, name)}: expected a real array of dtype {aval.dtype}, got dtype "
                f"{gradient.dtype}. Return the real part: gradient.real."
            )
        gradient = gradient.astype(aval.dtype)
    wanted, got = varying_axes(aval), varying_axes(typeof(gradient))
    return gradient if wanted == got else _match_axes(gradient, wanted, got, _gradient_of(layer, name))


def _match_axes(gradient: jax.Array, wanted: frozenset[Any], got: frozenset[Any], where: str) -> jax.Array:
    if extra := sorted(map(str, got - wanted)):
        raise ValueError(
            f"{where}: the argument is the same on all devices of the mesh axis {', '.join(extra)}, but its gradient "
            f"differs from device to device. Sum it in backward: jax.lax.psum(gradient, {', '.join(map(repr, extra))})."
        )
    return jax.lax.pcast(gradient, tuple(wanted - got), to="varying")


def _is_complex(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, np.complexfloating)


def _broadcasts(shape: Sequence[Any], target: Sequence[Any]) -> bool:
    # np.broadcast_shapes refuses the symbolic dimensions of jax.export.
    if len(shape) > len(target):
        return False
    return all(a == b or a == 1 for a, b in zip(reversed(shape), reversed(target), strict=False))


def _sum_to(gradient: jax.Array, shape: Sequence[Any]) -> jax.Array:
    extra = gradient.ndim - len(shape)
    stretched = [extra + i for i, n in enumerate(shape) if n == 1 and gradient.shape[extra + i] != 1]
    return jnp.sum(gradient, axis=(*range(extra), *stretched)).reshape(shape)
