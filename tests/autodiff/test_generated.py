"""Generated layers under generated stacks of transforms, against plain autodiff of the same function.

A layer takes its tensors positionally, by keyword, by default, in *args or in **kwargs, each argument being any pytree
of tensors and statics, and returns any pytree. What it computes is

    output k = sum over i of c[k, i] sin(w[k, i] x_i),

so that `backward` is easily written; what it saves, which gradients are None, which outputs are marked, and how the
gradients are given back, is drawn.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pylayer_jax import Function, PyLayer
from tests.kit.transforms import assert_same

pytestmark = pytest.mark.slow

EXAMPLES = int(os.environ.get("PYLAYER_JAX_EXAMPLES", "100"))  # and a fourth of that; a long run: 2000
SIZE = 3
KINDS = ("positional", "default", "rest", "keyword", "more")  # in the order of a signature
POSITIONAL = KINDS[:3]


# -- pytrees with places for tensors ----------------------------------------------------------------


class Place:
    """Stands for a tensor in a pytree that was drawn."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return self.name


TENSOR, INTEGER = Place("TENSOR"), Place("INTEGER")  # a place for a float tensor, and an array of integers
STATICS = (None, 3, "text", len, float("nan"))


def fill(tree: Any, at: Callable[[Place], Any], static: Callable[[Any], Any] = lambda v: v) -> Any:
    if isinstance(tree, (list, tuple)):
        return type(tree)([fill(v, at, static) for v in tree])
    if isinstance(tree, dict):
        return {k: fill(v, at, static) for k, v in tree.items()}
    return at(tree) if isinstance(tree, Place) else static(tree)


def places(tree: Any, value: Any) -> Iterator[Any]:
    """What `value` has at the places for float tensors of `tree`; None where it has None for all of a branch."""
    if isinstance(tree, (list, tuple)):
        for i, v in enumerate(tree):
            yield from places(v, None if value is None else value[i])
    elif isinstance(tree, dict):
        for k, v in tree.items():
            yield from places(v, None if value is None else value[k])
    elif tree is TENSOR:
        yield value


def count(tree: Any) -> int:
    return len(list(places(tree, None)))


def has_array(tree: Any) -> bool:
    found: list[Place] = []
    fill(tree, found.append)
    return bool(found)


# -- what is drawn ----------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Drawn:
    """One layer, and how it is called and differentiated. "Per tensor" counts float tensors in parameter order."""

    kinds: tuple[str, ...]  # per argument, in the order of KINDS
    trees: tuple[Any, ...]  # per argument
    by_name: bool  # positional arguments are passed by keyword, last first
    returned: Any  # a pytree with a place per output
    shapes: tuple[tuple[int, ...], ...]  # per tensor
    zero: tuple[bool, ...]  # per tensor: its gradient is None
    saved: tuple[str, ...]  # per tensor
    marked: tuple[bool, ...]  # per output: not differentiable
    used: tuple[bool, ...]  # per output: enters the loss
    every_argument: bool  # one gradient per argument, or one per argument that holds a tensor
    wide: bool  # gradients are left in the shape of the outputs
    left_out: bool  # trailing gradients that nobody asks for, where there is one per argument that holds a tensor
    surplus: int  # Nones behind the gradients of a Function
    dialect: bool  # Function
    forward_mode: bool
    materialize: bool
    differentiated: tuple[bool, ...]  # per tensor
    transforms: tuple[str, ...]
    order: int
    seed: int


def trees(*leaves: Any) -> Any:
    return st.recursive(
        st.sampled_from(leaves),
        lambda inner: st.one_of(
            st.lists(inner, max_size=3),
            st.lists(inner, max_size=2).map(tuple),
            st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
        ),
        max_leaves=4,
    )


@st.composite
def drawn(draw: Any) -> Drawn:
    kinds = sorted(draw(st.lists(st.sampled_from(KINDS), min_size=1, max_size=4)), key=KINDS.index)
    arguments = [draw(trees(TENSOR, TENSOR, TENSOR, INTEGER, *STATICS)) for _ in kinds]
    if not any(map(count, arguments)):
        arguments[0] = TENSOR
    n = sum(map(count, arguments))
    returned = draw(trees(TENSOR, TENSOR, TENSOR, *STATICS).filter(lambda tree: 0 < count(tree) <= 4))
    m = count(returned)

    def each(strategy: Any, number: int = n) -> Any:
        return tuple(draw(st.lists(strategy, min_size=number, max_size=number)))

    def some(flags: tuple[bool, ...]) -> tuple[bool, ...]:
        return flags if any(flags) else (True,) * len(flags)

    return Drawn(
        kinds=tuple(kinds),
        trees=tuple(arguments),
        by_name=draw(st.booleans()),
        returned=returned,
        shapes=each(st.sampled_from([(SIZE,), (SIZE,), (), (1,)])),
        zero=each(st.sampled_from([False, False, True])),
        saved=each(st.sampled_from(["save", "attribute", "intermediate"])),
        marked=each(st.sampled_from([False, False, True]), m),
        used=some(each(st.booleans(), m)),
        every_argument=draw(st.booleans()),
        wide=draw(st.booleans()),
        left_out=draw(st.booleans()),
        surplus=draw(st.integers(0, 2)),
        dialect=draw(st.booleans()),
        forward_mode=draw(st.booleans()),
        materialize=draw(st.booleans()),
        differentiated=some(each(st.booleans())),
        transforms=tuple(draw(st.lists(st.sampled_from(sorted(TRANSFORMS)), max_size=3))),
        order=draw(st.integers(1, 2)),
        seed=draw(st.integers(0, 99)),
    )


# -- the layer, and what it stands for ----------------------------------------------------------------


def coefficients(case: Drawn) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(case.seed)
    shape = count(case.returned), len(case.shapes)
    return rng.uniform(-1, 1, shape).astype(np.float32), rng.uniform(0.5, 1.5, shape).astype(np.float32)


def outputs_of(case: Drawn, xs: Any) -> list[Any]:
    c, w = coefficients(case)
    zero = jnp.zeros(SIZE)
    return [
        sum((ck * jnp.sin(wk * x) for ck, wk, x in zip(*row, xs, strict=True)), zero) for row in zip(c, w, strict=True)
    ]


def plain_of(case: Drawn) -> Callable[..., list[Any]]:
    def plain(*xs: Any) -> list[Any]:
        outputs = outputs_of(case, [jax.lax.stop_gradient(x) if z else x for x, z in zip(xs, case.zero, strict=True)])
        return [jax.lax.stop_gradient(y) if marked else y for y, marked in zip(outputs, case.marked, strict=True)]

    return plain


def layer_of(case: Drawn) -> Callable[..., list[Any]]:
    """The layer as a function of its float tensors alone, to the list of its outputs."""
    names = [f"p{i}" for i in range(len(case.kinds))]
    layer = type(
        "Generated",
        (Function if case.dialect else PyLayer,),
        {
            "forward": staticmethod(_with_signature(case, names, lambda *given: _forward(case, *given))),
            "backward": staticmethod(lambda ctx, *given: _backward(case, ctx, given)),
            "forward_mode": case.forward_mode,
        },
    )

    def apply(*xs: Any) -> list[Any]:
        tensors = iter(xs)
        filled = [fill(tree, lambda place: next(tensors) if place is TENSOR else jnp.arange(2)) for tree in case.trees]
        by_kind = list(zip(case.kinds, names, filled, strict=True))
        named = {name: v for kind, name, v in by_kind if kind in ("keyword", "more")}
        args = [v for kind, _, v in by_kind if kind in POSITIONAL]
        if _is_by_name(case):
            args, named = [], dict(reversed([(name, v) for _, name, v in by_kind if name not in named])) | named
        return list(places(case.returned, layer.apply(*args, static="anything", **named)))

    return apply


def _is_by_name(case: Drawn) -> bool:
    return case.by_name and "rest" not in case.kinds


def _with_signature(case: Drawn, names: list[str], run: Callable[..., Any]) -> Any:
    """`run(ctx, values of the arguments)` with the parameters that were drawn and a static keyword-only one."""
    of = {kind: [name for k, name in zip(case.kinds, names, strict=True) if k == kind] for kind in KINDS}
    listed = ", ".join([*of["positional"], *of["default"], "*rest", *of["keyword"], "*more.values()"])
    parameters = ", ".join(
        ["ctx", *of["positional"], *(f"{p}=None" for p in of["default"]), "*rest", "static=0", *of["keyword"], "**more"]
    )
    scope = {"run": run}
    exec(f"def forward({parameters}):\n    return run(ctx, [{listed}])", scope)
    return scope["forward"]


def _forward(case: Drawn, ctx: Any, values: list[Any]) -> Any:
    xs = list(places(case.trees, values))
    ctx.set_materialize_grads(case.materialize)
    how = {kind: [x for x, saved in zip(xs, case.saved, strict=True) if saved == kind] for kind in set(case.saved)}
    ctx.save_for_backward(*how.get("save", []))
    ctx.kept = {"unchanged": how.get("attribute", [])}
    ctx.halves = [0.5 * x for x in how.get("intermediate", [])]
    outputs = outputs_of(case, xs)
    ctx.mark_non_differentiable(*(y for y, marked in zip(outputs, case.marked, strict=True) if marked))
    ys = iter(outputs)
    return fill(case.returned, lambda _: next(ys))


def _backward(case: Drawn, ctx: Any, given: tuple[Any, ...]) -> Any:
    c, w = coefficients(case)
    sources = {"save": iter(ctx.saved_tensors), "attribute": iter(ctx.kept["unchanged"])}
    sources["intermediate"] = (2 * half for half in ctx.halves)
    xs = [next(sources[how]) for how in case.saved]
    cotangents = _cotangents(case, given)

    def gradient(i: int) -> Any:
        terms = [dy * c[k, i] * w[k, i] * jnp.cos(w[k, i] * xs[i]) for k, dy in enumerate(cotangents) if dy is not None]
        if case.zero[i] or not terms:
            return None
        # All outputs have one shape, which the smaller inputs were broadcast to.
        wide = sum(terms)
        return wide if case.wide or xs[i].shape == (SIZE,) else wide.sum().reshape(xs[i].shape)

    gradients = iter([gradient(i) for i in range(len(xs))])
    per_tensor = iter(case.differentiated)
    entries, asked = [], []
    for tree in case.trees:
        entry = fill(tree, lambda place: next(gradients) if place is TENSOR else None, lambda _: None)
        entries.append(entry if has_array(tree) else None)
        asked.append(any(list(itertools.islice(per_tensor, count(tree)))))
    if case.every_argument or case.dialect:
        entries.insert(sum(kind in POSITIONAL for kind in case.kinds), None)  # of the static parameter
        return (*entries, *[None] * case.surplus) if case.dialect else tuple(entries)
    slots = [i for i, tree in enumerate(case.trees) if has_array(tree)]
    while case.left_out and slots and not asked[slots[-1]]:
        slots.pop()
    return tuple(entries[i] for i in slots)


def _cotangents(case: Drawn, given: tuple[Any, ...]) -> list[Any]:
    """Per output what backward was given for it."""
    if isinstance(case.returned, (list, tuple)):
        entries = [v for v in case.returned if case.dialect or has_array(v)]
        assert len(given) == len(entries)
        return list(places(entries, given))
    (only,) = given
    return list(places(case.returned, only))


# -- transforms ---------------------------------------------------------------------------------------


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


def values_of(case: Drawn) -> list[jax.Array]:
    full = [jnp.linspace(-1 + 0.1 * i, 1.2, SIZE, dtype=jnp.float32) for i in range(len(case.shapes))]
    return [x if shape == (SIZE,) else x[0].reshape(shape) for x, shape in zip(full, case.shapes, strict=True)]


def derivative(case: Drawn, function: Any) -> Any:
    for name in case.transforms:
        function = TRANSFORMS[name](function)
    values = values_of(case)
    chosen = [i for i, d in enumerate(case.differentiated) if d]

    # Not all outputs count at first order, so that cotangents are missing.
    def loss(*some):
        full = list(values)
        for i, x in zip(chosen, some, strict=True):
            full[i] = x
        outputs = [y for y, used in zip(function(*full), case.used, strict=True) if used]
        return sum(jnp.sum(jnp.sin(y) * jnp.arange(1.0, SIZE + 1)) for y in outputs)

    first = jax.grad(loss, range(len(chosen)))
    some = [values[i] for i in chosen]
    if case.order == 1:
        return first(*some)
    return jax.grad(lambda *xs: sum(jnp.sum(jnp.cos(g)) for g in first(*xs)), range(len(chosen)))(*some)


# -- tests --------------------------------------------------------------------------------------------


def generated(examples: int) -> Any:
    # Reproducible, unless this is a long run.
    return settings(
        max_examples=examples,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        derandomize="PYLAYER_JAX_EXAMPLES" not in os.environ,
        print_blob=True,
    )


@generated(EXAMPLES)
@given(drawn())
def test_generated_layers(case):
    assert_same(derivative(case, layer_of(case)), derivative(case, plain_of(case)))


@generated(EXAMPLES // 4)
@given(drawn())
def test_generated_layers_return_what_they_compute(case):
    for around in (lambda f: f, jax.jit):
        assert_same(around(layer_of(case))(*values_of(case)), plain_of(case)(*values_of(case)))
