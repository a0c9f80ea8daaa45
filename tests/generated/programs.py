"""Draws random programs, and compares their gradients under pairs of hooks with plain ones.

    python -m tests.generated.programs 200 [seed] [--blocks]    # prints each failing program, made small

A pair without loss gives the plain gradient. The error of a pair with loss is at most twice that without recomputation.
With `--blocks`, the function has a `with` block in place of the decorator.
"""

from __future__ import annotations

import functools
import random
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pylayer_jax import saved_tensors_hooks, saved_tensors_report
from pylayer_jax.packers import by_name, cast_saved, chain, quantize_saved, recompute_saved, save_on_cpu
from tests.hooks.spy import in_block
from tests.kit.layers import Multiples

from .pieces import BINARY, CONTAINERS, DECIDES, OUTER, PIECES, SHAPE, UNARY, VIEWS, Outside, outside


def boxed(**options: Any) -> saved_tensors_hooks:
    return saved_tensors_hooks(lambda x: {"x": x}, lambda packed: packed["x"], differentiable=True, **options)


# Pairs without loss.
EXACT: dict[str, Callable[[], saved_tensors_hooks]] = {
    "recompute": recompute_saved,
    "on CPU": save_on_cpu,
    "of a user": boxed,
    "arguments": lambda: save_on_cpu(arguments=True),
    "chain": lambda: chain(boxed(), save_on_cpu()),
    "matrices": lambda: boxed(only=lambda x: x.ndim > 1),
    "limit of 1": lambda: recompute_saved(limit=1),
    "limit of 2000": lambda: recompute_saved(limit=2000),
    "by name": lambda: by_name(
        {"named": boxed(), "Tanh": None, "exp": save_on_cpu(), "dot_general": None, ...: boxed()}
    ),
    "some names": lambda: by_name({"mul": save_on_cpu(), "run": boxed(), "saved[0]": recompute_saved()}),
    "origin": lambda: boxed(only=lambda x, info: info.operation not in ("exp", "mul") and "f" not in info.inside),
}
FOR_BLOCKS = list(EXACT)[:6]  # the others need a plan
LOSSY = [(cast_saved,), (quantize_saved, 8), (quantize_saved, 4, 128, False)]


class Step(NamedTuple):
    """A statement: it computes an array from two of the values before it, whose positions are modulo their number."""

    name: str
    i: int
    j: int
    body: tuple[Step, ...] = ()
    view: str = "ws"  # of the stacked weights that a piece reads
    pair: str = ""  # around the body


def draw_steps(rng: random.Random, depth: int) -> tuple[Step, ...]:
    return tuple(draw_step(rng, depth) for _ in range(rng.randint(1, 3)))


def draw_step(rng: random.Random, depth: int) -> Step:
    # The last values are the likeliest.
    i, j = -1 - int(rng.expovariate(1.0)), -1 - int(rng.expovariate(0.5))
    tables = [list(UNARY)] * 5 + [list(BINARY)] * 3 + [DECIDES] + [list(PIECES)] * 9
    name = rng.choice(rng.choice(tables + [list(CONTAINERS), *[list(OUTER)] * 4] * (2 * depth)))
    view = rng.choice(["ws", *VIEWS])
    body = draw_steps(rng, depth - 1) if name in CONTAINERS or name in OUTER else ()
    pair = rng.choice(list(EXACT)) if body and rng.random() < 0.2 else ""
    return Step(name, i, j, body, view if name in PIECES or name in OUTER else "ws", pair)


def function_of(steps: tuple[Step, ...], has_hooks: bool) -> Callable[[Any, Outside], Any]:
    def value_of(step: Step, a: Any, b: Any, o: Outside) -> Any:
        def inner(x: Any) -> Any:
            return function_of(step.body, has_hooks)(x, o)

        f = EXACT[step.pair]()(inner) if step.pair and has_hooks else inner
        if step.name in CONTAINERS:
            return CONTAINERS[step.name](f)(a, b)
        if step.name in OUTER:
            return OUTER[step.name](f, a, b, VIEWS[step.view](o, a), o)
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
    is_typed_key: bool = True
    pair: str = "recompute"
    lossy: int | None = None  # position in LOSSY; in half of the programs, since most of the time goes into compiling
    form: str = "arguments"
    returns_dict: bool = False
    is_forward: bool = False  # the second derivative is forward over reverse
    in_block: bool = False
    argnums: tuple[int, ...] = (0, 1, 2)  # of the first derivative: of x, ws and b

    def loss(self, steps: tuple[Step, ...], wrap: Callable[[Any], Any]) -> Callable[..., Any]:
        def program(x: Any, o: Outside) -> Any:
            y = function_of(steps, has_hooks=wrap not in (unchanged, jax.checkpoint))(x, o)
            y, more = (2 * y, 3 * y) if wrap is unchanged else Multiples.apply(y)
            loss = jnp.sum(jnp.sin(y))
            return {"loss": loss, "unused": jnp.exp(more), "largest": y.argmax()} if self.returns_dict else loss

        wrapped = FORMS[self.form](wrap, jax.jit(program) if self.staging == "inner jit" else program)
        read = (lambda result: result["loss"]) if self.returns_dict else unchanged
        return lambda x, *arrays: read(wrapped(x, Outside(*arrays)))

    def results(self, steps: tuple[Step, ...], wrap: Any = unchanged, change: float = 0) -> list[np.ndarray]:
        """Return the values, and of order 1 and 2 the derivatives, each for several inputs."""
        loss = self.loss(steps, wrap)
        loss = jax.jit(loss) if self.staging == "jit inside" else loss
        gradient = jax.grad(loss, self.argnums)
        orders = lambda *a: (loss(*a),), lambda *a: (loss(*a), *gradient(*a)), lambda *a: self.second(gradient, *a)
        f = jax.jit(orders[self.order]) if self.staging == "jit" else orders[self.order]
        rows = []
        for seed in range(2 if self.staging == "eager" else 6):
            x = np.random.default_rng(seed).normal(size=SHAPE) * (1 + change)
            rows.append(f(jnp.asarray(x, float), *outside(seed, self.is_typed_key)))
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


def excess(steps: tuple[Step, ...], case: Case) -> str | None:
    """Return how much more is kept than a limit allows and than a warning says, or None."""
    if not case.pair.startswith("limit") or any(pair in str(steps) for pair in EXACT):
        return None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        pair, arrays = EXACT[case.pair](), (jnp.ones(SHAPE), *outside(0, case.is_typed_key))
        rows = saved_tensors_report(case.loss(steps, pair), *arrays).rows
    kept = sum(row.packed_bytes for row in rows if row.kind not in ("input", "constant"))  # these are outside values
    numbers = re.findall(r"\d+", " ".join(str(w.message) for w in caught).replace(",", ""))
    allowed = max(map(int, [case.pair.split()[-1], *numbers]))
    return f"{pair!r}: {kept} bytes are kept, {allowed} allowed" if kept > allowed else None


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

        exactness = 1e-5 if case.is_double else 1.0

        def results(pair: Any) -> list[np.ndarray]:
            return case.results(steps, functools.partial(in_block, pair) if case.in_block else pair)

        def spread() -> float:
            """Return by how much rounding errors alone change the plain results."""
            others = [case._replace(staging="jit" if case.staging == "eager" else "eager").results(steps)]
            others += [case.results(steps, change=change * exactness) for change in (2e-7, -3e-7)]
            others.append(case._replace(form="arguments").results(steps, jax.checkpoint))
            if not case.is_double:
                with jax.enable_x64(True):
                    others.append(case.results(steps))
            pairs = ([(o[: len(w)], w[: len(o)]) for o, w in zip(other, want, strict=True)] for other in others)
            return max(error_of(*zip(*pair, strict=True)) for pair in pairs)

        pair = EXACT[case.pair]()
        try:
            error = error_of(results(pair), want)
        except Exception as raised:
            return None if REFUSED in str(raised) else f"{pair!r}: {type(raised).__name__}: {str(raised)[:300]}"
        # A narrow value or cotangent is rounded before or after it is summed.
        tolerance = 0 if case.order == 0 else 1e-2 if "narrow" in str(steps) else 1e-4 * exactness
        if not error <= tolerance and (case.order == 0 or not error <= 10 * (size := spread())):
            return f"{pair!r}: error {error:.2g}" + (f", and {size:.2g} by rounding" if case.order else "")
        if (found := excess(steps, case)) is not None or case.lossy is None:
            return found
        kind, *args = LOSSY[case.lossy]
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
        if step.pair:
            yield (*steps[:n], step._replace(pair=""), *steps[n + 1 :])


def simpler(case: Case) -> Iterator[Case]:
    for name, default in (Case._field_defaults | {"order": 1}).items():
        if name not in ("pair", "in_block", "lossy") and getattr(case, name) not in (default, 0):
            yield case._replace(**{name: default})


def kind_of(found: str | None) -> str:
    return found.split(": ")[1].split()[0] if found else ""


def made_small(steps: tuple[Step, ...], case: Case, found: str) -> tuple[tuple[Step, ...], Case, str]:
    """Return a smaller program and a simpler case that fail in the same way, and how."""
    for candidate in [*((s, case) for s in smaller(steps) if s), *((steps, c) for c in simpler(case))]:
        if kind_of(other := difference(*candidate)) == kind_of(found):
            return made_small(*candidate, str(other))
    return steps, case, found


def draw(seed: int, in_block: bool) -> tuple[tuple[Step, ...], Case]:
    rng = random.Random(seed)
    order = rng.choice([0, 1, 1, 1, 1, 2])
    case = Case(
        order,
        staging=rng.choice(["jit", "jit", "jit", "jit inside", "inner jit", "eager"]),
        is_double=rng.random() < 0.5,
        is_typed_key=rng.random() < 0.5,
        pair=rng.choice(FOR_BLOCKS if in_block else [*EXACT, *["recompute", "on CPU"] * 3]),
        lossy=rng.randrange(len(LOSSY)) if order < 2 and rng.random() < 0.5 else None,
        form=rng.choice([*["arguments"] * 3, *FORMS]),
        returns_dict=rng.random() < 0.3,
        is_forward=rng.random() < 0.5,
        in_block=in_block,
        argnums=rng.choice([(0, 1, 2), (0, 1, 2), (0,), (1,), (2,)]),
    )
    return draw_steps(rng, rng.choice([0, 0, 1, 1, 1, 2])), case


def failure(seed: int, in_block: bool = False) -> str | None:
    steps, case = draw(seed, in_block)
    if (found := difference(steps, case)) is None:
        return None
    steps, case, found = made_small(steps, case, found)
    return f"{seed}: {found}\n    difference({steps}, {case})"


if __name__ == "__main__":
    count, start = [*(int(word) for word in sys.argv[1:] if word.isdigit()), 0][:2]
    failures = 0
    for seed in range(start, start + count):
        if (text := failure(seed, in_block="--blocks" in sys.argv)) is not None:
            failures += 1
            print(text, flush=True)
        if seed % 50 == 49:
            jax.clear_caches()
    print(f"{failures} of {count} fail")
