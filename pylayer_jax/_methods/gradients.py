"""The gradients that `backward` returned, matched to the arguments of `forward`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from pylayer_jax._jax.types import has_tangent
from pylayer_jax._trees.matching import collect_like
from pylayer_jax._trees.messages import describe, plural, source_of
from pylayer_jax._trees.partition import LEAF, unboxed

from .arguments import Argument, Arguments
from .fitting import entries_of, fit
from .mistakes import warn_of_missing_return, warn_of_narrow_gradient

__tracebackhide__ = True  # for pytest: errors raised here are about values of the user


def match_gradients(
    result: Any, arguments: Arguments, needs_grad: Sequence[bool], layer: Any, is_exact: bool
) -> list[Any]:
    """One gradient (or None for zero) per tensor of the call, in the dtype and shape of that tensor.

    `needs_grad` says which tensors need a gradient; gradients of the others are dropped. If `is_exact` is False, some
    of them may not need one, and a gradient that `backward` leaves out is zero. In torch's convention
    `backward` returns one entry for every argument of the call, and Nones may follow.

    Raises:
        ValueError: for a wrong count, structure, type or shape; it names the layer and the argument.
    """
    try:
        gradients = _matched(result, arguments, needs_grad, layer, is_exact)
    except ValueError as error:
        error.add_note(f"Defined here: {source_of(f'{arguments.layer}.backward', layer.backward)}.")
        raise
    if result is None and any(needs_grad):
        warn_of_missing_return(layer, arguments.layer)
    return gradients


def _matched(result: Any, arguments: Arguments, needs_grad: Sequence[bool], layer: Any, is_exact: bool) -> list[Any]:
    if isinstance(result, Iterator):
        raise ValueError(
            f"{arguments.layer}.backward returned {describe(result)}; expected its gradients in a tuple. Does it yield "
            "them? Return them: return g0, g1."
        )
    gradients: list[Any] = [None] * len(needs_grad)
    pairs = (
        _pair_all(result, arguments)
        if layer._torch_convention
        else _pair(result, arguments, needs_grad if is_exact else [False] * len(needs_grad))
    )
    for argument, entry in pairs:
        if any(needs_grad[argument.span]):
            gradients[argument.span] = _fit_argument(entry, argument, arguments, needs_grad, layer)
    return gradients


def _pair(result: Any, arguments: Arguments, needs_grad: Sequence[bool]) -> list[tuple[Argument, Any]]:
    slots = arguments.slots
    # For a single argument a list is that argument's gradient.
    entries = entries_of(result, unpack_list=len(slots) != 1)
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
    entries, count = entries_of(result, unpack_list=False), len(arguments.arguments)
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


def _fit_argument(
    entry: Any, argument: Argument, arguments: Arguments, needs_grad: Sequence[bool], layer: Any
) -> list[Any]:
    where = f"{arguments.layer}.backward, gradient of "
    found, paths = [entry], [""]
    if argument.skeleton is not LEAF:
        found = collect_like(entry, argument.skeleton, f"{where}{argument.name!r}")
        paths = argument.skeleton.tensor_paths()
    gradients: list[Any] = []
    for leaf, aval, path, need in zip(
        found, arguments.avals[argument.span], paths, needs_grad[argument.span], strict=True
    ):
        name = f"{argument.name + path!r}"
        gradients.append(fit(leaf, aval, where + name, is_gradient=True) if need and has_tangent(aval) else None)
        if gradients[-1] is not None and aval.dtype.itemsize == 1:
            warn_of_narrow_gradient(layer, arguments.layer, name, unboxed(leaf).dtype, aval.dtype)
    return gradients
