"""What a layer returns: outputs of every kind come back as they were, in every mode."""

from __future__ import annotations

from collections import namedtuple

import jax
import numpy as np
import pytest

from pylayer_jax import PyLayer
from tests.kit.modes import MODES, X

Named = namedtuple("Named", "value label")
OBJECT = object()
FUNCTION = lambda: None  # noqa: E731
OUTPUTS = {
    "statics": lambda y: (y, 1, None, "text", OBJECT, FUNCTION, [3]),
    "1-tuple": lambda y: (y,),
    "list": lambda y: [y, None],
    "dict": lambda y: {"b": y, "a": {"c": OBJECT}},
    "named tuple": lambda y: Named(y, "label"),
    "nested": lambda y: ([y, (None, {"k": FUNCTION})], 2.5),
}


@pytest.mark.parametrize("shape", OUTPUTS)
@pytest.mark.parametrize("mode", ["eager", "jit", *MODES])
def test_outputs_come_back_as_they_were(mode, shape):
    class Returns(PyLayer):
        @staticmethod
        def forward(ctx, x):
            return OUTPUTS[shape](x * 2)

        @staticmethod
        def backward(ctx, *dys):
            (dy,) = [d for d in jax.tree_util.tree_leaves(dys) if d is not None]
            return dy * 2

    found = []

    def f(x):
        out = Returns.apply(x)
        found.append(out)
        (y,) = [leaf for leaf in jax.tree_util.tree_leaves(out) if isinstance(leaf, jax.Array)]
        return y.sum()

    if mode in MODES:
        assert MODES[mode](f)(X).tolist() == [2, 2, 2]
    else:
        assert {"eager": f, "jit": jax.jit(f)}[mode](X) == 2 * X.sum()
    expected, treedef = jax.tree_util.tree_flatten(OUTPUTS[shape](None), is_leaf=lambda v: v is None)
    for out in found:
        leaves, got = jax.tree_util.tree_flatten(out, is_leaf=lambda v: v is None)
        assert got == treedef
        for a, b in zip(leaves, expected, strict=True):
            assert isinstance(a, jax.Array) or a is b or a == b


def test_output_without_a_tensor_is_an_error():
    class Empty(PyLayer):
        @staticmethod
        def forward(ctx, x, result):
            return result

    for result in (None, (), 3, (None, "text"), [np.array(["text"])]):
        for run in (lambda f: f, jax.jit, jax.grad):
            with pytest.raises(ValueError, match=r"Empty\.forward returned .* expected at least one tensor"):
                run(lambda x, r=result: Empty.apply(x, r))(1.0)


def test_input_returned_is_a_value_of_its_own():
    class Doubles(PyLayer):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x

        @staticmethod
        def backward(ctx, dy):
            return 2 * dy

    # The derivative of x * layer(x) is x + 2 layer... with the layer's own factor on its path alone.
    np.testing.assert_allclose(jax.grad(lambda x: (x * Doubles.apply(x)).sum())(X), 3 * X)
    np.testing.assert_allclose(jax.jit(jax.grad(lambda x: (x * Doubles.apply(x)).sum()))(X), 3 * X)


def test_shared_output_under_vmap_counts_once():
    class Shares(PyLayer):
        """One output that only the unmapped input reaches."""

        @staticmethod
        def forward(ctx, x, w):
            ctx.save_for_backward(x, w)
            return x * w, 2 * w

        @staticmethod
        def backward(ctx, a, b):
            x, w = ctx.saved_tensor()
            return a * w, a * x + 2 * b

    def total(layer):
        return lambda w: sum(v.sum() for v in jax.vmap(layer, in_axes=(0, None))(X, w))

    plain = total(lambda x, w: (x * w, 2 * w))
    for order in (
        jax.grad,
        lambda f: jax.jit(jax.grad(f)),
        lambda f: jax.grad(jax.jit(f)),
        lambda f: jax.grad(jax.grad(lambda w: f(w) ** 2)),
    ):
        np.testing.assert_allclose(order(total(Shares.apply))(3.0), order(plain)(3.0), rtol=1e-6)
