"""The residuals that JAX keeps: packed if hooks are active, and named in staged code if the class asks for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pylayer_jax._hooks.open_blocks import SUSPENDED, Hooks, active
from pylayer_jax._hooks.packed_residuals import pack
from pylayer_jax._jax.imports import checkpoint_name, set_current_trace
from pylayer_jax._jax.tracers import is_staging, is_tracer, trace_of_known_values

from .layer_call import LayerCall
from .run_backward import Derivative
from .saved_state import SavedState


def hooks_that_pack(call: LayerCall) -> Hooks | None:
    """The hooks of a call, unless an operation around it packs what is kept."""
    return None if active.value is SUSPENDED else call.hooks


def pack_residuals(
    call: LayerCall, saved: SavedState, derivative: Derivative, residuals: list[Any], outputs: list[Any]
) -> tuple[Derivative, list[Any], list[Any]]:
    """Pack the residuals if hooks are active, and name them if they are staged and the class has `saved_names`.

    Returns:
        A derivative that takes the arrays that are kept, these arrays, and the outputs bound to them.
    """
    count = len(residuals)
    owners: Sequence[int] = range(saved.saved_count)  # the tensor that each of the first arrays was packed from
    if saved.saved_count and (hooks := hooks_that_pack(call)) is not None:
        owner = f"{call.name}, saved tensor"
        # The operations that keep the same tensors run there, and find them packed.
        with set_current_trace(trace_of_known_values([*residuals, *outputs])):
            packed, arrays, outputs = pack(hooks, residuals[: saved.saved_count], outputs, owner)
        derivative = derivative.packing(packed)
        residuals, owners = [*arrays, *residuals[saved.saved_count :]], packed.owners
    if not call.layer.saved_names or not is_staging(include_outer=True):
        return derivative, residuals, outputs
    names = _checkpoint_names(call, saved, count)
    named = [_named(x, names[i]) for x, i in zip(residuals, owners, strict=False)] + residuals[len(owners) :]
    # An output that is kept goes on under its name, so that a policy which saves it does not compute it twice.
    outputs = [next((y for x, y in zip(residuals, named, strict=True) if x is o), o) for o in outputs]
    return derivative, named, outputs


def _named(tensor: Any, name: str) -> Any:
    return checkpoint_name(tensor, name) if name and is_tracer(tensor) else tensor


def _checkpoint_names(call: LayerCall, saved: SavedState, count: int) -> list[str]:
    """A name, which may be empty, for each saved residual, for the policies of `jax.checkpoint`."""
    given, layer = call.layer.saved_names, call.layer.__name__
    return saved.residual_names(count, lambda i: f"{layer}.saved[{i}]" if given is True else given[i])
