"""Exceptions of the package and messages that several modules raise."""

from __future__ import annotations

from typing import Any

from ._jax.linearity import NotLinearError

__all__ = ["NoForwardModeError", "NotLinearError", "OnceDifferentiableError", "once_differentiable_error"]


class OnceDifferentiableError(RuntimeError):
    """A second derivative goes through a `backward` that is marked @once_differentiable."""


def once_differentiable_error(layer: Any) -> OnceDifferentiableError | None:
    """Make the error for a second derivative of a class whose `backward` is decorated; None for any other class."""
    make_error = getattr(layer.backward, "second_derivative_error", None)
    return None if make_error is None else make_error()


class NoForwardModeError(TypeError):
    """A layer has no rule for forward mode."""

    def __init__(self, layer: str) -> None:
        super().__init__(
            f"{layer} has no rule for forward-mode differentiation (jax.jvp, jax.jacfwd, jax.linearize): it defines "
            "backward alone. Add forward_mode = True to the class, which derives the rule from a backward that is "
            "linear in its cotangents; or a static jvp(ctx, *tangents). Or use reverse mode: jax.vjp, jax.grad, "
            "jax.jacrev."
        )
