"""The outputs of `forward`: their structure, their types, and the cotangents that fit them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ._jax.tracers import has_named_axis, is_staging, is_tracer
from ._jax.types import as_arrays, has_tangent, is_ref, typeof, zeros_of
from ._messages import describe
from ._trees import LEAF, Skeleton, is_tensor, split

__tracebackhide__ = True  # pytest hides these frames: errors raised here concern the user's values


def with_tensor(result: Any) -> Any:
    """Return the result of `forward`, with its Python numbers as arrays if it holds no tensor but has a named axis.

    `jax.lax.psum(2.0, "i")` of a number that all examples share is a Python number in eager `jax.vmap`.
    tests: contract/test_vmap.py
    """
    if is_tensor(result) or (isinstance(result, tuple) and any(map(is_tensor, result))):
        return result
    tensors, skeleton = split(result)
    if tensors or not any(map(_is_number, skeleton.statics())) or not has_named_axis():
        return result
    return skeleton.fill([], lambda static: jnp.asarray(static) if _is_number(static) else static)


def _is_number(static: object) -> bool:
    return isinstance(static, (int, float, complex)) and not isinstance(static, bool)


class Outputs:
    """The structure and the types of the outputs of one run of `forward`, without the arrays."""

    __slots__ = ("groups", "has_tangent", "is_sequence", "marked", "shardings", "skeleton", "types")

    def __init__(self, result: Any, skeleton: Skeleton, arrays: Sequence[Any], marked: frozenset[int]) -> None:
        self.skeleton = skeleton
        # `backward` gets one cotangent for each element of a tuple or list, and one cotangent for any other result.
        self.is_sequence = isinstance(result, (tuple, list))
        if skeleton is LEAF:
            self.groups = [LEAF]
        else:
            self.groups = [split(x)[1] for x in result] if self.is_sequence else [skeleton]
        self.marked = marked  # indices of outputs that are marked non-differentiable
        self.types = [typeof(x) for x in arrays]
        self.has_tangent = [i not in marked and has_tangent(t) for i, t in enumerate(self.types)]
        # JAX may place an uncommitted array on any device, so zeros for the cotangent of this array need no sharding.
        self.shardings = [None if is_tracer(x) or not x.committed else x.sharding for x in arrays]

    @staticmethod
    def of(layer: str, result: Any) -> tuple[list[Any], list[Any], Skeleton]:
        """Split the result of a method. Return the tensors, the same tensors as JAX arrays, and the skeleton.

        Raises:
            ValueError: if the result holds no tensor, or if the result holds a Ref.
        """
        tensors, skeleton = split(result)
        if not tensors:
            raise ValueError(
                f"{layer}.forward returned {describe(result)}: expected at least one tensor, alone or in a tuple, "
                "list or dict. Numbers are no tensors; jnp.asarray turns them into tensors."
            )
        if len(skeleton.leaves) > len(tensors) and any(map(is_ref, skeleton.statics())):
            raise ValueError(
                f"{layer}.forward returned a jax.Ref among its outputs, which JAX does not allow. The caller has the "
                "Ref that it passed; for any other Ref, return its value: ref[...]."
            )
        return tensors, as_arrays(tensors), skeleton

    def cotangents(self, given: Sequence[Any], materialize: bool, with_statics: bool) -> list[Any]:
        """Return the cotangents that `backward` gets: one entry per top-level output that holds a tensor.

        A missing cotangent is zeros if `materialize`, otherwise None. If `with_statics`, an output without a tensor has
        the entry None.
        """
        full = [self._zeros(i) if c is None and materialize else c for i, c in enumerate(given)]
        entries: list[Any] = []
        for group in self.groups:
            if group.size:
                entries.append(group.without_statics(full[: group.size]))
                full = full[group.size :]
            elif with_statics:
                entries.append(None)
        return entries

    def _zeros(self, i: int) -> jax.Array:
        aval, sharding = self.types[i], self.shardings[i]
        return zeros_of(aval) if sharding is None or is_staging() else _zeros_maker(aval, sharding)()


@functools.lru_cache(maxsize=256)
def _zeros_maker(aval: Any, sharding: Any) -> Callable[[], jax.Array]:
    # With `jax.jit`, each device makes its own shard; `jax.device_put` would first compare the values of all processes.
    return jax.jit(lambda: zeros_of(aval), out_shardings=sharding)
