"""Layers made of functions, ways to run them, and all that an error says."""

from __future__ import annotations

import jax
import pytest

from pylayer_jax import PyLayer

GRADIENTS = {"grad": jax.grad, "jit-grad": lambda f: jax.jit(jax.grad(f)), "grad-jit": lambda f: jax.grad(jax.jit(f))}
gradients = pytest.mark.parametrize("run", GRADIENTS.values(), ids=GRADIENTS)


def layer(forward=lambda ctx, x: x * 2, backward=lambda ctx, dy: dy, base=PyLayer, **members):
    methods = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    return type("Made", (base,), methods | members)


def loss(made, *rest, **named):
    """The sum of a layer's output, as a function of its first argument."""
    return lambda x: made.apply(x, *rest, **named).sum()


def text_of(error):
    """What it says, with its notes."""
    return "\n".join([str(error), *getattr(error, "__notes__", ())])
