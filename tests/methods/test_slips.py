"""Slips whose first message was one of Python or JAX: what happened, where, and what to do."""

from __future__ import annotations

import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pylayer_jax import PyLayer, saved_tensors_report
from pylayer_jax.__main__ import main
from pylayer_jax.packers import quantize_saved
from pylayer_jax.testing import check_layer
from tests.kit.layers import Tanh

X = jnp.ones((2, 3))


def made(forward, backward=lambda ctx, dy: dy):
    return type("Made", (PyLayer,), {"forward": staticmethod(forward), "backward": staticmethod(backward)})


def branches(ctx, x, n):
    return x if n.sum() > 0 else -x


def counts(ctx, x, n):
    for _ in range(n):
        x = x * 2
    return x


def leaves_jax(ctx, x, n):
    return jnp.asarray(np.asarray(x) + n)


def branches_on_gradient(ctx, dy):
    if dy[0, 0] > 0:
        return dy
    return -dy


def times(ctx, p, x):
    return p["w"] * x + p["b"][0]["c"]


def weight(ctx, w, x):
    ctx.save_for_backward(x)
    return w.astype(jnp.float32) * x


def of_weight(ctx, dy):
    (x,) = ctx.saved_tensor()
    return dy * x, None


def enter_the_class():
    with quantize_saved:
        pass


def of_dict(gradient):
    layer = made(times, lambda ctx, dy: (gradient(dy), None))
    return jax.grad(lambda p: layer.apply(p, X).sum())({"w": X, "b": [{"c": X}]})


@pytest.mark.parametrize(
    ("slip", "text"),
    [
        (enter_the_class, r"quantize_saved in `with` is the class\. .* with quantize_saved\(\.\.\.\):"),
        (
            lambda: jax.jit(made(branches).apply)(X, X),
            r"Made\.forward asks for numbers at HERE:\d+, in `n.sum\(\) > 0`, .* \(n: float32\[2,3\]\)\. Use jnp.where",
        ),
        (lambda: jax.jit(made(counts).apply)(X, np.int32(3)), r"at HERE:\d+, in `.*range\(n\).*\(n: int32\[\]\)"),
        (lambda: jax.jit(made(leaves_jax).apply)(X, X), r"`np.asarray\(x\)`, .*jnp in place of np"),
        (
            lambda: jax.jit(jax.grad(lambda x: made(lambda ctx, x: x, branches_on_gradient).apply(x).sum()))(X),
            r"Made\.backward asks for numbers at HERE:\d+, in `dy\[0, 0\] > 0`, .* \(dy: float32\[2,3\]\)",
        ),
        (
            lambda: saved_tensors_report(Tanh.apply(X)),
            r"expected a function or a layer, got ArrayImpl .* saved_tensors_report\(Tanh\.apply, x\)",
        ),
        (lambda: check_layer(Tanh, X, skip="second"), r"skip=\['second'\]: expected names among .* second order"),
        (
            lambda: of_dict(lambda dy: {"w": dy, "b": [{}]}),
            r"gradient of 'p': expected a dict at \['b'\]\[0\] with the keys .*, 'c'; got one without 'c'.* HERE:\d",
        ),
    ],
)
def test_an_error_says_where_and_what_to_do(slip, text):
    with pytest.raises((TypeError, ValueError)) as caught:
        slip()
    message = " ".join([str(caught.value), *getattr(caught.value, "__notes__", ())])
    assert re.search(text.replace("HERE", re.escape(__file__)), message, re.DOTALL), message


def test_one_name_is_skipped():
    assert "second order" not in [row.name for row in check_layer(Tanh, X, skip="second order").rows]


def test_an_unknown_command(capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["chekc", "layers:Tanh"])
    assert "unknown command 'chekc'. To check a layer: python -m pylayer_jax check" in capsys.readouterr().err


def test_a_gradient_that_is_cast_to_one_byte_warns_once_per_class():
    layer, w = made(weight, of_weight), X.astype(jnp.float8_e4m3fn)
    with pytest.warns(UserWarning, match=r"Made.backward returned a float32 gradient for 'w', .*pass the wide tensor"):
        jax.grad(lambda w: layer.apply(w, X).sum())(w)
    with warnings.catch_warnings(action="error"):
        jax.jit(jax.grad(lambda w: layer.apply(w, X).sum()))(w)  # not again
        narrow = made(weight, lambda ctx, dy: (dy.astype(w.dtype), None))
        jax.grad(lambda w: narrow.apply(w, X).sum())(w)
