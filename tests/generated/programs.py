"""Programs that are drawn at random, in blocks of hooks, beside the same programs without hooks.

python -m tests.generated.programs 200 [seed]    # prints each program that differs, and how many were drawn
"""

from __future__ import annotations

import random
import sys
import warnings

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from pylayer_jax import saved_tensors_hooks
from pylayer_jax.packers import by_name, cast_saved, chain, quantize_saved, save_on_cpu
from tests.kit.layers import ForwardTanh, Multiply, Tanh

SHAPE = (4, 8)
W = np.cos(np.arange(64.0)).reshape(8, 8) * 0.3
MASK = np.arange(32).reshape(SHAPE) % 3 > 0


def normalized(x):
    return (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + 1)


def reduced(x):
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
    "moved": reduced,
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


def exact(draw, **options):
    """A pair whose packed tensors are equal to the tensors."""
    made = [
        lambda: saved_tensors_hooks(lambda x: {"x": x}, lambda p: p["x"], differentiable=True, **options),
        lambda: save_on_cpu(arguments=draw.random() < 0.5, **options),
        lambda: chain(
            saved_tensors_hooks(lambda x: (x, 1), lambda p: p[0], differentiable=True), save_on_cpu(), **options
        ),
    ]
    return draw.choice(made)()


def pair(draw):
    """An exact pair, perhaps for some tensors only."""
    kind = draw.choice(["all", "by name", "only", "origin"])
    if kind == "by name":
        keys = draw.sample(KEYS, draw.randint(1, 4))
        return by_name({key: exact(draw) if draw.random() < 0.7 else None for key in keys})
    if kind == "only":
        return exact(draw, only=lambda x: x.ndim > 1)
    if kind == "origin":
        name = draw.choice(["exp", "multiply", "tanh", "matmul"])
        return exact(draw, only=lambda x, info: info.operation != name and "body" not in info.inside)
    return exact(draw)


def code(draw, depth, hooked):
    """A function from an array to an array of the same shape, as code with blocks (if `hooked`) and without."""
    steps = [step(draw, depth, hooked) for _ in range(draw.randint(2, 4))]

    def body(use_hooks):
        def run(x):
            values = [x]
            for make, i, j in steps:
                values.append(make(use_hooks)(values[i % len(values)], values[j % len(values)]))
            return values[-1] + 0.1 * values[len(values) // 2]

        return run

    return body


def step(draw, depth, hooked):
    i, j = draw.randint(0, 9), draw.randint(0, 9)
    kind = draw.choice(
        ["unary"] * 5 + ["binary"] * 3 + (["scan", "vmap", "remat", "cond", "jit", "block"] if depth else [])
    )
    if kind == "unary":
        f = UNARY[draw.choice(list(UNARY))]
        return lambda _: lambda a, b: f(a), i, j
    if kind == "binary":
        f = BINARY[draw.choice(list(BINARY))]
        return lambda _: f, i, j
    inner = code(draw, depth - 1, hooked)
    if kind == "block":
        hooks = pair(draw)
        return lambda on: lambda a, b: hooks(inner(on))(a) if on else inner(on)(a), i, j
    if kind == "scan":
        weights = np.linspace(0.5, 1.0, 3)

        def scanned(on):
            f = inner(on)
            return lambda a, b: jax.lax.scan(lambda c, w: (jnp.tanh(f(c) * w) + 0.1 * b, c[0]), a, weights)[0]

        return scanned, i, j
    if kind == "vmap":

        def mapped(on):
            f = inner(on)
            return lambda a, b: jax.vmap(lambda x: f(x) * b)(jnp.stack([a, a * 0.5])).sum(0)

        return mapped, i, j
    if kind == "cond":
        return lambda on: lambda a, b: jax.lax.cond(b.sum() > 0, inner(on), jnp.sin, a), i, j
    wrap = {"remat": jax.checkpoint, "jit": jax.jit}[kind]
    return lambda on: lambda a, b: wrap(inner(on))(a), i, j


def draw_program(seed):
    """Return the numbers of a random program with hooks and without: values and derivatives of two orders."""
    draw = random.Random(seed)
    inner, hooks, compiled = code(draw, draw.randint(0, 2), True), pair(draw), draw.random() < 0.6

    def loss(on):
        body = inner(on)

        def program(x):
            return jnp.sum(jnp.sin(body(x)))

        return hooks(program) if on else program

    orders = {
        "value": lambda f: f,
        "gradient": jax.grad,
        "grad of jit": lambda f: jax.grad(jax.jit(f)),
        "second": lambda f: jax.grad(lambda x: jnp.sum(jnp.sin(jax.grad(f)(x)))),
        "forward over reverse": lambda f: lambda x: jax.jvp(jax.grad(f), (x,), (jnp.cos(x),))[1],
    }
    name = draw.choice(list(orders))
    mode = jax.jit if compiled else lambda f: f
    x = jnp.asarray(np.sin(np.arange(32.0)).reshape(SHAPE))
    return f"{seed} {name} {'jit' if compiled else 'eager'}", lambda on: mode(orders[name](loss(on)))(x), loss, x


# `save_on_cpu` in a cond that is differentiated twice is an error of JAX, with plain JAX too: see the guide on packing.
REFUSED = "Expected cotangent type float64<host>"


def difference(seed):
    """Return how a random program with hooks differs from the same program without, or None."""
    with jax.enable_x64(True), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of keys that name nothing
        title, run, loss, x = draw_program(seed)
        try:
            want = run(False)
        except Exception:  # JAX cannot do it without hooks
            return None
        try:
            got = run(True)
        except Exception as error:
            return None if REFUSED in str(error) else f"{title}: {type(error).__name__}: {str(error)[:200]}"
        scale = 1e-6 + float(jnp.abs(want).max())  # a derivative that is zero but for rounding is no measure
        if not bool(jnp.abs(got - want).max() <= 1e-9 * scale):
            return f"{title}: differs by {float(jnp.abs(got - want).max() / scale):.2g}"
        if seed % 4 == 0:
            found = lossy_difference(seed, loss(False), x)
            return found and f"{title}: {found}"
    return None


def lossy_difference(seed, f, x):
    """Compare the gradient with a cast or with 8 bits, which changes the tensors a little."""
    want = jax.grad(f)(x)
    hooks = [cast_saved(jnp.float32), quantize_saved(8)][seed // 4 % 2]
    got = jax.grad(hooks(f))(x)
    share = float(jnp.linalg.norm(got - want) / (1e-6 + jnp.linalg.norm(want)))
    return None if share <= (1e-4, 0.5)[seed // 4 % 2] else f"{hooks!r} differs by {share:.2g}"


if __name__ == "__main__":
    count, start = int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0
    found = 0
    for seed in range(start, start + count):
        if (text := difference(seed)) is not None:
            found += 1
            print(text, flush=True)
        if seed % 20 == 19:
            jax.clear_caches()
    print(f"{found} of {count} differ")
