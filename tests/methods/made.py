"""Layers made of functions, ways to run them, and all that an error says."""

from __future__ import annotations

import jax
import pytest

from pylayer_jax import PyLayer
from tests.kit.layers import layer_with
from tests.kit.modes import MODES

GRADIENTS = {name: MODES[name] for name in ("grad", "jit-grad", "grad-jit")}
RUNS = {"eager": lambda f: f, "jit": jax.jit, "grad": jax.grad, "jit-grad": MODES["jit-grad"]}
runs = pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
gradients = pytest.mark.parametrize("run", GRADIENTS.values(), ids=GRADIENTS)


def layer(forward=lambda ctx, x: x * 2, backward=lambda ctx, dy: dy, base=PyLayer, **members):
    return layer_with(base, forward=forward, backward=backward, **members)


def loss(made, *rest, **named):
    """The sum of a layer's output, as a function of its first argument."""
    return lambda x: made.apply(x, *rest, **named).sum()


def text_of(error):
    """What it says, with its notes."""
    return "\n".join([str(error), *getattr(error, "__notes__", ())])
