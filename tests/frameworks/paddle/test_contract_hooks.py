"""Saved-tensor hooks beside those of real Paddle: gradients, and how often each hook is called."""

from __future__ import annotations

import pytest

from tests.frameworks.shared.hooks import HOOKS, packs_without_differentiation, product
from tests.kit.oracle import MODES, Mine, Ours, Row, Table, X, Y, assert_same, compare, fail

TABLE = Table(HOOKS)


@TABLE.differ(X, Y, theirs=ValueError, ours=[Y, X])
def a_block_within_a_block(of):
    return of.hooked(of.hooked(of.multiply))


# Paddle takes a tuple or list that pack returns apart, and unpacks each of its parts.
@TABLE.differ(X, Y, theirs=OSError, ours=[Y, X])
def tuple_packed_for_a_layer(of):
    return of.hooked(product(of).apply, pack=lambda x: (x, 1), unpack=lambda kept: kept[0])


@TABLE.differ(theirs=ValueError, ours=[3])
def none_and_statics_saved_under_hooks(of):
    def forward(ctx, x):
        ctx.save_for_backward(None, 3, x)
        return x * 2

    return of.hooked(of.layer(forward, lambda ctx, dy: dy * ctx.saved_tensor()[1]).apply)


# Under hooks that copy, Paddle loses what a saved tensor owes to the input.
@TABLE.differ(theirs=[0], ours=[6 * X], orders=2)
def second_derivative_of_a_layer_under_hooks(of):
    layer = of.layer(of.saving(lambda x: x**3), lambda ctx, dy: 3 * dy * ctx.saved_tensor()[0] ** 2)
    return of.hooked(layer.apply, unpack=lambda kept: kept, pack=of.detach)


@TABLE.every()
def test_hooks(theirs, mode, one):
    compare(theirs, mode, one)


@MODES
def test_hooks_without_differentiation(theirs, mode):
    """Paddle packs all the same."""
    assert packs_without_differentiation(theirs, mode) == {"ours": 0, "theirs": 2}


@MODES
def test_a_block_left_by_an_exception(theirs, mode):
    for of in (ours := Ours(mode), theirs):
        with pytest.raises(Mine):
            of.hooked(fail)()
    one = Row("product", lambda of: of.multiply, (X, Y), (0, 1), orders=1)
    assert_same(ours.run(one).gradients, theirs.run(one).gradients)
    assert (ours.packs, theirs.packs) == (0, 0)
