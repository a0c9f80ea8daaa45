"""Forward mode: by the transpose of backward, by a layer's own `jvp`, and within other functions of JAX."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.kit.layers import ForwardTanh, Square, layer, loss
from tests.kit.modes import EAGER_AND_JIT
from tests.kit.transforms import FORWARD, assert_same, pushed, scalar

X = jnp.array([0.3, -0.7])


def test_eager_forward_mode_sees_numbers_and_runs_forward_once():
    seen = []

    def forward(ctx, x):
        seen.append(x)
        ctx.scale = 2.0 if x[0] > 0 else 3.0
        return jnp.asarray(np.asarray(x) * ctx.scale)

    made = layer(forward, lambda ctx, dy: dy * ctx.scale, forward_mode=True)
    assert jax.jvp(made.apply, (X,), (X,))[1].tolist() == (2 * X).tolist()
    assert jax.grad(loss(made))(-X).tolist() == [3, 3]
    np.testing.assert_allclose(jax.jacfwd(made.apply)(X), 2 * jnp.eye(2))
    assert [isinstance(x, jax.core.Tracer) for x in seen] == [False] * 3


def test_forward_is_staged_once_under_jit():
    runs = []

    def forward(ctx, x):
        runs.append(ctx.needs_input_grad)
        return ForwardTanh.forward(ctx, x)

    counted = layer(forward, base=ForwardTanh)
    jax.jit(jax.grad(loss(counted)))(X)
    jax.jit(lambda x: jax.jvp(counted.apply, (x,), (x,)))(X)
    assert runs == [(True,), (True,)]


# Linear, and each is its own transpose.
Flip = layer(lambda ctx, x: jnp.flip(x) * 3, lambda ctx, dy: Flip.apply(dy), forward_mode=True)
Product = layer(
    jnp.multiply, lambda a, b, dy: (Product.apply(dy, b), Product.apply(a, dy)), plain=True, forward_mode=True
)


@pytest.mark.parametrize("around", [lambda f: f, jax.jit, jax.checkpoint], ids=["eager", "jit", "remat"])
def test_a_backward_that_applies_its_own_layer(around):
    def total(flipped, product):
        return lambda x: jnp.sum(jnp.sin(around(lambda x: flipped(product(x, jnp.cos(x))))(x)) * jnp.array([1, 2.0]))

    ours, plain = total(Flip.apply, Product.apply), total(lambda x: jnp.flip(x) * 3, jnp.multiply)
    third = lambda f: jax.jit(jax.jacfwd(jax.grad(jax.jacfwd(lambda t: f(t * X)))))
    for derivative in (jax.jacfwd, jax.hessian, lambda f: jax.jacfwd(jax.jacfwd(f))):
        np.testing.assert_allclose(derivative(ours)(X), jax.jit(derivative(plain))(X), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(third(ours)(0.5), third(plain)(0.5), rtol=1e-4)


# -- a layer's own `jvp` ---------------------------------------------------------------------------


def tangents_of_product(ctx, dx, dn, dy):
    x, n, y = ctx.saved_tensor()
    assert (n, dn) == (3, None)
    return dx * y + dy * x, None, dx * jnp.cos(x)


# Its `jvp` is not the transpose of its `backward`, so that the result shows which of them ran.
OwnMap = layer(
    lambda x, n, y: (x * y, n, jnp.sin(x)),
    lambda x, n, y, dxy, dsin: (10 * dxy * y + dsin * jnp.cos(x), 10 * dxy * x),
    plain=True,
    jvp=tangents_of_product,
)


def own(x, y):
    return OwnMap.apply(x, 3, y)[::2]


def plain(x, y):
    return x * y, jnp.sin(x)


@pytest.mark.parametrize("transform", [name for name in FORWARD if "grad" not in name])  # which backward is part of
def test_jvp_is_the_tangent_map(transform):
    found, expected = (FORWARD[transform](scalar(f, linear=False), (X, X * 2), pushed) for f in (own, plain))
    assert_same(found, expected)


def test_the_tangent_map_has_a_derivative_in_reverse_mode():
    assert_same(*(jax.jacrev(jax.jacfwd(f))(X, X * 2) for f in (own, plain)))


def add_tangents(ctx, dx, dy):
    assert dx.dtype == dy.dtype == jnp.float32
    return dx + dy


Sum = layer(lambda ctx, x, y: x + y, jvp=add_tangents)


@EAGER_AND_JIT
def test_a_batch_of_which_the_tangents_see_nothing(mode):
    pushed = mode(jax.vmap(lambda x: jax.jvp(lambda y: Sum.apply(x, y), (X[0],), (X[1],))))(X)
    np.testing.assert_allclose(pushed, [X + X[0], [X[1], X[1]]], rtol=1e-6)


@EAGER_AND_JIT
def test_tangents_that_are_python_numbers(mode):
    assert mode(lambda x: jax.jvp(Sum.apply, (x, 3.0), (1.0, 1.0)))(2.0) == (5, 2)


@EAGER_AND_JIT
def test_reverse_mode_calls_backward(mode):
    made = layer(jnp.sin, lambda x, dy: jnp.clip(dy, -0.5, 0.5), plain=True, forward_mode=True)
    assert mode(jax.grad(loss(made)))(X).tolist() == [0.5, 0.5]
    assert mode(jax.grad(lambda x: own(x, X)[0].sum()))(X).tolist() == (10 * X).tolist()


@pytest.mark.parametrize("materialize", [True, False])
def test_missing_tangents_are_zeros_or_none(materialize):
    seen = []

    def forward(ctx, a, tree, index):
        ctx.set_materialize_grads(materialize)
        return a + tree["b"] + tree["c"] + index.astype(jnp.float32)

    def jvp(ctx, da, dtree, dindex):
        seen.append((da, dtree, dindex))
        assert ctx.needs_input_grad == (False, True, False)
        return dtree["b"]

    apply = layer(forward, jvp=jvp).apply
    given, other = {"b": X, "c": X, "n": 3}, jnp.array([0, 1])
    out, tangent = jax.jvp(lambda b: apply(X, given | {"b": b}, other), (X,), (jnp.array([2.0, 3.0]),))
    assert (out.shape, tangent.tolist()) == ((2,), [2, 3])
    ((da, dtree, dindex),) = seen
    assert dtree["n"] is None
    if materialize:
        assert da.tolist() == dtree["c"].tolist() == dindex.tolist() == [0, 0]
        assert dindex.dtype == jnp.int32
    else:
        assert da is dtree["c"] is dindex is None


@pytest.mark.parametrize(
    "returned",
    [
        lambda dx: dx,
        lambda dx: (dx, dx, None, dx),
        lambda dx: (dx[:1], None, None),
        lambda dx: (dx, None, dx),
        lambda dx: (dx, None, {"k": 1}),
        lambda dx: (jax.lax.complex(dx, dx), None, None),
    ],
    ids=["too few", "too many", "shape", "structure", "number", "complex"],
)
def test_what_jvp_must_return(returned):
    made = layer(lambda ctx, x: (x * 2, "static", {"k": x * 3}), jvp=lambda ctx, dx: returned(dx))
    with pytest.raises(ValueError, match=r"Made\.jvp"):
        jax.jvp(lambda x: made.apply(x)[::2], (X,), (X,))


def test_none_and_other_dtypes_from_jvp():
    def forward(ctx, x):
        marked = x * 3
        ctx.mark_non_differentiable(marked)
        return x * 2, marked, x.astype(jnp.bfloat16), x * 4

    made = layer(forward, jvp=lambda ctx, dx: (None, dx, dx, np.asarray(dx) * 4))
    zero, marked, low, number = jax.jvp(made.apply, (X,), (X,))[1]
    assert zero.tolist() == marked.tolist() == [0, 0]
    assert low.dtype == jnp.bfloat16
    assert number.tolist() == (X * 4).tolist()


# Linear; its rule, which plays no part here, is not its transpose.
Sums = layer(lambda ctx, x: (jnp.cumsum(x) * 3, x.sum()), lambda ctx, *_: pytest.fail("it is not differentiated"))
ForwardSums = layer(base=Sums, forward_mode=True)


TRANSPOSED = {
    "eager": lambda f: jax.linear_transpose(f, X)((X, X[0]))[0],
    "jit of": lambda f: jax.jit(lambda c: jax.linear_transpose(f, X)(c)[0])((X, X[0])),
    "vmap of": lambda f: jax.vmap(lambda c: jax.linear_transpose(f, X)(c)[0])((X[None], X[:1])),
    "of vmap": lambda f: jax.linear_transpose(jax.vmap(f), X[None])((X[None], X[:1]))[0],
}


@pytest.mark.parametrize("made", [Sums, ForwardSums])
@pytest.mark.parametrize("way", TRANSPOSED)
def test_linear_transpose_is_that_of_forward(made, way):
    found, expected = (TRANSPOSED[way](f) for f in (made.apply, lambda x: (jnp.cumsum(x) * 3, x.sum())))
    np.testing.assert_allclose(found, expected, rtol=1e-6)


@pytest.mark.parametrize("flag", [False, True])
def test_linear_transpose_needs_a_linear_forward(flag):
    with pytest.raises(TypeError, match=r"(?s)Made.*mul"):
        jax.linear_transpose(layer(base=Square, forward_mode=flag).apply, X)(X)
