"""Exceptions that several modules of the package raise."""

from __future__ import annotations

from typing import Any

from ._jax.linearity import NotLinearError

__all__ = ["NoForwardModeError", "NotLinearError", "OnceDifferentiableError", "once_differentiable_error"]


class OnceDifferentiableError(RuntimeError):
    """Raised if a second derivative goes through a `backward` that is decorated with @once_differentiable."""


def once_differentiable_error(layer: Any) -> OnceDifferentiableError | None:
    """Return the second-derivative error of a class with a @once_differentiable `backward`, None for other classes."""
    make_error = getattr(layer.backward, "second_derivative_error", None)
    return None if make_error is None else make_error()


class NoForwardModeError(TypeError):
    """Raised if forward mode is used on a layer that has no rule for forward mode."""

    def __init__(self, layer: str) -> None:
        super().__init__(
            f"{layer} has no rule for forward-mode differentiation (jax.jvp, jax.jacfwd, jax.linearize): it defines "
            "backward alone. Add forward_mode = True to the class, which derives the rule from a backward that is "
            "linear in its cotangents; or a static jvp(ctx, *tangents). Or use reverse mode: jax.vjp, jax.grad, "
            "jax.jacrev."
        )
