"""saved_tensors_report: its rows, its totals, and what is printed and drawn of them."""

import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

from pylayer_jax import saved_tensors_hooks, saved_tensors_report
from pylayer_jax.packers import by_name, cast_saved, quantize_saved, save_on_cpu, save_on_disk
from tests.hooks.spy import bytes_held, noting
from tests.kit.layers import ForwardTanh, Multiply, Square, Tanh, layer
from tests.kit.modes import EAGER_AND_JIT

X = jnp.ones((8, 4))
W = jnp.ones((4, 4))

SIZE = 8 * 4 * 4  # bytes of X


def forward_of_mixed(ctx, a, b, key=None):
    ctx.save_for_backward(a, {"b": b}, 3)
    ctx.scale, ctx.key, ctx.factor = jnp.sin(a), key, 2.0
    return a * b


# Keeps an input, a pytree, a static and attributes.
Mixed = layer(
    forward_of_mixed,
    lambda ctx, dy: (dy * ctx.saved_tensors[1]["b"], dy * ctx.saved_tensors[0] + 0 * ctx.scale),
    name="Mixed",
)


def layer_rows(report):
    return [r for r in report.rows if r.layer]


def test_layers_operations_and_inputs_have_rows():
    def loss(tree, x):
        y = Tanh.apply(x @ tree["w"])
        return Mixed.apply(y, jnp.exp(y), jax.random.key(0)).sum()

    report = saved_tensors_report(loss, {"w": W}, X)
    assert sorted((r.layer or r.kind, r.name, r.shape, r.times, r.bytes, r.note) for r in report.rows) == [
        ("Mixed", "ctx.key", (), 1, 8, ""),
        ("Mixed", "ctx.scale", (8, 4), 1, SIZE, ""),
        ("Mixed", "saved[1]['b']", (8, 4), 1, SIZE, ""),
        ("Tanh", "saved[0]", (8, 4), 1, SIZE, "also Mixed, saved[0]"),
        ("input", "args[0]['w']", (4, 4), 1, W.nbytes, ""),
        ("input", "args[1]", (8, 4), 1, SIZE, ""),
    ]
    assert {r.dtype for r in report.rows} == {"float32", "key<fry>"}
    lines = {r.source for r in report.rows if r.layer}
    assert len(lines) == 2
    assert all(line.startswith("test_report.py:") for line in lines)
    assert report.total_bytes == report.total_unpacked_bytes == 3 * SIZE + 8
    assert report.input_bytes == SIZE + W.nbytes
    assert "2 inputs" in str(report)


def test_the_rows_of_plain_operations():
    def loss(x):
        return jnp.sum(jnp.where(x > 0, jnp.sin(x) ** 2, 3.0))

    for around, dtypes in ((lambda f: f, {"sin": "float32", "gt": "bool"}), (cast_saved(), {"sin": "float32"})):
        operations = {r.name: r for r in saved_tensors_report(around(loss), X).rows if r.kind == "operation"}
        assert dtypes.items() <= {name: row.dtype for name, row in operations.items()}.items()
        assert {r.source for r in operations.values()} == {f"test_report.py:{loss.__code__.co_firstlineno + 1}"}


def test_an_input_is_told_apart_from_its_copy():
    def loss(x):
        return Multiply.apply(x, jnp.sin(x)).sum()

    report = saved_tensors_report(loss, X)
    assert {(r.kind, r.layer, r.note) for r in report.rows} == {
        ("layer", "Multiply", ""),
        ("operation", "", ""),
        ("input", "Multiply", "the input args[0]"),
    }
    # A ready pair does not pack values that come into the block from outside.
    assert saved_tensors_report(cast_saved()(loss), X).input_bytes == SIZE
    assert saved_tensors_report(cast_saved(arguments=True)(loss), X).input_bytes == 0
    for made in (Multiply, layer(base=Multiply, saved_names=("a", "b"))):
        report = saved_tensors_report(lambda a, b, made=made: made.apply(a, b).sum(), X, X)
        assert (report.total_bytes, report.input_bytes) == (0, 2 * SIZE)


@EAGER_AND_JIT
def test_rows_have_the_names_that_are_keys_of_by_name(mode):
    def loss(x):
        h = checkpoint_name(x @ W, "product").T
        return jnp.sum(jnp.exp(h) * Multiply.apply(Square.apply(h), jnp.tanh(h) * 3.0))

    rows = [r for r in saved_tensors_report(loss, X).rows if r.kind in ("layer", "operation")]
    names = {r.layer for r in rows} | {r.name for r in rows}
    assert names >= {"product", "Square", "tanh", "exp"}
    for name in {"Multiply", "mul", *names} - {""}:
        kept = []
        mode(jax.grad(by_name({name: noting(kept), ...: None})(loss)))(X)
        assert kept


@pytest.mark.parametrize("around", [lambda f: f, cast_saved()], ids=["plain", "block"])
@pytest.mark.parametrize(
    ("saved_names", "listed"),
    [
        (("left", "rest", None), ["left", "rest['b']"]),
        ((None, "rest", None), ["saved[0]", "rest['b']"]),
        (True, ["saved[0]", "saved[1]['b']"]),
        ((), ["saved[0]", "saved[1]['b']"]),
    ],
)
def test_a_tensor_is_listed_by_its_name_in_saved_names(saved_names, listed, around):
    named = layer(base=Mixed, saved_names=saved_names)
    report = saved_tensors_report(around(lambda x: named.apply(jnp.sin(x), jnp.exp(x)).sum()), X)
    assert {r.name.removeprefix("Made.") for r in layer_rows(report)} == {*listed, "ctx.scale"}


def test_what_a_branch_or_an_iteration_packs_has_its_own_name():
    def branches(x):
        return jax.lax.cond(x.sum() > 0, lambda x: jnp.tanh(x @ W), lambda x: -x, jnp.sin(x))

    def nested(x):
        rows = lambda x: jax.lax.map(lambda row: jnp.tanh(row @ W), x)
        return jax.lax.scan(lambda x, _: (rows(x), None), jnp.sin(x), None, length=2)[0]

    for function, shape, times in ((branches, (8, 4), 1), (nested, (4,), 16)):
        report = saved_tensors_report(cast_saved()(lambda x, f=function: jnp.sum(f(x))), X)
        (row,) = [r for r in report.rows if r.name == "tanh" and r.packed_bytes]
        assert (row.shape, row.times, row.bytes) == (shape, times, 2 * row.packed_bytes)
        assert row.bytes == times * jnp.zeros(shape).nbytes
        assert report.total_bytes < report.total_unpacked_bytes
        assert "packed" in str(report)


def test_types_alone_and_keywords_and_statics():
    def loss(tree, mode, *, scale):
        assert mode == "text"
        return Tanh.apply(jnp.sin(tree["x"] * scale)).sum(), "static"

    tree = {"x": jax.ShapeDtypeStruct((8, 4), jnp.float32)}
    report = saved_tensors_report(loss, tree, "text", scale=jnp.float32(2.0))
    assert {r.name for r in report.rows} == {"saved[0]", "sin", "args[0]['x']", "kwargs['scale']"}
    assert report.total_bytes == 2 * SIZE


def test_nothing_is_saved_where_nothing_is_differentiated():
    assert saved_tensors_report(lambda x: Tanh.apply(jax.lax.stop_gradient(x)).sum(), X).total_bytes == 0
    report = saved_tensors_report(lambda x: x.sum(), X)
    assert (report.rows, report.total_bytes) == ([], 0)
    assert saved_tensors_report(Tanh, X).total_bytes == X.nbytes
    with pytest.raises(TypeError, match="float"):
        saved_tensors_report(lambda n: n, 3)
    with pytest.raises(ZeroDivisionError):  # the function's own error
        saved_tensors_report(lambda x: x * (1 / 0), X)


def test_as_text_and_as_html():
    report = saved_tensors_report(lambda x: Mixed.apply(x, jnp.exp(x)).sum(), X)
    text, page = str(report), report._repr_html_()
    for word in ("Mixed", "saved[0]", "float32[8,4]", "128", "256"):
        assert word in text
        assert word in page
    assert repr(report) == text
    assert "[&#x27;b&#x27;]" in page
    assert "packed" not in page + text


def test_the_bars_of_a_plot_are_the_rows():
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    with cast_saved():
        report = saved_tensors_report(lambda x: Mixed.apply(Tanh.apply(x * 2), jnp.exp(x)).sum(), X)
    ax = report.plot()
    labels = [t.get_text() for t in ax.get_yticklabels()]
    assert labels == [f"{r.layer or r.kind}  {r.name}  {r.source}".rstrip() for r in report.rows]
    assert [bar.get_width() for bar in ax.patches] == [r.packed_bytes for r in report.rows]
    assert report.plot(ax) is ax


TALL, WIDE = jnp.ones((128, 64)), jnp.ones((64, 64))


def step(x, w):
    return Multiply.apply(Tanh.apply(jnp.sin(x @ w)), ForwardTanh.apply(x) * 2.0)


def in_shard_map(x, w):
    mesh = jax.make_mesh((4,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
    rows = PartitionSpec("i")
    return jax.shard_map(step, mesh=mesh, in_specs=(rows, PartitionSpec()), out_specs=rows)(x, w)


FUNCTIONS = {
    "operations": lambda x, w: jnp.where(x > 0, jnp.exp(x @ w), 0) ** 2,
    "steps": lambda x, w: step(step(step(x, w), w), w),
    "vmap": lambda x, w: jax.vmap(step, (0, None))(x, w),
    "scan": lambda x, w: jax.lax.scan(lambda x, _: (step(x, w), None), x, length=5)[0],
    "scan over rows": lambda x, w: jax.lax.scan(lambda c, row: (Multiply.apply(c, row + c @ w), c), x[0], x)[0],
    "cond": lambda x, w: jax.lax.cond(x.sum() > 0, step, lambda x, w: jnp.sin(x), x, w),
    "checkpoint": lambda x, w: jnp.sin(jax.checkpoint(step)(x * 2, w)),
    "policy": lambda x, w: jax.checkpoint(step, policy=jax.checkpoint_policies.dots_saveable)(x * 2, w),
    "checkpoint in scan": lambda x, w: jax.lax.scan(jax.checkpoint(lambda x, _: (step(x, w), None)), x, length=5)[0],
    "shard_map": in_shard_map,
}
# How many times each tensor of a layer is held, without packing; a checkpoint holds none.
TIMES = {name: {1} for name in ("vmap", "cond", "shard_map")}
TIMES |= {"steps": {3}, "scan": {5}, "scan over rows": {len(TALL)}}
AROUND = {
    "": lambda f: f,
    "jit": jax.jit,
    "block": cast_saved(),
    "block of jit": lambda f: quantize_saved()(jax.jit(f)),
    "jit of block": lambda f: jax.jit(saved_tensors_hooks(lambda x: {"x": x}, lambda packed: packed["x"])(f)),
}


@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_total_is_what_vjp_holds(name, around):
    def loss(x, w):
        return AROUND[around](FUNCTIONS[name])(x, w).sum()

    report = saved_tensors_report(loss, TALL, WIDE)
    # Hooks pack a scan in each iteration and a shard_map by shard in traced code, and as a whole in eager mode.
    traced = around.startswith("block") and name not in ("operations", "steps", "vmap", "cond")
    vjp = jax.jit(lambda x, w: jax.vjp(loss, x, w)[1]) if traced else lambda x, w: jax.vjp(loss, x, w)[1]
    predicate = 1 if name == "cond" else 0  # a concrete one is no residual
    held = bytes_held(vjp(TALL, WIDE))
    assert held <= report.total_bytes + report.input_bytes <= held + predicate
    assert all(row.source.startswith("test_report.py:") for row in report.rows if row.kind in ("layer", "operation"))
    if around in ("", "jit"):
        assert {row.times for row in layer_rows(report)} == TIMES.get(name, set())
    sizes = [row.packed_bytes for row in report.rows if row.kind != "input"]
    assert sizes == sorted(sizes, reverse=True)
    kinds = [row.kind == "input" for row in report.rows]
    assert kinds == sorted(kinds)
    kept_inputs = {row.name: row.bytes for row in report.rows if row.kind == "input" and not row.layer}
    assert kept_inputs.items() <= {"args[0]": TALL.nbytes, "args[1]": WIDE.nbytes}.items()


@EAGER_AND_JIT
@pytest.mark.parametrize("name", ["steps", "scan", "vmap", "shard_map"])
def test_what_is_packed_on_the_host(name, mode, tmp_path):
    function = mode(FUNCTIONS[name])

    def loss(x, w):
        return function(x, w).sum()

    pairs = save_on_cpu(arguments=True), save_on_disk(tmp_path, arguments=True)
    plain, cpu, disk = (saved_tensors_report(f, TALL, WIDE) for f in (loss, *(pair(loss) for pair in pairs)))
    for report in (cpu, disk):
        packed = [row for row in report.rows if row.note]
        assert {(row.layer, row.name) for row in packed} >= {("Tanh", "saved[0]"), ("ForwardTanh", "saved[0]")}
        assert report.input_bytes == 0
    assert cpu.total_bytes <= sum(row.bytes for row in cpu.rows if not row.shape)  # numbers
    assert cpu.host_bytes == sum(row.bytes for row in cpu.rows if "in host memory" in row.note)
    # What follows from a packed tensor is not kept.
    assert cpu.host_bytes <= cpu.total_unpacked_bytes + plain.input_bytes
    assert cpu.total_unpacked_bytes == plain.total_bytes
    assert all("host" in row.note for row in disk.rows if row.dtype == "float32" and row.shape and row.packed_bytes)
    assert disk.total_bytes < 200
    assert disk.total_unpacked_bytes == cpu.total_unpacked_bytes
