"""Draws random programs, and compares the gradients under the ready pairs, which recompute tensors, with plain ones.

    python -m tests.generated.recomputed 200 [seed]    # prints each failing program, made small, and their number

A pair without loss gives the plain gradient. The error of a pair with loss is at most twice that without recomputation.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pylayer_jax import Function, packers

from .programs import BINARY, CONTAINERS, MASK, SHAPE, UNARY, W
from .seeds import print_differences


class RowMax(Function):
    """The largest value of a row. Its rule compares what it saved."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.max(-1, keepdims=True) + 0 * x

    @staticmethod
    def backward(ctx, dy):
        (x,) = ctx.saved_tensors
        return jnp.where(x == x.max(-1, keepdims=True), dy.sum(-1, keepdims=True), 0)


class Clipped(Function):
    """A clipping rule that compares its output with its limits, and keeps both of its operands."""

    @staticmethod
    def forward(ctx, x):
        y = jnp.clip(x, x.mean(), 0.8)
        ctx.save_for_backward(x, y)
        return y

    @staticmethod
    def backward(ctx, dy):
        x, y = ctx.saved_tensors
        return jnp.where(x == y, dy * (1 + y), 0)


@jax.custom_vjp
def largest(x):
    return jnp.where(x == x.max(), x, 0.5 * x)


largest.defvjp(lambda x: (largest(x), (x, x.max())), lambda saved, dy: (dy * jnp.where(saved[0] == saved[1], 1, 0.5),))


def pooled(x):
    return jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 3), (1, 1), "SAME")


def one_hot(x):
    return x * jax.nn.one_hot(x.argmax(-1), x.shape[-1], dtype=x.dtype) + 0.3 * x


def masked_attention(x):
    return jax.nn.softmax(jnp.where(jnp.tri(len(x), dtype=bool), x @ x.T, -1e9)) @ x


CHEAP = {
    "erf": jax.lax.erf,
    "expm1": lambda x: jnp.expm1(-jnp.abs(x)),
    "log": lambda x: jnp.log(0.1 + x**2),
    "log1p": lambda x: jnp.log1p(jnp.exp(-x)),
    "sqrt": lambda x: jnp.sqrt(0.01 + x * x),
    "rsqrt": lambda x: x * jax.lax.rsqrt(0.1 + x * x),
    "fast sin": lambda x: jnp.sin(20 * x),
    "power": lambda x: (0.1 + jnp.abs(x)) ** 1.7,
    "powers": lambda x: (1 + x * x) ** jnp.tanh(x),
    "reciprocal": lambda x: 1 / (0.2 + jnp.exp(x)),
    "abs": jnp.abs,
    "relu": jax.nn.relu,
    "elu": jax.nn.elu,
    "gate": lambda x: x * jax.nn.sigmoid(3 * x),
    "massive channel": lambda x: jax.nn.sigmoid(x * jnp.array([300.0, *[1.0] * 7], x.dtype)) * x,
    "maximum": lambda x: jnp.maximum(jnp.sin(x), 0.2 * x),
    "clamp": lambda x: jnp.clip(jnp.sin(x), -0.5, 0.5) * x,
    "rounded": lambda x: x - jax.lax.stop_gradient(x - jnp.round(4 * x) / 4) * 0.5,
    "sign": lambda x: x * jnp.sign(jnp.sin(3 * x)),
    "floor": lambda x: x * jnp.floor(2 * jnp.sin(x)),
    "remainder": lambda x: x * (2 * x % 1),
    "integers": lambda x: x * (3 * x).astype(jnp.int32),
    "narrow": lambda x: jnp.sin(x).astype(jnp.bfloat16).astype(x.dtype) * x,
    "mask": lambda x: jnp.tanh(x) * MASK,
    "row": lambda x: x * jnp.exp(x[:1]) + x[:, :1],
    "pad": lambda x: jnp.pad(x * x, ((0, 0), (1, 1)))[:, :8],
    "concatenated": lambda x: jnp.concatenate([jnp.sin(x[:, :4]), x[:, 4:] ** 2], axis=-1),
    "variance": lambda x: x * jax.lax.rsqrt(x.var(-1, keepdims=True) + 0.1),
    "layer norm": lambda x: jax.nn.standardize(x, epsilon=0.1) * jnp.cos(jnp.arange(8.0)).astype(x.dtype),
    "dropout": lambda x: jnp.where(jax.random.bernoulli(jax.random.key(3), 0.7, SHAPE), x, 0) * jnp.sin(x),
    "jitted": jax.jit(lambda x: jnp.sin(x) * jax.nn.silu(x) - jnp.tanh(x) ** 2),
    "dense": lambda x: jax.nn.gelu(x @ W.astype(x.dtype)),
    "pooled": pooled,
    "one hot": one_hot,
    "top": lambda x: jnp.repeat(jax.lax.top_k(x, 2)[0], 4, axis=-1) * x,
    "is largest": lambda x: x * (x == x.max(-1, keepdims=True)) + 0.5 * x,
    "masked attention": masked_attention,
    "RowMax": RowMax.apply,
    "Clipped": Clipped.apply,
    "custom rule": largest,
}
UNARY = UNARY | CHEAP
BINARY = BINARY | {
    "subtract": lambda a, b: a - b * 0.5,
    "larger": lambda a, b: jnp.maximum(a, b),
    "gated": lambda a, b: jax.nn.silu(a) * b,
    "residual": lambda a, b: a + jax.nn.gelu(b) * 0.3,
    "distance": lambda a, b: jnp.sqrt((a - b) ** 2 + 0.01),
}
# Rules and operations that decide by what they saved, in a larger share.
DECIDES = ["RowMax", "Clipped", "custom rule", "is largest", "pooled", "one hot", "top"]


class Step(NamedTuple):
    """A statement: it computes an array from two of the values before it, whose positions are modulo their number."""

    name: str
    i: int
    j: int
    body: tuple[Step, ...] = ()

    def __str__(self) -> str:
        return f"{self.name}({self.i}, {self.j}{''.join(f', {step}' for step in self.body)})"


def draw_steps(rng: random.Random, depth: int) -> tuple[Step, ...]:
    return tuple(draw_step(rng, depth) for _ in range(rng.randint(1, 3)))


def draw_step(rng: random.Random, depth: int) -> Step:
    # The last values are the likeliest.
    i, j = -1 - int(rng.expovariate(1.0)), -1 - int(rng.expovariate(0.5))
    tables = [list(CHEAP)] * 4 + [list(UNARY)] * 3 + [list(BINARY)] * 3 + [DECIDES] + [list(CONTAINERS)] * (2 * depth)
    name = rng.choice(rng.choice(tables))
    return Step(name, i, j, draw_steps(rng, depth - 1) if name in CONTAINERS else ())


def function_of(steps: tuple[Step, ...]) -> Callable[[Any], Any]:
    def run(x: Any) -> Any:
        values = [x]
        for step in steps:
            a, b = values[step.i % len(values)], values[step.j % len(values)]
            if step.body:
                y = CONTAINERS[step.name](function_of(step.body))(a, b)
            else:
                y = UNARY[step.name](a) if step.name in UNARY else BINARY[step.name](a, b)
            values.append(y.astype(x.dtype))
        return values[-1] + 0.1 * values[len(values) // 2]

    return run


class Case(NamedTuple):
    """What is done with a program."""

    order: int
    is_jitted: bool
    is_double: bool
    packer: int
    compares_lossy: bool  # a pair with loss too, in half of the programs, since most of the time goes into compiling

    def gradients(self, f: Callable[[Any], Any], is_jitted: bool | None = None) -> np.ndarray:
        slope = jax.grad(f)
        if self.order == 2:
            slope = jax.grad(lambda x, first=slope: jnp.sum(jnp.sin(first(x))))
        is_jitted = self.is_jitted if is_jitted is None else is_jitted
        slope = jax.jit(slope) if is_jitted else slope
        inputs = np.random.default_rng(0).normal(size=(8 if is_jitted else 2, *SHAPE))
        return np.stack([np.asarray(slope(jnp.asarray(x, float))) for x in inputs]).astype(np.float64)


def error_of(got: np.ndarray, want: np.ndarray) -> float:
    return float(np.linalg.norm(got - want) / (1e-6 + np.linalg.norm(want)))


EXACT = [packers.recompute_saved, packers.save_on_cpu]
LOSSY = [(packers.cast_saved,), (packers.quantize_saved, 8), (packers.quantize_saved, 4, 128, False)]
# Errors of JAX for `save_on_cpu` in a cond that is differentiated twice, also without this package.
REFUSED = "Expected cotangent type"


def difference(steps: tuple[Step, ...], case: Case) -> str | None:
    """Return how a gradient under a pair of hooks is wrong, or None."""
    with jax.enable_x64(case.is_double):
        f = function_of(steps)

        def loss(x: Any) -> Any:
            return jnp.sum(jnp.sin(f(x)))

        try:
            want = case.gradients(loss)
        except Exception:  # JAX cannot differentiate this program
            return None
        if not np.isfinite(want).all():
            return None

        def is_unstable() -> bool:
            """Return whether rounding errors alone change the plain gradient."""
            others = [np.asarray(case.gradients(loss, not case.is_jitted))]
            with jax.enable_x64(not case.is_double):
                others.append(case.gradients(loss))
            return any(error_of(want[: len(other)], other[: len(want)]) > 3e-5 for other in others)

        pair = EXACT[case.packer % len(EXACT)]()
        try:
            error = error_of(case.gradients(pair(loss)), want)
        except Exception as raised:
            return None if REFUSED in str(raised) else f"{pair!r}: {type(raised).__name__}: {str(raised)[:300]}"
        # The cotangent of a cast to bfloat16 is rounded to bfloat16 too: before or after it is summed, of order 2.
        if not error <= (1e-2 if case.order > 1 and "narrow" in str(steps) else 1e-4) and not is_unstable():
            return f"{pair!r}: error {error:.2g}"
        if not case.compares_lossy:
            return None
        kind, *args = LOSSY[case.packer % len(LOSSY)]
        try:
            error, kept = (error_of(case.gradients(p(loss)), want) for p in (kind(*args), kind(*args, recompute=False)))
        except Exception as raised:
            return f"{kind(*args)!r}: {type(raised).__name__}: {str(raised)[:300]}"
        if not (error <= max(1e-3, 2 * kept) or np.isnan(kept)):
            return f"{kind(*args)!r}: error {error:.2g}, without recomputation {kept:.2g}"
    return None


def smaller(steps: tuple[Step, ...]) -> Iterator[tuple[Step, ...]]:
    """Yield the programs with one step less, and those with a container replaced by its body."""
    for n, step in enumerate(steps):
        yield steps[:n] + steps[n + 1 :]
        for body in smaller(step.body) if step.body else ():
            if body:
                yield (*steps[:n], step._replace(body=body), *steps[n + 1 :])
        if step.body:
            yield (*steps[:n], *step.body, *steps[n + 1 :])


def made_small(steps: tuple[Step, ...], case: Case) -> tuple[tuple[Step, ...], str]:
    """Return a smaller program that fails too, and how."""
    for candidate in smaller(steps):
        if candidate and difference(candidate, case) is not None:
            return made_small(candidate, case)
    return steps, str(difference(steps, case))


def draw(seed: int) -> tuple[tuple[Step, ...], Case]:
    rng = random.Random(seed)
    order = rng.choice([1, 1, 1, 2])
    is_jitted, is_double, compares_lossy = rng.random() < 0.8, rng.random() < 0.5, rng.random() < 0.5
    case = Case(order, is_jitted, is_double, rng.randrange(6), compares_lossy and order == 1)
    return draw_steps(rng, rng.choice([0, 0, 0, 1, 1, 2])), case


def failure(seed: int) -> str | None:
    steps, case = draw(seed)
    if difference(steps, case) is None:
        return None
    steps, found = made_small(steps, case)
    return f"{seed} {case}\n    {'; '.join(map(str, steps))}\n    {found}"


if __name__ == "__main__":
    print_differences(failure, cleared_after=50)
