"""Generated layers under generated stacks of transforms, against plain autodiff of the same function.

A layer takes its tensors positionally, by keyword, by default, in *args or in **kwargs, bare or within a pytree that
holds statics too, and returns them in some container. What it computes is

    output k = sum over i of c[k, i] sin(w[k, i] x_i),

so that `backward` is easily written; what it saves, and for which inputs it returns None, is drawn.
"""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pylayer_jax import Function, PyLayer

from .transforms import assert_same

pytestmark = pytest.mark.slow

EXAMPLES = int(os.environ.get("PYLAYER_JAX_EXAMPLES", "60"))  # a long run: 2000
SIZE = 3

# How a tensor is passed within its argument.
WRAPS = {
    "bare": (lambda x: x, lambda v: v, lambda g: g),
    "dict": (lambda x: {"t": x, "n": 3, "s": "static"}, lambda v: v["t"], lambda g: {"t": g, "n": None, "s": None}),
    "list": (lambda x: [x, None], lambda v: v[0], lambda g: [g, None]),
    "nested": (lambda x: ({"t": [x]}, len), lambda v: v[0]["t"][0], lambda g: ({"t": [g]}, None)),
}

# How the outputs come back, and how the cotangents are read from what backward gets.
CONTAINERS = {
    "tuple": (tuple, list),
    "list": (list, list),
    "dict": (lambda ys: {f"y{k}": y for k, y in enumerate(ys)}, lambda given: list(given[0].values())),
    "with statics": (lambda ys: (ys[0], "text", *ys[1:], 7), None),
}


@dataclasses.dataclass(frozen=True)
class Drawn:
    """One layer and how it is called and differentiated."""

    kinds: tuple[str, ...]  # per tensor: positional, default, rest, keyword, more
    wraps: tuple[str, ...]
    container: str
    outputs: int
    zero: tuple[bool, ...]  # per tensor: backward returns None
    saved: tuple[str, ...]  # per tensor: save, attribute, intermediate
    every_argument: bool  # one gradient per argument, or one per argument that holds a tensor
    dialect: bool  # Function
    forward_mode: bool
    materialize: bool
    differentiated: tuple[bool, ...]
    transforms: tuple[str, ...]
    order: int
    seed: int


@st.composite
def drawn(draw):
    order_of_kinds = ["positional", "default", "rest", "keyword", "more"]
    kinds = sorted(draw(st.lists(st.sampled_from(order_of_kinds), min_size=1, max_size=4)), key=order_of_kinds.index)
    n = len(kinds)

    def each(strategy):
        return tuple(draw(st.lists(strategy, min_size=n, max_size=n)))

    differentiated = each(st.booleans())
    return Drawn(
        kinds=tuple(kinds),
        wraps=each(st.sampled_from(sorted(WRAPS))),
        container=draw(st.sampled_from(sorted(CONTAINERS))),
        outputs=draw(st.integers(1, 3)),
        zero=each(st.sampled_from([False, False, True])),
        saved=each(st.sampled_from(["save", "attribute", "intermediate"])),
        every_argument=draw(st.booleans()),
        dialect=draw(st.booleans()),
        forward_mode=draw(st.booleans()),
        materialize=draw(st.booleans()),
        differentiated=differentiated if any(differentiated) else (True,) * n,
        transforms=tuple(draw(st.lists(st.sampled_from(sorted(TRANSFORMS)), max_size=3))),
        order=draw(st.integers(1, 2)),
        seed=draw(st.integers(0, 99)),
    )


def coefficients(case: Drawn) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(case.seed)
    shape = case.outputs, len(case.kinds)
    return rng.uniform(-1, 1, shape).astype(np.float32), rng.uniform(0.5, 1.5, shape).astype(np.float32)


def layer_of(case: Drawn) -> Any:
    """The layer as a function of its tensors alone."""
    c, w = coefficients(case)
    n = len(case.kinds)

    def compute(xs):
        return [sum(c[k, i] * jnp.sin(w[k, i] * xs[i]) for i in range(n)) for k in range(case.outputs)]

    def forward(ctx, values):
        xs = [WRAPS[wrap][1](v) for wrap, v in zip(case.wraps, values, strict=True)]
        ctx.set_materialize_grads(case.materialize)
        ctx.save_for_backward(*(x for x, how in zip(xs, case.saved, strict=True) if how == "save"))
        ctx.kept = [x for x, how in zip(xs, case.saved, strict=True) if how == "attribute"]
        ctx.halves = {
            i: 0.5 * x for i, (x, how) in enumerate(zip(xs, case.saved, strict=True)) if how == "intermediate"
        }
        return CONTAINERS[case.container][0](compute(xs))

    def backward(ctx, given):
        if case.container == "with statics":
            # A PyLayer has no cotangent for a static, a Function None.
            given = [given[0], *given[2:-1]] if case.dialect else list(given)
        else:
            given = CONTAINERS[case.container][1](given)
        saved, kept = iter(ctx.saved_tensors), iter(ctx.kept)
        xs = [
            next(saved) if how == "save" else next(kept) if how == "attribute" else 2 * ctx.halves[i]
            for i, how in enumerate(case.saved)
        ]
        gradients = []
        for i, x in enumerate(xs):
            terms = [dy * c[k, i] * w[k, i] * jnp.cos(w[k, i] * x) for k, dy in enumerate(given) if dy is not None]
            gradient = sum(terms) if terms else None
            gradients.append(None if case.zero[i] or gradient is None else WRAPS[case.wraps[i]][2](gradient))
        positional = sum(k in ("positional", "default", "rest") for k in case.kinds)
        if case.every_argument or case.dialect:
            gradients.insert(positional, None)  # the static keyword follows the positional arguments
        return tuple(gradients)

    # The signature: positional and default by name, the rest in *args, one static keyword, the rest in **kwargs.
    names = [f"p{i}" for i in range(n)]
    parts, call = ["ctx"], []
    for kind, name in zip(case.kinds, names, strict=True):
        if kind in ("positional", "default"):
            parts.append(name if kind == "positional" else f"{name}=None")
            call.append(name)
    parts.append("*rest")
    parts.append("static=0")
    for kind, name in zip(case.kinds, names, strict=True):
        if kind == "keyword":
            parts.append(name)
    parts.append("**more")
    listed = "[" + ", ".join([*call, "*rest", *(m for k, m in zip(case.kinds, names, strict=True) if k == "keyword")])
    scope = {"run": forward}
    exec(f"def forward({', '.join(parts)}):\n    return run(ctx, {listed}, *more.values()])", scope)
    body = {
        "forward": staticmethod(scope["forward"]),
        "backward": staticmethod(lambda ctx, *given: backward(ctx, list(given))),
        "forward_mode": case.forward_mode,
    }
    layer = type("Generated", (Function if case.dialect else PyLayer,), body)

    def apply(*xs):
        wrapped = [WRAPS[wrap][0](x) for wrap, x in zip(case.wraps, xs, strict=True)]
        args = [v for k, v in zip(case.kinds, wrapped, strict=True) if k in ("positional", "default", "rest")]
        named = {name: v for k, name, v in zip(case.kinds, names, wrapped, strict=True) if k in ("keyword", "more")}
        result = layer.apply(*args, static="anything", **named)
        return [y for y in jax.tree_util.tree_leaves(result) if isinstance(y, jax.Array)]

    return apply


def plain_of(case: Drawn) -> Any:
    c, w = coefficients(case)

    def plain(*xs):
        xs = [jax.lax.stop_gradient(x) if zero else x for x, zero in zip(xs, case.zero, strict=True)]
        return [sum(c[k, i] * jnp.sin(w[k, i] * x) for i, x in enumerate(xs)) for k in range(case.outputs)]

    return plain


def _vmapped(f):
    return lambda *xs: jax.tree.map(lambda y: y.sum(0), jax.vmap(f)(*(jnp.stack([x, 0.5 * x]) for x in xs)))


def _vmapped_over_the_first(f):
    def run(first, *rest):
        mapped = jax.vmap(f, (0, *[None] * len(rest)))(jnp.stack([first, 0.5 * first]), *rest)
        return jax.tree.map(lambda y: y.sum(0), mapped)

    return run


def _scanned(f):
    def run(*xs):
        def body(carry, scale):
            return jax.tree.map(jnp.add, carry, f(*(x * scale for x in xs))), None

        return jax.lax.scan(body, jax.tree.map(jnp.zeros_like, jax.eval_shape(f, *xs)), jnp.array([1.0, 0.7]))[0]

    return run


def _branched(f):
    return lambda *xs: jax.lax.cond(xs[0].sum() < 1e3, f, lambda *xs: jax.tree.map(lambda y: 0 * y, f(*xs)), *xs)


TRANSFORMS = {
    "jit": jax.jit,
    "vmap": _vmapped,
    "vmap of the first": _vmapped_over_the_first,
    "scan": _scanned,
    "remat": jax.checkpoint,
    "cond": _branched,
}


def derivative(case: Drawn, function: Any) -> Any:
    for name in case.transforms:
        function = TRANSFORMS[name](function)
    chosen = [i for i, d in enumerate(case.differentiated) if d]
    values = [jnp.linspace(-1 + 0.1 * i, 1.2, SIZE, dtype=jnp.float32) for i in range(len(case.kinds))]

    # Only the last output counts at first order, so that cotangents are missing.
    def loss(*some):
        full = list(values)
        for i, x in zip(chosen, some, strict=True):
            full[i] = x
        return jnp.sum(jnp.sin(function(*full)[-1]) * jnp.arange(1.0, SIZE + 1))

    first = jax.grad(loss, range(len(chosen)))
    some = [values[i] for i in chosen]
    if case.order == 1:
        return first(*some)
    return jax.grad(lambda *xs: sum(jnp.sum(jnp.cos(g)) for g in first(*xs)), range(len(chosen)))(*some)


@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck), derandomize=EXAMPLES < 200)
@given(drawn())
def test_generated_layers(case):
    assert_same(derivative(case, layer_of(case)), derivative(case, plain_of(case)))


@settings(
    max_examples=EXAMPLES // 4, deadline=None, suppress_health_check=list(HealthCheck), derandomize=EXAMPLES < 200
)
@given(drawn())
def test_generated_layers_return_what_they_compute(case):
    values = [jnp.linspace(-1, 1.2, SIZE, dtype=jnp.float32) for _ in case.kinds]
    for around in (lambda f: f, jax.jit):
        assert_same(around(layer_of(case))(*values), plain_of(case)(*values))
