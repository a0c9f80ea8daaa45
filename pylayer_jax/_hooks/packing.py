"""What a pair of hooks makes of saved tensors, and the way back.

NOTE [packed tensors]
A packed tensor takes part in derivatives of higher order as the tensor itself would, whatever the pair
does to its values: pack and unpack count as the identity, as in torch. Where an outer differentiation is
under way, the tensor therefore stays beside what was packed, for the sake of its tangent alone; its value is
never read there, so that XLA drops it from a compiled program.

Where a layer is only staged, to be differentiated later (`jax.grad` of `jax.jit`, the body of a scan), nothing
tells of which order that will be, and what stays would be an output of the compiled forward: the very memory
that packing is meant to save. There it does not stay. A second derivative goes through the hooks
themselves, if the pair says that this is right, and is an error otherwise.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Generator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pylayer_jax._autodiff.derivative import Derivative
from pylayer_jax._jax.identities import in_front
from pylayer_jax._jax.names import (
    NEEDS_VALUES,
    Primitive,
    Zero,
    differentiable,
    is_differentiated,
    is_key,
    is_staged,
    is_tracer,
    register,
    typeof,
    with_type,
)
from pylayer_jax._methods.arguments import as_array
from pylayer_jax._methods.context import describe
from pylayer_jax._trees.closures import traced_names
from pylayer_jax._trees.partition import Skeleton, is_tensor, split

from .active import Hooks, Memory, Pair, beneath_blocks, covered
from .host import Place


class Sealed:
    """One packed tensor, without its arrays."""

    __slots__ = ("__weakref__", "aval", "followed", "pair", "place", "sharding", "skeleton", "where")

    def __init__(self, pair: Pair, tensor: Any, where: str, followed: bool) -> None:
        self.pair = pair
        self.aval = typeof(tensor)
        # An array that JAX may place where it likes has none that must come back.
        self.sharding = None if is_tracer(tensor) or not getattr(tensor, "committed", False) else tensor.sharding
        self.where = where
        self.followed = followed  # whether the tensor itself is kept, for its tangent
        self.place: Place | None = None
        self.skeleton: Skeleton

    def open(self, arrays: Sequence[Any], waiting: Sequence[Any]) -> jax.Array:
        """The tensor, by the unpack hook, where `waiting` (cotangents) is there."""
        tensor, packed = (arrays[0], arrays[1:]) if self.followed else (None, arrays)
        if self.place is None and any(map(is_staged, packed)):
            # Else XLA may unpack as early as it packs, and hold all tensors unpacked until backward comes.
            packed = _together([*packed, *waiting])[: len(packed)]
        value = self._unpack(packed)
        return with_tangent_p.bind(tensor, value)[0] if self.followed else value

    def _unpack(self, arrays: Sequence[Any]) -> jax.Array:
        with covered(), beneath_blocks():
            if self.place is not None:
                return with_type(self.place.restored(arrays[0], self.aval), self.aval)
            packed = self.skeleton.fill(arrays)
            with _needs_no_values("unpack_hook", self.where):
                value = self.pair.unpack(packed)
            value = jnp.asarray(checked(value, self.aval, self.where))
            if self.sharding is not None and not is_tracer(value) and value.sharding != self.sharding:
                value = jax.device_put(value, self.sharding)
            return with_type(value, self.aval)


def checked(value: Any, aval: Any, where: str) -> Any:
    """What an unpack hook returned, if it is the tensor that was packed."""
    if not is_tensor(value) or value.shape != aval.shape or value.dtype != aval.dtype:
        raise ValueError(
            f"unpack_hook returned {describe(value)} for {where}: expected dtype {aval.dtype} and shape "
            f"{tuple(aval.shape)}, as they were packed. Return a tensor of that dtype and shape."
        )
    return value


class Packed:
    """A list of packed tensors, without their arrays."""

    __slots__ = ("entries", "size", "tensors")

    def __init__(self) -> None:
        self.entries: list[tuple[Sealed | None, slice]] = []  # which arrays are whose
        self.tensors: list[int] = []  # the entry of each tensor
        self.size = 0  # how many arrays there are

    def add(self, sealed: Sealed | None, arrays: int) -> None:
        self.entries.append((sealed, slice(self.size, self.size + arrays)))
        self.size += arrays

    @property
    def owners(self) -> list[int]:
        """Which tensor each array is for; the first where it is for several."""
        return [self.tensors.index(i) for i, (_, at) in enumerate(self.entries) for _ in range(at.start, at.stop)]

    def open(self, arrays: Sequence[Any], given: Sequence[Any]) -> list[Any]:
        """The tensors again, by the unpack hook. `given`: what `backward` waits for (cotangents), or None."""
        waiting = [c for c in given if c is not None][:1]
        opened = [arrays[at][0] if sealed is None else sealed.open(arrays[at], waiting) for sealed, at in self.entries]
        return [opened[i] for i in self.tensors]


class Unpacked(Sequence[Any]):
    """Residuals, the first of which were packed, and are unpacked when one of these is asked for."""

    def __init__(self, packed: Packed, arrays: Sequence[Any], given: Sequence[Any]) -> None:
        self._open = functools.cache(lambda: packed.open(arrays[: packed.size], given))
        self._rest = arrays[packed.size :]
        self._packed = len(packed.tensors)

    def __len__(self) -> int:
        return self._packed + len(self._rest)

    def __getitem__(self, index: Any) -> Any:
        return self._open()[index] if index < self._packed else self._rest[index - self._packed]


def unpacking(derivative: Derivative, packed: Packed) -> Derivative:
    """The derivative, from what was packed of its first residuals, and the others."""
    return dataclasses.replace(
        derivative,
        residuals=derivative.residuals - len(packed.tensors) + packed.size,
        unpack=functools.partial(Unpacked, packed),
    )


def pack(
    hooks: Hooks, tensors: Sequence[Any], outputs: Sequence[Any], owner: str
) -> tuple[Packed, list[Any], list[Any]]:
    """Pack tensors, each distinct one once.

    Returns:
        What can be opened again, the arrays that JAX keeps for it, and the outputs of the operation that
        keeps the tensors, bound to the packing.
    """
    memory, packed = hooks.pair.memory, Packed()
    places: dict[int, int] = {}
    rows: list[tuple[Any, Sealed | None, list[Any]]] = []
    fresh: list[tuple[Any, Sealed, list[Any]]] = []
    for i, tensor in enumerate(tensors):
        if places.setdefault(id(tensor), len(rows)) == len(rows):
            if is_key(tensor):
                rows.append((tensor, None, [tensor]))  # a PRNG key, which a hook could hardly read
            elif (known := memory.recall(tensor)) is not None:
                rows.append((tensor, *known))
            else:
                fresh.append((tensor, *seal(hooks, tensor, f"{owner} {i}")))
                rows.append(fresh[-1])
        packed.tensors.append(places[id(tensor)])
    outputs = _tied(fresh, list(outputs), memory)
    kept: list[Any] = []
    for tensor, sealed, arrays in rows:
        own = [tensor, *arrays] if sealed is not None and sealed.followed else arrays
        packed.add(sealed, len(own))
        kept += own
    return packed, kept, outputs


def _tied(fresh: Sequence[tuple[Any, Sealed, list[Any]]], outputs: list[Any], memory: Memory) -> list[Any]:
    """Remember what was packed, and under jit bind it to the outputs."""
    # Else XLA may see unpack(pack(x)) as a whole and keep x (two casts, for one, cancel out there), or pack so late
    # that all tensors live on till then.
    staged = [x for _, sealed, arrays in fresh if sealed.place is None for x in arrays if is_staged(x)]
    before = outputs
    if staged:
        bound = _together([*outputs, *staged])
        outputs = bound[: len(outputs)]
        renamed = {id(x): y for x, y in zip(staged, bound[len(outputs) :], strict=True)}
        for _, _, arrays in fresh:
            arrays[:] = [renamed.get(id(x), x) for x in arrays]
    for tensor, sealed, arrays in fresh:
        memory.remember(tensor, sealed, arrays)
        for old, new in zip(before, outputs, strict=True):
            if old is tensor and new is not tensor:
                memory.remember(new, sealed, arrays)
    return outputs


def seal(hooks: Hooks, tensor: Any, where: str) -> tuple[Sealed, list[Any]]:
    """Pack one tensor: what can be opened again, and the arrays that JAX has to keep for it."""
    with covered(), beneath_blocks():
        return (_seal_traced if is_tracer(tensor) else _seal_concrete)(hooks, tensor, where)


def _seal_concrete(hooks: Hooks, tensor: Any, where: str) -> tuple[Sealed, list[Any]]:
    pair, sealed = hooks.pair, Sealed(hooks.pair, tensor, where, followed=False)
    value = np.asarray(tensor) if pair.host else tensor
    arrays, sealed.skeleton = _packed(pair, value, where)
    return sealed, arrays


def _seal_traced(hooks: Hooks, tensor: Any, where: str) -> tuple[Sealed, list[Any]]:
    pair, moves = hooks.pair, differentiable(typeof(tensor))
    followed = moves and (is_differentiated(tensor) or (is_staged(tensor) and not hooks.deferred))
    sealed = Sealed(pair, tensor, where, followed)
    if followed:
        value = jax.lax.stop_gradient(tensor)
    else:
        value = first_order_p.bind(tensor, where=where)[0] if moves and not pair.differentiable else tensor
    value = as_array(value, sealed.aval)
    if pair.host:
        if hooks.rematerialized:
            raise NotImplementedError(
                f"{where} cannot be packed on the host inside of jax.checkpoint, which refuses effects. Put the hooks "
                "block around the checkpointed function instead of inside, or use hooks without host=True."
            )
        aval = sealed.aval
        sealed.place = Place(pair.store, pair.pack, lambda x: checked(pair.unpack(x), aval, where), where)
        arrays = [sealed.place.token(value)]
    else:
        arrays, sealed.skeleton = _packed(pair, value, where)
    return sealed, arrays


def _packed(pair: Pair, value: Any, where: str) -> tuple[list[Any], Skeleton]:
    with _needs_no_values("pack_hook", where):
        packed = pair.pack(value)
    # A NumPy array stays on the host, and with every other object dies with the vjp function.
    arrays, skeleton = split(packed, lambda leaf: isinstance(leaf, jax.Array))
    for path, leaf in skeleton.static_paths():
        if callable(leaf) and (hidden := traced_names(leaf)):
            raise ValueError(
                f"pack_hook{path} returned, for {where}, a function that closes over traced values "
                f"({', '.join(hidden)}), which cannot be kept. Return the values themselves in a tuple or dict."
            )
    return arrays, skeleton


@contextlib.contextmanager
def _needs_no_values(hook: str, where: str) -> Generator[None]:
    try:
        yield
    except NEEDS_VALUES as error:
        raise TypeError(
            f"{hook} needs concrete values, but {where} is traced (jax.jit, jax.vmap, jax.lax.scan, ...). Run it on "
            "the host: saved_tensors_hooks(pack_hook, unpack_hook, host=True)."
        ) from error
    except Exception as error:
        error.add_note(f"This happened in {hook}, for {where}.")
        raise


# -- order of computation --------------------------------------------------------------------------

# `jax.lax.optimization_barrier`, whose derivative leaves what has no tangent without one (not so in jax 0.10).
together_p = Primitive("pylayer_barrier")


def _together(values: Sequence[Any]) -> list[Any]:
    """The values, each of which XLA computes only where it has all of them."""
    return together_p.bind(*values)


def _together_values(*values: Any) -> list[Any]:
    return list(jax.lax.optimization_barrier(values))


register(
    together_p,
    evaluate=_together_values,
    abstract=lambda *types: (list(types), frozenset()),
    jvp=lambda primals, tangents: (together_p.bind(*primals), list(tangents)),
    batch=lambda _, args, dims: (together_p.bind(*args), list(dims)),
)


# -- derivatives of higher order, see NOTE [packed tensors] ---------------------------------------

# tensor, value -> the value, with the tangent of the tensor. A `jax.custom_jvp` would do, but for jax 0.10,
# which forgets its rule within a scan.
with_tangent_p = Primitive("pylayer_unpacked")

# tensor -> the tensor, which must not be differentiated.
first_order_p = Primitive("pylayer_packed")


def _with_tangent_jvp(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    return with_tangent_p.bind(*primals), [tangents[0]]


def _with_tangent_batch(axis: Any, args: Sequence[Any], dims: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    if all(d is None for d in dims):  # JAX asks in this case too
        return with_tangent_p.bind(*args), [None]
    return with_tangent_p.bind(*(in_front(x, d, axis) for x, d in zip(args, dims, strict=True))), [0]


def _first_order_jvp(primals: Sequence[Any], tangents: Sequence[Any], *, where: str) -> tuple[list[Any], Sequence[Any]]:
    if type(tangents[0]) is not Zero:
        raise TypeError(
            f"a second derivative goes through {where}, which a pack hook packed inside of staged code (a jitted "
            "function, the body of a scan) that was differentiated from outside. Put the hooks block around that code "
            "instead, into the function that jax.grad differentiates; or, where JAX can differentiate the hooks with "
            "the derivative of the identity, pass saved_tensors_hooks(..., differentiable=True)."
        )
    return first_order_p.bind(*primals, where=where), tangents


def _first_order_batch(axis: Any, args: Sequence[Any], dims: Sequence[Any], *, where: str) -> Any:
    del axis
    return first_order_p.bind(*args, where=where), dims


def _last(*args: Any, **_: Any) -> list[Any]:
    return [args[-1]]


def _last_type(*types: Any, **_: Any) -> tuple[list[Any], Any]:
    return [types[-1]], frozenset()


register(with_tangent_p, evaluate=_last, abstract=_last_type, jvp=_with_tangent_jvp, batch=_with_tangent_batch)
register(first_order_p, evaluate=_last, abstract=_last_type, jvp=_first_order_jvp, batch=_first_order_batch)
