"""Saved-tensor hooks beside those of real torch: gradients, and how often each hook is called."""

from __future__ import annotations

import contextlib

import pytest

from tests.frameworks.shared.hooks import HOOKS, packs_without_differentiation, product
from tests.kit.oracle import MODES, Mine, Ours, Row, Table, X, Y, assert_same, compare, fail

TABLE = Table(HOOKS)


@TABLE.count(X, Y, wrt=(0,), theirs=(2, 2), ours=(2, 2))
def one_input_of_a_layer_needs_a_gradient(of):
    return of.hooked(product(of).apply)


@TABLE.count(theirs=(1, 1), ours=(1, 1))
def none_saved(of):
    def forward(ctx, x):
        ctx.save_for_backward(None, x)
        return x * 2

    return of.hooked(of.layer(forward, lambda ctx, dy: dy * ctx.saved_tensors[1]).apply)


@TABLE.every()
def test_hooks(theirs, mode, one):
    compare(theirs, mode, one)


@MODES
def test_hooks_without_differentiation(theirs, mode):
    assert packs_without_differentiation(theirs, mode) == {"ours": 0, "theirs": 0}


@MODES
@pytest.mark.parametrize("fails", [False, True], ids=["left", "left by an exception"])
def test_the_innermost_pair_alone_applies(theirs, mode, fails):
    """And the outer one again behind it."""
    calls = {}

    def build(of):
        layer, events = product(of), calls.setdefault(of, [])

        def pair(name):
            return of.hooks(
                lambda x: events.append(f"{name} packs") or {"hidden": x},
                lambda kept: events.append(f"{name} unpacks") or kept["hidden"],
            )

        def nested(x, y):
            with pair("outer"):
                with contextlib.suppress(Mine), pair("inner"):
                    z = layer.apply(x, y)
                    if fails:
                        fail()
                return z, layer.apply(y, x)

        return nested

    ours, one = Ours(mode), Row("nested", build, (X, Y), (0, 1), orders=1)
    assert_same(ours.run(one).gradients, theirs.run(one).gradients)
    assert sorted(calls[ours]) == sorted(calls[theirs])
    assert calls[ours][:4] == calls[theirs][:4] == ["inner packs"] * 2 + ["outer packs"] * 2


@MODES
def test_disabled_hooks(theirs, mode):
    """Layers and operations go on inside; a block that ends restores the message of the one around it."""
    pair = lambda x: x, lambda x: x

    def build(of):
        layer = product(of)

        def inside(x):
            with of.disable_hooks("outer"):
                with of.disable_hooks("inner"):
                    y = layer.apply(x, x) * x
                with pytest.raises(RuntimeError, match=r"^outer$"), of.hooks(*pair):
                    pass
            with of.hooks(*pair):
                return y

        return inside

    ours, one = Ours(mode), Row("disabled", build, (X,), (0,), orders=1)
    assert_same(ours.run(one).gradients, theirs.run(one).gradients)
