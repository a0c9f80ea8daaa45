"""Generated signatures, arguments and outputs, against plain autodiff of the same function.

A layer takes its tensors positionally, by keyword, by default, in *args or in **kwargs, each argument being any pytree
of tensors and statics, and returns any pytree. What it computes is

    output k = sum over i of c[k, i] sin(w[k, i] x_i),

so that `backward` is easily written; which gradients are None, and how the gradients are given back, is drawn. What is
saved and marked, rules, orders and stacks of transforms are drawn in test_generated_layers.py.
"""

import itertools
import os
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pylayer_jax import Function, PyLayer
from tests.kit.transforms import assert_same

pytestmark = pytest.mark.slow

EXAMPLES = int(os.environ.get("PYLAYER_JAX_EXAMPLES", "100"))
SIZE = 3
KINDS = ("positional", "default", "rest", "keyword", "more")  # in the order of a signature
POSITIONAL = KINDS[:3]


# -- pytrees with places for tensors ----------------------------------------------------------------


class Place:
    """Stands for a tensor in a pytree that was drawn."""

    def __init__(self, name):
        self.name = name

    def __repr__(self):
        return self.name


TENSOR, INTEGER = Place("TENSOR"), Place("INTEGER")  # a place for a float tensor, and an array of integers
STATICS = (None, 3, "text", len, float("nan"))


def fill(tree, at, static=lambda v: v):
    return jax.tree.map(lambda leaf: at(leaf) if isinstance(leaf, Place) else static(leaf), tree)


def places(tree, value):
    """What `value` has at the places for float tensors of `tree`; None where it has None for all of a branch."""
    if isinstance(tree, (list, tuple, dict)):
        for k in sorted(tree) if isinstance(tree, dict) else range(len(tree)):
            yield from places(tree[k], None if value is None else value[k])
    elif tree is TENSOR:
        yield value


def count(tree):
    return len(list(places(tree, None)))


def has_array(tree):
    return any(isinstance(leaf, Place) for leaf in jax.tree.leaves(tree))


# -- what is drawn ----------------------------------------------------------------------------------


def trees(*leaves):
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
def drawn(draw):
    """One layer, and how it is called and differentiated. "Per tensor" counts float tensors in parameter order."""
    kinds = sorted(draw(st.lists(st.sampled_from(KINDS), min_size=1, max_size=4)), key=KINDS.index)
    arguments = [draw(trees(TENSOR, TENSOR, TENSOR, INTEGER, *STATICS)) for _ in kinds]
    if not any(map(count, arguments)):
        arguments[0] = TENSOR
    n = sum(map(count, arguments))
    returned = draw(trees(TENSOR, TENSOR, TENSOR, *STATICS).filter(lambda tree: 0 < count(tree) <= 4))

    def each(strategy, number=n):
        return tuple(draw(st.lists(strategy, min_size=number, max_size=number)))

    def some(number):
        flags = each(st.booleans(), number)
        return flags if any(flags) else (True,) * number

    return SimpleNamespace(
        kinds=kinds,  # per argument, in the order of KINDS
        trees=arguments,
        by_name=draw(st.booleans()),  # positional arguments are passed by keyword, last first
        returned=returned,  # a pytree with a place per output
        shapes=each(st.sampled_from([(SIZE,), (SIZE,), (), (1,)])),  # per tensor
        zero=each(st.sampled_from([False, False, True])),  # per tensor: its gradient is None
        used=some(count(returned)),  # per output: enters the loss
        every_argument=draw(st.booleans()),  # one gradient per argument, or one per argument that holds a tensor
        wide=draw(st.booleans()),  # gradients are left in the shape of the outputs
        left_out=draw(st.booleans()),  # trailing gradients that nobody asks for, where there is one per such argument
        surplus=draw(st.integers(0, 2)),  # Nones behind the gradients of a Function
        dialect=draw(st.sampled_from([PyLayer, Function])),
        forward_mode=draw(st.booleans()),
        materialize=draw(st.booleans()),
        differentiated=some(n),  # per tensor
        around=draw(st.sampled_from([lambda f: f, jax.jit, jax.checkpoint, vmapped_over_the_first])),
        seed=draw(st.integers(0, 99)),
    )


def vmapped_over_the_first(f):
    def run(first, *rest):
        mapped = jax.vmap(f, (0, *[None] * len(rest)))(jnp.stack([first, 0.5 * first]), *rest)
        return jax.tree.map(lambda y: y.sum(0), mapped)

    return run


# -- the layer, and what it stands for ----------------------------------------------------------------


def coefficients(case):
    rng = np.random.default_rng(case.seed)
    shape = count(case.returned), len(case.shapes)
    return rng.uniform(-1, 1, shape).astype(np.float32), rng.uniform(0.5, 1.5, shape).astype(np.float32)


def outputs_of(case, xs):
    c, w = coefficients(case)
    zero = jnp.zeros(SIZE)
    return [
        sum((ck * jnp.sin(wk * x) for ck, wk, x in zip(*row, xs, strict=True)), zero) for row in zip(c, w, strict=True)
    ]


def plain_of(case):
    stop = jax.lax.stop_gradient
    return lambda *xs: outputs_of(case, [stop(x) if zero else x for x, zero in zip(xs, case.zero, strict=True)])


def layer_of(case):
    """A function of the float tensors of a layer, which returns the list of its outputs."""
    names = [f"p{i}" for i in range(len(case.kinds))]
    members = {
        "forward": staticmethod(_with_signature(case, names, lambda *given: _forward(case, *given))),
        "backward": staticmethod(lambda ctx, *given: _backward(case, ctx, given)),
        "forward_mode": case.forward_mode,
    }
    layer = type("Generated", (case.dialect,), members)

    def apply(*xs):
        tensors = iter(xs)
        filled = [fill(tree, lambda place: next(tensors) if place is TENSOR else jnp.arange(2)) for tree in case.trees]
        by_kind = list(zip(case.kinds, names, filled, strict=True))
        positional = [(name, v) for kind, name, v in by_kind if kind in POSITIONAL]
        named = {name: v for kind, name, v in by_kind if kind not in POSITIONAL}
        if case.by_name and "rest" not in case.kinds:
            positional, named = [], dict(reversed(positional)) | named
        return list(places(case.returned, layer.apply(*(v for _, v in positional), static="anything", **named)))

    return apply


def _with_signature(case, names, run):
    """`run(ctx, values of the arguments)` with the parameters that were drawn and a static keyword-only one."""
    of = {kind: [name for k, name in zip(case.kinds, names, strict=True) if k == kind] for kind in KINDS}
    listed = ", ".join([*of["positional"], *of["default"], "*rest", *of["keyword"], "*more.values()"])
    defaults = [f"{p}=None" for p in of["default"]]
    parameters = ", ".join(["ctx", *of["positional"], *defaults, "*rest", "static=0", *of["keyword"], "**more"])
    scope = {"run": run}
    exec(f"def forward({parameters}):\n    return run(ctx, [{listed}])", scope)
    return scope["forward"]


def _forward(case, ctx, values):
    xs = list(places(case.trees, values))
    ctx.set_materialize_grads(case.materialize)
    ctx.save_for_backward(*xs)
    ys = iter(outputs_of(case, xs))
    return fill(case.returned, lambda _: next(ys))


def _backward(case, ctx, given):
    c, w = coefficients(case)
    xs, cotangents = ctx.saved_tensors, _cotangents(case, given)

    def gradient(i):
        terms = [dy * c[k, i] * w[k, i] * jnp.cos(w[k, i] * xs[i]) for k, dy in enumerate(cotangents) if dy is not None]
        if case.zero[i] or not terms:
            return None
        # All outputs have one shape, which the smaller inputs were broadcast to.
        wide = sum(terms)
        return wide if case.wide or xs[i].shape == (SIZE,) else wide.sum().reshape(xs[i].shape)

    gradients, asked = iter([gradient(i) for i in range(len(xs))]), iter(case.differentiated)
    entries, needed = [], []
    for tree in case.trees:
        entry = fill(tree, lambda place: next(gradients) if place is TENSOR else None, lambda _: None)
        entries.append(entry if has_array(tree) else None)
        needed.append(any(list(itertools.islice(asked, count(tree)))))
    if case.every_argument or case.dialect is Function:
        entries.insert(sum(kind in POSITIONAL for kind in case.kinds), None)  # of the static parameter
        return (*entries, *[None] * case.surplus) if case.dialect is Function else tuple(entries)
    slots = [i for i, tree in enumerate(case.trees) if has_array(tree)]
    while case.left_out and slots and not needed[slots[-1]]:
        slots.pop()
    return tuple(entries[i] for i in slots)


def _cotangents(case, given):
    """Per output what backward was given for it."""
    if not isinstance(case.returned, (list, tuple)):
        (only,) = given
        return list(places(case.returned, only))
    entries = [v for v in case.returned if case.dialect is Function or has_array(v)]
    assert len(given) == len(entries)
    return list(places(entries, given))


# -- tests --------------------------------------------------------------------------------------------


def values_of(case):
    full = [jnp.linspace(-1 + 0.1 * i, 1.2, SIZE, dtype=jnp.float32) for i in range(len(case.shapes))]
    return [x if shape == (SIZE,) else x[0].reshape(shape) for x, shape in zip(full, case.shapes, strict=True)]


def gradients(case, function):
    # Not all outputs count, so that cotangents are missing.
    def loss(*xs):
        outputs = [y for y, used in zip(case.around(function)(*xs), case.used, strict=True) if used]
        return sum(jnp.sum(jnp.sin(y) * jnp.arange(1.0, SIZE + 1)) for y in outputs)

    return jax.grad(loss, [i for i, asked in enumerate(case.differentiated) if asked])(*values_of(case))


@settings(
    max_examples=EXAMPLES,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    derandomize="PYLAYER_JAX_EXAMPLES" not in os.environ,  # reproducible, unless this is a long run
    print_blob=True,
)
@given(drawn())
def test_outputs_and_gradients(case):
    layer, plain, values = layer_of(case), plain_of(case), values_of(case)
    assert_same(layer(*values), plain(*values))
    assert_same(case.around(layer)(*values), case.around(plain)(*values))
    assert_same(gradients(case, layer), gradients(case, plain))
