"""Matches the results of `backward` to the arguments of `forward`, and the results of `jvp` to its outputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ._arguments import Argument, Arguments
from ._jax.types import as_array, as_arrays, has_tangent, is_key, tangent_type, typeof, varying_axes, zeros_of
from ._messages import describe, plural, source_of
from ._outputs import Outputs
from ._trees import LEAF, collect_like, is_tensor, unboxed
from ._warnings import warn_of_missing_return

__tracebackhide__ = True  # for pytest: errors raised here are about values of the user


def match_gradients(result: Any, arguments: Arguments, needs: Sequence[bool], layer: Any) -> list[Any]:
    """Return one gradient (or None for zero) per tensor of the call, in the dtype and shape of that tensor.

    `needs` says which tensors need a gradient; other gradients are dropped. In torch's convention `backward`
    returns one entry for every argument of the call, and Nones may follow.

    Raises:
        ValueError: for a wrong count, structure, type or shape; the message names the layer and the argument.
    """
    try:
        gradients: list[Any] = [None] * len(needs)
        if isinstance(result, Iterator):
            raise ValueError(
                f"{arguments.layer}.backward returned {describe(result)}; expected its gradients in a tuple. Does it "
                "yield them? Return them: return g0, g1."
            )
        pairs = _pair_all(result, arguments) if layer._torch_convention else _pair(result, arguments, needs)
        for argument, entry in pairs:
            if any(needs[argument.span]):
                gradients[argument.span] = _fit_argument(entry, argument, arguments, needs)
    except ValueError as error:
        error.add_note(f"Defined here: {source_of(f'{arguments.layer}.backward', layer.backward)}.")
        raise
    if result is None and any(needs):
        warn_of_missing_return(layer, arguments.layer)
    return gradients


def _entries(result: Any, unpack_list: bool) -> list[Any]:
    """Return the items of a tuple (and of a list, if `unpack_list`); any other result is the only entry."""
    return list(result) if isinstance(result, tuple) or (unpack_list and isinstance(result, list)) else [result]


def _pair(result: Any, arguments: Arguments, needs: Sequence[bool]) -> list[tuple[Argument, Any]]:
    slots = arguments.slots()
    # For a single argument a list is that argument's gradient.
    entries = _entries(result, unpack_list=len(slots) != 1)
    if len(entries) == len(slots):
        return list(zip(slots, entries, strict=True))
    if len(entries) == len(arguments.arguments):
        return _pair_tensors(entries, arguments)
    left_out = [a for a in slots[len(entries) :] if any(needs[a.span])]
    if len(entries) < len(slots) and not left_out:
        return list(zip(slots, entries, strict=False))
    message = _count_message(entries, slots, arguments, left_out)
    raise ValueError(message if result is not None else f"{message} Did you forget return?")


def _pair_all(result: Any, arguments: Arguments) -> list[tuple[Argument, Any]]:
    entries, count = _entries(result, unpack_list=False), len(arguments.arguments)
    if len(entries) < count or any(e is not None for e in entries[count:]):
        hint = "; a list is one gradient, return a tuple" if isinstance(result, list) else ""
        hint += ". Did you forget return?" if result is None else "."
        raise ValueError(
            f"{arguments.layer}.backward returned {plural(len(entries), 'gradient', 'gradients')}; expected {count}, "
            f"one per argument passed ({', '.join(arguments.names())}), of which None is zero{hint}"
        )
    return _pair_tensors(entries[:count], arguments)


def _pair_tensors(entries: list[Any], arguments: Arguments) -> list[tuple[Argument, Any]]:
    for argument, entry in zip(arguments.arguments, entries, strict=True):
        is_number = any(isinstance(x, (int, float, complex)) for x in argument.skeleton.leaves)
        if entry is not None and not argument.skeleton.size and not is_number:
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


def _fit_argument(entry: Any, argument: Argument, arguments: Arguments, needs: Sequence[bool]) -> list[Any]:
    where = f"{arguments.layer}.backward, gradient of "
    found, paths = [entry], [""]
    if argument.skeleton is not LEAF:
        found = collect_like(entry, argument.skeleton, f"{where}{argument.name!r}", describe)
        paths = argument.skeleton.tensor_paths()
    spans = (arguments.types[argument.span], paths, needs[argument.span])
    return [
        fit(leaf, aval, lambda path=path: f"{where}{argument.name + path!r}", is_gradient=True) if need else None
        for leaf, aval, path, need in zip(found, *spans, strict=True)
    ]


# -- tangents ----------------------------------------------------------------------------------------------


def argument_tangents(arguments: Arguments, tangents: Sequence[Any], materialize: bool) -> list[Any]:
    """Return the tangents for `jvp`: one entry per argument of the call, None if the argument holds no tensor.

    A missing tangent is zeros, or None after `ctx.set_materialize_grads(False)`.
    """

    def zeros(aval: Any) -> Any:
        return zeros_of(tangent_type(aval) if has_tangent(aval) else aval)

    full = [
        zeros(a) if t is None and materialize else as_array(t, a)
        for t, a in zip(tangents, arguments.types, strict=True)
    ]
    return arguments.per_argument(full)


def match_tangents(result: Any, outputs: Outputs, layer: str) -> list[Any]:
    """Return one tangent (or None for zero) per output that can have one, of the shape and in the dtype of the output.

    Raises:
        ValueError: for a wrong count, structure, type or shape; the message names the layer and the output.
    """
    groups, entries = outputs.groups, _entries(result, unpack_list=outputs.is_sequence)
    if len(entries) != len(groups):
        with_tensors = [g for g in groups if g.size]
        if len(entries) != len(with_tensors):
            raise ValueError(
                f"{layer}.jvp returned {len(entries)} tangents; expected {len(groups)}, one per output of forward. "
                "Return None for an output that has none."
            )
        groups = with_tensors
    found: list[Any] = []
    for group, entry in zip(groups, entries, strict=True):
        if group is LEAF:
            found.append(entry)
        elif group.size:
            found += collect_like(entry, group, f"{layer}.jvp, tangent of output {len(found)}", describe)
    rows = zip(found, outputs.types, outputs.skeleton.tensor_paths(), outputs.has_tangent, strict=True)
    return [
        fit(tangent, tangent_type(aval), lambda path=path: f"{layer}.jvp, tangent of output{path}")
        for tangent, aval, path, can_have_one in rows
        if can_have_one
    ]


# -- one array -----------------------------------------------------------------------------------------------


def fit(value: Any, aval: Any, where: Callable[[], str], is_gradient: bool = False) -> Any:
    """Return `value` with the dtype and shape of `aval`, varying over the mesh axes of `aval`; None stays None.

    A gradient may have more or fewer axes of length 1, or a shape to which the shape of `aval` broadcasts.

    Raises:
        ValueError: if the value is not an array, has another shape, is complex although `aval` is real, or differs
            between devices although `aval` does not. The message begins with the result of `where()`.
    """
    value = unboxed(value)
    if value is None:
        return None
    if not is_tensor(value) or is_key(value):
        raise ValueError(
            f"{where()}: expected an array of dtype {aval.dtype} and shape {tuple(aval.shape)}, or None for zero; got "
            f"{describe(value)}."
        )
    (value,) = as_arrays([value])
    if typeof(value) == aval:
        return value
    if value.shape != aval.shape:
        if is_gradient and [n for n in value.shape if n != 1] == [n for n in aval.shape if n != 1]:
            value = value.reshape(aval.shape)
        elif is_gradient and _broadcasts(aval.shape, value.shape):
            value = _sum_to(value, aval.shape)
        else:
            summed = " (or one that it broadcasts to, which is summed)" if is_gradient else ""
            raise ValueError(f"{where()}: expected shape {tuple(aval.shape)}{summed}, got {tuple(value.shape)}.")
    if jnp.iscomplexobj(value) and not jnp.issubdtype(aval.dtype, jnp.complexfloating):
        raise ValueError(
            f"{where()}: expected a real array of dtype {aval.dtype}, got dtype {value.dtype}. Return its real part: "
            "jnp.real(...)."
        )
    value = value if value.dtype == aval.dtype else value.astype(aval.dtype)
    wanted, got = varying_axes(aval), varying_axes(typeof(value))
    if extra := sorted(map(str, got - wanted)):
        axes = repr(extra[0]) if len(extra) == 1 else repr(tuple(extra))
        raise ValueError(
            f"{where()}: expected a value that is the same on all devices of the mesh axis {', '.join(extra)}, but it "
            f"differs from device to device. Sum it before it is returned, with jax.lax.psum(value, {axes}); or make "
            f"the argument vary before the layer gets it: jax.lax.pcast(argument, {axes}, to='varying')."
        )
    return jax.lax.pcast(value, tuple(wanted - got), to="varying") if wanted != got else value


def _broadcasts(shape: Sequence[Any], target: Sequence[Any]) -> bool:
    # np.broadcast_shapes refuses the symbolic dimensions of jax.export.
    if len(shape) > len(target):
        return False
    return all(a == b or a == 1 for a, b in zip(reversed(shape), reversed(target), strict=False))


def _sum_to(value: jax.Array, shape: Sequence[Any]) -> jax.Array:
    extra = value.ndim - len(shape)
    stretched = [extra + i for i, n in enumerate(shape) if n == 1 and value.shape[extra + i] != 1]
    return jnp.sum(value, axis=(*range(extra), *stretched)).reshape(shape)
