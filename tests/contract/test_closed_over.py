"""A traced value that a method closes over is a constant, or raises an error. No gradient is silently wrong."""

import functools

import jax
import jax.numpy as jnp
import pytest

from tests.kit.layers import layer, loss, text_of
from tests.kit.modes import MODES, X, gradients, modes


def closing_over(w):
    return layer(lambda ctx, x: x * w, lambda ctx, dy: dy * w)


def with_backward_over(w):
    return layer(backward=lambda ctx, dy: dy * w)


def assert_named(run):
    """Assert that a call raises an error that names the layer, and says what to do."""
    with pytest.raises(Exception, match=r".") as caught:
        run()
    text = text_of(caught.value)
    assert "Made" in text
    assert "as an argument" in text


def assert_right_or_refused(run, expected):
    """Assert that a call returns these numbers or raises an error, since other numbers would be silently wrong."""
    try:
        found = run()
    except Exception:
        return
    assert found.tolist() == expected


@modes
def test_a_differentiated_value_that_a_method_closes_over(mode):
    assert_named(lambda: MODES[mode](lambda w: loss(closing_over(w))(X))(X))
    with pytest.raises(Exception, match=r"."):  # of JAX: the value belongs to a trace that has ended
        MODES[mode](lambda x: loss(with_backward_over(jnp.sum(x)))(x))(X)


@gradients
@pytest.mark.parametrize(
    "of", [lambda f: f, lambda f: lambda x: jax.grad(f)(x).sum()], ids=["an argument too", "at the outer order"]
)
def test_a_differentiated_scalar_that_forward_closes_over_is_named(of, run):
    assert_named(lambda: run(lambda w: of(loss(closing_over(w)))(X * w))(2.0))


RULES = pytest.mark.parametrize(
    ("mode", "forward_mode"), [("grad", False), ("jit-grad", True), ("scan", False), ("vmap", True)]
)


class Scale:
    def __init__(self, scale):
        self.scale = scale

    def method(self, x):
        return x * self.scale


@RULES
def test_a_differentiated_value_within_an_argument_that_is_no_pytree_is_named(forward_mode, mode):
    applied = lambda x, held: held.method(x)
    made = layer(applied, lambda x, held, dy: held.method(dy), plain=True, forward_mode=forward_mode)
    assert_named(lambda: MODES[mode](lambda w: loss(made, Scale(w))(X * 1))(X))


@modes
def test_an_object_with_differentiated_values_that_nobody_reads(mode):
    flagged = layer(lambda x, held: x * 2, lambda x, held, dy: dy * len(vars(held)), plain=True)
    assert MODES[mode](lambda x: (flagged.apply(x, Scale(x)) + x).sum())(X).tolist() == [2, 2, 2]
    assert MODES[mode](lambda x: (flagged.apply(X, Scale(x)) + x).sum())(X).tolist() == [1, 1, 1]


def closure(scale):
    return lambda x: x * scale


# Functions from which one look shows `scale`.
SHOWN = {
    "closure": closure,
    "dict in a closure": lambda w: (lambda scale: lambda x: x * scale["w"])({"w": w}),
    "default": lambda w: lambda x, scale=w: x * scale,
    "keyword-only default": lambda w: lambda x, *, scale=w: x * scale,
    "partial": lambda w: functools.partial(lambda scale, x: x * scale, w),
    "partial with a keyword": lambda w: functools.partial(lambda x, scale: x * scale, scale=w),
    "decorated": lambda w: functools.wraps(closure(w))(lambda x: closure(w)(x)),
    "jitted": lambda w: jax.jit(closure(w)),
}


@RULES
@pytest.mark.parametrize("hide", SHOWN.values(), ids=SHOWN)
def test_the_error_says_which_variable_of_which_argument(hide, forward_mode, mode):
    made = layer(lambda ctx, x, f: f(x), lambda ctx, dy: dy, forward_mode=forward_mode)
    with pytest.raises(Exception, match=r"Made(?s:.*)\bscale \(in argument f\)(?s:.*)as an argument"):
        MODES[mode](lambda w: loss(made, f=hide(w))(X * 1))(X)
    pair = layer(lambda ctx, x, fs: fs["f"][0](x), lambda ctx, dy: dy, forward_mode=forward_mode)
    with pytest.raises(Exception, match=r"\bscale \(in argument fs\['f'\]\[0\]\)"):
        MODES[mode](lambda w: loss(pair, {"f": [hide(w)]})(X * 1))(X)


# -- values of a trace that has ended when backward runs ------------------------------------------


DEAD = {
    "grad of jit": lambda f: jax.grad(lambda x, w: jax.jit(f)(x, w).sum()),
    "scan": lambda f: jax.grad(lambda x, w: jax.lax.scan(lambda x, w: (f(x, w), None), x, w[None])[0].sum()),
    "checkpoint": lambda f: jax.grad(lambda x, w: jax.checkpoint(f)(x, w).sum()),
}
HOLD = SHOWN | {
    "object": Scale,
    "method": lambda w: Scale(w).method,
    "Partial": lambda w: jax.tree_util.Partial(lambda scale, x: x * scale, w),
}
# How forward keeps what it is given, and how backward reads it.
KEEP = {
    "on ctx": (lambda ctx, held: setattr(ctx, "held", held), lambda ctx: ctx.held),
    "saved": (lambda ctx, held: ctx.save_for_backward(held), lambda ctx: ctx.saved_tensors[0]),
}


def called(held, x):
    return (held if callable(held) else held.method)(x)


@pytest.mark.parametrize(("keep", "read"), KEEP.values(), ids=KEEP)
@pytest.mark.parametrize("mode", DEAD.values(), ids=DEAD)
@pytest.mark.parametrize("hide", HOLD.values(), ids=HOLD)
def test_a_traced_value_on_ctx_that_has_ended_is_an_error(hide, mode, keep, read):
    holding = layer(lambda ctx, x, held: (keep(ctx, held), called(held, x))[1], lambda ctx, dy: called(read(ctx), dy))

    def run():
        return mode(lambda x, w: holding.apply(x, hide(w)))(X, X)

    if hide is HOLD["Partial"]:
        assert run().tolist() == X.tolist()
    else:
        with pytest.raises(Exception, match=r"."):  # of JAX
            run()


@pytest.mark.parametrize("mode", DEAD.values(), ids=DEAD)
def test_a_traced_value_on_ctx_that_backward_does_not_use(mode):
    made = layer(lambda ctx, x, held: setattr(ctx, "held", held) or held.method(x), lambda ctx, dy: ctx.held and dy * 2)
    assert mode(lambda x, w: made.apply(x, Scale(w)))(X, X).tolist() == [2, 2, 2]


def test_constants_that_methods_close_over():
    assert jax.jit(jax.grad(loss(closing_over(jnp.float32(3)))))(X).tolist() == [3, 3, 3]
    assert jax.jit(lambda w: loss(closing_over(w))(X))(3.0) == 3 * X.sum()


STAGED = {"": lambda f: f, "jit": jax.jit, "cond": lambda f: lambda x: jax.lax.cond(x[0] > 0, f, f, x)}


@pytest.mark.parametrize("made", [closing_over, with_backward_over])
@pytest.mark.parametrize("stage", STAGED.values(), ids=STAGED)
def test_values_of_transformations_that_have_not_ended(stage, made):
    def slope(w):
        return jax.grad(stage(loss(made(w))))(X)

    w = jnp.float32(3)
    for run in (jax.jit, lambda f: lambda w: jax.vmap(f)(w[None])[0], lambda f: jax.jit(jax.checkpoint(f))):
        assert_right_or_refused(lambda: run(slope)(w), [3, 3, 3])  # noqa: B023
    for run in (jax.grad, jax.jacfwd, lambda f: jax.jit(jax.grad(f)), lambda f: jax.grad(jax.checkpoint(f))):
        assert_right_or_refused(lambda: run(lambda w: slope(w).sum())(w), 3.0)  # noqa: B023
