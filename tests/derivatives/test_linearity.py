"""Forward mode transposes `backward` if it is proved linear in its cotangents, and otherwise refuses it."""

import os

import hypothesis
import hypothesis.strategies
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.kit.layers import Multiply, Square, layer
from tests.kit.modes import EAGER_AND_JIT

EXAMPLES = int(os.environ.get("PYLAYER_JAX_EXAMPLES", "100"))
MASK = jnp.array([True, False, True])
FLAG = jnp.array(True)
ZEROS = np.zeros(3, np.float32)
X = jnp.array([0.3, 0.7, -0.2])
T = jnp.array([1.0, 2.0, 3.0])


def ruled(backward, forward=lambda ctx, x: x * 1.0, **flags):
    return layer(forward, lambda ctx, dy: backward(dy), **flags)


def both_ways(made):
    """Return the derivative along T, by jvp and by vjp, in eager mode."""
    tangent = jax.jvp(made.apply, (X,), (T,))[1]
    _, pull = jax.vjp(made.apply, X)
    return tangent, jnp.stack([pull(unit)[0] for unit in jnp.eye(3)]) @ T


AFFINE = {
    "add": lambda dy: dy + 1.0,
    "constant": jnp.ones_like,
    "where": lambda dy: jnp.where(MASK, dy, 1.0),
    "pad": lambda dy: jnp.pad(dy[:2], (0, 1), constant_values=1.0),
    "dynamic_update_slice": lambda dy: jax.lax.dynamic_update_slice(dy, jnp.ones(1), (0,)),
    "at_set": lambda dy: dy.at[0].set(1.0),
    "fill_value": lambda dy: jnp.take(dy, jnp.array([0, 1, 7]), mode="fill", fill_value=1.0),
    "scan": lambda dy: jax.lax.scan(lambda c, x: (c, x + 1.0), 0.0, dy)[1],
    "carry": lambda dy: jax.lax.scan(lambda c, x: (c + x, c + x), 1.0, dy)[1],
    "while_loop": lambda dy: jax.lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1] + 1.0), (0, dy))[1],
    "while_loop_until": lambda dy: jax.lax.while_loop(lambda c: c.sum() < 9, lambda c: c * 2.0, dy),
    "cond": lambda dy: jax.lax.cond(FLAG, lambda d: d, jnp.ones_like, dy),
}
THROUGH_INTEGERS = {
    "int8": lambda dy: jnp.round(dy / 0.1).astype(jnp.int8).astype(jnp.float32) * 0.1,
    "argsort": lambda dy: dy[jnp.argsort(dy)],
    "isfinite": lambda dy: jnp.where(jnp.isfinite(dy), dy, 0),
    "sign": lambda dy: dy * (dy > 0).astype(dy.dtype),
    "group_sizes": lambda dy: jax.lax.ragged_dot(jnp.diag(dy), jnp.ones((1, 3, 3)), (dy > 0).sum(keepdims=True)).sum(1),
}
NOT_LINEAR = {
    "clip": lambda dy: jnp.clip(dy, -1, 1),
    "relu": jax.nn.relu,
    "sort": jnp.sort,
    "square": lambda dy: dy * dy,
    "product": lambda dy: jnp.ones(3) * (jnp.append(dy, X) @ jnp.append(X, dy)),
    "divisor": lambda dy: 1 / dy,
    "solve": lambda dy: jax.lax.custom_linear_solve(lambda v: dy * v, dy, lambda _, b: b, lambda _, b: b),
    "exp": jnp.exp,
    "scan_of_sin": lambda dy: jax.lax.scan(lambda c, _: (jnp.sin(c), None), dy, None, length=2)[0],
    "layer_of_two": lambda dy: Multiply.apply(dy, dy),
    "stop_gradient": jax.lax.stop_gradient,
}
REFUSED = AFFINE | THROUGH_INTEGERS | NOT_LINEAR
OPERATIONS = {  # which the error names, of those that can be one alone
    "where": "select_n",
    "isfinite": "is_finite",
    "argsort": "sort",
    "sign": "gt",
    "sort": "sort",
    "square": "mul",
    "divisor": "div",
    "solve": "custom_linear_solve",
    "exp": "exp",
    "scan_of_sin": "sin",
    "stop_gradient": "stop_gradient",
}
LINEAR = {
    "zero": jnp.zeros_like,
    "where": lambda dy: jnp.where(MASK, 0.0, 2 * dy),
    "where_zeros": lambda dy: jnp.where(MASK, dy, ZEROS),
    "at_set_zero": lambda dy: dy.at[0].set(0.0),
    "at_subtract": lambda dy: dy.at[jnp.array([0, 0])].subtract(dy[1:]),
    "at_multiply": lambda dy: dy.at[0].multiply(2.0),
    "pad": lambda dy: jnp.pad(dy[:2], (0, 1)),
    "roll": lambda dy: jnp.roll(dy, 1),
    "flip": lambda dy: dy[::-1],
    "dynamic_slice": lambda dy: jnp.pad(jax.lax.dynamic_slice(dy, (1,), (2,)), (1, 0)),
    "cumsum": jnp.cumsum,
    "mean": lambda dy: dy - dy.mean(),
    "fft": lambda dy: jnp.fft.fft(dy).real,
    "index": lambda dy: dy[jnp.array([0, 1, 1])],
    "segment_sum": lambda dy: jax.ops.segment_sum(dy, jnp.array([0, 1, 1]), 3),
    "sorted_constant": lambda dy: dy[jnp.argsort(jnp.array([3.0, 1.0, 2.0]))],
    "one_operand": lambda dy: jnp.where(X > 0.5, dy * X, dy) / X + dy @ jnp.outer(X, X),
    "convolve": lambda dy: jnp.convolve(dy, jnp.array([1.0, 2.0, 1.0]), "same"),
    "solve": lambda dy: jnp.linalg.solve(jnp.eye(3) * 2, dy),
    "scan": lambda dy: jax.lax.scan(lambda c, x: (c + x, c * 2 + x), 0.0, dy)[1],
    "cond": lambda dy: jax.lax.cond(FLAG, lambda d: d, jnp.zeros_like, dy),
    "cond_of_false": lambda dy: jax.lax.cond(False, lambda d: 3 * d, lambda d: 2 * d, dy),
    "jvp_of_a_layer": lambda dy: jax.jvp(Square.apply, (X,), (dy,))[1],
    "while_loop_of_a_constant": lambda dy: dy * jax.lax.while_loop(lambda c: c < 3, lambda c: c + 1, 0.0),
    "jit": jax.jit(lambda dy: 2 * dy),
}


@EAGER_AND_JIT
@pytest.mark.parametrize("name", REFUSED)
def test_a_backward_that_is_not_linear_is_refused(name, mode):
    made = ruled(REFUSED[name], forward_mode=True)
    with pytest.raises(TypeError, match=rf"(?s)Made\.backward is not linear.*{OPERATIONS.get(name, '')}"):
        mode(lambda: jax.jvp(made.apply, (X,), (T,)))()


@pytest.mark.parametrize(
    ("backward", "reason"),
    [
        (lambda dy: jnp.zeros(3).at[jnp.array([0, 1, 1])].set(dy), r"^(?!.*loop).*scatter"),
        (lambda dy: jax.scipy.sparse.linalg.cg(lambda v: v * 2, dy)[0], r"\bloop\b"),
    ],
    ids=["scatter", "conjugate gradients"],
)
def test_what_jax_cannot_transpose_is_named(backward, reason):
    with pytest.raises(TypeError, match=reason):
        jax.jvp(ruled(backward, forward_mode=True).apply, (X,), (T,))


@EAGER_AND_JIT
@pytest.mark.parametrize("name", [*THROUGH_INTEGERS, *NOT_LINEAR, "add", "where", "carry", "cond"])
def test_forward_over_reverse_is_refused_or_equals_reverse_over_reverse(name, mode):
    made = ruled(REFUSED[name])
    gradient = jax.grad(lambda x: (made.apply(x) ** 2).sum())
    found, message = outcome(mode(lambda: jax.jvp(gradient, (X,), (T,))[1]))
    if found is None:
        assert "Made.backward" in message
    else:  # under jit, a tangent that nothing depends on is never computed
        np.testing.assert_allclose(found, jax.jacrev(gradient)(X) @ T)


def outcome(function):
    try:
        return function(), None
    except TypeError as error:
        return None, str(error)


@pytest.mark.parametrize("backward", LINEAR.values(), ids=LINEAR)
def test_a_linear_backward_is_transposed(backward):
    tangent, expected = both_ways(ruled(backward, forward_mode=True))
    np.testing.assert_allclose(tangent, expected, rtol=1e-5, atol=1e-6)


ONE = hypothesis.strategies.sampled_from(
    [
        lambda dy: dy.astype(jnp.bfloat16).astype(jnp.float32),
        *(LINEAR[name] for name in ("jit", "where", "roll", "cumsum", "mean", "at_set_zero", "index")),
        *(AFFINE[name] for name in ("add", "where", "at_set", "pad")),
        *(REFUSED[name] for name in ("int8", "argsort", "sign", "square", "exp")),
    ]
)
WRAPPED = hypothesis.strategies.sampled_from(
    [
        lambda f: f,
        jax.jit,
        jax.checkpoint,
        lambda f: lambda d: jax.lax.cond(FLAG, f, lambda d: 3.0 * d, d),
        lambda f: lambda d: jax.lax.fori_loop(0, 2, lambda _, c: f(c), d),
        lambda f: lambda d: jax.lax.scan(lambda c, _: (f(c), c), d, None, length=2)[1].sum(0),
        lambda f: lambda d: jax.vmap(f)(jnp.stack([d, 2 * d])).sum(0),
        lambda f: lambda d: ruled(lambda g: -g, lambda ctx, x: f(x)).apply(d),
        lambda f: lambda d: f(d) + d,
        lambda f: lambda d: f(jnp.zeros(3)) + d,
    ]
)


@pytest.mark.slow
@hypothesis.settings(max_examples=EXAMPLES, deadline=None, derandomize="PYLAYER_JAX_EXAMPLES" not in os.environ)
@hypothesis.given(hypothesis.strategies.lists(hypothesis.strategies.tuples(ONE, WRAPPED), min_size=1, max_size=3))
def test_generated_backwards_are_right_or_refused(steps):
    def backward(dy):
        for one, wrap in steps:
            dy = wrap(one)(dy)
        return dy

    made = ruled(backward, forward_mode=True)
    found, message = outcome(lambda: both_ways(made))
    if found is None:
        assert "Made.backward" in message
        return
    tangent, expected = found
    # bfloat16 is among the operations, and its rounding is relative to the largest value; a constant is larger.
    np.testing.assert_allclose(tangent, expected, atol=0.03 * max(1, np.abs(expected).max()))
    # A map that is not refused is linear.
    twice = 2 * backward(T)
    np.testing.assert_allclose(backward(2 * T), twice, atol=0.03 * max(1, np.abs(twice).max()))


def test_a_backward_with_a_layer_that_saves_an_intermediate():
    def forward(ctx, x, c):
        wave = jnp.sin(x)
        ctx.save_for_backward(wave, jnp.cos(x))
        return wave * c

    inner = layer(forward, lambda ctx, dy: (None, dy * ctx.saved_tensor()[0]))
    outer = layer(lambda x: -jnp.cos(x), inner.apply, plain=True)

    def loss(x):
        return jnp.sum(outer.apply(x) * x)

    # The gradient of the loss is inner(x, x) - cos(x), and the rule of inner has a gradient only for its second input.
    x = jnp.asarray([0.3, 1.2])
    for run in (lambda f: f, jax.jit):
        for second in (jax.jacrev(jax.grad(loss)), jax.hessian(loss)):
            np.testing.assert_allclose(run(second)(x), jnp.diag(2 * jnp.sin(x)), rtol=1e-5, atol=1e-6)
