"""JAX uses `backward` at every order: known numbers, calls of methods, and derivatives of each kind of saved tensor."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pylayer_jax import Function, once_differentiable
from tests.hooks.spy import in_block
from tests.kit.layers import bits, layer, text_of
from tests.kit.modes import SECOND, STAGED

grad = jax.grad
WITHIN = {"plain": lambda f: f, **STAGED}


def test_when_the_rule_of_jax_itself_may_take_its_place():
    """Assert a limit of `jax.custom_jvp` in scans. If this fails with all versions, it may replace `rule_function`."""

    tanh = jax.custom_jvp(jnp.tanh)
    tanh.defjvp(lambda primals, tangents: (tanh(*primals), 2 * tangents[0] * (1 - tanh(*primals) ** 2)))
    second = grad(grad(lambda x: jax.lax.scan(lambda c, _: (tanh(c), None), x, None, length=2)[0]))(jnp.float32(0.3))
    np.testing.assert_allclose(second, -10.9068 if jax.__version_info__ >= (0, 12) else -3.7074, rtol=1e-4)


@pytest.mark.parametrize(
    ("transform", "expected"),
    [
        (lambda f: f, 9),
        (grad, 6),
        (lambda f: grad(grad(f)), 2),
        (lambda f: jax.jit(grad(f)), 6),
        (lambda f: jax.jit(grad(grad(f))), 2),
        (jax.hessian, 2),
        (lambda f: grad(jax.jit(f)), 6),  # staged by jit, then differentiated
    ],
)
def test_forward_runs_once_per_application(transform, expected):
    calls = []

    def forward(ctx, x):
        calls.append(x)
        scaled = x * np.float32(len(calls))  # an intermediate, which another run would make another number
        ctx.save_for_backward(scaled)
        return scaled * scaled

    def backward(ctx, dy):
        return 2 * dy * ctx.saved_tensor()[0] * np.float32(len(calls))

    found = transform(layer(forward, backward).apply)(jnp.float32(3.0))
    assert (len(calls), found) == (1, expected)


def exponential(ctx, x):
    y = jnp.asarray(np.exp(np.asarray(x)))
    assert float(x) > 0
    ctx.save_for_backward(y)
    return y


Host = layer(exponential, lambda ctx, dy: dy * float(dy) * np.asarray(ctx.saved_tensor()[0]))
HostOfIntermediate = layer(lambda ctx, x: exponential(ctx, x) * 1, base=Host)


@pytest.mark.parametrize("layer", [Host, HostOfIntermediate, layer(base=Host, forward_mode=True)])
def test_host_code_has_a_first_derivative_in_eager_mode(layer):
    x = jnp.float32(0.5)
    np.testing.assert_allclose(layer.apply(x), np.exp(0.5), rtol=1e-6)
    np.testing.assert_allclose(grad(layer.apply)(x), np.exp(0.5), rtol=1e-6)
    with pytest.raises(jax.errors.TracerArrayConversionError) as caught:
        jax.jit(grad(layer.apply))(x)
    assert f"{layer.__name__}.forward" in text_of(caught.value)
    for second in (grad(grad(layer.apply)), jax.hessian(layer.apply)):
        with pytest.raises(TypeError, match=rf"(?s){layer.__name__}.*jax\.pure_callback"):
            second(x)


@once_differentiable
def cosine_once(ctx, dy):
    assert ctx.needs_input_grad == (True,)
    return dy * jnp.cos(ctx.saved_tensor()[0])


Once = layer(lambda ctx, x: ctx.save_for_backward(x) or jnp.sin(x), cosine_once, name="Once")


@once_differentiable
def cosine_once_on_host(ctx, dy):
    return np.asarray(dy) * np.cos(np.asarray(ctx.saved_tensor()[0]))


OnceOnHost = layer(base=Once, name="OnceOnHost", backward=cosine_once_on_host)
OnceForward = layer(base=Once, name="OnceForward", forward_mode=True)
# Its `jvp` may be differentiated.
OnceWithJvp = layer(base=Once, name="OnceWithJvp", jvp=lambda ctx, t: t * jnp.cos(ctx.saved_tensor()[0]))


def pushed(f):
    return lambda x: jax.jvp(f, (x,), (1.0,))[1]


TWICE_IN_REVERSE = [
    lambda f: grad(grad(f)),
    jax.hessian,
    lambda f: jax.jit(grad(grad(f))),
    lambda f: grad(jax.jit(grad(f))),
    lambda f: jax.jit(jax.hessian(f)),
    lambda f: in_block(bits(), grad(grad(f))),
]
TWICE_FORWARD = [
    lambda f: pushed(pushed(f)),
    lambda f: grad(pushed(f)),
    lambda f: jax.jit(pushed(pushed(f))),
    lambda f: jax.jit(grad(pushed(f))),
]


@pytest.mark.parametrize("layer", [Once, OnceOnHost, OnceForward, OnceWithJvp])
def test_once_differentiable(layer):
    on_host = layer is OnceOnHost
    firsts = [grad, lambda f: in_block(bits(), grad(f))]
    firsts += [] if on_host else [lambda f: jax.jit(grad(f)), lambda f: grad(jax.jit(f))]
    if layer in (OnceForward, OnceWithJvp):
        firsts += [pushed, lambda f: jax.jit(pushed(f))]
    for first in firsts:
        np.testing.assert_allclose(first(layer.apply)(0.3), np.cos(0.3), rtol=1e-6)
    refused = TWICE_IN_REVERSE[: 2 if on_host else None] + (TWICE_FORWARD if layer is OnceForward else [])
    for i, second in enumerate(refused):
        with pytest.raises(RuntimeError, match=r"(?i)once.*once_differentiable"):
            pytest.fail(f"{i}: {second(layer.apply)(0.3)}")
    if layer is OnceWithJvp:
        for second in TWICE_FORWARD:
            np.testing.assert_allclose(second(layer.apply)(0.3), -np.sin(0.3), rtol=1e-6)


@pytest.mark.parametrize("place", ["plain", "jit", "scan", "checkpoint"])
def test_once_differentiable_backward_may_be_transposed(place):
    f, x = WITHIN[place](Once.apply), 2.0

    def transposed(t):
        return jax.linear_transpose(lambda dy: jax.vjp(f, x)[1](dy)[0], x)(t)[0]

    for run in (transposed, jax.jit(transposed)):
        np.testing.assert_allclose(run(0.5), 0.5 * np.cos(x), rtol=1e-6)  # no derivative of backward, linear in dy


X, S, C = 0.7, np.sin(0.7), np.cos(0.7)


def saves(forward, save, marks_last=False, kind="PyLayer", **attributes):
    """Return a layer of one input that saves save(inputs, outputs); its second derivative shows that of `save`."""

    def set_up(ctx, inputs, output):
        ctx.save_for_backward(save(*inputs, output))
        if marks_last:
            ctx.mark_non_differentiable(output[-1])

    def forward_with_ctx(ctx, x):
        output = forward(x)
        set_up(ctx, (x,), output)
        return output

    backward = lambda ctx, *dys: sum(dys) * ctx.saved_tensors[0]
    if kind == "PyLayer":
        return layer(forward_with_ctx, backward, **attributes)
    return layer(forward, backward, Function, setup_context=set_up, **attributes)


TWO = jnp.float32(2.0)
NUMPY_TWO = np.array(2.0, np.float32)
two_results = jax.jit(lambda x: (jnp.sin(x), x**3))

# name: forward, what is saved (x, output), the second derivative of the sum of the outputs at X. As backward is dy * m,
# the derivative of m is: the own one for an input, m for an output (the rule), through forward for an intermediate.
CASES = {
    "an input that is returned": (lambda x: x, lambda x, y: x * x, 2 * X),
    "a no-op by astype": (lambda x: x.astype(x.dtype), lambda x, y: x * x, 2 * X),
    "an input in a list": (lambda x: [x], lambda x, y: x * x, 2 * X),
    "the input as the output": (lambda x: x, lambda x, y: y, 1.0),
    "an output": (jnp.sin, lambda x, y: y, S),
    "computed from the output and the input": (jnp.sin, lambda x, y: y * x, S * X * X + S),
    "one object twice": (lambda x: (lambda y: (y, y))(jnp.sin(x)), lambda x, y: y[0] * y[0], 2 * 2 * S * S**2),
    "one object twice, the first": (lambda x: (lambda y: (y, y))(jnp.sin(x)), lambda x, y: y[0], 2 * S),
    "of a constant that is returned": (lambda x: TWO, lambda x, y: x * TWO, 2.0),
    "a constant that is returned": (lambda x: (x * 1, TWO), lambda x, y: TWO, 2 * 2.0),
    "a NumPy constant that is returned": (lambda x: (x * 1, NUMPY_TWO), lambda x, y: y[1], 2 * 2.0),
    "one of two results of an operation": (
        lambda x: two_results(x)[0],
        lambda x, y: two_results(x)[1] * y,
        S * X**3 * X**3 + S * 3 * X**2,
    ),
}


# The same, where the last output is marked: saved, it is a constant; for what is computed from it, it is plain code.
MARKED = {
    "a marked output": (lambda x: (x * 1, x**3), lambda x, ys: ys[1], 0.0),
    "computed from a marked output": (lambda x: (x * 1, x**3), lambda x, ys: ys[1] * 2 * ys[1], 12 * X**5),
    "computed from a marked input": (lambda x: (jnp.cos(x), x), lambda x, ys: -jnp.sin(x), -C),
}


@pytest.mark.parametrize("second", SECOND.values(), ids=SECOND)
@pytest.mark.parametrize(("kind", "forward_mode"), [("PyLayer", False), ("setup_context", True)])
def test_second_derivative_by_what_is_saved(kind, forward_mode, second):
    for name, (forward, save, expected) in (CASES | MARKED).items():
        apply = saves(forward, save, name in MARKED, kind, forward_mode=forward_mode).apply
        found = second(lambda x: sum(jax.tree.leaves(apply(x))))(jnp.float32(X))  # noqa: B023
        np.testing.assert_allclose(found, expected, rtol=1e-5, err_msg=name)


@pytest.mark.parametrize("forward_mode", [False, True])
def test_a_ref_that_forward_makes_is_right_at_every_order(forward_mode):
    def saved(x, _):
        ref = jax.new_ref(jnp.zeros_like(x))
        ref[...] = x**3
        return ref[...]

    apply = saves(lambda x: x * 1, saved, forward_mode=forward_mode).apply
    for within in (lambda f: f, STAGED["jit"], STAGED["checkpoint"], STAGED["cond"]):
        f = within(apply)
        np.testing.assert_allclose(grad(f)(X), X**3, rtol=1e-5)
        np.testing.assert_allclose(jax.jit(grad(f))(X), X**3, rtol=1e-5)
    for name, second in SECOND.items():
        if "of vmap" not in name:
            np.testing.assert_allclose(second(apply)(jnp.float32(X)), 3 * X**2, rtol=1e-5, err_msg=name)


def test_a_ref_that_forward_closes_over_is_refused_where_it_is_traced():
    def run(derivative):
        ref = jax.new_ref(jnp.zeros(()))

        def forward(ctx, x):
            ref[...] += x
            return x * ref[...]

        return derivative(layer(forward, lambda ctx, dy: 3 * dy).apply)(jnp.float32(2.0)), ref[...]

    assert run(grad) == (3, 2)  # on concrete values
    scanned = lambda f: grad(lambda x: jax.lax.scan(lambda c, _: (c + f(x), None), 0.0, None, length=2)[0])
    for traced in (lambda f: grad(jax.jit(f)), scanned, lambda f: jax.jit(grad(f)), lambda f: grad(grad(f))):
        with pytest.raises(TypeError, match=r"Made.*as an argument"):
            run(traced)


RETURNED = np.array([0.3, -0.7, 1.1], np.float32)


@pytest.mark.parametrize(
    "keep",
    [
        lambda ctx, output: ctx.save_for_backward(output),
        lambda ctx, output: ctx.save_for_backward(RETURNED),
        lambda ctx, output: setattr(ctx, "kept", {"in": [RETURNED]}),
    ],
    ids=["output", "by its name", "in a container"],
)
def test_a_numpy_constant_that_setup_context_keeps_by_its_own_name_is_the_output(keep):
    def backward(ctx, dy):
        (kept,) = ctx.saved_tensors or jax.tree.leaves(ctx.kept)
        return dy["y"] * kept

    setup = lambda ctx, inputs, output: keep(ctx, output["y"])
    made = layer(lambda x: {"y": RETURNED}, backward, Function, setup_context=setup)
    slope = jax.grad(lambda x: jnp.sum(made.apply(x)["y"]))
    # The gradient is y, and dy/dx is y by the rule.
    np.testing.assert_allclose(jax.jit(jax.grad(lambda x: jnp.sum(slope(x))))(jnp.ones(3)), RETURNED)
