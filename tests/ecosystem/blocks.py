"""A block of hooks around the differentiated code, or none, and how near its gradients come."""

from __future__ import annotations

import contextlib

import jax
import numpy as np

from pylayer_jax.packers import cast_saved
from tests.ecosystem.layers import Steep, steep
from tests.hooks.spy import Spy


class Block(contextlib.ContextDecorator):
    """Use it in `with` around the code that is differentiated, or as a decorator of it."""

    def __init__(self, kind):
        self.spy = Spy() if kind == "spy" else None
        self.hooks = {"none": None, "spy": self.spy and self.spy.hooks, "cast": cast_saved()}[kind]
        # Of the largest entry: bfloat16 keeps eight bits.
        self.tolerance = 0.03 if kind == "cast" else 2e-5
        self._entered = []

    def __enter__(self):
        self._entered.append(contextlib.nullcontext() if self.hooks is None else self.hooks)
        self._entered[-1].__enter__()
        return self

    def __exit__(self, *exception):
        self._entered.pop().__exit__(*exception)

    def assert_close(self, got, want):
        """Gradients agree leaf by leaf."""
        assert_close(got, want, self.tolerance)

    def compare(self, run, ours=Steep.apply, plain=steep):
        """`run(f, block)` gives a value and gradients: of a layer in this block as of plain code in none."""
        (value, gradients), (want, want_gradients) = run(ours, self), run(plain, NO_BLOCK)
        assert_close(value, want)
        self.assert_close(gradients, want_gradients)


def assert_close(got, want, tolerance=2e-5):
    """Two pytrees agree: every leaf, relative to the largest entry of the whole tree."""
    paths, treedef = jax.tree_util.tree_flatten_with_path(want)
    leaves, found = jax.tree_util.tree_flatten(got)
    assert found == treedef
    largest = max(float(np.abs(np.asarray(x, np.float64)).max()) for _, x in paths)
    assert largest > 0, "zeros prove nothing"
    for leaf, (path, x) in zip(leaves, paths, strict=True):
        name = jax.tree_util.keystr(path)
        np.testing.assert_allclose(leaf, x, rtol=0, atol=tolerance * largest, err_msg=name)


NO_BLOCK = Block("none")
