"""Layers that use the name of a mapped axis."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.kit.modes import EAGER_AND_JIT, X

from .made import layer


def rank_like(x):
    return jax.lax.axis_index("b").astype(x.dtype)


def of_rank(ctx, x):
    """Keeps what only the place in the batch tells."""
    rank = rank_like(x)
    ctx.save_for_backward(rank)
    ctx.mask = rank > 0
    return x * rank


LAYERS = {
    "of rank": (of_rank, lambda ctx, dy: jnp.where(ctx.mask, dy * ctx.saved_tensor()[0], 0)),
    "sum of ranks": (
        lambda ctx, x: jax.lax.psum(x * rank_like(x), "b"),
        lambda ctx, dy: jax.lax.psum(dy, "b") * rank_like(dy),
    ),
}


@pytest.mark.parametrize("forward_mode", [False, True], ids=["", "forward mode"])
@EAGER_AND_JIT
@pytest.mark.parametrize("name", LAYERS)
def test_what_depends_on_the_index_along_a_mapped_axis(name, mode, forward_mode):
    made = layer(*LAYERS[name], forward_mode=forward_mode)

    def plain(x):
        ranked = x * rank_like(x)
        return ranked if name == "of rank" else jax.lax.psum(ranked, "b")

    def over(f, *axes):
        return jax.vmap(f, axes or 0, axis_name="b")

    def f(g):
        # Mapped, and shared by all examples: a collective over an axis that no operand has is JAX's error.
        shared = g if name == "of rank" else jnp.cos
        return lambda x, w: (over(lambda x, w: jnp.sin(g(x)) * shared(w), 0, None)(x, w) ** 2).sum()

    def scanned(g):
        return lambda c, _: (jnp.sin(jax.checkpoint(g)(c)), None)

    w = jnp.float32(0.7)
    ways = [
        lambda g: over(jax.grad(lambda x: g(jnp.sin(x))))(X),
        lambda g: jax.grad(f(g), (0, 1))(X, w),
        lambda g: jax.grad(lambda x, w: (jax.grad(f(g))(x, w) ** 2).sum(), (0, 1))(X, w),
        lambda g: over(lambda x: jax.grad(lambda x: jax.lax.scan(scanned(g), x, None, length=2)[0])(x))(X),
    ]
    if forward_mode:
        ways += [
            lambda g: over(lambda x: jax.jvp(g, (w,), (w,))[1] * x)(X),
            lambda g: jax.jvp(f(g), (X, w), (X, w)),
            lambda g: jax.jacfwd(jax.grad(f(g)))(X, w),
        ]
    for way in ways:
        ours, expected = mode(functools.partial(way, made.apply))(), jax.jit(functools.partial(way, plain))()
        for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_a_layer_within_forward_gets_an_argument_that_all_examples_share():
    def inner_forward(ctx, w):
        y = jnp.tanh(w)
        ctx.save_for_backward(y)
        return y

    inner = layer(inner_forward, lambda ctx, dy: dy * (1 - ctx.saved_tensor()[0] ** 2))

    def forward(ctx, x, w):
        h = inner.apply(w)
        ctx.save_for_backward(x, h)
        return x * h

    def backward(ctx, dy):
        x, h = ctx.saved_tensor()
        return dy * h, dy * x * (1 - h**2)

    def loss(f):
        return lambda x, w: jnp.sin(jax.vmap(f, (0, None), axis_name="b")(x, w)).sum()

    w = jnp.array([0.7, 1.1, -0.4])
    ours, plain = loss(layer(forward, backward).apply), loss(lambda x, w: x * jnp.tanh(w))
    expected = jax.jit(jax.hessian(plain, (0, 1)))(jnp.stack([w, w**2]), w)
    for derivative in (
        jax.hessian(ours, (0, 1)),
        jax.jit(jax.hessian(ours, (0, 1))),
        jax.jacrev(jax.grad(ours, (0, 1)), (0, 1)),
    ):
        found = derivative(jnp.stack([w, w**2]), w)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), found, expected)


def test_a_mean_over_the_axis_in_backward_needs_forward_mode():
    def mean_of(**attributes):
        made = layer(lambda ctx, x: jax.lax.pmean(x, "b"), lambda ctx, dy: jax.lax.pmean(dy, "b"), **attributes)
        return jax.grad(lambda x: jnp.sin(jax.vmap(made.apply, axis_name="b")(x)).sum())

    with pytest.raises(NameError, match="unbound axis name"):
        mean_of()(X)
    np.testing.assert_allclose(mean_of(forward_mode=True)(X), jnp.full_like(X, jnp.cos(X.mean())), rtol=1e-5)
