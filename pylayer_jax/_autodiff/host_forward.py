"""A `forward` in host code: it needs concrete numbers, so that JAX cannot trace it for a second derivative."""

from __future__ import annotations

from collections.abc import Sequence

from pylayer_jax._jax.masks import select
from pylayer_jax._methods.once_differentiable import second_derivative_error_of
from pylayer_jax._trees.known_values import KnownValues

from .layer_call import LayerCall
from .saved_state import SavedState


def second_derivative_error(
    call: LayerCall, saved: SavedState, numbers: Sequence[str], computed: Sequence[bool]
) -> Exception | None:
    """The error for a second derivative of a `forward` that ran on concrete values; None if nothing would be lost.

    `numbers` are the names of kept values that it may have computed; `computed` is a mask of the residuals: those with
    a derivative that are neither inputs nor outputs.
    """
    if any(computed):
        names = ", ".join(filter(None, select(saved.residual_names(len(computed)), computed)))
        kept = f"saved a tensor that is neither an input nor an output{names and f' ({names})'}"
    elif numbers:
        kept = f"kept {', '.join(numbers)}, which may depend on the inputs"
    else:
        return None
    if (forbidden := second_derivative_error_of(call.layer.backward)) is not None:
        return forbidden()
    return TypeError(
        f"{call.name}: a second derivative goes through forward, which needs concrete values and cannot be traced, and "
        f"which {kept}. Its derivative would be lost. Write forward with jax.numpy, or keep inputs and outputs only. "
        "Decorate backward with @once_differentiable if second derivatives are not meant."
    )


def known_values(call: LayerCall) -> KnownValues:
    """Values that are no results of `forward`, which has not run yet."""
    layer = call.layer
    methods = [layer.forward, getattr(layer, "setup_context", None), layer.backward]
    statics = [x for a in call.arguments.arguments for x in a.skeleton.statics()]
    return KnownValues(methods, [*statics, *map(vars, layer.__mro__)])


def computed_numbers(call: LayerCall, saved: SavedState, known: KnownValues) -> list[str]:
    """The names of what `forward` may have computed beside tensors: what it kept, and what it left for `backward`."""
    read = known.names_of_new(call.layer.backward)
    return [*saved.numbers(known), *(f"{name} (which backward reads)" for name in read)]
