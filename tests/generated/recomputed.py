"""Draws random programs, and compares the gradients under the ready pairs, which recompute tensors, with plain ones.

    python -m tests.generated.recomputed 200 [seed] [--blocks]    # prints each failing program, made small

A pair without loss gives the plain gradient. The error of a pair with loss is at most twice that without recomputation.
With `--blocks`, the function has a `with` block in place of the decorator.
"""

from __future__ import annotations

import functools
import inspect
import random
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pylayer_jax import Function, packers

from .pieces import MASK, OUTER, PIECES, SHAPE, VIEWS, Outside, W, outside
from .programs import BINARY, CONTAINERS, UNARY
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
    "dropout": lambda x: jnp.where(jax.random.bernoulli(jax.random.key(3), jnp.float32(0.7), SHAPE), x, 0) * jnp.sin(x),
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
    view: str = "ws"  # of the stacked weights that a piece reads


def draw_steps(rng: random.Random, depth: int) -> tuple[Step, ...]:
    return tuple(draw_step(rng, depth) for _ in range(rng.randint(1, 3)))


def draw_step(rng: random.Random, depth: int) -> Step:
    # The last values are the likeliest.
    i, j = -1 - int(rng.expovariate(1.0)), -1 - int(rng.expovariate(0.5))
    tables = [list(CHEAP)] * 3 + [list(UNARY)] * 2 + [list(BINARY)] * 3 + [DECIDES] + [list(PIECES)] * 9
    name = rng.choice(rng.choice(tables + [list(CONTAINERS), *[list(OUTER)] * 4] * (2 * depth)))
    view = rng.choice(["ws", *VIEWS])
    body = draw_steps(rng, depth - 1) if name in CONTAINERS or name in OUTER else ()
    return Step(name, i, j, body, view if name in PIECES or name in OUTER else "ws")


def function_of(steps: tuple[Step, ...]) -> Callable[[Any, Outside], Any]:
    def value_of(step: Step, a: Any, b: Any, o: Outside) -> Any:
        if step.name in CONTAINERS:
            return CONTAINERS[step.name](lambda x: function_of(step.body)(x, o))(a, b)
        if step.name in OUTER:
            return OUTER[step.name](lambda x: function_of(step.body)(x, o), a, b, VIEWS[step.view](o, a), o)
        if step.name in PIECES:
            return PIECES[step.name](a, b, VIEWS[step.view](o, a), o)
        return UNARY[step.name](a) if step.name in UNARY else BINARY[step.name](a, b)

    def run(x: Any, o: Outside) -> Any:
        values = [x]
        for step in steps:
            a, b = values[step.i % len(values)], values[step.j % len(values)]
            values.append(value_of(step, a, b, o).astype(x.dtype))
        return values[-1] + 0.1 * values[len(values) // 2]

    return run


def unchanged(f: Any) -> Any:
    return f


def in_block(pair: Any) -> Callable[[Any], Any]:
    """Return a decorator that opens a `with` block in the function."""

    def decorator(f: Any) -> Any:
        def with_block(*args: Any) -> Any:
            with pair:
                return f(*args)

        return with_block

    return decorator


# What a decorated function takes: arrays, as arguments or closed over, or a dict with a static entry.
FORMS = {
    "arguments": lambda wrap, f: lambda x, o: wrap(lambda x, *arrays: f(x, Outside(*arrays)))(x, *o),
    "closed over": lambda wrap, f: lambda x, o: wrap(lambda x: f(x, o))(x),
    "x closed over": lambda wrap, f: lambda x, o: wrap(lambda o: f(x, o))(o),
    "dict": lambda wrap, f: lambda x, o: wrap(lambda d: f(d["x"], d["o"]))({"x": x, "o": o, "mode": "text"}),
}


class Case(NamedTuple):
    """What is done with a program."""

    order: int
    staging: str = "jit"  # or "eager", "jit inside" of the derivative, or of the decorated function: "inner jit"
    is_double: bool = False
    packer: int = 0
    compares_lossy: bool = False  # in half of the programs, since most of the time goes into compiling
    form: str = "arguments"
    returns_dict: bool = False
    is_forward: bool = False  # the second derivative is forward over reverse
    in_block: bool = False

    def loss(self, steps: tuple[Step, ...], wrap: Callable[[Any], Any]) -> Callable[..., Any]:
        def program(x: Any, o: Outside) -> Any:
            y = function_of(steps)(x, o)
            loss = jnp.sum(jnp.sin(y))
            return {"loss": loss, "unused": jnp.exp(y), "largest": y.argmax()} if self.returns_dict else loss

        wrapped = FORMS[self.form](wrap, jax.jit(program) if self.staging == "inner jit" else program)
        read = (lambda result: result["loss"]) if self.returns_dict else unchanged
        return lambda x, *arrays: read(wrapped(x, Outside(*arrays)))

    def results(self, steps: tuple[Step, ...], wrap: Any = unchanged, change: float = 0) -> list[np.ndarray]:
        """Return the values, and of order 1 and 2 the derivatives in x, ws and b, each for several inputs."""
        loss = self.loss(steps, wrap)
        loss = jax.jit(loss) if self.staging == "jit inside" else loss
        gradient = jax.grad(loss, (0, 1, 2))
        f = [lambda *a: (loss(*a),), lambda *a: (loss(*a), *gradient(*a)), lambda *a: self.second(gradient, *a)][
            self.order
        ]
        f = jax.jit(f) if self.staging == "jit" else f
        rows = []
        for seed in range(2 if self.staging == "eager" else 6):
            x = np.random.default_rng(seed).normal(size=SHAPE) * (1 + change)
            rows.append(f(jnp.asarray(x, float), *outside(seed, is_typed_key=self.packer % 2 == 0)))
        return [np.stack([np.asarray(row[n], np.float64) for row in rows]) for n in range(len(rows[0]))]

    def second(self, gradient: Callable[..., Any], *arrays: Any) -> Any:
        first, others = arrays[:3], arrays[3:]
        if self.is_forward:
            return jax.jvp(lambda *a: gradient(*a, *others), first, tuple(map(jnp.cos, first)))[1]
        return jax.grad(lambda *a: sum(jnp.sum(jnp.sin(d)) for d in gradient(*a, *others)), (0, 1, 2))(*first)


def error_of(got: list[np.ndarray], want: list[np.ndarray], share: float = 0) -> float:
    """Return the largest relative error of a result. `share` of the size of all is added to the size of each."""
    size = share * np.sqrt(sum(np.sum(w**2) for w in want))
    return max(float(np.linalg.norm(g - w) / (1e-6 + size + np.linalg.norm(w))) for g, w in zip(got, want, strict=True))


EXACT = [packers.recompute_saved, packers.save_on_cpu]
if "limit" in inspect.signature(packers.recompute_saved).parameters:
    EXACT += [functools.partial(packers.recompute_saved, limit=limit) for limit in (1, 2000)]
LOSSY = [(packers.cast_saved,), (packers.quantize_saved, 8), (packers.quantize_saved, 4, 128, False)]
# Errors of JAX for `save_on_cpu` in a cond that is differentiated twice, also without this package.
REFUSED = "Expected cotangent type"


def difference(steps: tuple[Step, ...], case: Case) -> str | None:
    """Return how a result under a pair of hooks is wrong, or None."""
    with jax.enable_x64(case.is_double), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of blocks that pack nothing
        try:
            want = case.results(steps)
        except (TypeError, ValueError, NotImplementedError):  # JAX cannot differentiate this program
            return None
        if not all(np.isfinite(w).all() for w in want):
            return None

        def results(pair: Any) -> list[np.ndarray]:
            return case.results(steps, in_block(pair) if case.in_block else pair)

        def spread() -> float:
            """Return by how much rounding errors alone change the plain results."""
            others = [case._replace(staging="jit" if case.staging == "eager" else "eager").results(steps)]
            others += [case.results(steps, change=change) for change in (2e-7, -3e-7)]
            others.append(case._replace(form="arguments").results(steps, jax.checkpoint))
            with jax.enable_x64(not case.is_double):
                others.append(case.results(steps))
            pairs = ([(o[: len(w)], w[: len(o)]) for o, w in zip(other, want, strict=True)] for other in others)
            return max(error_of(*zip(*pair, strict=True)) for pair in pairs)

        exact = EXACT[: 2 if case.in_block else None]
        pair = exact[case.packer % len(exact)]()
        try:
            error = error_of(results(pair), want)
        except Exception as raised:
            return None if REFUSED in str(raised) else f"{pair!r}: {type(raised).__name__}: {str(raised)[:300]}"
        # A narrow value or cotangent is rounded before or after it is summed.
        tolerance = 0 if case.order == 0 else 1e-2 if "narrow" in str(steps) else 1e-4
        if not error <= tolerance and (case.order == 0 or not error <= 10 * (size := spread())):
            return f"{pair!r}: error {error:.2g}" + (f", and {size:.2g} by rounding" if case.order else "")
        if not case.compares_lossy:
            return None
        kind, *args = LOSSY[case.packer % len(LOSSY)]
        try:
            error, kept = (error_of(results(p), want, 0.1) for p in (kind(*args), kind(*args, recompute=False)))
        except Exception as raised:
            return f"{kind(*args)!r}: {type(raised).__name__}: {str(raised)[:300]}"
        if not (error <= (max(1e-3, 2 * kept) if case.order else 0) or np.isnan(kept)):
            return f"{kind(*args)!r}: error {error:.2g}, without recomputation {kept:.2g}"
    return None


def smaller(steps: tuple[Step, ...]) -> Iterator[tuple[Step, ...]]:
    """Yield the programs with one step less, with a container replaced by its body, and with plain weights."""
    for n, step in enumerate(steps):
        yield steps[:n] + steps[n + 1 :]
        for body in smaller(step.body) if step.body else ():
            if body:
                yield (*steps[:n], step._replace(body=body), *steps[n + 1 :])
        if step.body:
            yield (*steps[:n], *step.body, *steps[n + 1 :])
        if step.view != "ws":
            yield (*steps[:n], step._replace(view="ws"), *steps[n + 1 :])


def simpler(case: Case) -> Iterator[Case]:
    """Yield the cases with one field as it is by default, or of order 1."""
    for name, default in (Case._field_defaults | {"order": 1}).items():
        if name not in ("packer", "in_block", "compares_lossy") and getattr(case, name) not in (default, 0):
            yield case._replace(**{name: default})


def kind_of(found: str | None) -> str:
    """Return the type of the exception, or "error"."""
    return found.split(": ")[1].split()[0] if found else ""


def made_small(steps: tuple[Step, ...], case: Case, found: str) -> tuple[tuple[Step, ...], Case, str]:
    """Return a smaller program and a simpler case that fail in the same way, and how."""
    for candidate in [*((s, case) for s in smaller(steps) if s), *((steps, c) for c in simpler(case))]:
        if kind_of(other := difference(*candidate)) == kind_of(found):
            return made_small(*candidate, str(other))
    return steps, case, found


def draw(seed: int) -> tuple[tuple[Step, ...], Case]:
    rng = random.Random(seed)
    order = rng.choice([0, 1, 1, 1, 1, 2])
    staging = rng.choice(["jit", "jit", "jit", "jit inside", "inner jit", "eager"])
    lossy, form = order < 2 and rng.random() < 0.5, rng.choice([*["arguments"] * 3, *FORMS])
    case = Case(
        order, staging, rng.random() < 0.5, rng.randrange(12), lossy, form, rng.random() < 0.3, rng.random() < 0.5
    )
    return draw_steps(rng, rng.choice([0, 0, 1, 1, 1, 2])), case


def failure(seed: int, in_block: bool = False) -> str | None:
    steps, case = draw(seed)
    case = case._replace(in_block=in_block)
    if (found := difference(steps, case)) is None:
        return None
    steps, case, found = made_small(steps, case, found)
    return f"{seed}: {found}\n    difference({steps}, {case})"


if __name__ == "__main__":
    print_differences(functools.partial(failure, in_block="--blocks" in sys.argv), cleared_after=50)
