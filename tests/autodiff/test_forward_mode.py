"""Forward mode by the transpose of backward."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pylayer_jax import PyLayer
from tests.kit.layers import Tanh, layer_of

X = jnp.array([0.3, 0.7])


ForwardTanh = type("ForwardTanh", (Tanh,), {"forward_mode": True})


def test_reverse_mode_still_calls_backward():
    layer = layer_of(jnp.sin, lambda x, dy: jnp.clip(dy, -0.5, 0.5), forward_mode=True)
    for around in (lambda f: f, jax.jit):
        assert around(jax.grad(lambda x: layer.apply(x).sum()))(X).tolist() == [0.5, 0.5]


def test_eager_forward_mode_sees_numbers_and_runs_forward_once():
    seen = []

    class Seen(PyLayer):
        forward_mode = True

        @staticmethod
        def forward(ctx, x):
            seen.append(x)
            ctx.scale = 2.0 if x[0] > 0 else 3.0
            return jnp.asarray(np.asarray(x) * ctx.scale)

        @staticmethod
        def backward(ctx, dy):
            return dy * ctx.scale

    assert jax.jvp(Seen.apply, (X,), (X,))[1].tolist() == (2 * X).tolist()
    assert jax.grad(lambda x: Seen.apply(x).sum())(-X).tolist() == [3, 3]
    np.testing.assert_allclose(jax.jacfwd(Seen.apply)(X), 2 * jnp.eye(2))
    assert [isinstance(x, jax.core.Tracer) for x in seen] == [False] * 3


def test_forward_is_staged_once_under_jit():
    runs = []

    class Counted(ForwardTanh):
        @staticmethod
        def forward(ctx, x):
            runs.append(ctx.needs_input_grad)
            return ForwardTanh.forward(ctx, x)

    jax.jit(jax.grad(lambda x: Counted.apply(x).sum()))(X)
    jax.jit(lambda x: jax.jvp(Counted.apply, (x,), (x,)))(X)
    assert runs == [(True,), (True,)]


class Flip(PyLayer):
    """Linear: its backward is itself, as that of an exchange between devices is."""

    forward_mode = True

    @staticmethod
    def forward(ctx, x, times):
        ctx.times = times
        return jnp.flip(x) * times

    @staticmethod
    def backward(ctx, dy):
        return Flip.apply(dy, ctx.times), None


Product = layer_of(
    jnp.multiply, lambda a, b, dy: (Product.apply(dy, b), Product.apply(a, dy)), "Product", forward_mode=True
)


@pytest.mark.parametrize("around", [lambda f: f, jax.jit, jax.checkpoint], ids=["eager", "jit", "remat"])
def test_a_backward_that_applies_its_own_layer(around):
    def ours(x):
        y = around(lambda x: Flip.apply(Product.apply(x, jnp.cos(x)), 3.0))(x)
        return jnp.sum(jnp.sin(y) * jnp.array([1, 2.0]))

    def plain(x):
        return jnp.sum(jnp.sin(jnp.flip(x * jnp.cos(x)) * 3.0) * jnp.array([1, 2.0]))

    twice = [jax.hessian, lambda f: jax.jacfwd(jax.jacfwd(f)), lambda f: jax.jacrev(jax.jacfwd(f))]
    for derivative in (jax.jacfwd, jax.grad, *twice):
        np.testing.assert_allclose(derivative(ours)(X), jax.jit(derivative(plain))(X), rtol=1e-4, atol=1e-5)
    third = lambda f: jax.jit(jax.jacfwd(jax.grad(jax.jacfwd(lambda x: f(x * X)))))  # noqa: E731
    np.testing.assert_allclose(third(ours)(0.5), third(plain)(0.5), rtol=1e-4)


def test_under_shard_map():
    mesh = jax.make_mesh((4,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("i")
    x = jnp.arange(8.0) / 8
    for run in (lambda f: f, jax.jit):
        ours = run(jax.shard_map(ForwardTanh.apply, mesh=mesh, in_specs=spec, out_specs=spec))
        np.testing.assert_allclose(jax.jvp(ours, (x,), (x,)), jax.jvp(jnp.tanh, (x,), (x,)), rtol=1e-5)


def test_no_hidden_gradient_of_what_forward_closes_over():
    def outer(scale):
        class Scaled(PyLayer):
            forward_mode = True

            @staticmethod
            def forward(ctx, x):
                return x * scale

            @staticmethod
            def backward(ctx, dy):
                return dy

        return Scaled.apply(X).sum()

    for derivative in (jax.grad(outer), jax.jacfwd(outer), jax.jit(jax.grad(outer)), jax.jit(jax.jacfwd(outer))):
        with pytest.raises(Exception, match=r"(?is)Scaled.*as an argument"):
            derivative(2.0)
    assert jax.vmap(outer)(jnp.array([1.0, 2.0])).tolist() == [float(X.sum()), 2 * float(X.sum())]
