"""The outputs of `forward`: their structure, their types, and the cotangents that fit them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax

from pylayer_jax._jax.tracers import is_staging, is_tracer
from pylayer_jax._jax.types import as_arrays, has_tangent, is_ref, typeof, zeros_of
from pylayer_jax._trees.messages import describe
from pylayer_jax._trees.partition import TreeWithoutTensors, contains, split

from .context import ContextState

__tracebackhide__ = True  # for pytest: errors raised here are about values of the user


Identity = tuple[Literal["input", "output"], int]


def _identities(inputs: Sequence[Any], outputs: Sequence[Any]) -> list[Identity]:
    """The input that each output is if it is saved, or the output: the last one that is the same object."""
    known: dict[int, Identity] = {id(x): ("output", i) for i, x in enumerate(outputs)}
    known |= {id(x): ("input", i) for i, x in enumerate(inputs)}
    return [known[id(x)] for x in outputs]


class Outputs:
    """The outputs of one run of `forward`, without its tensors."""

    __slots__ = (
        "groups",
        "has_tangent",
        "identities",
        "is_sequence",
        "non_differentiable",
        "shardings",
        "skeleton",
        "types",
    )

    def __init__(
        self,
        result: Any,
        skeleton: TreeWithoutTensors,
        arrays: Sequence[jax.Array],
        non_differentiable: frozenset[int],
        inputs: Sequence[Any],
    ) -> None:
        self.skeleton = skeleton
        # One cotangent for each element of a tuple or list, or one for any other result.
        self.is_sequence = isinstance(result, (tuple, list))
        self.groups = [split(x)[1] for x in result] if self.is_sequence else [skeleton]
        self.non_differentiable = non_differentiable
        self.types = [typeof(x) for x in arrays]
        self.has_tangent = tuple([i not in non_differentiable and has_tangent(t) for i, t in enumerate(self.types)])
        self.identities = _identities(inputs, arrays)
        # JAX may place an array that is not committed on any device, and so its zeros.
        self.shardings = [None if is_tracer(x) or not x.committed else x.sharding for x in arrays]

    @staticmethod
    def of(
        layer: str, result: Any, inputs: Sequence[Any], state: ContextState | None = None
    ) -> tuple[Outputs, list[Any], list[jax.Array]]:
        """The outputs, the tensors of `result` as they are, and these as JAX arrays. `inputs` are the input tensors."""
        tensors, skeleton = split(result)
        if not tensors:
            raise ValueError(
                f"{layer}.forward returned {describe(result)}: expected at least one tensor, alone or in a tuple, "
                "list or dict. Numbers are no tensors; jnp.asarray makes one of them."
            )
        if len(skeleton.leaves) > len(tensors) and any(map(is_ref, skeleton.statics())):
            raise ValueError(
                f"{layer}.forward returned a jax.Ref among its outputs, which JAX does not allow. The caller has the "
                "Ref that it passed; return the value of another one: ref[...]."
            )
        arrays = as_arrays(tensors)
        marked = frozenset() if state is None else _non_differentiable(layer, tensors, state)
        return Outputs(result, skeleton, arrays, marked, inputs), tensors, arrays

    def as_returned(self, values: Sequence[Any], inputs: Sequence[Any]) -> list[Any]:
        """The output tensors, where an output that is an input, or a later output, is that very object."""
        known = {"input": inputs, "output": values}
        return [known[kind][i] for kind, i in self.identities]

    def cotangents(self, given: Sequence[Any], materialize: bool, with_statics: bool) -> list[Any]:
        """The arguments of `backward`: one entry for each element that holds a tensor. A missing one is zeros or None.

        With `with_statics`, the other elements have an entry too, which is None.
        """
        full = [self._zeros(i) if c is None and materialize else c for i, c in enumerate(given)]
        entries: list[Any] = []
        for group in self.groups:
            if group.size:
                entries.append(group.fill_without_statics(full[: group.size]))
                full = full[group.size :]
            elif with_statics:
                entries.append(None)
        return entries

    def _zeros(self, i: int) -> jax.Array:
        aval, sharding = self.types[i], self.shardings[i]
        return zeros_of(aval) if sharding is None or is_staging(include_outer=True) else _zeros_maker(aval, sharding)()


def _non_differentiable(layer: str, tensors: Sequence[Any], state: ContextState) -> frozenset[int]:
    for value, call, advice in state.must_return:
        if not contains(tensors, value):
            raise ValueError(f"ctx.{call} in {layer}.forward: {describe(value)} is not an output of forward. {advice}")
    return frozenset(i for i, tensor in enumerate(tensors) if contains(state.non_differentiable, tensor))


@functools.lru_cache(maxsize=256)
def _zeros_maker(aval: Any, sharding: Any) -> Callable[[], jax.Array]:
    # Each device makes its own share. `jax.device_put` compares the values of all processes first.
    return jax.jit(lambda: zeros_of(aval), out_shardings=sharding)
