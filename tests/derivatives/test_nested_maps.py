"""Staged layers within two `jax.vmap`: each maps an axis of its own, and its examples may share what the other maps."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pylayer_jax import PyLayer
from tests.kit.layers import ForwardTanh, Tanh
from tests.kit.modes import SECOND

# The sizes of all axes are equal: then nothing but the numbers shows that two were exchanged.
SIZE = 2
STAGED = {
    "outside": lambda vmap, f, inner, outer: jax.jit(vmap(vmap(f, *inner), *outer)),
    "between": lambda vmap, f, inner, outer: vmap(jax.jit(vmap(f, *inner)), *outer),
    "inside": lambda vmap, f, inner, outer: vmap(vmap(jax.jit(f), *inner), *outer),
    "checkpoint": lambda vmap, f, inner, outer: jax.checkpoint(vmap(vmap(f, *inner), *outer)),
}


class Two(PyLayer):
    """A layer whose first output does not depend on the second argument."""

    @staticmethod
    def forward(ctx, x, s):
        ctx.save_for_backward(x, s)
        return jnp.sin(x), jnp.cos(s) * x

    @staticmethod
    def backward(ctx, dy, dz):
        x, s = ctx.saved_tensor()
        return dy * jnp.cos(x) * s + dz * s, dy * x + dz * x / 2


class ForwardTwo(Two):
    forward_mode = True


def looped(f, in_axes, out_axes):
    """What `jax.vmap` means, one example after the other."""

    def run(*args):
        examples = [
            [x if a is None else jnp.take(x, i, a) for x, a in zip(args, in_axes, strict=True)] for i in range(SIZE)
        ]
        return jax.tree.map(lambda *ys: jnp.stack(ys, out_axes), *(f(*example) for example in examples))

    return run


def unstaged(vmap, f, inner, outer):
    return vmap(vmap(f, *inner), *outer)


MAPPED = [(0, 0), (0, None), (None, 0)]  # x and s of one map; the outer one of two has the last axis


@pytest.mark.parametrize(
    ("layer", "staged", "out_axes"),
    [(ForwardTwo, "outside", 1), (Two, "outside", 0), *((Two, staged, 1) for staged in STAGED)],
)
def test_which_axis_is_which(layer, staged, out_axes):
    for inner, outer in itertools.product(MAPPED, MAPPED):
        ranks = [sum(a[i] is not None for a in (inner, outer)) for i in range(2)]
        x, s = (jnp.sin(jnp.arange(1.0, 1 + SIZE**rank)).reshape((SIZE,) * rank) for rank in ranks)
        axes = tuple(None if a is None else rank - 1 for a, rank in zip(outer, ranks, strict=True))

        def derivatives(vmap, run, axes=axes, inner=inner, x=x, s=s):
            maps = run(vmap, layer.apply, (inner, 0), (axes, out_axes))

            def loss(x, s):
                y, z = maps(x, s)
                return (y * jnp.arange(1.0, 5.0).reshape(2, 2) + jnp.sin(y * z)).sum()

            slope = jax.grad(loss, (0, 1))
            return slope(x, s), jax.grad(lambda x: sum(jnp.sin(g).sum() for g in slope(x, s)))(x)

        expected, found = derivatives(looped, unstaged), derivatives(jax.vmap, STAGED[staged])
        for right, got in zip(jax.tree.leaves(expected), jax.tree.leaves(found), strict=True):
            np.testing.assert_allclose(got, right, rtol=1e-4, atol=1e-5)


# -- a named axis, of which the examples share the operands of a layer -----------------------------


class MappedTanh(Tanh):
    @staticmethod
    def vmap(info, in_dims, x):
        return jnp.tanh(jnp.broadcast_to(x, (info.batch_size, *x.shape)) if in_dims[0] is None else x), in_dims[0] or 0


def applying(inner):
    class Outer(PyLayer):
        """tanh(tanh(x)), by layers in both methods."""

        @staticmethod
        def forward(ctx, x):
            y = inner.apply(x)
            ctx.save_for_backward(x, y)
            return inner.apply(y)

        @staticmethod
        def backward(ctx, dy):
            x, y = ctx.saved_tensor()
            return dy * (1 - inner.apply(y) ** 2) * (1 - inner.apply(x) ** 2)

    return Outer.apply


X, Z = jnp.array([1.0, 2.0, 3.0]), jnp.array([0.5, 0.7])
SHARING = {
    "one map": lambda f: lambda b: jax.vmap(lambda x: x * f(b), axis_name="i")(X).sum(),
    "the outer map": lambda f: (
        lambda b: jax.vmap(lambda x: x * jax.vmap(lambda z: f(z * b))(Z), axis_name="i")(X).sum()
    ),
    "the inner map": lambda f: (
        lambda b: jax.vmap(lambda x: jax.vmap(lambda z: z * f(x * b), axis_name="j")(Z), axis_name="i")(X).sum()
    ),
    "a scan in a map": lambda f: (
        lambda b: jax.vmap(
            lambda x: x * jax.lax.scan(lambda c, _: (f(c), f(b)), b, None, length=2)[1].sum(), axis_name="i"
        )(X).sum()
    ),
}


@pytest.mark.parametrize("around", [lambda f: f, jax.jit, jax.checkpoint], ids=["eager", "jit", "remat"])
@pytest.mark.parametrize("within", [lambda f: f, jax.jit], ids=["", "jitted layer"])
@pytest.mark.parametrize("sharing", SHARING)
@pytest.mark.parametrize("inner", [Tanh, ForwardTanh, MappedTanh])
def test_layers_in_methods_never_count_twice_where_examples_share_their_operands(inner, sharing, within, around):
    b = jnp.float32(0.3)
    found = around(SHARING[sharing](within(applying(inner))))
    plain = SHARING[sharing](lambda x: jnp.tanh(jnp.tanh(x)))
    for order in (jax.grad, SECOND["grad of grad"]):
        try:
            gradient = order(found)(b)
        except (NameError, TypeError, ValueError, NotImplementedError):
            continue  # an error of JAX may be, and another number may not
        np.testing.assert_allclose(gradient, order(plain)(b), rtol=1e-4)


def test_backward_runs_once_in_maps_without_a_name():
    calls = []

    class Counts(Tanh):
        @staticmethod
        def backward(ctx, dy):
            calls.append(None)
            return Tanh.backward(ctx, dy)

    jax.grad(lambda b: jax.vmap(lambda x: x * jax.vmap(lambda z: Counts.apply(z * b))(Z))(X).sum())(jnp.float32(0.3))
    assert len(calls) == 1
