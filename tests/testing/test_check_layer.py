"""check_layer: which properties layers have, and that it rejects wrong rules by the right one."""

from __future__ import annotations

import io
import sys
import types

import jax
import jax.numpy as jnp
import pytest

from pylayer_jax import PyLayer, once_differentiable
from pylayer_jax.testing import check_layer, gradgradcheck
from pylayer_jax.testing._check_layer import PROPERTIES
from tests.kit.case import X
from tests.kit.layers import Multiply, Square, Tanh
from tests.kit.wrong_layers import (
    INDEX,
    WRONG,
    WRONG_IN_ONE_WAY,
    Clips,
    Holder,
    Log,
    OnHost,
    Picks,
    RefusesABatchOfIndices,
    Sine,
    SineBothWays,
    Takes,
    TanhBothWays,
    WrongSign,
    sine,
)

from .cases import CASE, on_host

KEY = jax.random.key(0)


def all_but(*names):
    """What to skip for a check of these properties alone."""
    return [name for name in PROPERTIES if name not in names]


MAPS = "vmap", "scan"
STAGED = ["jit", *MAPS, "cond", "remat", "shard_map", "not differentiated", "leaks"]
COMPLEX = jnp.array([1 + 2j, -0.5 + 0.3j])


QUICK = all_but("jit", "vmap", "gradients", "second order", "forward over reverse", "arguments", "cotangents", "linear")


@pytest.mark.parametrize("name", ["FreshStatics", "NoneForMissing", "MixedOutputs", "AskedLinear"])
def test_right_layers_have_every_property(name):
    report = check_layer(CASE[name].layer, *CASE[name].args)
    assert report.passed
    assert [row.name for row in report] == ["eager", *PROPERTIES]


@pytest.mark.parametrize("name", ["Trees", "OneTuple", "MarkedOutput", "Round", "InputReturned", "RouterLoss"])
def test_layers_are_right_beside_a_reference(name):
    case = CASE[name]
    report = check_layer(case.layer, *case.args, reference=case.reference, skip=QUICK)
    assert report["gradients"].message.startswith("as those of the reference; for other values (random sizes")


# Which properties fail, and what the first of them says.
FAILS = {
    "sign": (["gradients"], "numerically"),
    "one index": (["gradients"], r"at index \(1, 2\)"),
    "second order": (["second order"], "numerically"),
    "no second order": (["second order"], "numerically"),
    "dropped None": (["cotangents"], "with a cotangent for output 0 alone .* by backward of zeros for the others"),
    "dropped argument": (["arguments"], r"args\[0\] when args\[0\] alone is differentiated"),
    "leak": (["leaks"], "a tracer is leaked: "),
    "global": (["repeatable"], "when the layer ran on other values before backward"),
    "counter": (["repeatable"], "by another run"),
    "jit": (["jit"], r"args\[0\] (of|under) jit"),
    "conjugate": (["gradients"], r"args\[0\] at index \(\d,\), (real|imaginary) part"),
    "three times": (["gradients"], "by backward in float32, but .* numerically"),
    "nan": (["gradients"], "is nan by backward in float32"),
    "table": (["gradients"], "for other values .* numerically"),
    "no transposes": (["gradients"], r"for other values \(random sizes\): .* numerically"),
    "swapped": (["gradients"], r"for other values \(random sizes and signs\): .* numerically"),
    "swapped scalars": (["gradients"], r"for other values \(random sizes\): .* numerically"),
    "small values": (["gradients"], r"at index \(0,\) is .* wrong at 1 of 2 places"),
    "absolute": (["linear"], "with cotangents of the other sign .* by linearity"),
    "absolute scalar": (["linear"], "with cotangents of the other sign .* by linearity"),
    "clipped": (["linear"], "with cotangents 1048576 times as large .* by linearity"),
    "small units": (["gradients"], "is .*e-09 by backward, but .*e-09 numerically"),
}


@pytest.mark.parametrize("name", WRONG)
def test_check_layer_rejects(name):
    layer, _, args = WRONG[name]
    expected, message = FAILS[name]
    report = check_layer(layer, *args, raises=False, skip=[*STAGED[1:-1], "forward over reverse"])
    failed = [row.name for row in report if not row.passed]
    assert set(expected) <= set(failed)
    if name not in ("global", "counter", "jit", "nan", "table", "absolute", "absolute scalar"):  # wrong in several ways
        assert failed == expected
    with pytest.raises(AssertionError, match=message):
        raise AssertionError(report[expected[0]].message)


@pytest.mark.parametrize("name", ["sign", "second order"])
def test_check_layer_rejects_beside_a_reference(name):
    layer, reference, args = WRONG[name]
    with pytest.raises(AssertionError, match=f"✗ {FAILS[name][0][0]} .* by the reference"):
        check_layer(layer, *args, reference=reference, skip=all_but("gradients", "second order"))


@pytest.mark.parametrize("name", WRONG_IN_ONE_WAY)
def test_check_layer_rejects_what_is_wrong_in_one_way(name):
    layer, args, expected, message = WRONG_IN_ONE_WAY[name]
    report = check_layer(layer, *args, raises=False, skip=all_but("jit", "gradients", *expected))
    assert {row.name for row in report if not row.passed} == set(expected)
    with pytest.raises(AssertionError, match=message):
        raise AssertionError(report[expected[0]].message)


@on_host
def test_what_cannot_be_tested_has_not_passed():
    report = check_layer(OnHost, X, raises=False)
    failed = [row.name for row in report if not row.passed]
    assert failed == STAGED
    assert "TracerArrayConversionError" in report["jit"].message
    assert "OnHost.forward" in report["vmap"].message
    assert check_layer(OnHost, X, skip=failed).passed


RULED = jax.custom_vjp(jnp.sin)
RULED.defvjp(lambda x: (jnp.sin(x), x), lambda x, dy: (dy * jnp.cos(x),))
PICKED = X[0], INDEX, jnp.array(True)
CLIPPED = CASE["ClippedReversal"]


def closures():
    weights = {"w": jnp.float32(3)}
    traced = lambda x, holder: Tanh.apply(x) * holder.w * weights["w"]  # noqa: E731
    return traced, lambda x: Tanh.apply(x) * float(weights["w"])


TRACED, CONCRETE = closures()


class KeepsAnObject(PyLayer):
    """Right; the object may hold a constant of a trace."""

    @staticmethod
    def forward(ctx, x, holder):
        ctx.holder = holder
        return x * holder.w

    @staticmethod
    def backward(ctx, dy):
        return dy * ctx.holder.w


# The property, the layer, its arguments, and what a report of that property says.
SAYS = [
    *((name, Picks, (*PICKED, KEY), "3 examples, with args[1], args[2], args[3] mapped too") for name in MAPS),
    ("vmap", Picks, (*PICKED, jax.random.key(0, impl="rbg")), "with args[1], args[2] mapped too"),
    ("vmap", lambda *xs: Multiply.apply(xs[0], sum(xs)), [X] * 5, "3 examples, 15 of 31 choices of what is mapped"),
    ("vmap", Takes, (X[0], jnp.int32(2)), "with args[1] mapped too"),
    ("vmap", RefusesABatchOfIndices, PICKED[:2], "too (NotImplementedError: one index for all)"),
    ("scan", RefusesABatchOfIndices, PICKED[:2], "3 examples, with args[1] mapped too"),
    (
        "scan",
        lambda x, n: Tanh.apply(x).sum(int(n)),
        (X, jnp.int32(1)),
        "; none with args[1] mapped too (ConcretizationTypeError: ",
    ),
    ("shard_map", Multiply, (jax.device_put(X, jax.devices()[1]), X), "on each of 4 devices"),
    ("forward mode", CASE["Trees"].layer, CASE["Trees"].args, "there is none: Trees defines backward alone"),
    ("forward over reverse", CASE["Trees"].layer, CASE["Trees"].args, " places, under jit"),
    ("forward mode", RULED, (X,), "there is none: a jax.custom_vjp function defines backward alone"),
    ("forward mode", SineBothWays, (jnp.ones((50, 10)),), "as reverse mode at 200 places"),
    ("forward mode", lambda z: (Square.apply(z), jnp.abs(z)), (COMPLEX,), "as reverse mode at 2 places"),
    ("forward over reverse", lambda z: (Square.apply(z), jnp.abs(z)), (COMPLEX,), " places, under jit"),
    ("forward over reverse", CLIPPED.layer, CLIPPED.args, "there is none: "),
    ("forward over reverse", Clips, (X,), "there is none: Clips.backward is not linear"),
    ("linear", Tanh, (X,), "proved, and as measured with 5 kinds of cotangents"),
    (
        "linear",
        sine(backward=lambda ctx, dy: jnp.maximum(*[Sine.backward(ctx, dy)] * 2)),
        (X,),
        "as measured with 5 kinds of cotangents; not proved: it has the operation 'max'",
    ),
    ("not differentiated", TRACED, (X, Holder(jnp.float32(2))), ", with 2 tensors in objects or functions too"),
    ("not differentiated", CONCRETE, (X,), "; 1 tensor in objects or functions cannot be traced"),
    ("leaks", lambda x: KeepsAnObject.apply(x, Holder(jnp.tanh(jax.lax.stop_gradient(x)))), (X,), "none under jit"),
    ("arguments", Tanh, (X,), "1 of 1 is differentiable"),
    ("arguments", lambda x, n, how: Tanh.apply(x), (X, jnp.arange(3), "text"), "1 of 3 is differentiable"),
    ("arguments", lambda t: Multiply.apply(*t), ((X, X),), "1 of 1 is differentiable, with 2 arrays; each has the"),
    ("arguments", lambda t, x: Multiply.apply(*t) + x, ((X, X), X), "2 of 2 are differentiable, with 3 arrays; each"),
]


@pytest.mark.parametrize(("name", "layer", "args", "message"), SAYS, ids=[f"{row[0]}: {row[3][:30]}" for row in SAYS])
def test_a_property_says_how_far_it_was_tested(name, layer, args, message):
    assert message in check_layer(layer, *args, skip=all_but(name))[name].message


def only_where(condition):
    """A right layer for some values."""

    def run(x):
        if not condition(x):
            raise ValueError("no others")
        return Tanh.apply(x)

    return run


SIGNS = jnp.array([1.0, -1] * 4)

# The layer, its argument, and what a report says of other values.
OTHER_VALUES = {
    "both signs": (Tanh, X, "(random sizes and signs)"),
    "positive": (Log, jnp.array([1e-3, 2.0]), "(random sizes)"),
    "a scalar": (Tanh, X[0, 0], "(random sizes)"),
    "zeros": (Tanh, jnp.zeros(3), "(random sizes and signs)"),
    "complex": (Square, COMPLEX, "(random sizes and signs)"),
    "signs matter": (lambda x: jnp.log(Tanh.apply(x * SIGNS)), SIGNS, "(random sizes)"),
    "at most one": (lambda x: jnp.arcsin(Multiply.apply(x, x)), jnp.full(9, 0.99), "(random sizes)"),
    "at least one": (lambda x: jnp.arccosh(Multiply.apply(x, x)), jnp.full(9, 1.05), "(larger sizes)"),
    "sorted": (only_where(lambda x: jnp.all(jnp.diff(x) > 0)), jnp.linspace(-2.0, 3, 9), "(random sizes and signs)"),
    "falling": (only_where(lambda x: jnp.all(jnp.diff(x) < 0)), jnp.linspace(3.0, 0, 9), "(random sizes)"),
    "positive definite": (
        lambda a: jnp.linalg.cholesky(Multiply.apply(a, a)),
        jnp.full((4, 4), 0.99) + 0.02 * jnp.eye(4),
        "(0.7391 times the given ones)",
    ),
    "refused": (only_where(lambda x: abs(x[0] - 2) < 0.01), jnp.array([2.0, -3]), "tried (ValueError: no others)"),
    "nan": (lambda x: jnp.sqrt(Tanh.apply(1e-3 - (x - 1) ** 2)), jnp.ones(3), "(it has results that are not finite)"),
}


@pytest.mark.parametrize("name", OTHER_VALUES)
def test_other_values_are_in_the_domain_that_the_given_ones_show(name):
    layer, x, message = OTHER_VALUES[name]
    report = check_layer(layer, x, skip=all_but("gradients"), raises=False)
    assert report.passed
    assert message in report["gradients"].message


@pytest.mark.parametrize(("layer", "reference"), [(SineBothWays, jnp.sin), (TanhBothWays, jnp.tanh)])
def test_forward_mode_is_compared_where_there_is_one(layer, reference):
    report = check_layer(layer, X, reference=reference, skip=all_but("forward mode", "forward over reverse"))
    assert report["forward mode"].message == "as reverse mode at 6 places, under jit, of vmap, and as of the reference"
    assert report["forward over reverse"].message.endswith("12 places, under jit; so is forward over forward")


def test_forward_mode_beside_a_reference():
    report = check_layer(SineBothWays, X, reference=jnp.cos, skip=all_but("forward mode"), raises=False)
    assert "the tangent of output 0 by jax.jvp at index" in report["forward mode"].message
    assert "by the reference" in report["forward mode"].message
    report = check_layer(SineBothWays, X, reference=RULED, skip=all_but("forward mode"))
    assert report["forward mode"].message == "as reverse mode at 6 places, under jit, of vmap"


def test_shard_map_takes_the_mesh_that_is_set():
    mesh = jax.make_mesh((2,), ("i",), devices=jax.devices()[:2])
    with jax.set_mesh(mesh):
        report = check_layer(Tanh, X, skip=all_but("shard_map"))
    assert "on each of 2 devices" in report["shard_map"].message


def test_numerical_gradients_in_the_dtypes_given():
    def narrow(x):  # within which float64 is lost
        return Tanh.apply(x.astype(jnp.float32)).astype(x.dtype)

    assert not check_layer(narrow, X, skip=all_but("gradients"), raises=False).passed
    assert check_layer(narrow, X, skip=all_but("gradients"), float64=False).passed


def test_once_differentiable_says_so():
    layer, skip = sine(backward=once_differentiable(Sine.backward)), all_but("gradients", "second order")
    with pytest.raises(AssertionError, match=r"✗ second order +RuntimeError: .*once_differentiable") as caught:
        check_layer(layer, X, skip=skip)
    last = str(caught.value).splitlines()[-1]
    assert last == "Is the layer meant to have no second derivative? Then pass skip=['second order']."
    assert check_layer(layer, X, skip=["second order", *skip]).passed


def test_a_layer_that_does_not_run_has_one_row():
    report = check_layer(Tanh, X, X, raises=False)
    assert [(row.name, row.passed) for row in report] == [("eager", False)]
    assert "TypeError: Tanh.apply: " in str(report)


def test_a_layer_that_cannot_be_differentiated_has_a_report():
    def fails(ctx, x):
        if any(ctx.needs_input_grad):
            raise NotImplementedError("not in this dtype")
        return Sine.forward(ctx, x)

    report = check_layer(sine(forward=fails), X, raises=False)
    assert [(row.name, row.passed) for row in report] == [("eager", False)]


def test_a_layer_that_communicates_has_another_check():
    report = check_layer(sine(forward=lambda ctx, x: jax.lax.psum(x, "model")), X, raises=False)
    assert "Does the layer communicate between devices?" in report.hints()[0]
    assert "pylayer_jax.testing.check_parallel(Layer, reference," in report.hints()[0]


class Terminal(io.StringIO):
    encoding = "ascii"

    def isatty(self):
        return True


class Notebook(io.StringIO):
    __module__ = "ipykernel.iostream"


def test_a_person_sees_each_property_as_it_is_done(monkeypatch, capsys):
    seen = []

    def sees(x):
        seen.append(out.getvalue())
        return Tanh.apply(x)

    check_layer(Tanh, X, skip=all_but("jit", "saved"))
    monkeypatch.setattr(sys, "stdout", out := Terminal())
    check_layer(Tanh, X, skip=all_but("jit", "saved"))
    monkeypatch.delenv("PYTEST_CURRENT_TEST")
    monkeypatch.setenv("TERM", "xterm")
    check_layer(sees, X, skip=all_but("jit", "saved"))
    eager, jit, saved = seen[-1].splitlines() + out.getvalue().splitlines()[2:3]
    assert (eager[:7], jit[:5], saved[:7]) == ("? eager", "? jit", "? saved")
    assert max(map(len, (eager, jit, saved))) < 80
    assert out.getvalue().endswith("\n\x1b[3A\x1b[J")  # what comes next stands in the place of these lines
    monkeypatch.undo()
    assert capsys.readouterr().out == ""


def test_a_notebook_shows_each_property_as_it_is_done(monkeypatch):
    shown = []

    class Handle:
        def update(self, data, raw):
            shown.append(data["text/plain"])

    display = types.SimpleNamespace(display=lambda data, raw, display_id: Handle())
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    monkeypatch.setattr(sys, "stdout", Notebook())
    monkeypatch.delenv("PYTEST_CURRENT_TEST")
    check_layer(Tanh, X, skip=all_but("jit", "saved"))
    assert [len(text.splitlines()) for text in shown] == [1, 2, 3, 0]


def test_the_report_is_a_line_per_property():
    lines = str(check_layer(Multiply, X, 2 * X, skip=all_but("jit", "saved"))).splitlines()
    assert lines[0] == "Multiply"
    assert lines[1].split() == ["✓", "eager", "returns", "float32[2,3];", "gradients", "of", "args[0],", "args[1]"]
    assert all(line.startswith("✓ ") for line in lines[1:])
    assert lines[-1].split() == ["✓", "saved", "2", "arrays,", "48", "bytes:", "float32[2,3],", "float32[2,3]"]
    with pytest.raises(AssertionError, match=r"check_layer of WrongSign\n✓ eager .*\n(.*\n)*✗ gradients "):
        check_layer(WrongSign, X, skip=all_but("gradients"))
    skipped = all_but("jit", "gradients")
    assert repr(check_layer(Tanh, X, skip=skipped)) == "<LayerReport of Tanh: 3 properties, passed>"
    failed = check_layer(WrongSign, X, skip=skipped, raises=False)
    assert repr(failed) == "<LayerReport of WrongSign: 3 properties, failed: gradients>"
    with pytest.raises(ValueError, match=r"skip=\['speed'\]: expected names among jit, vmap"):
        check_layer(Tanh, X, skip=["speed"])


def test_a_wrong_gradient_says_how_a_meant_one_is_declared():
    case = CASE["Round"]
    with pytest.raises(AssertionError) as caught:
        check_layer(case.layer, *case.args, skip=all_but("gradients", "second order"))
    first, second, third = str(caught.value).splitlines()[-3:]
    assert first.startswith("Is backward meant to give another gradient (straight-through, reversed, clipped)?")
    assert f"{first} {second}".endswith(
        "Then pass reference=FUNCTION: plain JAX with the meant gradient, as in lambda x: x + "
        "jax.lax.stop_gradient(jnp.round(x) - x); or skip=['gradients']."
    )
    assert "pass float64=False, or tolerances that allow for it, as in rtol=0.03, atol=0.03." in third
    check_layer(case.layer, *case.args, skip=all_but("second order", "jit"))
    # Beside a reference, or where another property fails, there is nothing to declare.
    args = {"skip": all_but("gradients", "jit"), "raises": False}
    assert "meant" not in str(check_layer(WrongSign, X, reference=jnp.sin, **args))
    assert "meant" not in str(check_layer(WRONG["jit"][0], *WRONG["jit"][2], skip=all_but("jit"), raises=False))
    # A product without transposes is right for symmetric matrices.
    args = {"skip": all_but("gradients"), "raises": False}
    assert "as symmetric matrices, or" in str(
        check_layer(WRONG["no transposes"][0], *WRONG["no transposes"][2], **args)
    )


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.int8])
def test_the_hint_about_rounding_is_one_that_helps(dtype):
    class Rounds(PyLayer):
        @staticmethod
        def forward(ctx, x):
            scale = jnp.max(jnp.abs(x)) / 127 if dtype == jnp.int8 else jnp.ones((), x.dtype)
            ctx.save_for_backward((x / scale + 0.5 * (dtype == jnp.int8)).astype(dtype), scale)
            return jnp.sin(x)

        @staticmethod
        def backward(ctx, dy):
            rounded, scale = ctx.saved_tensors
            return dy * jnp.cos(rounded.astype(dy.dtype) * scale)

    skip = all_but("gradients", "second order")
    report = check_layer(Rounds, X, skip=skip, raises=False)
    hint = str(report).splitlines()[-1]
    assert f"It saves {jnp.dtype(dtype).name}. Is that rounding meant? Then pass rtol=0.03, atol=0.03" in hint
    skip += ["second order"] if hint.endswith("; and skip=['second order'].") else []
    assert check_layer(Rounds, X, skip=skip, rtol=0.03, atol=0.03).passed


def test_a_backward_that_is_not_linear_may_be_meant():
    clipped, args = WRONG["clipped"][0], WRONG["clipped"][2]
    report = check_layer(clipped, *args, skip=all_but("linear", "gradients"), raises=False)
    assert not report["linear"].passed
    hint = "Is backward meant not to be linear in its cotangents (clipped, normalized)? Then pass skip=['linear']."
    assert str(report).splitlines()[-1] == hint
    assert check_layer(clipped, *args, skip=all_but("gradients")).passed
    report = check_layer(CLIPPED.layer, *CLIPPED.args, reference=CLIPPED.reference, skip=all_but("linear"))
    assert report["linear"].message.startswith("it is not, as that of the reference: ")


# Layers as people write them, away from numbers of size one, all of which are right.
RIGHT = {
    "bfloat16": (Tanh, (X.astype(jnp.bfloat16),)),
    "bfloat16 and float32": (lambda x, w: Multiply.apply(x, w.astype(x.dtype)), (X.astype(jnp.bfloat16), X)),
    "jitted": (jax.jit(Tanh.apply), (X,)),
    "softmax in float16": (lambda x: jax.nn.softmax(Tanh.apply(x)), (X.astype(jnp.float16),)),
    "large": (Multiply, (X * 1e6, X * 1e6)),
    "large and small": (Multiply, (X * 1e6, X * 1e-9)),
    "large sum": (lambda x: Tanh.apply(x) + 1e6, (X,)),
    "small": (Tanh, (X * 1e-9,)),
    "small scale": (lambda x: Tanh.apply(x * 1e9), (X * 1e-9,)),
    "small shift": (lambda x: Tanh.apply(x + 1), (X * 1e-9,)),
    "cancels": (lambda x: jax.nn.softmax(Tanh.apply(x)).sum(-1), (X,)),
    "centred": (lambda x: Tanh.apply(x - x.mean()), (jnp.full(4, 0.3),)),
    "one of each": (lambda x, index, flag, key: Picks.apply(x, index, flag, key) * 3, (X[0], INDEX, True, KEY)),
    "dropout": (lambda x, key: jnp.where(jax.random.bernoulli(key, 0.5, x.shape), Tanh.apply(x), 0), (X, KEY)),
    "domain": (lambda x: jnp.arccosh(Multiply.apply(x, x)), (1.2 + jnp.abs(X),)),
    "kinks": (lambda x: jnp.clip(jax.nn.relu(Tanh.apply(x)), 0.1, 0.5), (X,)),
    "small and large": (Log, (jnp.array([1e-3, 2, 1e3]),)),
    "zeros": (Multiply, (jnp.zeros(3), jnp.ones(3))),
    "complex": (lambda z: Multiply.apply(z, jnp.exp(z)), (COMPLEX,)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", RIGHT)
def test_right_layers_of_every_scale_are_accepted(name):
    function, args = RIGHT[name]
    # What has a scale of its own: the comparison with eager mode, with the other mode, and with numbers.
    assert check_layer(function, *args, skip=all_but("jit", "vmap", "linear", "forward mode")).passed
    gradgradcheck(jax.jit(getattr(function, "apply", function)), args)  # in eager mode each operation is a program


def test_keywords_are_arguments():
    def scaled(x, *, factor, how):
        assert how == "twice"
        return Tanh.apply(2 * x) * factor["f"]

    keywords = {"factor": {"f": jnp.float32(3)}, "how": "twice"}
    report = check_layer(scaled, X, kwargs=keywords, skip=all_but("jit", "gradients", "arguments", "repeatable"))
    assert report["eager"].message == "returns float32[2,3]; gradients of args[0], factor['f']"
    assert report["arguments"].message == "2 of 3 are differentiable; each has the same gradient alone"
    reference = lambda x, *, factor, how: jnp.tanh(2 * x) * factor["f"]  # noqa: E731
    assert check_layer(scaled, X, kwargs=keywords, reference=reference, skip=all_but("gradients")).passed
    wrong = check_layer(
        lambda x, *, y: WrongSign.apply(y) * x, X, kwargs={"y": X}, skip=all_but("gradients"), raises=False
    )
    assert "the gradient of y at index" in wrong["gradients"].message
    with pytest.raises(TypeError, match="expected a layer or a function, got 3"):
        check_layer(3, kwargs={"x": X})
