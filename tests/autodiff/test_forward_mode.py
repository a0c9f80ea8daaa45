"""Forward mode by the transpose of backward."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pylayer_jax import PyLayer, once_differentiable
from tests.kit.layers import Multiply, Square, Tanh
from tests.kit.transforms import (
    assert_same,
)

pytestmark = pytest.mark.own_primitive
X = jnp.array([0.3, 0.7])


def forward_layer(backward, forward=jnp.sin):
    class Layer(PyLayer):
        forward_mode = True

        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return forward(x)

    Layer.backward = staticmethod(backward)
    return Layer


@pytest.mark.parametrize(
    ("backward", "names"),
    [
        (lambda ctx, dy: jnp.clip(dy, -0.5, 0.5), "the operation 'max'"),
        (lambda ctx, dy: jnp.exp(dy), "the operation 'exp'"),
        (lambda ctx, dy: jnp.sort(dy), "the operation 'sort'"),
        (lambda ctx, dy: jax.nn.relu(dy), "the operation 'max'"),
        (lambda ctx, dy: jnp.where(dy > 0, dy, 0.0), "the operation 'gt'"),
        (lambda ctx, dy: dy * dy, r"a product of two terms that depend on them \(mul\)"),
        (
            lambda ctx, dy: jnp.ones(2) * (jnp.append(dy, X) @ jnp.append(X, dy)),
            r"adds a term that does not depend on them \(concatenate; in place of .* write a @ b\.T \+ b @ a\.T\)",
        ),
        (
            lambda ctx, dy: jax.lax.custom_linear_solve(lambda v: dy * v, dy, lambda _, b: b, lambda _, b: b),
            "the operation 'custom_linear_solve', whose matrix depends on them",
        ),
        (lambda ctx, dy: 1 / dy, "the operation 'div', whose divisor depends on them"),
        (lambda ctx, dy: dy + 1, r"adds a term that does not depend on them \(add\)"),
        (lambda ctx, dy: jnp.ones_like(dy), "returns a gradient that does not depend on them"),
        (lambda ctx, dy: jax.lax.scan(lambda c, _: (jnp.sin(c), None), dy, None, length=2)[0], "the operation 'sin'"),
        (
            lambda ctx, dy: Multiply.apply(dy, dy),
            "applies the layer Multiply, whose forward is not, as it has a product",
        ),
        (lambda ctx, dy: Square.apply(dy), "applies the layer Square, whose forward is not, as it has a product"),
        (lambda ctx, dy: Shift.apply(dy), "applies the layer Shift, whose forward is not, as it adds a term"),
    ],
)
@pytest.mark.parametrize("run", [jax.jvp, jax.jit(jax.jvp, static_argnums=0)], ids=["eager", "jit"])
def test_the_error_names_what_is_not_linear(backward, names, run):
    with pytest.raises(TypeError, match=rf"Layer.backward .*{names}"):
        run(forward_layer(backward).apply, (X,), (X,))


def test_an_operation_that_is_linear_in_one_operand_is_fine():
    def backward(ctx, dy):
        (x,) = ctx.saved_tensor()
        mixed = jnp.where(x > 0.5, dy * x, dy) / x + jnp.pad(jnp.flip(dy)[:1], (0, 1)) - jnp.cumsum(dy)
        return mixed + jax.jit(lambda d: jnp.tile(d, 2)[1:3] @ jnp.outer(x, x))(dy)

    layer = forward_layer(backward)
    jacobian = jax.jacrev(layer.apply)(X)
    assert abs(jacobian).min() > 0
    np.testing.assert_allclose(jax.jacfwd(layer.apply)(X), jacobian, rtol=1e-5)


def test_reverse_mode_still_calls_backward():
    layer = forward_layer(lambda ctx, dy: jnp.clip(dy, -0.5, 0.5))
    assert jax.grad(lambda x: layer.apply(x).sum())(X).tolist() == [0.5, 0.5]
    assert jax.jit(jax.grad(lambda x: layer.apply(x).sum()))(X).tolist() == [0.5, 0.5]


def test_eager_forward_mode_sees_numbers_and_runs_forward_once():
    seen = []

    class Seen(PyLayer):
        forward_mode = True

        @staticmethod
        def forward(ctx, x):
            seen.append(float(x[0]))
            ctx.scale = 2.0 if x[0] > 0 else 3.0
            return jnp.asarray(np.asarray(x) * ctx.scale)

        @staticmethod
        def backward(ctx, dy):
            return dy * ctx.scale

    assert jax.jvp(Seen.apply, (X,), (X,))[1].tolist() == (2 * X).tolist()
    assert jax.grad(lambda x: Seen.apply(x).sum())(-X).tolist() == [3, 3]
    np.testing.assert_allclose(jax.jacfwd(Seen.apply)(X), 2 * jnp.eye(2))
    assert jax.jacfwd(jax.jacfwd(Seen.apply))(X).shape == (2, 2, 2)
    assert len(seen) == 4
    assert all(isinstance(s, float) for s in seen)


def test_forward_is_staged_once_under_jit():
    runs = []

    class Counted(Tanh):
        forward_mode = True

        @staticmethod
        def forward(ctx, x):
            runs.append(ctx.needs_input_grad)
            return Tanh.forward(ctx, x)

    jax.jit(jax.grad(lambda x: Counted.apply(x).sum()))(X)
    jax.jit(lambda x: jax.jvp(Counted.apply, (x,), (x,)))(X)
    assert runs == [(True,), (True,)]


class Shift(PyLayer):
    forward_mode = True

    @staticmethod
    def forward(ctx, x):
        return x + 1

    @staticmethod
    def backward(ctx, dy):
        return dy


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


class Product(PyLayer):
    """Linear in each argument: its backward applies itself to the cotangent and a saved input."""

    forward_mode = True

    @staticmethod
    def forward(ctx, a, b):
        ctx.save_for_backward(a, b)
        return a * b

    @staticmethod
    def backward(ctx, dy):
        a, b = ctx.saved_tensors
        return Product.apply(dy, b), Product.apply(a, dy)


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


def test_complex_tangents():
    class Power(PyLayer):
        forward_mode = True
        complex_convention = "paddle"

        @staticmethod
        def forward(ctx, z):
            ctx.save_for_backward(z)
            return z**2 * (1 + 2j)

        @staticmethod
        def backward(ctx, dy):
            return dy * jnp.conj(2 * ctx.saved_tensors[0] * (1 + 2j))

    z, t = jnp.array(0.3 - 0.8j), jnp.array(1.5 + 0.2j)
    expected = jax.jvp(lambda z: z**2 * (1 + 2j), (z,), (t,))
    np.testing.assert_allclose(jax.jvp(Power.apply, (z,), (t,)), expected, rtol=1e-5)


def test_under_shard_map():
    mesh = jax.make_mesh((4,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("i")
    x = jnp.arange(8.0) / 8

    class Forward(Tanh):
        forward_mode = True

    def sharded(f):
        return jax.shard_map(f, mesh=mesh, in_specs=spec, out_specs=spec)

    for run in (lambda f: f, jax.jit):
        ours, expected = run(sharded(Forward.apply)), run(sharded(jnp.tanh))
        np.testing.assert_allclose(jax.jvp(ours, (x,), (x,)), jax.jvp(expected, (x,), (x,)), rtol=1e-5)
        np.testing.assert_allclose(jax.vjp(ours, x)[1](x)[0], jax.vjp(expected, x)[1](x)[0], rtol=1e-5)


def test_under_export():
    class Forward(Tanh):
        forward_mode = True

    exported = jax.export.export(jax.jit(Forward.apply))(X)
    loaded = jax.export.deserialize(exported.serialize(vjp_order=1))
    np.testing.assert_allclose(jax.grad(lambda x: loaded.call(x).sum())(X), 1 - jnp.tanh(X) ** 2, rtol=1e-5)


def test_no_hidden_gradient_of_what_forward_closes_over():
    class Forward(Tanh):
        forward_mode = True

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
        with pytest.raises(jax.errors.UnexpectedTracerError, match=r"closes over \(scale\).*Pass it as an argument"):
            derivative(2.0)
    assert jax.vmap(outer)(jnp.array([1.0, 2.0])).tolist() == [float(X.sum()), 2 * float(X.sum())]


def test_once_differentiable():
    class Once(Tanh):
        forward_mode = True
        backward = staticmethod(once_differentiable(Tanh.backward))

    np.testing.assert_allclose(jax.jvp(Once.apply, (X,), (X,)), jax.jvp(jnp.tanh, (X,), (X,)), rtol=1e-5)

    def total(x):
        return Once.apply(x).sum()

    for second in (jax.hessian, lambda f: jax.jacfwd(jax.jacfwd(f)), lambda f: jax.jacrev(jax.jacfwd(f))):
        for around in (lambda f: f, jax.jit):
            with pytest.raises(RuntimeError, match="marked @once_differentiable, but a second derivative"):
                around(second(total))(X)


def test_a_batched_cond_in_backward():
    # JAX turns it into selections, and stops the gradients of the branch that is not taken.
    class Branches(PyLayer):
        forward_mode = True

        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x**2

        @staticmethod
        def backward(ctx, dy):
            (x,) = ctx.saved_tensor()
            inner = lambda g: jax.lax.cond(x > 2, lambda g: g, lambda g: g * 2 * x, g)  # noqa: E731
            return jax.lax.cond(x > 0, inner, lambda g: 2 * g * x, dy)

    batch = jnp.array([1.0, -2.0])
    plain = lambda x: x**2  # noqa: E731
    for over in (jax.jacfwd, jax.hessian, lambda f: lambda x: jax.jvp(f, (x,), (x,))[1]):
        assert_same(jax.vmap(over(Branches.apply))(batch), jax.vmap(over(plain))(batch))
    assert_same(jax.jvp(jax.vmap(Branches.apply), (batch,), (batch,)), (batch**2, 2 * batch**2))

    class Stopped(Branches):
        @staticmethod
        def backward(ctx, dy):
            return jax.lax.stop_gradient(dy)

    with pytest.raises(TypeError, match="the operation 'stop_gradient'"):
        jax.jacfwd(Stopped.apply)(1.0)


def test_what_jax_cannot_transpose_is_not_called_nonlinear():
    class Largest(PyLayer):
        @staticmethod
        def forward(ctx, x, unique):
            y, ctx.places = jax.lax.top_k(x, 2)
            ctx.size, ctx.unique = x.shape[0], unique
            return y

        @staticmethod
        def backward(ctx, dy):
            return jnp.zeros(ctx.size).at[ctx.places].set(dy, unique_indices=ctx.unique)

    f = lambda unique: lambda x: (Largest.apply(x, unique) ** 2).sum()  # noqa: E731
    x = jnp.array([0.1, 2.0, 1.0])
    assert_same(jax.hessian(f(True))(x), jnp.diag(jnp.array([0.0, 2, 2])))
    with pytest.raises(TypeError, match=r"Largest\.backward cannot be transposed by JAX \(.*unique_indices=True"):
        jax.hessian(f(False))(x)
