"""What backward may return: every row of the table of entries, eager and under jit."""

import dataclasses
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pylayer_jax import Function, PyLayer
from tests.kit.layers import layer, loss
from tests.kit.modes import EAGER_AND_JIT, X, gradients


def gives(give, forward=lambda *args: args[0] * 2):
    """A layer whose backward returns `give(dy)`."""
    return layer(lambda ctx, *args: forward(*args), lambda ctx, dy: give(dy))


def named(give):
    """The same with named parameters x, n, w and a default."""
    return layer(lambda ctx, x, n, w, flag=True: x * n + w, lambda ctx, dy: give(dy))


# -- the entry for an array -----------------------------------------------------------------------

# For the shape of an input, the shapes of gradients that are summed to it, as in torch.
SHAPES = {
    (): [(1,), (2, 3)],
    (3,): [(1, 3), (4, 3), (2, 4, 3)],
    (1, 3): [(4, 3)],
    (3, 1): [(3, 4), (2, 3, 1)],
    (1, 1): [(3, 1)],
    (2, 1, 3): [(5, 2, 4, 3)],
    (1, 0): [(3, 0)],
}
FITTED = {
    **{dtype: ((3,), np.ones(3, dtype)) for dtype in ("float16", jnp.bfloat16, "int32", "bool", "float64")},
    **{
        f"{given} for {shape}": (shape, np.arange(math.prod(given), dtype=np.float32).reshape(given))
        for shape, every in SHAPES.items()
        for given in every
    },
}


@pytest.mark.parametrize(("mode", "array"), [(lambda f: f, np.asarray), (jax.jit, jnp.asarray)], ids=["eager", "jit"])
@pytest.mark.parametrize(("shape", "given"), FITTED.values(), ids=map(str, FITTED))
def test_other_dtypes_are_cast_and_other_shapes_summed(mode, shape, given, array):
    gradient = mode(jax.grad(loss(gives(lambda dy: array(given)))))(jnp.ones(shape))
    expected = jnp.asarray(given, jnp.float32)
    if given.size > math.prod(shape):  # the transpose of broadcasting
        (expected,) = jax.vjp(lambda x: jnp.broadcast_to(x, given.shape), jnp.ones(shape))[1](expected)
    np.testing.assert_array_equal(gradient, expected.reshape(shape), strict=True)


# Shapes of inputs and of gradients that torch refuses. Most differ in axes of length 1 only.
MISSHAPEN = [
    ((1,), ()), ((3,), (3, 1)), ((3,), (1, 3, 1)), ((1, 1), ()), ((3, 1), (3,)), ((3, 1), (1, 3)), ((1, 3), (3, 1)),
    ((1, 3), (3,)), ((2, 3), (2, 1, 3)), ((2, 1, 3), (2, 3)), ((0, 1), (1, 0)), ((3,), ()),
    ((3,), (1,)), ((3,), (2,)), ((3,), (3, 4)), ((3,), (3, 1, 2)),
]  # fmt: skip


@pytest.mark.parametrize(("shape", "given"), MISSHAPEN)
def test_a_gradient_that_would_have_to_be_reshaped_is_refused(shape, given):
    advice = "reshape" * ([n for n in shape if n != 1] == [n for n in given if n != 1])
    parts = [r"Made\.backward.*args\[0\]", *map(re.escape, (str(shape), str(given), advice, __file__))]
    message = "(?s:.*)".join(parts)
    for base in (PyLayer, Function):
        made = layer(lambda ctx, *args: args[0] * 2, lambda ctx, dy: jnp.ones(given), base)
        with pytest.raises(ValueError, match=message):
            jax.grad(loss(made))(jnp.ones(shape))


NO_ARRAY = r"Made\.backward(?s:.*)args\[0\]"
REFUSED = {
    **{str(value): (lambda dy, value=value: value, NO_ARRAY) for value in [1, 2.5, "text", [], [1.0], {"a": 1}]},
    "key": (lambda dy: jax.random.key(0), NO_ARRAY),
    "list of one, as in Paddle and torch": (lambda dy: [dy], NO_ARRAY),
    "complex": (lambda dy: jax.lax.complex(dy, dy), NO_ARRAY),
    "generator": (lambda dy: (x for x in [dy]), r"Made\.backward"),
}


@EAGER_AND_JIT
@pytest.mark.parametrize(("give", "message"), REFUSED.values(), ids=REFUSED)
def test_an_entry_that_does_not_fit_an_array(mode, give, message):
    with pytest.raises(ValueError, match=message):
        mode(jax.grad(loss(gives(give))))(X)


# -- how many entries -----------------------------------------------------------------------------

# Warnings are errors here: a tuple of Nones is silent, unlike a backward without a return.
CONVENTIONS = {
    "per slot": (lambda dy: (dy, 3 * dy), (1, 3)),
    "list": (lambda dy: [dy, 3 * dy], (1, 3)),
    "per argument": (lambda dy: (dy, None, 3 * dy), (1, 3)),
    "none first": (lambda dy: (None, 3 * dy), (0, 3)),
    "none": (lambda dy: (None, None, None), (0, 0)),
}


@EAGER_AND_JIT
@pytest.mark.parametrize(("give", "expected"), CONVENTIONS.values(), ids=CONVENTIONS)
def test_both_conventions(mode, give, expected):
    gradients = mode(jax.grad(lambda x, w: named(give).apply(x, 2, w).sum(), (0, 1)))(X, X)
    assert [g.tolist() for g in gradients] == [[e] * 3 for e in expected]


@EAGER_AND_JIT
@pytest.mark.parametrize("count", [None, 0, 1, 4, 5])
def test_wrong_counts(mode, count):
    made = named(lambda dy: None if count is None else (dy,) * count)
    with pytest.raises(ValueError, match=rf"Made\.backward returned {1 if count is None else count}(?s:.*)x, w"):
        mode(jax.grad(lambda x, w: made.apply(x, 2, w).sum(), (0, 1)))(X, X)


@EAGER_AND_JIT
def test_a_gradient_for_a_python_number_is_ignored(mode):
    assert mode(jax.grad(loss(named(lambda dy: (dy * 3, dy, dy)), 2, X)))(X).tolist() == [3, 3, 3]
    square = layer(lambda x, n: x * x * n, lambda x, n, dy: (2 * dy * x, dy), plain=True)
    assert mode(jax.hessian(square.apply))(1.0, 1.0) == 2


@gradients
@pytest.mark.parametrize("forward_mode", [False, True])
@pytest.mark.parametrize("reads", [False, True])
def test_trailing_entries_may_be_left_out_where_no_gradient_is_needed(run, forward_mode, reads):
    def forward(ctx, x, n, w):
        assert not reads or ctx.needs_input_grad
        return x * n + w

    short = layer(forward, lambda ctx, dy: 5 * dy, forward_mode=forward_mode)
    assert run(loss(short, 2, X))(X).tolist() == [5, 5, 5]
    with pytest.raises(ValueError, match=r"returned 1\b(?s:.*)\bw\b"):
        run(lambda w: short.apply(X, 2, w).sum())(X)


@EAGER_AND_JIT
def test_what_needs_no_gradient_is_ignored(mode):
    ignored = gives(lambda dy: (dy, "anything", object(), jnp.ones(77)))
    assert mode(jax.grad(loss(ignored, jnp.arange(2), jax.random.key(0), X)))(X).tolist() == [1, 1, 1]


# -- the entry for a container --------------------------------------------------------------------

TREE = {"a": X, "b": (X, [X])}
STRUCTURES = {
    "list": ([X, X], lambda xs: xs[0] * 2 + xs[1], lambda dy: [dy, None], [1, 0]),
    **{
        name: (TREE, lambda t: t["a"] + t["b"][0] + t["b"][1][0], give, expected)
        for name, give, expected in [
            ("whole", lambda dy: {"a": dy, "b": (2 * dy, [3 * dy])}, [1, 2, 3]),
            ("none at leaves", lambda dy: {"a": None, "b": (2 * dy, [None])}, [0, 2, 0]),
            ("none at a container", lambda dy: {"a": dy, "b": None}, [1, 0, 0]),
            ("none", lambda dy: (None,), [0, 0, 0]),
        ]
    },
}


@EAGER_AND_JIT
@pytest.mark.parametrize(("tree", "forward", "give", "expected"), STRUCTURES.values(), ids=STRUCTURES)
def test_structures_with_none_anywhere(mode, tree, forward, give, expected):
    gradients = mode(jax.grad(loss(gives(give, forward))))(tree)
    assert [leaf.tolist() for leaf in jax.tree.leaves(gradients)] == [[e] * 3 for e in expected]


@EAGER_AND_JIT
@pytest.mark.parametrize(
    ("tree", "give", "message"),
    [
        ([X, X], lambda dy: [dy] * 3, r"Made\.backward(?s:.*)args\[0\]"),
        ({"a": X}, lambda dy: ({"z": dy},), r"args\[0\](?s:.*)'z'"),
        ({"w": [X]}, lambda dy: {"w": [jnp.ones(2)]}, r"args\[0\]\['w'\]\[0\](?s:.*)\(3,\)"),
        ((X, X), lambda dy: (dy, dy), r"Made\.backward"),
    ],
    ids=["count", "keys", "shape", "tuple"],
)
def test_a_structure_that_does_not_fit(mode, tree, give, message):
    with pytest.raises(ValueError, match=message):
        mode(jax.grad(loss(gives(give, lambda t: jax.tree.leaves(t)[0] * 2))))(tree)


@EAGER_AND_JIT
@pytest.mark.parametrize(
    ("give", "message"),
    [(lambda dy: {"n": dy}, r"\['w'\](?s:.*)\['n'\]"), (lambda dy: {"w": dy, "m": dy}, r"\['w'\](?s:.*)'m'")],
    ids=["missing", "unknown"],
)
def test_a_key_that_holds_a_tensor_must_be_there_and_no_other(mode, give, message):
    made = gives(give, lambda p: p["w"] * p["n"])
    with pytest.raises(ValueError, match=rf"args\[0\](?s:.*){message}"):
        mode(jax.grad(lambda w: made.apply({"w": w, "n": 2}).sum()))(X)


@pytest.mark.parametrize("forward_mode", [False, True], ids=["", "forward mode"])
@EAGER_AND_JIT
def test_cotangents_that_are_python_numbers(mode, forward_mode):
    def backward(ctx, dy, dz):
        assert (dy.shape, dy.dtype, dz.shape, dz.dtype) == ((), jnp.float32, (), jnp.float32)
        return dy * 2 + dz * 3

    two = layer(lambda ctx, x: (x * 2, jnp.sin(x)), backward, forward_mode=forward_mode)
    pull = lambda x, dy, dz: jax.vjp(two.apply, x)[1]((dy, dz))[0]
    assert mode(lambda x: pull(x, 1.0, 2.0))(jnp.float32(0.5)) == 8
    assert mode(jax.vmap(lambda x: pull(x, x, 2.0)))(X).tolist() == (X * 2 + 6).tolist()


# -- values that stand for the one array that they hold, as parameters of flax.nnx do --------------


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Box:
    value: jax.Array
    label: str = dataclasses.field(metadata={"static": True}, default="")

    def __jax_array__(self):
        return self.value


def multiply(give):
    """Return a layer whose second argument is an array, or the only leaf of another pytree."""

    array = lambda w: jax.tree.leaves(w)[0]
    return layer(lambda x, w: x * array(w), lambda x, w, dy: (dy * array(w), give(dy * x)), plain=True)


GIVEN = {"array": lambda g: g, "box": Box, "box of another kind": lambda g: Box(g, "other")}


@EAGER_AND_JIT
@pytest.mark.parametrize("give", GIVEN.values(), ids=GIVEN)
def test_an_array_or_a_box_as_the_gradient_of_either(mode, give):
    for w, of_w in ((Box(2 * X), give), (2 * X, give), ({"w": Box(2 * X)}, lambda g: {"w": give(g)})):
        dx, dw = mode(jax.grad(lambda x, w: multiply(of_w).apply(x, w).sum(), (0, 1)))(X, w)  # noqa: B023
        assert jax.tree.structure(dw) == jax.tree.structure(w)
        np.testing.assert_allclose(dx, 2 * X)
        np.testing.assert_allclose(jax.tree.leaves(dw)[0], X)
