"""Draws random programs, and compares each with the same program in blocks of saved-tensor hooks.

    python -m tests.generated.programs 200 [seed]    # prints each program that differs, and how many were drawn

A program is drawn as a function from `use_hooks` to a function of arrays, so that both versions share all choices.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from pylayer_jax import saved_tensors_hooks
from pylayer_jax.packers import by_name, cast_saved, chain, quantize_saved, save_on_cpu
from tests.kit.layers import ForwardTanh, Multiply, Tanh

from .pieces import MASK, OUTER, PIECES, SHAPE, VIEWS, W, outside
from .seeds import print_differences


def normalized(x):
    return (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + 1)


def moved(x):
    return x.reshape(2, 2, 8).transpose(1, 0, 2).reshape(SHAPE)[::-1] * 0.5


UNARY = {
    "sin": jnp.sin,
    "tanh": jnp.tanh,
    "exp": lambda x: jnp.exp(-(x**2)),
    "gelu": jax.nn.gelu,
    "silu": jax.nn.silu,
    "softmax": jax.nn.softmax,
    "log_softmax": jax.nn.log_softmax,
    "matmul": lambda x: x @ W,
    "attention": lambda x: jax.nn.softmax(x @ x.T) @ x,
    "normalized": normalized,
    "moved": moved,
    "masked": lambda x: jnp.where(MASK, x, 0.5 * x),
    "cube": lambda x: 0.1 * x**3,
    "one minus": lambda x: 1 - x * 0.5,
    "named": lambda x: checkpoint_name(x * jnp.cos(x), "named"),
    "renamed": lambda x: checkpoint_name(jnp.sin(x), "named").reshape(8, 4).reshape(SHAPE),
    "Tanh": Tanh.apply,
    "ForwardTanh": ForwardTanh.apply,
    "stopped": lambda x: x - jax.lax.stop_gradient(x.max(-1, keepdims=True)) * 0.5,
    "sorted": lambda x: jnp.sort(x, -1),
    "cumulated": lambda x: jnp.cumsum(x, -1) * 0.2,
    "gathered": lambda x: x[jnp.array([2, 0, 3, 3])],
}
BINARY = {
    "add": lambda a, b: a + b,
    "multiply": lambda a, b: a * b,
    "divide": lambda a, b: a / (1 + b**2),
    "Multiply": Multiply.apply,
    "product": lambda a, b: a @ b.T @ a * 0.2,
    "chosen": lambda a, b: jnp.where(a > b, a, b * 2),
    "scaled": lambda a, b: a * b.mean(),
}
KEYS = ["named", "Tanh", "exp", "matmul", "sin", "multiply", "body", "program", "saved[0]", "tanh", ...]


def exact_hooks(rng, **options):
    """Return hooks that pack tensors without loss."""
    made = [
        lambda: saved_tensors_hooks(lambda x: {"x": x}, lambda p: p["x"], differentiable=True, **options),
        lambda: save_on_cpu(arguments=rng.random() < 0.5, **options),
        lambda: chain(
            saved_tensors_hooks(lambda x: (x, 1), lambda p: p[0], differentiable=True), save_on_cpu(), **options
        ),
    ]
    return rng.choice(made)()


def hooks_for_some(rng):
    """Return hooks that pack without loss, perhaps for some tensors only."""
    kind = rng.choice(["all", "by name", "only", "origin"])
    if kind == "by name":
        keys = rng.sample(KEYS, rng.randint(1, 4))
        return by_name({key: exact_hooks(rng) if rng.random() < 0.7 else None for key in keys})
    if kind == "only":
        return exact_hooks(rng, only=lambda x: x.ndim > 1)
    if kind == "origin":
        name = rng.choice(["exp", "multiply", "tanh", "matmul"])
        return exact_hooks(rng, only=lambda x, info: info.operation != name and "body" not in info.inside)
    return exact_hooks(rng)


class Step(NamedTuple):
    """A statement of a program: it computes an array from two of the values before it."""

    make: Callable[[bool], Callable[[Any, Any], Any]]  # from `use_hooks` to a function of the two arrays
    i: int  # positions of the two values, modulo the number of values
    j: int


def draw_body(rng, depth):
    """Return a function from `use_hooks` to a function from an array to an array of the same shape."""
    steps = [draw_step(rng, depth) for _ in range(rng.randint(2, 4))]

    def body(use_hooks):
        def run(x):
            values = [x]
            for step in steps:
                a, b = values[step.i % len(values)], values[step.j % len(values)]
                values.append(step.make(use_hooks)(a, b))
            return values[-1] + 0.1 * values[len(values) // 2]

        return run

    return body


def draw_step(rng, depth):
    i, j = rng.randint(0, 9), rng.randint(0, 9)
    containers = [*CONTAINERS, *["block", "outer"] * 2] if depth else []
    kind = rng.choice(["unary"] * 5 + ["binary"] * 3 + ["piece"] * 3 + containers)
    if kind == "unary":
        unary = UNARY[rng.choice(list(UNARY))]
        return Step(lambda _: lambda a, b: unary(a), i, j)
    if kind == "binary":
        binary = BINARY[rng.choice(list(BINARY))]
        return Step(lambda _: binary, i, j)
    if kind in ("piece", "outer"):
        pieces, view, seed = PIECES if kind == "piece" else OUTER, VIEWS[rng.choice(list(VIEWS))], rng.randrange(99)
        piece, inner = pieces[rng.choice(list(pieces))], [draw_body(rng, depth - 1)] if kind == "outer" else []

        def with_outside(use_hooks):
            o, fs = outside(seed), [body(use_hooks) for body in inner]
            return lambda a, b: piece(*fs, a, b, view(o, a), o).astype(a.dtype)

        return Step(with_outside, i, j)
    body = draw_body(rng, depth - 1)
    if kind == "block":
        hooks = hooks_for_some(rng)

        def in_block(use_hooks):
            f = hooks(body(use_hooks)) if use_hooks else body(use_hooks)
            return lambda a, b: f(a)

        return Step(in_block, i, j)
    return Step(lambda use_hooks: CONTAINERS[kind](body(use_hooks)), i, j)


def scan(f):
    weights = np.linspace(0.5, 1.0, 3)
    return lambda a, b: jax.lax.scan(lambda c, w: (jnp.tanh(f(c) * w) + 0.1 * b, c[0]), a, weights)[0]


def vmap(f):
    return lambda a, b: jax.vmap(lambda x: f(x) * b)(jnp.stack([a, a * 0.5])).sum(0)


# Code that contains a function of one array, as a function of two arrays.
CONTAINERS = {
    "scan": scan,
    "vmap": vmap,
    "remat": lambda f: lambda a, b: jax.checkpoint(f)(a),
    "cond": lambda f: lambda a, b: jax.lax.cond(b.sum() > 0, f, jnp.sin, a),
    "jit": lambda f: lambda a, b: jax.jit(f)(a),
}
DERIVATIVES = {
    "value": lambda f: f,
    "gradient": jax.grad,
    "grad of jit": lambda f: jax.grad(jax.jit(f)),
    "second": lambda f: jax.grad(lambda x: jnp.sum(jnp.sin(jax.grad(f)(x)))),
    "forward over reverse": lambda f: lambda x: jax.jvp(jax.grad(f), (x,), (jnp.cos(x),))[1],
}


def draw_program(seed):
    """Draw a program.

    Return its title; a function `run(use_hooks)`, which computes its value or one derivative; a function
    `loss(use_hooks)`, which returns the program as a function of its input; and the input.
    """
    rng = random.Random(seed)
    body, hooks, is_jitted = draw_body(rng, rng.randint(0, 2)), hooks_for_some(rng), rng.random() < 0.6

    def loss(use_hooks):
        f = body(use_hooks)

        def program(x):
            return jnp.sum(jnp.sin(f(x)))

        return hooks(program) if use_hooks else program

    derivative = rng.choice(list(DERIVATIVES))
    x = jnp.asarray(np.sin(np.arange(32.0)).reshape(SHAPE))

    def run(use_hooks):
        f = DERIVATIVES[derivative](loss(use_hooks))
        return (jax.jit(f) if is_jitted else f)(x)

    return f"{seed} {derivative} {'jit' if is_jitted else 'eager'}", run, loss, x


# An error of JAX for `save_on_cpu` in a cond that is differentiated twice, also without this package: see the guide on
# packing.
REFUSED = "Expected cotangent type float64<host>"


def difference(seed):
    """Return how a random program with hooks differs from the same program without. Return None if they agree."""
    with jax.enable_x64(True), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # about keys of `by_name` that name nothing
        title, run, loss, x = draw_program(seed)
        try:
            want = run(False)
        except Exception:  # JAX cannot differentiate this program, also without hooks
            return None
        try:
            got = run(True)
        except Exception as error:
            return None if REFUSED in str(error) else f"{title}: {type(error).__name__}: {str(error)[:200]}"
        scale = 1e-6 + float(jnp.abs(want).max())  # the small number is for a derivative that is zero up to rounding
        if not bool(jnp.abs(got - want).max() <= 1e-9 * scale):
            return f"{title}: differs by {float(jnp.abs(got - want).max() / scale):.2g}"
        if seed % 4 == 0:
            found = lossy_difference(seed, loss(False), x)
            return found and f"{title}: {found}"
    return None


LOSSY = [(cast_saved(jnp.float32), 1e-4), (quantize_saved(8), 0.5)]  # hooks, and the relative error that they may make


def lossy_difference(seed, f, x):
    """Return how the gradient with hooks that change the tensors a little differs too much, or None."""
    hooks, tolerance = LOSSY[seed // 4 % 2]
    want, got = jax.grad(f)(x), jax.grad(hooks(f))(x)
    error = float(jnp.linalg.norm(got - want) / (1e-6 + jnp.linalg.norm(want)))
    return None if error <= tolerance else f"{hooks!r} differs by {error:.2g}"


if __name__ == "__main__":
    print_differences(difference, cleared_after=20)
