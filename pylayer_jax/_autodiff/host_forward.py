"""A `forward` in host code: it needs concrete numbers, so that JAX cannot trace it for a second derivative."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pylayer_jax._jax.types import has_tangent
from pylayer_jax._methods.once_differentiable import second_derivative_error_of
from pylayer_jax._trees.closures import values_in_reach

from .layer_call import LayerCall
from .saved_state import SavedState


def second_derivative_error(call: LayerCall, saved: SavedState, intermediates: Sequence[Any]) -> Exception | None:
    """The error for a second derivative of a `forward` that ran on concrete values; None if nothing would be lost."""
    if any(map(has_tangent, intermediates)):
        kept = "saved a tensor that is neither an input nor an output"
    elif names := saved.numbers(_known_before(call)):
        kept = f"kept {', '.join(names)}, which may depend on the inputs"
    else:
        return None
    if (forbidden := second_derivative_error_of(call.layer.backward)) is not None:
        return forbidden()
    return TypeError(
        f"{call.name}: a second derivative goes through forward, which needs concrete values and cannot be traced, and "
        f"which {kept}. Its derivative would be lost. Write forward with jax.numpy, or keep inputs and outputs only. "
        "Decorate backward with @once_differentiable if second derivatives are not meant."
    )


def _known_before(call: LayerCall) -> list[Any]:
    """Values that are no results of `forward`."""
    methods = [call.layer.forward, getattr(call.layer, "setup_context", None)]
    given = [x for a in call.arguments.arguments for x in a.skeleton.statics()]
    return given + [x for method in methods for x in values_in_reach(method)]
