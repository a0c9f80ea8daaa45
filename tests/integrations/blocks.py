"""Defines layers with twice the true gradient, blocks of hooks around them, and comparisons of their gradients."""

import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.hooks.spy import Spy, in_block
from tests.kit.layers import Steep, layer


def steep(x):
    """Return the function of `Steep` as a plain custom_vjp function."""
    value = jax.lax.stop_gradient(x)
    return jnp.tanh(value + 2 * (x - value))


def applied(vjp):
    """Return a layer that takes a whole module, statics included, and returns twice the true gradient.

    `vjp` is `jax.vjp`, or what a library has in its place for modules.
    """

    def backward(ctx, dy):
        _, pull = vjp(lambda linear, x: linear(x), *ctx.saved_tensor())
        return jax.tree.map(lambda g: 2 * g, pull(dy))

    return layer(lambda ctx, linear, x: ctx.save_for_backward(linear, x) or linear(x), backward, name="Applied")


def doubled(model, x):
    """Return the output of a module for `x`, with twice its gradient."""
    y = jax.lax.stop_gradient(model(x))
    return y + 2 * (model(x) - y)


class Block:
    """Decorator that puts code into a block of a pair of hooks, or leaves it as it is."""

    def __init__(self, kind):
        self.spy = Spy() if kind == "spy" else None

    def __call__(self, function):
        return function if self.spy is None else in_block(self.spy.hooks, function)

    def compare(self, run, ours=Steep.apply, plain=steep):
        """Assert that `run(f, block)` is the same for a layer in this block and for plain code without a block."""
        (value, gradients), (want, want_gradients) = run(ours, self), run(plain, NO_BLOCK)
        assert_close(value, want)
        assert_close(gradients, want_gradients)


def assert_close(got, want, tolerance=2e-5):
    """Assert that two pytrees agree, relative to the largest entry of the whole tree."""
    paths, treedef = jax.tree_util.tree_flatten_with_path(want)
    leaves, found = jax.tree_util.tree_flatten(got)
    assert found == treedef
    largest = max(float(np.abs(np.asarray(x, np.float64)).max()) for _, x in paths)
    assert largest > 0, "zeros prove nothing"
    for leaf, (path, x) in zip(leaves, paths, strict=True):
        name = jax.tree_util.keystr(path)
        np.testing.assert_allclose(leaf, x, rtol=0, atol=tolerance * largest, err_msg=name)


NO_BLOCK = Block("none")


# Whether the absence of a library fails, instead of skipping: `conftest.py` sets it before it collects a test.
required = False


def library(name):
    """Import a module; if it is not installed, skip the tests of the module that calls this."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        if required:
            raise
        pytest.skip(f'{name}: {error}. pip install -e ".[ecosystem]"', allow_module_level=True)
