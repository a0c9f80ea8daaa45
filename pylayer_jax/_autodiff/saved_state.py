"""The non-array state that `forward` saved."""

from __future__ import annotations

import collections
import copy
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from pylayer_jax._jax.types import as_arrays
from pylayer_jax._methods.context import PyLayerContext
from pylayer_jax._methods.outputs import Outputs
from pylayer_jax._trees.closures import (
    Place,
    is_of_current_jaxpr,
    is_within_compiled,
    places_of,
    replace_tracers_by_types,
    tracers_in,
)
from pylayer_jax._trees.known_values import KnownValues
from pylayer_jax._trees.partition import TreeWithoutTensors, is_tensor_or_ref, split


@dataclasses.dataclass(slots=True)
class SavedTree:
    """A pytree: its skeleton, and the index of each of its tensors among the residuals."""

    skeleton: TreeWithoutTensors
    residuals: list[int]

    def restore(self, residuals: Sequence[Any]) -> Any:
        # JAX hands on some constants as NumPy arrays.
        return self.skeleton.fill(as_arrays([residuals[i] for i in self.residuals]), copy_container)


def copy_container(static: Any) -> Any:
    """A copy of a container that is no pytree to JAX; any other static itself."""
    return copy.copy(static) if isinstance(static, _CONTAINERS) else static


_CONTAINERS = (dict, set, collections.deque, bytearray)  # the dicts have keys that cannot be sorted


@dataclasses.dataclass(eq=False, slots=True)
class SavedState:
    """The non-array state that one run of `forward` saved.

    A saved value is a `SavedTree` if it is a tensor or a container, and the value itself if not.
    """

    outputs: Outputs
    saved: Any  # of save_for_backward; None if nothing was saved
    saved_count: int  # the number of residuals that save_for_backward saved, which are the first
    saved_for_jvp: Any  # None if it is the same as `saved`
    attributes: dict[str, Any]
    hidden: list[tuple[str, Place, SavedTree]]  # where objects on the context hold tensors: NOTE [hidden tensors]
    materialize: bool
    needs_grad: list[bool]  # the inputs for which `forward` saw True in needs_input_grad
    read_needs_input_grad: bool  # whether `forward` read it, so that the saved values may depend on it
    perturbed_is_exact: bool  # False under JAX_REMAT3, where JAX reports every input as perturbed

    def residual_names(
        self, count: int, name_entry: Callable[[int], str | None] = lambda i: f"saved[{i}]"
    ) -> list[str]:
        """A name for each of `count` residuals, or an empty one.

        `name_entry` names the i-th value of save_for_backward; None leaves it without a name.
        """
        names = [""] * count
        if isinstance(self.saved, SavedTree):
            for (entry, path), i in zip(self.saved.skeleton.tensor_entries(), self.saved.residuals, strict=True):
                if not names[i] and (name := name_entry(entry)) is not None:
                    names[i] = name + path
        others = {"saved_for_forward": self.saved_for_jvp} | {f"ctx.{k}": v for k, v in self.attributes.items()}
        hidden = [(name, value) for name, _, value in self.hidden]
        for start, value in [*others.items(), *hidden]:
            if isinstance(value, SavedTree):
                for path, i in zip(value.skeleton.tensor_paths(), value.residuals, strict=True):
                    names[i] = names[i] or start + path
        return names

    def numbers(self, known: KnownValues) -> list[str]:
        """The names of kept values that are no tensors, but may depend on the numbers that `forward` saw.

        These are floats, complex numbers, and objects, unless they are among the `known` ones, taken before it ran.
        """
        kept = {"saved": self.saved, "saved_for_forward": self.saved_for_jvp}
        kept |= {f"ctx.{name}": value for name, value in self.attributes.items()}
        names: list[str] = []
        for start, value in kept.items():
            paths = value.skeleton.static_paths() if isinstance(value, SavedTree) else [("", value)]
            names += [start + path for path, leaf in paths if not known.has(leaf)]
            if isinstance(value, SavedTree) and not all(map(known.has_numbers_of, value.skeleton.static_data())):
                names.append(f"a key or static field of {start}")
        return names


def save_state(
    ctx: PyLayerContext,
    outputs: Outputs,
    stands_for: dict[int, Any],
    needs_grad: list[bool],
    *,
    perturbed_is_exact: bool,
    has_jvp: bool,
    packs: bool,
    is_hidden: Callable[[object], bool],
) -> tuple[SavedState, list[Any]]:
    """What a context holds after `forward`, and the residuals: each tensor that it keeps, once.

    `stands_for` has, by the identity of a tensor, the object of equal value that is kept in its place: the output that
    a NumPy value is, or the argument of which `forward` got a copy. With `packs`, saved tensors share no residual with
    attributes, which are never packed.
    """
    state, layer = ctx._state, ctx._state.layer
    residuals: list[Any] = []
    indices: dict[int, int] = {}
    hidden: list[tuple[str, Place]] = []

    def save(value: Any, name: str) -> Any:
        tensors, skeleton = split(value, is_tensor_or_ref)
        statics = skeleton.statics()
        for i, leaf in enumerate(statics if tracers_in(statics) else ()):
            for place in places_of(leaf, is_hidden):
                path = name + skeleton.static_paths()[i][0]
                is_made_by_forward = callable(leaf) and any(map(is_of_current_jaxpr, split(place.read())[0]))
                if is_made_by_forward or place.owner is None or is_within_compiled(leaf, is_hidden):
                    raise ValueError(
                        f"{path} in {layer}.forward is {'a function that closes' if callable(leaf) else 'an object'} "
                        f"over traced values ({place.name}), which cannot be kept for backward. Keep the values "
                        "themselves, with ctx.save_for_backward or as attributes, and build the function in backward."
                    )
                hidden.append((f"{path}.{place.name.lstrip('.')}", place))
        return keep(tensors, skeleton, value)

    def keep(tensors: list[Any], skeleton: TreeWithoutTensors, value: Any) -> Any:
        if stands_for:
            tensors = [stands_for.get(id(x), x) for x in tensors]
        for tensor in tensors:
            if indices.setdefault(id(tensor), len(residuals)) == len(residuals):
                residuals.append(tensor)
        # A container is made anew for each run of `backward`.
        is_object = len(skeleton.leaves) == 1 and not tensors and skeleton.leaves[0] is value
        return value if is_object else SavedTree(skeleton, [indices[id(x)] for x in tensors])

    saved = None if state.saved is None else save(state.saved, "ctx.save_for_backward")
    saved_count = len(residuals)
    if packs:
        indices.clear()
    for_jvp = state.saved_for_jvp if has_jvp else None
    attributes = {name: save(value, f"ctx.{name}") for name, value in vars(ctx).items()}
    found = SavedState(
        outputs=outputs,
        saved=saved,
        saved_count=saved_count,
        saved_for_jvp=None if for_jvp is None else save(for_jvp, "ctx.save_for_forward"),
        attributes=attributes,
        hidden=[(name, place, keep(*split(place.read()), None)) for name, place in hidden],
        materialize=state.materialize,
        needs_grad=needs_grad,
        read_needs_input_grad=state.read_needs_input_grad,
        perturbed_is_exact=perturbed_is_exact,
    )
    for _, place in hidden:
        replace_tracers_by_types(place)
    return found, as_arrays(residuals)
