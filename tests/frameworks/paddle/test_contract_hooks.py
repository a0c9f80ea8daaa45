"""Saved-tensor hooks beside those of real Paddle: gradients, and how often each hook is called."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from tests.frameworks.shared.differences import FAILING_HOOKS, hooks_that_are_not_callable
from tests.frameworks.shared.hooks import HOOKS, packs_without_differentiation, product
from tests.kit.oracle import (
    HALVES,
    MODES,
    Mine,
    Ours,
    Row,
    Table,
    X,
    Y,
    assert_same,
    compare_hooks,
    compare_with_table,
    fail,
)

COUNTS = Table(HOOKS)
TABLE = Table()


@COUNTS.add(X, Y, wrt=(0,), theirs=(2, 2), ours=(1, 1))
def one_factor_needs_a_gradient(of):
    return of.hooked(of.multiply)


# Operations inside forward save nothing that anyone could ask for, but Paddle packs them.
@COUNTS.add(theirs=(3, 1), ours=(1, 1))
def layer_inside_a_layer(of):
    inner = product(of)

    return of.hooked(
        of.layer(of.saving(lambda x: inner.apply(x, x) * 1), lambda ctx, dy: 2 * dy * ctx.saved_tensor()[0]).apply
    )


@MODES
@COUNTS.every()
def test_hooks(theirs, mode, one):
    compare_hooks(theirs, mode, one)


# Every exception in a hook is an OSError there.
for name, build in FAILING_HOOKS:
    TABLE.differ(X, Y, label=name, theirs=OSError, ours=Mine, match="on purpose")(build)
TABLE.differ(X, Y, theirs=OSError, ours=TypeError, match="pack_hook")(hooks_that_are_not_callable)


@TABLE.differ(X, Y, theirs=ValueError, ours=[Y, X])
def a_block_within_a_block(of):
    return of.hooked(of.hooked(of.multiply))


# What unpack returns in place of a tensor.
UNPACKED = {
    "number": (ValueError, ValueError, lambda of, x: 3),
    "nothing": (ValueError, ValueError, lambda of, x: None),
    # Paddle computes with whatever comes.
    "shape": ([np.full(2, 1, np.float32)] * 2, ValueError, lambda of, x: of.ones((3, 3))),
}

for name, (their, our, unpacked) in UNPACKED.items():

    @TABLE.differ(X, Y, label=name, theirs=their, ours=our, match="unpack_hook")
    def unpacked_for_an_operation(of, unpacked=unpacked):
        return of.hooked(of.multiply, unpack=lambda kept: unpacked(of, kept["hidden"]))


@TABLE.differ(X, Y, theirs=HALVES, ours=ValueError, match="unpack_hook")
def unpacked_in_another_dtype_for_a_layer(of):
    return of.hooked(product(of).apply, unpack=lambda kept: of.cast(kept["hidden"], "float16"))


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
    return of.hooked(
        layer.apply,
        unpack=lambda kept: kept,
        pack=jax.lax.stop_gradient if isinstance(of, Ours) else lambda x: x.detach(),
    )


@MODES
@TABLE.every()
def test_errors_and_differences(theirs, mode, one):
    compare_with_table(theirs, mode, one)


@MODES
def test_hooks_without_differentiation(theirs, mode):
    """Paddle packs all the same."""
    assert packs_without_differentiation(theirs, mode) == {"ours": 0, "theirs": 2}


@MODES
def test_a_block_left_by_an_exception(theirs, mode):
    for of in (ours := Ours(mode), theirs):
        with pytest.raises(Mine):
            of.hooked(fail)()
    one = Row("product", lambda of: of.multiply, (X, Y), (0, 1))
    assert_same(ours.run(one).gradients, theirs.run(one).gradients)
    assert (ours.packs, theirs.packs) == (0, 0)
