"""What the documents say of Paddle and torch, asked of the real ones. Skipped where they are not installed."""

from __future__ import annotations

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pylayer_jax import PyLayer

from .registry import DoubledTanh, Round


@pytest.fixture
def torch(framework):
    return framework("torch")


@pytest.fixture
def paddle(framework):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return framework("paddle")


def torch_second(torch, forward, backward, f, x):
    """Value, gradient and second derivative of f(layer) at x."""

    class Layer(torch.autograd.Function):
        pass

    Layer.forward, Layer.backward = staticmethod(forward), staticmethod(backward)
    at = torch.tensor(x, dtype=torch.float32, requires_grad=True)
    value = f(Layer.apply, at)
    (first,) = torch.autograd.grad(value, at, create_graph=True)
    (second,) = torch.autograd.grad(first, at)
    return [float(v.detach()) for v in (value, first, second)]


def paddle_second(paddle, forward, backward, f, x):
    layer = type(
        "Layer", (paddle.autograd.PyLayer,), {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    )
    at = paddle.to_tensor(x, dtype="float32", stop_gradient=False)
    value = f(layer.apply, at)
    (first,) = paddle.grad(value, at, create_graph=True)
    (second,) = paddle.grad(first, at)
    return [float(v.detach()) for v in (value, first, second)]


def ours_second(f, layer, x):
    g = lambda x: f(layer.apply, x)  # noqa: E731
    return [float(v) for v in (g(jnp.float32(x)), jax.grad(g)(x), jax.grad(jax.grad(g))(x))]


def test_second_derivative_of_straight_through_round(torch, paddle):
    f = lambda layer, x: layer(x) ** 3  # noqa: E731
    expected = ours_second(f, Round, 1.3)
    assert expected == [1.0, 3.0, 6.0]
    assert torch_second(torch, lambda ctx, x: torch.round(x), lambda ctx, dy: dy, f, 1.3) == expected
    # Paddle takes a copy, as a backward that returns its cotangent itself would alias it.
    assert paddle_second(paddle, lambda ctx, x: paddle.round(x), lambda ctx, dy: dy * 1, f, 1.3) == expected


def test_second_derivative_of_doubled_tanh(torch, paddle):
    f = lambda layer, x: layer(layer(x))  # noqa: E731

    def rule(tanh, read):
        def forward(ctx, x):
            y = tanh(x)
            ctx.save_for_backward(y)
            return y

        def backward(ctx, dy):
            (y,) = read(ctx)
            return 2 * dy * (1 - y * y)

        return forward, backward

    expected = ours_second(f, DoubledTanh, 0.3)
    np.testing.assert_allclose(expected[2], -10.9068, rtol=1e-5)
    got = torch_second(torch, *rule(torch.tanh, lambda ctx: ctx.saved_tensors), f, 0.3)
    np.testing.assert_allclose(got, expected, rtol=1e-5)
    got = paddle_second(paddle, *rule(paddle.tanh, lambda ctx: ctx.saved_tensor()), f, 0.3)
    np.testing.assert_allclose(got, expected, rtol=1e-5)


@pytest.mark.parametrize("give", ["bool", "int32", "float64", "wide"])
def test_gradients_are_cast_and_summed_as_in_torch(torch, give):
    def entry(dy, cast, expand):
        return expand(dy) if give == "wide" else cast(dy * 3)

    class Ours(PyLayer):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, dy):
            dtype = "float16" if give == "float64" else give  # JAX has no 64 bits unless asked
            return entry(dy, lambda v: v.astype(dtype), lambda v: jnp.broadcast_to(v, (4, 3)))

    class Theirs(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, dy):
            return entry(dy, lambda v: v.to(getattr(torch, give)), lambda v: v.expand(4, 3))

    x = torch.ones(3, requires_grad=True)
    Theirs.apply(x).sum().backward()
    gradient = jax.grad(lambda x: Ours.apply(x).sum())(jnp.ones(3))
    assert gradient.dtype == jnp.float32
    assert x.grad.dtype == torch.float32
    assert gradient.tolist() == x.grad.tolist()


def test_complex_convention_of_torch(torch):
    class Ours(PyLayer):
        complex_convention = "paddle"

        @staticmethod
        def forward(ctx, z):
            ctx.save_for_backward(z)
            return z * z

        @staticmethod
        def backward(ctx, dy):
            (z,) = ctx.saved_tensors
            return dy * 2 * jnp.conj(z)

    class Theirs(torch.autograd.Function):
        @staticmethod
        def forward(ctx, z):
            ctx.save_for_backward(z)
            return z * z

        @staticmethod
        def backward(ctx, dy):
            (z,) = ctx.saved_tensors
            return dy * 2 * z.conj()

    value = np.array([1 + 2j, 0.5 - 1j], np.complex64)
    z = torch.tensor(value, requires_grad=True)
    (Theirs.apply(z).abs() ** 2).sum().backward()
    ours = jax.grad(lambda z: (jnp.abs(Ours.apply(z)) ** 2).sum())(jnp.asarray(value))
    np.testing.assert_allclose(ours.conj(), z.grad.numpy(), rtol=1e-5)  # jax.grad gives the conjugate of torch's


def test_keywords_follow_parameters_here_and_the_call_in_paddle(paddle):
    class Theirs(paddle.autograd.PyLayer):
        @staticmethod
        def forward(ctx, a, b):
            return 2 * a + 3 * b

        @staticmethod
        def backward(ctx, dy):
            return 2 * dy, 3 * dy

    class Ours(PyLayer):
        @staticmethod
        def forward(ctx, a, b):
            return 2 * a + 3 * b

        @staticmethod
        def backward(ctx, dy):
            return 2 * dy, 3 * dy

    a, b = (paddle.to_tensor(v, dtype="float32", stop_gradient=False) for v in (1.0, 1.0))
    Theirs.apply(b=b, a=a).backward()
    assert (float(a.grad), float(b.grad)) == (3, 2)  # swapped
    assert jax.grad(lambda a, b: Ours.apply(b=b, a=a), (0, 1))(1.0, 1.0) == (2, 3)
