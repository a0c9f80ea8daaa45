"""saved_tensors_report: what each application of a layer keeps."""

from __future__ import annotations

import contextlib
import types

import jax
import jax.numpy as jnp
import pytest

from pylayer_jax import Function, PyLayer, saved_tensors_hooks, saved_tensors_report
from pylayer_jax.packers import cast_saved
from tests.kit.layers import Multiply, Tanh

X = jnp.ones((8, 4))
W = jnp.ones((4, 4))

SIZE = 8 * 4 * 4  # bytes of X


class Mixed(PyLayer):
    """An input, a pytree, a static and attributes."""

    @staticmethod
    def forward(ctx, a, b, key=None):
        ctx.save_for_backward(a, {"b": b}, 3)
        ctx.scale, ctx.key, ctx.factor = jnp.sin(a), key, 2.0
        return a * b

    @staticmethod
    def backward(ctx, dy):
        a, tree, _ = ctx.saved_tensor()
        return dy * tree["b"], dy * a, None


class ForwardTanh(Tanh):
    forward_mode = True


def listed(report):
    return [(r.layer, r.name, r.shape, r.times, r.bytes, r.note) for r in report.rows]


def test_one_row_per_tensor():
    def loss(w, x):
        y = Tanh.apply(x @ w)
        return Mixed.apply(y, jnp.cos(y), jax.random.key(0)).sum()

    report = saved_tensors_report(loss, W, X)
    assert listed(report) == [
        ("Tanh", "saved[0]", (8, 4), 1, SIZE, ""),
        ("Mixed", "saved[0]", (8, 4), 1, 0, "the same as Tanh 0, saved[0]"),
        ("Mixed", "saved[1]['b']", (8, 4), 1, SIZE, ""),
        ("Mixed", "ctx.scale", (8, 4), 1, SIZE, ""),
        ("Mixed", "ctx.key", (), 1, 8, ""),
    ]
    assert [r.application for r in report.rows] == [0, 1, 1, 1, 1]
    assert {r.dtype for r in report.rows} == {"float32", "key<fry>"}
    assert all(r.source.startswith("test_report.py:") for r in report.rows)
    assert report.rows[0].source != report.rows[1].source
    assert report.total_bytes == report.total_packed_bytes == 3 * SIZE + 8


def test_where_apply_itself_is_transformed():
    hooked = cast_saved()(Tanh.apply)
    f = lambda x: jax.vmap(Tanh.apply)(jax.checkpoint(Tanh.apply)(hooked(x) * 2)).sum()  # noqa: E731
    for report in (saved_tensors_report(f, X), saved_tensors_report(Tanh.apply, X), saved_tensors_report(Tanh, X)):
        assert report.rows
        assert all(r.source.startswith("test_report.py:") for r in report.rows)


def test_an_argument_is_told():
    report = saved_tensors_report(lambda x: Multiply.apply(x, x + 1).sum(), X)
    assert [r.note for r in report.rows] == ["an argument of the function", ""]


def _scanned(f):
    return lambda x: jax.lax.scan(lambda c, _: (jnp.sin(f(c)), None), x, None, length=5)[0]


@pytest.mark.parametrize("layer", [Tanh, ForwardTanh], ids=["custom_vjp", "forward mode"])
@pytest.mark.parametrize(
    ("around", "times", "shape", "counted"),
    [
        (lambda f: f, 1, (8, 4), SIZE),
        (jax.jit, 1, (8, 4), SIZE),
        (jax.vmap, 1, (8, 4), SIZE),
        (lambda f: jax.jit(jax.vmap(f, 1)), 1, None, SIZE),
        (
            lambda f: lambda x: jax.lax.scan(lambda c, _: (jnp.sin(f(c)), None), x, None, length=5)[0],
            5,
            (8, 4),
            5 * SIZE,
        ),
        (lambda f: lambda x: jax.lax.cond(x.sum() > 0, f, jnp.sin, x), 1, (8, 4), SIZE),
        (lambda f: jax.checkpoint(lambda x: f(x) * 2), 1, (8, 4), 0),
        (lambda f: lambda x: (lambda g: g(g(x)))(jax.jit(f)), 2, (8, 4), 2 * SIZE),
    ],
    ids=["plain", "jit", "vmap", "jit of vmap", "scan", "cond", "checkpoint", "jit twice"],
)
def test_under_transforms(layer, around, times, shape, counted):
    def model(x):
        return around(lambda v: layer.apply(v * 2))(x).sum()

    jax.grad(model)(X)  # what JAX has traced before is traced anew
    report = saved_tensors_report(model, X)
    (row,) = report.rows
    assert row.times == times
    assert sorted(row.shape) == [4, 8] if shape is None else row.shape == shape
    assert row.bytes == counted
    assert row.source.startswith("test_report.py:")
    assert bool(row.note) == (counted == 0)
    assert saved_tensors_report(jax.jit(model), X).total_bytes == counted


def test_what_a_policy_saves_is_counted():
    policies = jax.checkpoint_policies

    class NamedTanh(Tanh):
        saved_names = ("y",)

    def bytes_under(policy):
        return saved_tensors_report(
            jax.checkpoint(lambda x: NamedTanh.apply(x * 2).sum(), policy=policy), X
        ).total_bytes

    if getattr(jax.config, "jax_remat3", False):
        pytest.skip("JAX_REMAT3 makes residuals another way")
    assert bytes_under(policies.save_only_these_names("y")) == SIZE
    assert bytes_under(policies.save_only_these_names("NamedTanh.saved[0]")) == 0


@pytest.mark.parametrize("hooks", [contextlib.nullcontext, cast_saved])
def test_a_tensor_is_listed_by_its_name_in_saved_names(hooks):
    class Named(Mixed):
        saved_names = ("left", "rest", None)

    class NamedInPart(Mixed):
        saved_names = (None, "rest", None)

    class NamedByPlace(Mixed):
        saved_names = True

    def names(layer):
        with hooks():
            report = saved_tensors_report(lambda x: layer.apply(x * 2, x * 3).sum(), X)
        return [row.name for row in report.rows]

    assert names(Named) == ["left", "rest['b']", "ctx.scale"]
    assert names(NamedInPart) == ["saved[0]", "rest['b']", "ctx.scale"]
    assert names(NamedByPlace) == names(Mixed) == ["saved[0]", "saved[1]['b']", "ctx.scale"]


def test_packed_bytes_under_the_hooks_that_are_active():
    def loss(x):
        return jax.vmap(Tanh.apply)(Tanh.apply(x * 2)).sum()

    with cast_saved(jnp.bfloat16):
        report = saved_tensors_report(loss, X)
    assert [(r.bytes, r.packed_bytes) for r in report.rows] == [(SIZE, SIZE // 2)] * 2
    assert (report.total_bytes, report.total_packed_bytes) == (2 * SIZE, SIZE)
    assert f"{2 * SIZE:,} bytes are saved for backward, {SIZE:,} as they are packed" in str(report)
    inside = saved_tensors_hooks(lambda x: {"real": x}, lambda packed: packed["real"])
    assert saved_tensors_report(inside(lambda x: Tanh.apply(x * 2).sum()), X).total_packed_bytes == SIZE
    assert saved_tensors_report(loss, X).total_packed_bytes == 2 * SIZE


def test_types_alone_and_keywords_and_statics():
    def loss(tree, mode, *, scale):
        assert mode == "text"
        return Tanh.apply(tree["x"] * scale).sum(), "static"

    report = saved_tensors_report(
        loss, {"x": jax.ShapeDtypeStruct((8, 4), jnp.float32)}, "text", scale=jnp.float32(2.0)
    )
    assert report.total_bytes == SIZE


def test_nothing_is_saved_where_nothing_is_differentiated():
    assert saved_tensors_report(lambda x: Tanh.apply(jax.lax.stop_gradient(x)).sum(), X).total_bytes == 0
    assert saved_tensors_report(lambda x: x.sum(), X).rows == []
    with pytest.raises(TypeError, match="none of the arguments holds a float array"):
        saved_tensors_report(lambda n: n, 3)


def test_a_report_leaves_nothing_behind():
    step = jax.jit(jax.grad(lambda x: Tanh.apply(x * 2).sum()))
    before = step.lower(X).as_text()
    saved_tensors_report(lambda x: step(x).sum(), X)
    assert step.lower(X).as_text() == before
    assert "saved_tensors_report" not in str(jax.make_jaxpr(step)(X))


def test_with_a_function_and_its_own_error():
    class Scaled(Function):
        @staticmethod
        def forward(x, factor):
            return x * factor

        @staticmethod
        def setup_context(ctx, inputs, output):
            ctx.save_for_backward(*inputs)

        @staticmethod
        def backward(ctx, dy):
            x, factor = ctx.saved_tensors
            return dy * factor, (dy * x).sum()

    report = saved_tensors_report(lambda x, f: Scaled.apply(x * 2, f * 2).sum(), X, jnp.float32(3.0))
    assert [(r.layer, r.name, r.bytes) for r in report.rows] == [
        ("Scaled", "saved[0]", SIZE),
        ("Scaled", "saved[1]", 4),
    ]
    with pytest.raises(ZeroDivisionError):
        saved_tensors_report(lambda x: x / 0 if 1 / 0 else x, X)


def test_as_text_and_as_html():
    report = saved_tensors_report(lambda x: Mixed.apply(x * 2, x * 3).sum(), X)
    lines = str(report).splitlines()
    assert lines[0].split() == ["layer", "saved", "type", "times", "bytes", "where"]
    assert lines[1].split()[:5] == ["Mixed", "saved[0]", "float32[8,4]", "1", "128"]
    assert lines[-1] == "384 bytes are saved for backward, in 1 application of layers."
    assert repr(report) == f"<SavedTensorsReport: {lines[-1]}>"
    shown = types.SimpleNamespace(text=lambda text: lines.append(text))  # the printer of IPython
    report._repr_pretty_(shown, False)
    assert lines[-1] == str(report)
    page = report._repr_html_()
    assert "<td>saved[1][&#x27;b&#x27;]</td>" in page
    assert page.count("<tr>") == 4
    assert "packed" not in page


def test_sizes_after_packing_have_a_column_where_something_is_packed():
    with cast_saved():
        report = saved_tensors_report(lambda x: Mixed.apply(x * 2, x * 3).sum(), X)
    lines = str(report).splitlines()
    assert lines[0].split() == ["layer", "saved", "type", "times", "bytes", "packed", "where"]
    assert [line.split()[4:6] for line in lines[1:4]] == [["128", "64"], ["128", "64"], ["128", "128"]]
    assert "<th>bytes</th><th>packed</th><th>where</th>" in report._repr_html_()


def test_plot():
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    with cast_saved():
        report = saved_tensors_report(lambda x: Mixed.apply(Tanh.apply(x * 2), x * 3).sum(), X)
    ax = report.plot()
    assert [t.get_text() for t in ax.get_yticklabels()] == ["Tanh 0", "Mixed 1"]
    assert [bar.get_width() for bar in ax.patches] == [128, 256, 64, 192]
    assert report.plot(ax) is ax
