"""A function with its rule beside `jax.custom_jvp`, which it replaces: the same numbers under each transform."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.jet import jet

from pylayer_jax._jax import rule_function
from pylayer_jax._jax.jaxprs import stage
from pylayer_jax._jax.rule_function import RuleFunction

X = jnp.float32(0.3)
XS = jnp.array([0.3, -0.8, 1.1], jnp.float32)


class DoubledTanh(RuleFunction):
    """x, y -> tanh(x), its sign, x * y; the rule of the first value is twice its derivative."""

    name = "DoubledTanh"

    def __init__(self, jaxpr=None):
        self.jaxpr = jaxpr

    def run(self, x, y):
        t = jnp.tanh(x)
        return [t, jnp.sign(t).astype(jnp.int32), x * y]

    def rule(self, primals, tangents):
        x, y = primals
        dx, dy = (jnp.zeros_like(x) if t is None else t for t in tangents)
        values = rule_function.call(self, primals)
        return values, [2 * dx * (1 - values[0] ** 2), None, x * dy + y * dx]

    def call_staged(self, *args):
        jaxpr, consts, _ = stage(lambda *xs: (self.run(*xs), None), [jax.typeof(x) for x in args], self.name)
        assert not consts
        return rule_function.call(DoubledTanh(jaxpr), args)


def ours(x, y):
    return tuple(rule_function.call(DoubledTanh(), [x, y]))


def written_for_jax():
    @jax.custom_jvp
    def theirs(x, y):
        return tuple(DoubledTanh().run(x, y))

    @theirs.defjvp
    def rule(primals, tangents):
        (x, y), (dx, dy) = primals, tangents
        t, sign, product = theirs(x, y)
        zero = np.zeros(sign.shape, jax.dtypes.float0)
        return (t, sign, product), (2 * dx * (1 - t**2), zero, x * dy + y * dx)

    return theirs


def mixed(f):
    return lambda x: (lambda t, sign, p: jnp.sum(t * p + jnp.sin(t) * sign.astype(t.dtype)))(*f(x, 0.7 * x))


def scanned(f):
    def run(x):
        return jax.lax.scan(lambda c, s: (f(c, s * c)[0], f(c, s)[2]), x, jnp.array([0.5, 0.9], x.dtype))

    return lambda x: (lambda carry, ys: jnp.sum(carry) + jnp.sum(ys))(*run(x))


def in_a_loop(f):
    """The same as a loop in Python."""

    def run(x):
        total = 0.0
        for s in (0.5, 0.9):
            total, x = total + jnp.sum(f(x, s)[2]), f(x, s * x)[0]
        return jnp.sum(x) + total

    return run


PROGRAMS = {
    "plain": mixed,
    "one value": lambda f: lambda x: f(x, x)[0].sum(),
    "twice": lambda f: lambda x: f(f(x, x)[0], x)[2].sum(),
    "one operand": lambda f: lambda x: f(x, 2.0 * jax.lax.stop_gradient(x))[0].sum(),
    "jit": lambda f: jax.jit(mixed(f)),
    "checkpoint": lambda f: jax.checkpoint(mixed(f)),
    "cond": lambda f: lambda x: jax.lax.cond(jnp.sum(x) < 9, mixed(f), lambda x: jnp.sum(x), x),
    "vmap": lambda f: lambda x: jax.vmap(mixed(f))(jnp.stack([x, 2 * x])).sum(),
    "vmap of one operand": lambda f: lambda x: jax.vmap(lambda a: f(a, x)[2] * f(x, a)[0])(jnp.stack([x, -x])).sum(),
}
ORDERS = {
    "value": lambda g: g,
    "grad": jax.grad,
    "grad of grad": lambda g: jax.grad(lambda x: jax.grad(g)(x).sum()),
    "third": lambda g: jax.grad(lambda x: jax.grad(lambda x: jax.grad(g)(x).sum())(x).sum()),
    "jvp": lambda g: lambda x: jax.jvp(g, (x,), (x,))[1],
    "hessian": jax.hessian,
    "jacfwd of jacfwd": lambda g: jax.jacfwd(jax.jacfwd(g)),
    "grad of jvp": lambda g: jax.grad(lambda x: jax.jvp(g, (x,), (jnp.cos(x),))[1]),
    "linearize": lambda g: lambda x: jax.linearize(g, x)[1](x),
    "jit of grad of grad": lambda g: jax.jit(jax.grad(lambda x: jax.grad(g)(x).sum())),
    "grad of grad of jit": lambda g: jax.grad(lambda x: jax.grad(jax.jit(g))(x).sum()),
}


PROGRAMS["scan"] = scanned


# Orders with the numbers of another one.
LIKE = {"linearize": "jvp", "jit of grad of grad": "grad of grad", "grad of grad of jit": "grad of grad"}


def values(functions):
    return jax.jit(lambda x: {name: f(x) for name, f in functions.items()})(XS)


@functools.cache
def of_custom_jvp(order):
    expected = {name: ORDERS[order](program(written_for_jax())) for name, program in PROGRAMS.items()}
    # In a scan jax 0.10 forgets the rule.
    return values(expected | {"scan": ORDERS[order](in_a_loop(written_for_jax()))})


@pytest.mark.parametrize("order", ORDERS)
def test_a_function_with_its_rule_is_what_custom_jvp_is(order):
    found = {name: ORDERS[order](program(ours)) for name, program in PROGRAMS.items()}
    wanted, got = of_custom_jvp(LIKE.get(order, order)), values(found)
    for name, value in wanted.items():
        np.testing.assert_allclose(got[name], value, rtol=2e-5, atol=1e-5, err_msg=name)
    if order == "grad of grad":
        np.testing.assert_allclose(found["twice"](XS), wanted["twice"], rtol=2e-5)  # operation by operation


def test_taylor_series():
    point, series = jet(lambda x: ours(x, x)[0], (X,), ((jnp.float32(1.0), jnp.float32(0.0)),))
    first = 2 * (1 - point**2)
    np.testing.assert_allclose(series, [first, -4 * point * first], rtol=1e-5)


def test_when_the_rule_of_jax_itself_may_take_its_place():
    """If this fails with the oldest supported jax, `jax.custom_jvp` holds in scans: `RuleFunction` can go."""

    @jax.custom_jvp
    def tanh(x):
        return jnp.tanh(x)

    @tanh.defjvp
    def rule(primals, tangents):
        y = tanh(*primals)
        return y, 2 * tangents[0] * (1 - y**2)

    def twice(x):
        return jax.lax.scan(lambda c, _: (tanh(c), None), x, None, length=2)[0]

    is_right = jax.__version_info__ >= (0, 12)
    np.testing.assert_allclose(jax.grad(jax.grad(twice))(X), -10.9068 if is_right else -3.7074, rtol=1e-4)
