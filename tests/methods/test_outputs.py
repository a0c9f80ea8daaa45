"""What a layer returns: outputs of every kind come back as they were, in every mode."""

from __future__ import annotations

from collections import namedtuple

import jax
import numpy as np
import pytest

from tests.kit.modes import EAGER_AND_JIT, MODES, X

from .made import layer

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


def flat(outputs):
    return jax.tree.flatten(outputs, is_leaf=lambda v: v is None)


@pytest.mark.parametrize("outputs", OUTPUTS.values(), ids=OUTPUTS)
@pytest.mark.parametrize("mode", [None, *MODES])
def test_outputs_come_back_as_they_were(mode, outputs):
    made = layer(lambda ctx, x: outputs(x * 2), lambda ctx, *dys: 2 * jax.tree.leaves(dys)[0])
    found = []

    def f(x):
        found.append(flat(made.apply(x)))
        (y,) = [leaf for leaf in found[-1][0] if isinstance(leaf, jax.Array)]
        return y.sum()

    if mode:
        assert MODES[mode](f)(X).tolist() == [2, 2, 2]
    else:
        assert f(X) == jax.jit(f)(X) == 2 * X.sum()
    expected, treedef = flat(outputs(None))
    for leaves, got in found:
        assert got == treedef
        for a, b in zip(leaves, expected, strict=True):
            assert isinstance(a, jax.Array) or a is b or a == b


def test_output_without_a_tensor_is_an_error():
    made = layer(lambda ctx, x, result: result)
    for result in (None, (), 3, (None, "text"), [np.array(["text"])]):
        for run in (lambda f: f, jax.jit, jax.grad):
            with pytest.raises(ValueError, match=r"Made\.forward.*tensor"):
                run(lambda x, r=result: made.apply(x, r))(1.0)


@EAGER_AND_JIT
def test_input_returned_is_a_value_of_its_own(mode):
    doubles = layer(lambda ctx, x: x, lambda ctx, dy: 2 * dy)
    # The layer's own factor is on its path alone.
    np.testing.assert_allclose(mode(jax.grad(lambda x: (x * doubles.apply(x)).sum()))(X), 3 * X)


def test_shared_output_under_vmap_counts_once():
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x * w, 2 * w  # the second reaches only the input that is not mapped

    def backward(ctx, a, b):
        x, w = ctx.saved_tensor()
        return a * w, a * x + 2 * b

    def total(of_one):
        return lambda w: sum(v.sum() for v in jax.vmap(of_one, in_axes=(0, None))(X, w))

    ours, plain = total(layer(forward, backward).apply), total(lambda x, w: (x * w, 2 * w))
    for order in (jax.grad, lambda f: jax.grad(jax.jit(f)), lambda f: jax.grad(jax.grad(lambda w: f(w) ** 2))):
        np.testing.assert_allclose(order(ours)(3.0), jax.jit(order(plain))(3.0), rtol=1e-6)
