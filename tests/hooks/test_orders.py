"""saved_tensors_hooks under several derivatives of one function, in forward mode, and in compiled programs."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pylayer_jax.packers import cast_saved, save_on_cpu
from tests.kit.layers import ForwardTanh, Multiply, Tanh, bits, layer
from tests.kit.modes import EAGER_AND_JIT, MODES, STAGED

from .spy import Spy, X, in_block, noting, tanh_sum


def exported(f):
    restored = jax.export.deserialize(jax.export.export(jax.jit(f))(X).serialize(vjp_order=2))
    return jax.grad(restored.call)


# The gradient of a function that is staged.
FIRST = {
    "jit": MODES["grad-jit"],
    "scan": lambda f: jax.grad(lambda x: jax.lax.scan(lambda c, x: (c + f(x), None), 0.0, x[None])[0]),
    "vjp within jit": lambda f: jax.jit(lambda x: jax.vjp(f, x)[1](1.0)[0]),
    "export": exported,
}


def loss(x):
    return jnp.sum(jnp.sin(Tanh.apply(x)))


@pytest.mark.parametrize("staged", FIRST)
@pytest.mark.parametrize(
    ("hooks", "atol"), [(save_on_cpu(), 1e-6), (cast_saved(), 0.03), (Spy(differentiable=True).hooks, 1e-6)]
)
def test_a_second_derivative_of_staged_code_with_a_differentiable_pair_inside(staged, hooks, atol):
    first = FIRST[staged](in_block(hooks, loss))
    first(X)  # compiled where nothing further out is differentiated
    expected = jax.grad(lambda x: jax.grad(loss)(x).sum())(X)
    for jit in (lambda f: f, jax.jit):
        np.testing.assert_allclose(jit(jax.grad(lambda x: first(x).sum()))(X), expected, rtol=1e-5, atol=atol)


@pytest.mark.parametrize("staged", ["scan", "vjp within jit"])
@pytest.mark.parametrize("function", [tanh_sum, lambda x: jnp.sin(x).sum()], ids=["layer", "operation"])
def test_it_is_refused_with_another_pair(staged, function):
    first = FIRST[staged](in_block(bits(), function))
    first(X)
    owner = "Tanh" if function is tanh_sum else "sin"
    with pytest.raises(TypeError, match=rf"(?s){owner}.*differentiable=True"):
        jax.grad(lambda x: first(x).sum())(X)


def test_two_derivatives_in_a_block_that_moves_to_host_memory():
    twice = lambda x: jnp.sum(jax.grad(lambda x: jnp.sum(jax.grad(loss)(x)))(x) ** 2)
    expected, found = (jax.jit(jax.grad(f))(X) for f in (twice, in_block(save_on_cpu(), twice)))
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


DERIVATIVES = {
    "jvp": lambda f: lambda x: jax.jvp(f, (x,), (x,))[1],
    "jacfwd": jax.jacfwd,
    "hessian": lambda f: jax.hessian(lambda x: f(x).sum()),
    "reverse twice": lambda f: jax.grad(lambda x: jax.grad(lambda x: f(x).sum())(x).sum()),
    "reverse over forward": lambda f: jax.jacrev(lambda x: jax.jvp(f, (x,), (x,))[1]),
}


Twice = layer(backward=lambda ctx, dy: 2 * dy, forward_mode=True)


@EAGER_AND_JIT
@pytest.mark.parametrize("around", [jax.jacfwd, jax.jacrev])
@pytest.mark.parametrize("decorate", [lambda hooks, f: hooks(f), in_block], ids=["decorated", "block"])
@pytest.mark.parametrize("inner", [jax.grad, lambda f: lambda x: jax.jvp(f, (x,), (x,))[1]], ids=["grad", "jvp"])
def test_an_inner_derivative_that_reaches_nothing(inner, decorate, around, mode):
    staged = jax.jit(lambda x, c: jnp.sin(c) + jnp.sin(jnp.round(x)))
    f = decorate(Spy(differentiable=True).hooks, lambda x, c: staged(x, c) + jax.nn.relu(c))
    frozen = lambda x, c: inner(lambda x: f(x, c).sum())(x)
    assert not np.any(mode(around(frozen, 1))(X, X))


@EAGER_AND_JIT
@pytest.mark.parametrize("derivative", DERIVATIVES)
def test_a_block_in_a_backward_that_is_transposed(derivative, mode):
    packed = []
    hooks, of = noting(packed), DERIVATIVES[derivative]

    def backward(x, dy):
        with hooks:
            return hooks(lambda dy: Twice.apply(dy) * jnp.cos(x))(dy) / 2

    for flag in (False, True) if derivative in ("hessian", "reverse twice") else (True,):
        sine = layer(jnp.sin, backward, plain=True, forward_mode=flag).apply
        np.testing.assert_allclose(mode(of(sine))(X), jax.jit(of(jnp.sin))(X), rtol=1e-5, atol=1e-6)
    assert packed or derivative != "reverse twice"


# -- forward mode: as if the block was not there ---------------------------------------------------


ROWS = jnp.array([[0.3, -0.5, 1.2], [0.8, 0.1, -0.7]])
W = jnp.linspace(-1.0, 1.0, 9).reshape(3, 3)


PushedTanh = layer(base=Tanh, jvp=lambda ctx, dx: dx * (1 - ctx.saved_tensor()[0] ** 2))


def everything(x):
    x = jnp.sin(x @ W) * jnp.exp(x) + jnp.where(jnp.argsort(x) > 0, x, x * x)
    x = PushedTanh.apply(ForwardTanh.apply(x @ W) * x)
    x = jax.lax.scan(lambda c, w: (jnp.tanh(c * w), c), x, W)[0]
    return jax.lax.cond(x.sum() > 0, jnp.sin, lambda x: ForwardTanh.apply(x) ** 2, x)


AROUND = {
    "eager": lambda f: f,
    **{name: STAGED[name] for name in ("jit", "scan", "cond", "checkpoint")},
    "vmap of checkpoint": lambda f: jax.vmap(jax.checkpoint(lambda x: f(x[None])[0])),
}
FORWARD = {name: DERIVATIVES[name] for name in ("jvp", "reverse over forward")}
FORWARD |= {"jacfwd of jacfwd": lambda f: jax.jacfwd(jax.jacfwd(lambda x: f(x)[0]))}


@pytest.mark.parametrize(
    ("around", "derivative"),
    [*itertools.product(AROUND, ["jvp"]), *itertools.product(("jit", "scan"), list(FORWARD)[1:])],
)
def test_it_passes_through_a_block(around, derivative):
    packed = []
    hooked = in_block(noting(packed, differentiable=True), everything)
    expected = jax.jit(FORWARD[derivative](AROUND[around](everything)))(ROWS)
    got = FORWARD[derivative](AROUND[around](hooked))(ROWS)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=1e-5), got, expected)
    assert around != "eager" or not packed


@EAGER_AND_JIT
def test_forward_mode_where_no_cotangent_reaches_an_operand(mode):
    f = lambda x, y: jnp.sin(x) * jax.lax.stop_gradient(y)
    got = jax.jvp(mode(cast_saved()(f)), (W, W), (W, W))[1]
    np.testing.assert_allclose(got, W * W * jnp.cos(W), rtol=1e-2)
    values = cast_saved()(lambda x: (x, jnp.zeros(())))  # a tangent of zero times an infinite slope would be NaN
    assert jax.jvp(mode(lambda x: values(x)[0] + jnp.sqrt(values(x)[1])), (1.0,), (1.0,))[1] == 1.0


@EAGER_AND_JIT
def test_linear_transpose(mode):
    def linear(x):
        return jnp.sin(W) @ (3.0 * x) + jnp.where(W > 0, x, 0.0)

    hooked = in_block(bits(), linear)
    (expected,) = jax.vjp(linear, W)[1](W)
    (got,) = jax.linear_transpose(mode(hooked), W)(W)
    np.testing.assert_allclose(got, expected, rtol=1e-6)


TWO = jnp.array([0.3, 0.7])
ForwardMultiply = layer(base=Multiply, forward_mode=True)


def test_jacobian_under_hooks():
    jacobian = jax.jacfwd(ForwardMultiply.apply, (0, 1))
    with bits():  # the tangents are mapped, and what was packed is not
        for run in (jacobian, jax.jit(jacobian)):
            np.testing.assert_allclose(run(TWO, TWO + 1), [jnp.diag(TWO + 1), jnp.diag(TWO)], rtol=1e-6)


def sines(x):
    return jnp.sum(jnp.sin(Tanh.apply(x)) * x)


def test_without_hooks_nothing_is_left_of_a_block():
    def after(x):
        with bits():
            pass
        return sines(x)

    programs = [jax.jit(jax.grad(f)).lower(X).as_text() for f in (sines, after)]
    assert programs[0] == programs[1].replace("jit_after", "jit_sines")


def test_compiled_forward_is_that_without_hooks():
    plain, hooked = (jax.jit(f).lower(X).compile() for f in (sines, bits()(sines)))
    assert plain.cost_analysis() == hooked.cost_analysis()
