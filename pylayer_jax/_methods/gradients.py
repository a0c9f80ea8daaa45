"""What `backward` returned, matched to the inputs of `forward`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pylayer_jax._jax.names import differentiable, is_key, typeof, varying_axes
from pylayer_jax._trees.partition import BARE, Skeleton, is_tensor

from .arguments import Argument, Arguments
from .context import describe

_ONE_LEVEL = jax.tree_util.default_registry.flatten_one_level


def match_gradients(
    result: Any, arguments: Arguments, needed: Sequence[bool], per_argument: bool, surely: bool
) -> list[Any]:
    """One gradient (or None for zero) per tensor of the call, in the dtype and shape of that tensor.

    `needed` says which tensors need one; what is given for the others is dropped. With `per_argument`, as in
    torch, there is one entry for every argument passed, and Nones may follow. Unless they `surely` need one,
    gradients that are left out are zero.

    Raises:
        ValueError: for a wrong count, structure, type or shape; it names the layer and the argument.
    """
    if isinstance(result, Iterator):
        raise ValueError(
            f"{arguments.layer}.backward returned {describe(result)}; expected its gradients in a tuple. Does it yield "
            "them? Return them: return g0, g1."
        )
    gradients: list[Any] = [None] * len(needed)
    pairs = (
        _pair_all(result, arguments)
        if per_argument
        else _pair(result, arguments, needed if surely else [False] * len(needed))
    )
    for argument, entry in pairs:
        if any(needed[argument.span]):
            gradients[argument.span] = _fit_argument(entry, argument, arguments, needed)
    return gradients


def _pair(result: Any, arguments: Arguments, needed: Sequence[bool]) -> list[tuple[Argument, Any]]:
    slots = arguments.slots
    entries = _entries(result, slots)
    if len(entries) == len(slots):
        return list(zip(slots, entries, strict=True))
    if len(entries) == len(arguments.arguments):
        return _with_tensors(entries, arguments)
    left_out = slots[len(entries) :]
    if len(entries) < len(slots) and not any(any(needed[a.span]) for a in left_out):
        return list(zip(slots, entries, strict=False))
    raise ValueError(_count_message(entries, slots, arguments, [a for a in left_out if any(needed[a.span])]))


def _pair_all(result: Any, arguments: Arguments) -> list[tuple[Argument, Any]]:
    entries, count = list(result) if isinstance(result, tuple) else [result], len(arguments.arguments)
    if len(entries) < count or any(e is not None for e in entries[count:]):
        names = ", ".join(a.name for a in arguments.arguments)
        hint = "; a list is one gradient, return a tuple" if isinstance(result, list) else ""
        raise ValueError(
            f"{arguments.layer}.backward returned {_plural(len(entries), 'gradient', 'gradients')}; expected {count}, "
            f"one per argument passed ({names}), of which None is zero{hint}."
        )
    return _with_tensors(entries[:count], arguments)


def _with_tensors(entries: list[Any], arguments: Arguments) -> list[tuple[Argument, Any]]:
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
    if isinstance(result, list) and len(slots) != 1:  # for a lone argument it is that argument's gradient
        return result
    return [result]


def _count_message(entries: list[Any], slots: list[Argument], arguments: Arguments, missing: list[Argument]) -> str:
    def listed(items: list[Argument]) -> str:
        return ", ".join(a.name for a in items) or "none"

    message = (
        f"{arguments.layer}.backward returned {_plural(len(entries), 'gradient', 'gradients')}; expected "
        f"{len(slots)}, one per argument that holds a tensor ({listed(slots)})"
    )
    if len(slots) != len(arguments.arguments):
        message += f", or {len(arguments.arguments)}, one per argument passed ({listed(arguments.arguments)})"
    if missing:
        message += f". Missing: {listed(missing)}; return None where the gradient is zero"
    elif len(slots) == 1 and len(entries) > 1:
        message += ". For one argument that is a tuple, return its gradients as one entry: ((g0, g1),)"
    return message + "."


def _plural(count: int, one: str, many: str) -> str:
    return f"{count} {one if count == 1 else many}"


def _fit_argument(entry: Any, argument: Argument, arguments: Arguments, needed: Sequence[bool]) -> list[Any]:
    avals, where = arguments.avals[argument.span], f"{arguments.layer}.backward, gradient of "
    if argument.skeleton is BARE:
        return [_fit(entry, avals[0], where, argument.name)]
    found: list[Any] = [None] * argument.skeleton.size
    model = places(argument.skeleton)
    spread_entry(entry, model, "", found, f"{where}{argument.name!r}")
    return [
        _fit(leaf, aval, where, argument.name + path) if need else None
        for leaf, aval, path, need in zip(
            found, avals, argument.skeleton.tensor_paths(), needed[argument.span], strict=True
        )
    ]


def places(skeleton: Skeleton) -> Any:
    """A pytree with a place instead of each tensor."""
    return skeleton.fill([_Place(i) for i in range(skeleton.size)])


class _Place:
    """Stands for the i-th tensor of an argument."""

    def __init__(self, index: int) -> None:
        self.index = index


def spread_entry(entry: Any, model: Any, path: str, found: list[Any], where: str) -> None:
    """Put the leaves of `entry` into `found`, by the places that `model` has; None is None for all of them."""
    # Written out because jax.tree.broadcast would spread an array over a whole dict, and flatten_up_to
    # refuses None in the place of one.
    if isinstance(model, _Place):
        found[model.index] = entry
        return
    level = _ONE_LEVEL(model)
    if entry is None or level is None:  # None is zero for the whole subtree; a static has no gradient
        return
    children, aux = list(level[0]), level[1]
    other = _ONE_LEVEL(entry)
    kinds = {type(model), type(entry)}
    place = f" at {path}" if path else ""
    if other is None or other[1] != aux or (len(kinds) > 1 and not kinds <= {list, tuple}):
        raise ValueError(
            f"{where}: expected the structure of the argument, {_shape_of(model)}{place}, or None; got "
            f"{describe(entry)}."
        )
    others = list(other[0])
    if len(others) != len(children):
        raise ValueError(f"{where}: expected {_plural(len(children), 'entry', 'entries')}{place}, got {len(others)}.")
    for i, (child, part) in enumerate(zip(children, others, strict=True)):
        spread_entry(part, child, f"{path}[{i}]", found, where)


def _shape_of(model: Any) -> str:
    return str(jax.tree_util.tree_map(lambda _: "*", model)).replace("'*'", "*")


def _fit(gradient: Any, aval: Any, where: str, name: str) -> Any:
    if gradient is None or not differentiable(aval):
        return None
    if not is_tensor(gradient) or is_key(gradient):
        raise ValueError(
            f"{where}{name!r}: expected an array of dtype {aval.dtype} and shape {tuple(aval.shape)}, or None for "
            f"zero; got {describe(gradient)}."
        )
    gradient = gradient if isinstance(gradient, jax.Array) else jnp.asarray(gradient)
    if gradient.shape != aval.shape:
        if not _broadcasts(aval.shape, gradient.shape):
            raise ValueError(
                f"{where}{name!r}: expected shape {tuple(aval.shape)} (or one that it broadcasts to, which is "
                f"summed), got {tuple(gradient.shape)}."
            )
        gradient = _sum_to(gradient, aval.shape)
    if gradient.dtype != aval.dtype:
        if _is_complex(gradient.dtype) and not _is_complex(aval.dtype):
            raise ValueError(
                f"{where}{name!r}: expected a real array of dtype {aval.dtype}, got dtype {gradient.dtype}. Return "
                "the real part: gradient.real."
            )
        gradient = gradient.astype(aval.dtype)
    wanted, got = varying_axes(aval), varying_axes(typeof(gradient))
    return gradient if wanted == got else _match_axes(gradient, wanted, got, f"{where}{name!r}")


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
    # np.broadcast_shapes does not take the symbolic dimensions of jax.export.
    if len(shape) > len(target):
        return False
    return all(a == b or a == 1 for a, b in zip(reversed(shape), reversed(target), strict=False))


def _sum_to(gradient: jax.Array, shape: Sequence[Any]) -> jax.Array:
    extra = gradient.ndim - len(shape)
    stretched = [extra + i for i, n in enumerate(shape) if n == 1 and gradient.shape[extra + i] != 1]
    return jnp.sum(gradient, axis=(*range(extra), *stretched)).reshape(shape)
