"""`jax.Ref` arguments: state that the methods of a layer read and write. See NOTE [Refs]."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from pylayer_jax._jax.identity_primitives import forbid_derivative
from pylayer_jax._jax.tracers import is_differentiated
from pylayer_jax._jax.types import is_ref
from pylayer_jax._methods.once_differentiable import second_derivative_error_of
from pylayer_jax._trees.closures import traced_names, tracers_in

from .layer_call import LayerCall


def check_refs(call: LayerCall, tensors: Sequence[Any]) -> None:
    """Refuse Refs whose content may be differentiated, or that JAX does not see.

    Raises:
        TypeError: at once; or, for a call that is staged, when it is differentiated. Also for a class with a `vmap`
            method, which would be passed over.
    """
    if not call.arguments.is_plain_call:
        _refuse_hidden_refs(call)
    for name, ref in call.arguments.refs_of(tensors):
        if call.layer._has_vmap_method():
            raise TypeError(
                f"{call.name}.apply: argument {name} is a jax.Ref, and the class has a vmap method, which gets none. "
                "Pass its value: ref[...]."
            )
        error = functools.partial(_differentiated_ref_error, call.name, name)
        if is_differentiated(ref):
            raise error()
        if call.log is not None:  # only a later differentiation will know; compiled, the value is not read
            forbid_derivative([ref[...]], error)


def _refuse_hidden_refs(call: LayerCall) -> None:
    """Refuse a traced Ref within an object that is no pytree: `backward` may run after its trace has ended."""
    if not any(map(is_ref, tracers_in([x for a in call.arguments.arguments for x in a.skeleton.statics()]))):
        return
    for argument in call.arguments.arguments:
        for i, leaf in enumerate(argument.skeleton.statics()):
            if held := traced_names(leaf, is_ref):
                path, _ = argument.skeleton.static_paths()[i]
                raise TypeError(
                    f"{call.name}.apply: argument {argument.name}{path} holds a jax.Ref ({', '.join(held)}), but "
                    f"{type(leaf).__qualname__} is no pytree, so that JAX does not see the Ref. Register the type "
                    "(jax.tree_util.register_dataclass), or pass the Ref itself."
                )


def _differentiated_ref_error(layer: str, name: str) -> TypeError:
    return TypeError(
        f"{layer}.apply: argument {name} is a jax.Ref that JAX differentiates: it was made within the differentiated "
        "function, or is one of the arguments for which the function is differentiated. A Ref gets no gradient from a "
        "layer. Make it outside, and close over it or pass it as another argument; or pass its value: ref[...]."
    )


def second_derivative_error(call: LayerCall) -> Exception:
    """The error for a derivative of a call whose `forward` writes to a Ref, or keeps it."""
    if (forbidden := second_derivative_error_of(call.layer.backward)) is not None:
        return forbidden()
    refs = f"the jax.Ref {', '.join(call.arguments.refs)}" if call.arguments.refs else "a jax.Ref that it closes over"
    return TypeError(
        f"{call.name}.forward writes {refs}, or keeps it for backward. Such a call has a first derivative in reverse "
        "mode only: no second derivative, no forward mode, no vmap method. Where the Ref is only read, pass its value: "
        "ref[...]."
    )
