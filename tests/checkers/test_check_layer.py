"""`check_layer` reports each property, says how far it was tested, and tells how to declare an intended failure."""

import contextlib
import io
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pylayer_jax.testing import check_layer
from pylayer_jax.testing._checkers import PROPERTIES
from tests.checkers.wrong_layers import (
    COMPLEX,
    INDEX,
    KEY,
    WRONG,
    Clip,
    Clips,
    Log,
    OnHost,
    Picks,
    RefusesABatchOfIndices,
    Sine,
    SineBothWays,
    WrongSign,
    all_but,
    saved,
    saving,
    sine,
)
from tests.kit.case import X, ruled
from tests.kit.layers import Multiply, Square, Tanh, layer
from tests.layers import CASES

CASE = {case.name: case for case in CASES}
CLIPPED = CASE["ClippedReversal"]


def failed(subject, *args, rows, **options):
    """Return the names of the rows that fail, and the hints of the report."""
    report = check_layer(subject, *args, raises=False, skip=all_but(*rows), **options)
    return [row.name for row in report if not row.passed], "\n".join(report.hints())


@pytest.mark.parametrize("name", ["MixedOutputs", "AskedLinear"])
def test_right_layers_have_every_property(name):
    report = check_layer(CASE[name].layer, *CASE[name].args)
    assert report.passed
    assert [row.name for row in report] == ["eager", *PROPERTIES]


BESIDE = ["jit", "vmap", "gradients", "second order", "forward over reverse", "cotangents", "linear"]


@pytest.mark.parametrize("name", ["Trees", "MarkedOutput", "RouterLoss"])
def test_layers_are_right_beside_a_reference(name):
    case = CASE[name]
    report = check_layer(case.layer, *case.args, reference=case.reference, skip=all_but(*BESIDE))
    assert "reference" in report["gradients"].message


def test_a_reference_is_compared():
    rows = ["gradients", "second order"]
    assert failed(WrongSign, X, reference=jnp.sin, rows=rows)[0] == rows
    assert failed(CLIPPED.layer, *CLIPPED.args, reference=CLIPPED.reference, rows=["linear"])[0] == []


PICKED = X[0], INDEX, jnp.array(True)
PLAIN = ruled(jnp.sin, lambda args, dy: (dy * jnp.cos(*args),))


# The property, the layer, its arguments, and words of the report of that property.
SAYS = [
    ("vmap", Picks, (*PICKED, KEY), "args[3]"),
    ("vmap", lambda *xs: Multiply.apply(xs[0], sum(xs)), [X] * 5, "16"),
    ("vmap", RefusesABatchOfIndices, PICKED[:2], "one index for all"),
    ("shard_map", Multiply, (jax.device_put(X, jax.devices()[1]), X), "4 devices"),
    ("forward mode", CASE["Trees"].layer, CASE["Trees"].args, "Trees"),
    ("forward mode", lambda x: PLAIN(x), (X,), "custom_vjp"),
    ("forward over reverse", SineBothWays, (X,), "forward over forward"),
    ("forward over reverse", lambda z: (Square.apply(z), jnp.abs(z)), (COMPLEX,), "matches"),
    ("forward over reverse", Clips, (X,), "Clips.backward"),
    ("linear", Tanh, (X,), "proved"),
    ("arguments", lambda x, n, how: Tanh.apply(x), (X, jnp.arange(3), "text"), "args[0]"),
    ("gradients", Tanh, (X.astype(jnp.bfloat16),), "bfloat16"),
]


def in_a_shard_map(x):
    mesh = jax.make_mesh((1,), ("i",), devices=jax.devices()[:1])
    whole = jax.sharding.PartitionSpec()
    summed = jax.shard_map(lambda x: jax.lax.psum(Tanh.apply(x), "i"), mesh=mesh, in_specs=whole, out_specs=whole)
    return jnp.where(x > 1e9, 0, summed(x))


def passing(value):
    """Return a layer of `value` whose gradient is that of x, which is wrong except for positive values."""
    return layer(lambda x: value(x), lambda x, dy: dy, plain=True)


def softmax(x):
    e = jnp.exp(x - x.max(-1, keepdims=True))
    return Tanh.apply(e / e.sum(-1, keepdims=True))


POSITIVE = jnp.linspace(0.2, 1, 5)

# A layer, its arguments, and words with which the report names a branch that no value takes.
BRANCHES = {
    "one limit": (lambda x: Clip.apply(jnp.abs(x)), (X,), "max at "),
    "where": (layer(lambda x: jnp.where(x > 1e9, 0, x), lambda x, dy: dy, plain=True), (X,), "select_n at test_check_"),
    "cond": (lambda x: jax.lax.cond(jnp.sum(x) > 1e9, jnp.sin, Tanh.apply, x), (X,), "cond at test_check_layer.py"),
    "cotangents": (CLIPPED.layer, CLIPPED.args, ""),
    "a tie": (lambda x: jnp.maximum(Tanh.apply(x), 0) + jnp.where(x == 0, 1, x), (X,), ""),
    "concrete values": (OnHost, (X,), ""),
    "a shard_map": (in_a_shard_map, (X,), "select_n at test_check_layer.py"),
    "abs": (passing(jnp.abs), (POSITIVE,), "abs at test_check_layer.py"),
    "abs of complex": (lambda z: jnp.abs(Square.apply(z)), (COMPLEX,), ""),
    "sign": (passing(lambda x: jnp.sign(x) * x), (POSITIVE,), "sign at test_check_layer.py"),
    "a mask": (passing(lambda x: x * (x > 0).astype(x.dtype)), (POSITIVE,), "convert_element_type at test_check_"),
    "softmax": (softmax, (POSITIVE,), ""),
}


@pytest.mark.parametrize("name", BRANCHES)
def test_a_branch_that_no_value_takes_is_named_with_its_line(name):
    subject, args, words = BRANCHES[name]
    reference = CLIPPED.reference if name == "cotangents" else None
    with pytest.warns(UserWarning, match=words) if words else contextlib.nullcontext():
        message = check_layer(subject, *args, reference=reference, skip=all_but("gradients"))["gradients"].message
    assert words in message
    assert ("branches" in message) == bool(words)


def test_an_object_on_a_context_is_no_leak():
    forward = lambda ctx, x, holder: (setattr(ctx, "holder", holder), x * holder.w)[1]
    made = layer(forward, lambda ctx, dy: dy * ctx.holder.w)
    apply = lambda x: made.apply(x, types.SimpleNamespace(w=jnp.tanh(jax.lax.stop_gradient(x))))
    assert check_layer(apply, X, skip=all_but("leaks")).passed


def only_where(condition):
    """Return a right function that raises an error for values without a property."""

    def run(x):
        if not condition(x):
            raise ValueError("no others")
        return Tanh.apply(x)

    return run


SIGNS = jnp.array([1.0, -1] * 4)

# The layer, its argument, and words of the report about other values: those in the domain that the given ones show.
OTHER_VALUES = {
    "positive": (Log, jnp.array([1e-3, 2.0]), "random sizes"),
    "signs matter": (lambda x: jnp.log(Tanh.apply(x * SIGNS)), SIGNS, "random sizes"),
    "at least one": (lambda x: jnp.arccosh(Multiply.apply(x, x)), jnp.full(9, 1.05), "larger"),
    "sorted": (only_where(lambda x: jnp.all(jnp.diff(x) > 0)), jnp.linspace(-2.0, 3, 9), "0.7391 times"),
    "positive definite": (
        lambda a: jnp.linalg.cholesky(Multiply.apply(a, a)),
        jnp.full((4, 4), 0.99) + 0.02 * jnp.eye(4),
        "0.7391 times",
    ),
    "refused": (only_where(lambda x: abs(x[0] - 2) < 0.01), jnp.array([2.0, -3]), "no others"),
    "nan": (lambda x: jnp.sqrt(Tanh.apply(1e-3 - (x - 1) ** 2)), jnp.ones(3), "not finite"),
}


SAYS += [("gradients", subject, (x,), words) for subject, x, words in OTHER_VALUES.values()]


@pytest.mark.parametrize(("name", "subject", "args", "words"), SAYS, ids=[f"{row[0]}: {row[3]}" for row in SAYS])
def test_a_property_says_how_far_it_was_tested(name, subject, args, words):
    assert words in check_layer(subject, *args, skip=all_but(name))[name].message


def test_shard_map_takes_the_mesh_that_is_set():
    mesh = jax.make_mesh((2,), ("i",), devices=jax.devices()[:2])
    with jax.set_mesh(mesh):
        assert "2 devices" in check_layer(Tanh, X, skip=all_but("shard_map"))["shard_map"].message


def test_keywords_are_arguments():
    def scaled(x, *, factor, how):
        assert how == "twice"
        return Tanh.apply(2 * x) * factor["f"]

    keywords = {"factor": {"f": jnp.float32(3)}, "how": "twice"}
    report = check_layer(scaled, X, kwargs=keywords, skip=all_but("jit", "gradients", "arguments", "repeatable"))
    assert "factor['f']" in report["eager"].message
    reference = lambda x, *, factor, how: jnp.tanh(2 * x) * factor["f"]
    assert check_layer(scaled, X, kwargs=keywords, reference=reference, skip=all_but("gradients")).passed
    with pytest.raises(AssertionError, match="gradient of y"):
        check_layer(lambda x, *, y: WrongSign.apply(y) * x, X, kwargs={"y": X}, skip=all_but("gradients"))


def test_the_report_is_a_line_per_property():
    lines = str(check_layer(Multiply, X, 2 * X, skip=all_but("jit", "remat"))).splitlines()
    assert lines[0] == "Multiply"
    assert [line.split()[:2] for line in lines[1:]] == [["✓", "eager"], ["✓", "jit"], ["✓", "remat"]]
    # A property that a layer cannot have, or cannot lack, was not checked: its row has no tick.
    report = check_layer(Tanh, X, skip=all_but("forward mode", "arguments", "cotangents", "linear"))
    assert report.passed
    assert [row.mark for row in report] == ["✓", "–", "–", "–", "✓"]
    assert "forward_mode = True" in report["forward mode"].message
    with pytest.raises(AssertionError, match=r"(?s)WrongSign.*✓ eager .*✗ gradients "):
        check_layer(WrongSign, X, skip=all_but("gradients"))
    report = check_layer(WrongSign, X, skip=all_but("jit", "gradients"), raises=False)
    assert "WrongSign" in repr(report)
    with pytest.raises(ValueError, match="speed"):
        check_layer(Tanh, X, skip=["speed"])


def test_a_notebook_shows_a_table():
    report = check_layer(lambda x: WrongSign.apply(x), X, skip=all_but("jit", "gradients"), raises=False)
    table = report._repr_html_()
    assert table.count("<tr") == 1 + len(report.rows)
    assert all(f"<td>{row.mark}</td><td>{row.name}</td>" in table for row in report)
    assert "&lt;lambda&gt;" in table
    assert "reference=FUNCTION" in table  # the hints
    assert "<lambda>" not in table


def fails(ctx, x):
    if any(ctx.needs_input_grad):
        raise NotImplementedError("not in this dtype")
    return Sine.forward(ctx, x)


@pytest.mark.parametrize(
    ("subject", "args", "message"),
    [(Tanh, (X, X), "TypeError: Tanh.apply: "), (sine(forward=fails), (X,), "NotImplementedError: not in this dtype")],
)
def test_a_layer_that_does_not_run_has_one_row(subject, args, message):
    (row,) = check_layer(subject, *args, raises=False)
    assert not row.passed
    assert message in row.message


def test_an_exception_of_host_code_is_in_the_report():
    def host(x):
        if x.ndim != X.ndim:
            raise RuntimeError("one example alone")
        return np.sin(x)

    def forward(ctx, x):
        ctx.save_for_backward(x)
        return jax.pure_callback(host, jax.typeof(x), x, vmap_method="expand_dims")

    report = check_layer(sine(forward=forward), X, raises=False, skip=all_but("vmap"))
    assert "one example alone" in report["vmap"].message


def test_a_layer_that_communicates_has_another_check():
    assert "assert_equivalent" in failed(sine(forward=lambda ctx, x: jax.lax.psum(x, "model")), X, rows=["jit"])[1]


def test_a_wrong_gradient_says_how_a_meant_one_is_declared():
    case, rows = CASE["Round"], ["gradients", "second order"]
    hints = failed(case.layer, *case.args, rows=rows)[1]
    assert "reference=FUNCTION" in hints
    assert "skip=['gradients']" in hints
    # Beside a reference, or where another property fails, there is nothing to declare.
    assert "reference=" not in failed(WrongSign, X, reference=jnp.sin, rows=rows)[1]
    assert failed(WRONG["jit"].layer, X, rows=["jit"]) == (["jit"], "")
    # A product without transposes is right for symmetric matrices.
    wrong = WRONG["no transposes"]
    assert "symmetric" in failed(wrong.layer, *wrong.args, rows=rows)[1]


@pytest.mark.parametrize(("name", "row"), [("once", "second order"), ("clipped", "linear")])
def test_a_lack_that_may_be_meant_says_how_it_is_declared(name, row):
    wrong, rows = WRONG[name].layer, ["gradients", row]
    found, hints = failed(wrong, X, rows=rows)
    assert found == [row]
    assert f"skip=['{row}']" in hints
    assert check_layer(wrong, X, skip=[row, *all_but(*rows)]).passed


def test_the_hint_about_rounding_is_one_that_helps():
    rounds = sine(
        forward=saving(jnp.sin, lambda x: x.astype(jnp.bfloat16)),
        backward=lambda ctx, dy: dy * jnp.cos(saved(ctx).astype(dy.dtype)),
    )
    rows, hints = failed(rounds, X, rows=["gradients"])
    assert rows == ["gradients"]
    assert "rtol=0.03, atol=0.03" in hints
    assert failed(rounds, X, rows=["gradients"], rtol=0.03, atol=0.03)[0] == []


class Terminal(io.StringIO):
    def isatty(self):
        return True


class Notebook(io.StringIO):
    __module__ = "ipykernel.iostream"


@pytest.mark.parametrize("kind", [Terminal, Notebook])
def test_a_person_sees_each_property_as_it_is_done(kind, monkeypatch):
    seen = []

    def sees(x):
        seen.append(out.getvalue())
        return Tanh.apply(x)

    monkeypatch.setattr(sys, "stderr", out := kind())
    check_layer(Tanh, X, skip=all_but("jit", "remat"))
    assert out.getvalue() == ""  # a test shows nothing
    monkeypatch.delenv("PYTEST_CURRENT_TEST")
    check_layer(sees, X, skip=all_but("jit", "remat"))
    assert [line.split()[1] for line in seen[-1].split("\r")[:-1]] == ["eager", "jit"]
    *lines, last, rest = out.getvalue().split("\r")
    assert lines[2].split()[1] == "remat"
    assert max(map(len, lines)) < 80
    assert not last.strip()  # what comes next stands in the place of the line
    assert not rest


def test_a_tuple_of_arguments_is_named():
    with pytest.raises(AssertionError, match="singly"):
        check_layer(Tanh, (X,))
    assert "singly" not in str(check_layer(layer(lambda ctx, xs: xs[0], lambda ctx, dy: ((dy,),)), (X,), raises=False))
