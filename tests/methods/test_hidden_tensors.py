"""Traced values where JAX does not look: in objects that are no pytrees, and in functions among the arguments."""

from __future__ import annotations

import collections
import dataclasses
import functools
import operator
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pylayer_jax import PyLayer
from tests.kit.modes import MODES, X, modes

from .made import gradients, layer, loss, runs, text_of

WEIGHT = jnp.float32(2.0)


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    w: object

    def __call__(self, x):
        return x * self.w


class Model:
    def __init__(self, w):
        self.layers = [types.SimpleNamespace(w=w, parent=self)]

    def __call__(self, x):
        return x * self.layers[0].w

    def method(self, x):
        return x * self.layers[0].w


def decorated(w):
    return functools.wraps(Model)(lambda x: x * w)


def composed(w, depth=6):
    function = lambda x: x * w  # noqa: E731
    for _ in range(depth):
        function = (lambda inner: lambda x: inner(x))(function)
    return function


class Finds:
    """Multiplies by the one array that `find` gives of what it holds."""

    def __init__(self, held, find):
        self.held, self.find = held, find

    def __call__(self, x):
        return x * self.find(self.held)


class Mapping(dict):
    pass


Pair = collections.namedtuple("Pair", "a b")


def deep(w):
    for _ in range(20):
        w = types.SimpleNamespace(w=w)
    return Finds(w, lambda held: functools.reduce(lambda held, _: held.w, range(20), held))


def made_within(w):
    class Local:
        def __call__(self, x):
            return x * w

    return Local()


# Objects and functions that multiply by `w`, which they hold.
HIDING = {
    "slots": Frozen,
    "nested object": Model,
    "method": lambda w: Model(w).method,
    "closure": lambda w: lambda x: x * w,
    "default": lambda w: lambda x, w=w: x * w,
    "partial": lambda w: functools.partial(lambda w, x: x * w, w),
    "partial by keyword": lambda w: functools.partial(lambda x, w: x * w, w=w),
    "decorated": decorated,
}

FURTHER = {
    "composed functions": composed,
    "deep objects": deep,
    "dict subclass": lambda w: Finds(Mapping(w=w), lambda held: held["w"]),
    "deque": lambda w: Finds(collections.deque([None, w]), lambda held: held[1]),
    "set of objects": lambda w: Finds({Model(w)}, lambda held: next(iter(held)).layers[0].w),
    "named tuple twice": lambda w: Finds([(t := Pair(0, (w,))), t], lambda held: (held[0].b[0] + held[1].b[0]) / 2),
    "twice in an object": lambda w: Finds(types.SimpleNamespace(a=w, b=w), lambda held: (held.a + held.b) / 2),
    "class made in a function": made_within,
}


@dataclasses.dataclass
class Weighted(PyLayer):
    w: object


def keeping(backward, forward=lambda x, held: x * 2, **members):
    """A layer that keeps its second argument."""

    def keep(ctx, x, held):
        ctx.held = held
        return forward(x, held)

    return layer(keep, backward, **members)


def keep_result(ctx, x, function):
    ctx.kept = types.SimpleNamespace(y=function(jnp.ones(3)))
    return x * ctx.kept.y


LAYERS = {
    "applies": keeping(lambda ctx, dy: ctx.held(dy) * 3, lambda x, held: held(x)),
    "forward mode": keeping(lambda ctx, dy: ctx.held(dy) * 3, lambda x, held: held(x), forward_mode=True),
    "object on ctx": layer(keep_result, lambda ctx, dy: dy * ctx.kept.y * 3),
}
layers = pytest.mark.parametrize("made", LAYERS.values(), ids=LAYERS)


@modes
@layers
@pytest.mark.parametrize("hide", HIDING.values(), ids=HIDING)
def test_a_hidden_value_is_a_constant(hide, made, mode):
    # `w` is computed within the transform, from no value that is differentiated.
    def total(x):
        return loss(made, hide(WEIGHT * jax.lax.stop_gradient(jnp.ones_like(x))))(x)

    assert MODES[mode](total)(X).tolist() == [6, 6, 6]


@pytest.mark.parametrize("mode", ["grad-jit", "vmap"])
@pytest.mark.parametrize("hide", FURTHER.values(), ids=FURTHER)
def test_a_hidden_value_is_found_wherever_it_is(hide, mode):
    def total(x, w):
        return loss(LAYERS["applies"], hide(w))(x)

    derivative = MODES[mode](lambda xw: total(xw[:3], jax.lax.stop_gradient(xw[3])))
    assert derivative(jnp.append(X, WEIGHT)).tolist() == [6, 6, 6, 0]


CONTAINERS = {  # each is one leaf to JAX: how to make it of an array, and to find the array
    "dict subclass": (lambda w: Mapping(w=w), lambda held: held["w"]),
    "counter": (lambda w: collections.Counter(w=w), lambda held: held["w"]),
    "deque": (lambda w: collections.deque([w], maxlen=2), lambda held: held[0]),
}


@modes
@pytest.mark.parametrize("is_computed", [False, True], ids=["argument", "computed"])
@pytest.mark.parametrize("forward_mode", [False, True], ids=["", "forward mode"])
@pytest.mark.parametrize("container", CONTAINERS)
def test_a_container_that_is_one_leaf(container, forward_mode, is_computed, mode):
    make, find = CONTAINERS[container]

    def forward(ctx, x, held):
        ctx.held = make(find(held) * 1) if is_computed else held
        return x * find(held)

    made = layer(forward, lambda ctx, dy: jnp.where(find(ctx.held) == 2, 3 * dy, 0), forward_mode=forward_mode)
    total = lambda x: loss(made, make(WEIGHT * jax.lax.stop_gradient(jnp.ones_like(x))))(x)  # noqa: E731
    assert MODES[mode](total)(X).tolist() == [3, 3, 3]


def test_a_function_of_c_that_holds_a_traced_value_serves_forward_and_is_not_kept():
    def total(made):
        return lambda x: loss(made, operator.methodcaller("__rmul__", jax.lax.stop_gradient(x) * 0 + WEIGHT))(x)

    only_forward = layer(lambda ctx, x, held: held(x), lambda ctx, dy: dy * 6)
    assert jax.grad(jax.jit(total(only_forward)))(X).tolist() == [6, 6, 6]
    with pytest.raises(ValueError, match=r"ctx\.held in Made\.forward is a function .* cannot be kept for backward"):
        jax.grad(jax.jit(total(LAYERS["applies"])))(X)


@modes
def test_a_jitted_function_hides_a_constant_from_forward_alone(mode):
    made = layer(lambda ctx, x, function: function(x), lambda ctx, dy: dy * 6)

    def total(x):
        w = WEIGHT * jax.lax.stop_gradient(jnp.ones_like(x))
        return loss(made, jax.jit(lambda x: x * w))(x)

    assert MODES[mode](total)(X).tolist() == [6, 6, 6]


@pytest.mark.parametrize("hide", ["nested object", "closure"])
@pytest.mark.parametrize(
    "run",
    [
        lambda f: jax.grad(jax.jit(f))(X, WEIGHT),
        lambda f: jax.vmap(jax.grad(f), (None, 0))(X, WEIGHT[None])[0],
        lambda f: jax.grad(lambda x, w: jax.vmap(f, (None, 0))(x, w).sum())(X, WEIGHT[None]),
        lambda f: jax.grad(lambda x: jax.lax.map(lambda w: f(x, w), WEIGHT[None]).sum())(X),
        lambda f: jax.jit(jax.grad(jax.checkpoint(f)))(X, WEIGHT),
    ],
    ids=["grad of jit", "vmap of grad", "grad of vmap", "map", "jit of grad of remat"],
)
def test_a_hidden_value_that_the_transform_traces(hide, run):
    assert run(lambda x, w: loss(LAYERS["applies"], HIDING[hide](w))(x)).tolist() == [6, 6, 6]


@modes
@layers
@pytest.mark.parametrize(
    ("hide", "message"),
    [
        ("slots", r"argument \w+ holds a traced value in \.w, but its type Frozen is no pytree"),
        ("method", r"argument \w+ holds a traced value in \.layers\[0\]\.w, but its type Model is no pytree"),
        ("closure", r"closes over \(w \(in argument \w+\)\)\. .*Pass it as an argument: Made\.apply\(\.\.\., w\)"),
    ],
)
def test_a_hidden_value_that_is_differentiated_is_named(hide, message, made, mode):
    with pytest.raises(jax.errors.UnexpectedTracerError, match=message):
        MODES[mode](lambda w: loss(made, HIDING[hide](w))(X * 1))(X)


@modes
def test_an_object_with_differentiated_values_that_nobody_reads(mode):
    flagged = keeping(lambda ctx, dy: dy * len(ctx.held.layers))
    assert MODES[mode](lambda x: (flagged.apply(x, Model(x)) + x).sum())(X).tolist() == [2, 2, 2]
    assert MODES[mode](lambda x: (flagged.apply(X, Model(x)) + x).sum())(X).tolist() == [1, 1, 1]


@pytest.mark.parametrize(
    ("forward", "hide", "where"),
    [
        (lambda ctx, boxes, x: boxes[0].w * x, lambda w: [Frozen(w)], r"boxes\[0\]"),
        (lambda ctx, own, x: own.w * x, lambda w: Weighted(w), "own"),
    ],
    ids=["in a list", "layer"],
)
def test_an_argument_that_hides_a_differentiated_value_is_named(forward, hide, where):
    made = layer(forward)
    with pytest.raises(jax.errors.UnexpectedTracerError, match=rf"argument {where} holds a traced value in \.w, but"):
        jax.grad(lambda w: made.apply(hide(w), X).sum())(2.0)


# -- what a method closes over --------------------------------------------------------------------


def closing_over(w):
    return layer(lambda ctx, x: x * w, lambda ctx, dy: dy * w)


def with_backward_over(w, use=lambda dy, w: dy * w):
    return layer(backward=lambda ctx, dy: use(dy, w))


@modes
def test_a_differentiated_value_that_a_method_closes_over_is_named(mode):
    ways_out = r"Pass it as an argument.*apply\(\.\.\., w\)"
    message = rf"Made\.forward uses .* closes over \(w\)\. .*{ways_out}"
    with pytest.raises(jax.errors.UnexpectedTracerError, match=message):
        MODES[mode](lambda w: loss(closing_over(w))(X))(X)
    message = r"Made\.backward uses a traced value that it closes over \(w\).*as an argument: .*apply\(\.\.\., w\)"
    with pytest.raises(jax.errors.UnexpectedTracerError, match=message):
        MODES[mode](lambda x: loss(with_backward_over(jnp.sum(x)))(x))(X)


@gradients
def test_a_value_that_is_differentiated_as_an_argument_too_is_never_silent(run):
    with pytest.raises(Exception, match="as an argument") as caught:
        run(lambda w: loss(closing_over(w))(X * w))(2.0)
    assert type(caught.value).__name__ in ("UnexpectedTracerError", "CustomVJPException")


def test_a_value_that_forward_closes_over_at_the_outer_order():
    for run in (jax.grad, lambda f: jax.jit(jax.grad(f))):
        with pytest.raises(jax.errors.UnexpectedTracerError, match="Pass it as an argument"):
            run(lambda w: jax.grad(loss(closing_over(w)))(X).sum())(2.0)


def test_constants_that_methods_close_over():
    assert jax.jit(jax.grad(loss(closing_over(jnp.float32(3)))))(X).tolist() == [3, 3, 3]
    scaled = lambda w, x: loss(closing_over(w))(x)  # noqa: E731
    assert jax.jit(scaled)(3.0, X) == 3 * X.sum()
    assert jax.jit(jax.grad(scaled, 1))(3.0, X).tolist() == [3, 3, 3]


@modes
def test_the_shape_of_a_value_that_backward_closes_over(mode):
    by_size = lambda dy, w: dy * w.shape[0]  # noqa: E731
    assert MODES[mode](lambda x: loss(with_backward_over(x, by_size))(x))(X).tolist() == [3, 3, 3]


def over_closure(w):
    return loss(with_backward_over(w))


def over_object(w):
    return loss(keeping(lambda ctx, dy: dy * ctx.held.w), Frozen(w))


# Under grad of jit a backward that closes over a traced value is refused: the next test.
@pytest.mark.parametrize(
    ("over", "inner"), [(over_closure, lambda f: f), (over_object, lambda f: f), (over_object, jax.jit)]
)
def test_values_of_transformations_that_have_not_ended(over, inner):
    def slope(w):
        return jax.grad(inner(over(w)))(X)

    for run in (jax.jit, lambda f: lambda w: jax.vmap(f)(w[None])[0], lambda f: jax.jit(jax.checkpoint(f))):
        assert run(slope)(jnp.float32(3)).tolist() == [3, 3, 3]
    looped = jax.jit(lambda w: jax.lax.scan(lambda total, _: (total + slope(w), None), jnp.zeros(3), None, length=2)[0])
    assert looped(3.0).tolist() == [6, 6, 6]
    for run in (jax.grad, jax.jacfwd, lambda f: jax.jit(jax.grad(jax.jit(f))), lambda f: jax.grad(jax.checkpoint(f))):
        assert run(lambda w: slope(w).sum())(3.0) == 3


# JAX loses what the transpose of a staged function closes over: without a word where that is differentiated.
@pytest.mark.parametrize(
    "outer", [jax.jit, jax.grad, lambda f: jax.jit(jax.grad(f)), lambda f: lambda w: jax.vmap(f)(w[None])]
)
@pytest.mark.parametrize("stage", [jax.jit, lambda f: lambda x: jax.lax.cond(x[0] > 0, f, f, x)], ids=["jit", "cond"])
def test_a_backward_of_staged_code_that_closes_over_a_value_is_named(outer, stage):
    message = r"Made\.backward uses a traced value that it closes over \(w\).*as an argument: .*apply\(\.\.\., w\)"
    with pytest.raises(jax.errors.UnexpectedTracerError, match=message):
        outer(lambda w: jax.grad(stage(over_closure(w)))(X).sum())(jnp.float32(3))


# -- what a method writes -------------------------------------------------------------------------


def writing(method, **members):
    def note(name, held, value):
        if name == method:
            held.mask = value
        return value

    def forward(ctx, x, model):
        ctx.model = model
        return note("forward", model, x * 2)

    return layer(forward, lambda ctx, dy: note("backward", ctx.model, dy * 1), **members)


@pytest.mark.parametrize("forward_mode", [False, True])
@pytest.mark.parametrize("method", ["forward", "backward"])
@pytest.mark.parametrize("mode", [m for m in MODES if m not in ("grad", "vmap")])
def test_a_traced_value_written_to_an_object(mode, method, forward_mode):
    made = writing(method, forward_mode=forward_mode)
    name = {"forward": "model", "backward": r"ctx\.model"}[method]
    advice = {"forward": ".*Return it as .*save_for_backward", "backward": ".*Return it as"}[method]
    with pytest.raises(ValueError, match=rf"Made\.{method} wrote a traced value to {name}\.mask, {advice}"):
        MODES[mode](loss(made, types.SimpleNamespace()))(X)


@pytest.mark.parametrize("method", ["forward", "backward"])
def test_in_eager_mode_an_object_takes_arrays(method):
    if jax.config.jax_custom_vjp3 and method == "forward":
        pytest.skip("under jax_custom_vjp3 forward is always traced")
    model = types.SimpleNamespace()
    jax.grad(loss(writing(method), model))(X)
    np.testing.assert_array_equal(model.mask, X * 2 if method == "forward" else jnp.ones(3))
    with pytest.raises(ValueError, match="wrote a traced value to model"):
        jax.vmap(lambda x: writing("forward").apply(x, model))(X)


def buffering(method, hold):
    def note(name, value):
        if name == method:
            made.buffer["last"] = made.last = hold(value)
        return value * 2

    made = layer(lambda ctx, x: note("forward", x), lambda ctx, dy: note("backward", dy), buffer={}, last=None)
    return made


@pytest.mark.parametrize("method", ["forward", "backward"])
@pytest.mark.parametrize("mode", ["jit-grad", "grad-jit"])
@pytest.mark.parametrize("hold", [lambda x: x, lambda x: lambda: x], ids=["array", "function"])
def test_a_traced_value_written_to_the_class(hold, mode, method):
    match = rf"Made\.{method} wrote a traced value to Made\.(last|buffer\['last'\])[.x]*, which"
    with pytest.raises(ValueError, match=match):
        MODES[mode](loss(buffering(method, hold)))(X)


def test_in_eager_mode_a_class_takes_arrays():
    made = buffering("backward", lambda x: x)
    jax.grad(loss(made))(X)
    assert made.last.tolist() == made.buffer["last"].tolist() == [1, 1, 1]


NAMED = jnp.ones(3)
NAMED.label = "there before"


@runs
@pytest.mark.parametrize("name", ["stop_gradient", "note"])
@pytest.mark.parametrize("of", [lambda x, y: y, lambda x, y: x], ids=["output", "input"])
def test_an_attribute_of_an_array_is_refused_in_every_mode(of, name, run):
    def forward(ctx, x):
        y = x * 2
        setattr(of(x, y), name, True)
        return y, NAMED

    with pytest.raises(AttributeError) as raised:
        run(lambda x: layer(forward).apply(x)[0].sum())(X)
    assert ("jax.lax.stop_gradient(x)" if name == "stop_gradient" else "takes no attributes") in text_of(raised.value)


@runs
def test_an_array_that_had_attributes_before_may_be_returned(run):
    made = layer(lambda ctx, x: (x * 2, NAMED), lambda ctx, dy, _: dy)
    run(lambda x: made.apply(x)[0].sum())(X)


@pytest.mark.parametrize(
    "run",
    [
        lambda f: jax.jit(jax.grad(f))(X, WEIGHT),
        lambda f: jax.grad(jax.jit(f))(X, WEIGHT),
        lambda f: jax.vmap(jax.grad(f), (None, 0))(X, WEIGHT[None])[0],
        lambda f: jax.grad(lambda x: jax.vmap(f, (None, 0))(x, WEIGHT[None]).sum())(X),
    ],
    ids=["jit of grad", "grad of jit", "vmap of grad", "grad of vmap"],
)
def test_an_attribute_that_is_swapped_in_for_a_call(run):
    held = Model(1.0)

    def swapped(x, w):
        held.layers[0].w, before = w, held.layers[0].w
        try:
            return loss(LAYERS["applies"], held)(x)
        finally:
            held.layers[0].w = before

    assert run(swapped).tolist() == [6, 6, 6]
    assert held.layers[0].w == 1.0
