"""Errors of derivatives that do not exist, as types: the test kit tells them from other errors."""

from __future__ import annotations

from collections.abc import Sequence


class NoForwardModeError(TypeError):
    """A layer has no rule for forward mode."""

    def __init__(self, layer: str, refs: Sequence[str] = ()) -> None:
        reason = (
            "it defines backward alone. Add forward_mode = True to the class, which derives the rule from a backward "
            "that is linear in its cotangents; or a static jvp(ctx, *tangents)."
        )
        if refs:
            reason = (
                f"the call takes a jax.Ref ({', '.join(refs)}). If the layer only reads it, pass its value: ref[...]."
            )
        super().__init__(
            f"{layer} has no rule for forward-mode differentiation (jax.jvp, jax.jacfwd, jax.linearize): {reason} "
            "Or use reverse mode: jax.vjp, jax.grad, jax.jacrev."
        )
        self.layer = layer


class NotDerivableError(TypeError):
    """Forward mode, or forward mode over reverse mode, cannot be derived from the methods of a layer."""
