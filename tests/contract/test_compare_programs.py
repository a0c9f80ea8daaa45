"""compare_programs: the figures of each program, what may be compared, and what is printed and drawn of them."""

import contextlib
import dataclasses
import math
import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pylayer_jax import _compare_programs, compare_programs, saved_tensors_report
from pylayer_jax._compare_programs import ProgramComparison
from pylayer_jax.packers import cast_saved, quantize_saved, recompute_saved
from tests.kit.layers import Multiply, Tanh
from tests.kit.modes import NEEDS_BARRIERS
from tests.kit.oracle import Mine, fail

W = jnp.linspace(-1.0, 1.0, 32 * 32).reshape(32, 32)
X = jnp.linspace(-1.0, 1.0, 64 * 32).reshape(64, 32)


def loss(w, x):
    return jnp.sum(Tanh.apply(jnp.sin(x @ w)) ** 2)


def compare(programs, *args, rounds=0):
    return {row.name: row for row in compare_programs(programs, *args, rounds=rounds).rows}


def test_the_figures_are_those_of_jax_and_of_the_report():
    programs = {"plain": loss, "8 bits": quantize_saved(8)(loss)}
    rows = compare(programs, W, X)
    assert list(rows) == list(programs)
    for name, program in programs.items():
        compiled = jax.jit(jax.value_and_grad(program, (0, 1))).lower(W, X).compile()
        memory = compiled.memory_analysis()
        sizes = memory.temp_size_in_bytes, memory.argument_size_in_bytes, memory.output_size_in_bytes
        assert (rows[name].temp_bytes, rows[name].peak_bytes) == (sizes[0], sum(sizes))
        assert rows[name].program is program
        cost = compiled.cost_analysis()
        figures = rows[name].operations, rows[name].transcendentals, rows[name].accessed_bytes
        assert figures == (cost["flops"], cost["transcendentals"], cost["bytes accessed"])
        assert rows[name].held_bytes == saved_tensors_report(program, W, X).total_bytes
        assert min(rows[name].trace_seconds, rows[name].compile_seconds) > 0
    assert rows["8 bits"].held_bytes < 0.5 * rows["plain"].held_bytes
    assert rows["plain"].error == 0
    assert 0 < rows["8 bits"].error < 0.05


def test_a_step_is_timed_once_in_each_round():
    runs = []

    def counted(x):
        jax.debug.callback(lambda: runs.append(1))
        return jnp.sum(x**2)

    timed = compare({"first": counted, "second": lambda x: jnp.sum(x**2)}, X, rounds=3)
    jax.effects_barrier()
    assert len(runs) >= 4  # once for the error
    assert {len(row.step_seconds) for row in timed.values()} == {3}
    assert min(seconds for row in timed.values() for seconds in row.step_seconds) > 0
    runs.clear()
    untimed = compare({"first": counted}, X, rounds=0)["first"]
    jax.effects_barrier()
    assert len(runs) == 1
    assert (untimed.step_seconds, untimed.error, untimed.value_error) == ((), 0, 0)


def test_shapes_are_compiled_and_not_run():
    def refuses(w, x):
        jax.debug.callback(lambda: pytest.fail("a program ran"))
        return loss(w, x)

    shapes = jax.eval_shape(lambda: (W, X))
    compiled = compare({"plain": refuses}, *shapes, rounds=3)["plain"]
    jax.effects_barrier()
    assert (compiled.step_seconds, compiled.error) == ((), None)
    assert compiled.held_bytes == compare({"plain": loss}, W, X)["plain"].held_bytes
    mixed = compare({"plain": refuses}, W, shapes[1])["plain"]
    assert mixed.temp_bytes == compiled.temp_bytes


def test_the_gradient_is_that_in_every_float_array():
    tree = {"w": W, "layers": [np.ones(32, np.float32), jnp.bfloat16(2.0)], "activation": jnp.tanh, "n": 2}
    sizes = W.size, 32, 1, X.size

    def model(tree, x, ids, key, doubled=None):
        assert (tree["activation"], tree["n"]) == (jnp.tanh, 2)
        arrays = tree["w"], *tree["layers"], x
        return sum(jnp.sum(a).astype(jnp.float32) * (1 + (i == doubled)) for i, a in enumerate(arrays))

    programs = {"first": model} | {i: lambda *args, i=i: model(*args, doubled=i) for i in range(4)}
    _, *rows = compare(programs, tree, X, jnp.array([1, 0]), jax.random.key(0)).values()
    for row, size in zip(rows, sizes, strict=True):
        assert row.error == pytest.approx(math.sqrt(size / sum(sizes)), rel=1e-2)


def test_values_are_compared_too():
    values = {"first": 4.0, "more": 5.0, "same": 4.0, "none": jnp.nan}
    rows = compare({name: lambda x, v=v: jnp.sum(x * 0) + v for name, v in values.items()}, X)
    assert [row.value_error for row in rows.values()][:3] == [0, 0.25, 0]
    assert math.isnan(rows["none"].value_error)
    assert {row.error for row in rows.values()} == {0}
    of_zero = compare({"zero": lambda x: jnp.sum(x * 0), "one": lambda x: jnp.sum(x * 0) + 1}, X)
    assert of_zero["one"].value_error == math.inf


def model(ws, x):
    for w in ws:
        x = jax.nn.gelu(x @ w)
    return jnp.mean(x**2)


MODEL = ([W * (0.3 + 0.01 * i) for i in range(4)], jnp.concatenate([X] * 4))


@pytest.fixture(scope="module")
def standard():
    return compare_programs(model, *MODEL, rounds=0)


def test_one_function_is_compared_under_the_ready_pairs(standard):
    exact = [f"recompute_saved(limit='{size}')" for size in ("64 KiB", "32 KiB")]
    names = ["plain", "recompute_saved()", *exact, "cast_saved()", "quantize_saved(8)"]
    assert [row.name for row in standard.rows] == names
    plain, exact, half, quarter, cast, eight = standard.rows
    assert plain.program is model
    assert max(row.error for row in (exact, half, quarter)) < 1e-5 < cast.error < eight.error < 0.1
    assert quarter.held_bytes < half.held_bytes < exact.held_bytes < 0.5 * plain.held_bytes
    np.testing.assert_allclose(eight.program(*MODEL), model(*MODEL), rtol=1e-6)
    assert len(compare_programs(Tanh, jnp.float32(0.5), rounds=0).rows) == 6


@pytest.fixture(scope="module")
def exhaustive():
    """The rows of 20 limits."""
    held = saved_tensors_report(recompute_saved()(model), *MODEL).total_bytes
    programs = {i: recompute_saved(limit=held * i / 20)(model) for i in range(21)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return compare_programs(programs, *jax.eval_shape(lambda: MODEL)).rows


@NEEDS_BARRIERS
@pytest.mark.parametrize("part", [0.0, 0.1, 0.3, 0.4, 0.6, 0.9])
def test_within_finds_the_exact_program_with_the_fewest_operations(part, exhaustive):
    comparison = compare_programs(model, *jax.eval_shape(lambda: MODEL))
    n_rows = len(comparison.rows)
    least, most = min(row.peak_bytes for row in exhaustive), comparison.rows[0].peak_bytes
    memory = least + part * (most - least)
    found = comparison.within(memory)
    assert found.peak_bytes <= memory
    assert found.operations <= 1.05 * min(row.operations for row in exhaustive if row.peak_bytes <= memory)
    assert "recompute" in found.name
    assert n_rows <= len(comparison.rows) <= n_rows + 6


def test_a_peak_that_lies_elsewhere_is_told():
    def of_logits(w, x):
        for _ in range(12):
            x = jnp.tanh(x @ w)
        return jnp.sum(jax.nn.logsumexp(x @ jnp.tile(w, (1, 64)), -1))

    programs = {"plain": of_logits, "8 bits": quantize_saved(8)(of_logits)}
    comparison = compare_programs(programs, W, jnp.concatenate([X] * 4), rounds=0)
    assert "elsewhere" in str(comparison)
    assert "elsewhere" not in str(compare_programs({"plain": of_logits, "again": of_logits}, W, X, rounds=0))


def test_a_row_is_shown_before_the_next_program_is_compiled(monkeypatch):
    shown, seen = [], []
    monkeypatch.setattr(_compare_programs, "progress", lambda: contextlib.nullcontext(shown.append))

    def second(w, x):
        seen.append(" ".join(shown))
        return loss(w, x)

    compare_programs({"the first": loss, "the second": second}, W, X, rounds=0)
    assert "the first" in seen[-1]
    assert "the second" not in seen[-1]


def test_the_row_of_the_smallest_error_that_fits(standard):
    for limit in {row.peak_bytes for row in standard.rows}:
        chosen = standard.within(limit)
        assert chosen.peak_bytes <= limit
        assert chosen.error <= 1e-5 + min(row.error for row in standard.rows if row.peak_bytes <= limit)
    assert standard.within("1 GiB").name == "plain"  # as exact as recompute_saved(), with fewer operations
    with pytest.raises(ValueError, match="more") as caught:
        standard.within(1)
    assert min(standard.rows, key=lambda row: row.peak_bytes).name in str(caught.value)  # also of the rows added


def rows_of(*figures):
    """Rows with a name, a peak, an error and operations each."""
    row = compare_programs({"plain": jnp.sum}, X, rounds=0).rows[0]
    names = "name", "peak_bytes", "error", "operations"
    return ProgramComparison([dataclasses.replace(row, **dict(zip(names, f, strict=True))) for f in figures])


SLOW, FAST, ROUNDS = ("slow", 5, 0.0, 200.0), ("fast", 7, 9e-6, 100.0), ("rounds", 1, 0.1, 50.0)
PLAIN, NAN = ("plain", 5, 0.0, 9.0), ("nan", 1, math.nan, 1.0)
# Rows, a limit, and the name of the row that is chosen.
CHOSEN = [
    ((SLOW, NAN, FAST, ROUNDS), 9, "fast"),  # of equal errors the one with the fewest operations
    ((SLOW, NAN, FAST, ROUNDS), 6.5, "slow"),
    ((SLOW, NAN, FAST, ROUNDS), 1, "rounds"),
    ((("first", 5, 0.0, None), ("second", 5, 0.0, None)), 5, "first"),
    ((PLAIN, NAN), 5, "plain"),
    ((("plain", 5, math.nan, 9.0), NAN), 1, "nan"),  # where plain has one too, a NaN is no error of the others
]


@pytest.mark.parametrize(("figures", "limit", "name"), CHOSEN)
def test_the_row_that_is_chosen(figures, limit, name):
    assert rows_of(*figures).within(limit).name == name


@pytest.mark.parametrize(
    ("figures", "text"),
    [
        ((PLAIN, NAN), r"plain takes least, 5.00 B: 4.00 B more.*nan has a NaN"),
        ((("fits", 1, 0.0, 1.0), ("unknown", None, 0.0, 1.0)), "unknown"),  # memory that a backend does not tell
    ],
)
def test_no_row_is_chosen(figures, text):
    with pytest.raises(ValueError, match=text):
        rows_of(*figures).within(1)


def test_shapes_are_chosen_in_their_order():
    shapes = jax.eval_shape(lambda: MODEL)
    found = compare_programs({"plain": model, "cast": cast_saved()(model), "8 bits": quantize_saved(8)(model)}, *shapes)
    assert [row.error for row in found.rows] == [None] * 3
    plain, least = found.rows[0], min(found.rows, key=lambda row: row.peak_bytes)
    assert found.within(plain.peak_bytes) is plain
    assert found.within(least.peak_bytes) is least


def test_a_text_is_a_number_of_bytes():
    found = rows_of(("only", 1.5 * 2**30, 0.0, 1.0))
    for text in ("1.5 GiB", "1.5GiB", "1.5 gib", " 1536 MiB ", "1.62 GB", "0.0015 TiB", "1610612736B", "1610613 kB"):
        assert found.within(text).name == "only"
    for text in ("1.4 GiB", "1.5 GB", ".9 GiB", "1535 MiB", "1 B"):
        with pytest.raises(ValueError, match=re.escape(repr(text))):
            found.within(text)
    for text in ("", "2", "GiB", "-2 GiB", "two GiB", "2 GiB/s", "1e3 MB", "2 XiB", "1,5 GiB"):
        with pytest.raises(ValueError, match=rf"(?s){re.escape(repr(text))}.*KiB"):
            found.within(text)


@pytest.mark.parametrize("x", [X.astype(jnp.bfloat16), jnp.array([1 + 2j, 3 - 1j])], ids=["bfloat16", "complex"])
def test_the_error_is_that_of_the_gradients_and_is_not_rounded(x):
    programs = {k: lambda x, k=k: jnp.sum(jnp.abs(x) ** 2 + k * x.real) for k in (0.0, 0.1)}
    a, b = (np.asarray(jax.jit(jax.grad(f))(x), np.complex128) for f in programs.values())
    np.testing.assert_allclose(compare(programs, x)["0.1"].error, np.linalg.norm(b - a) / np.linalg.norm(a), rtol=1e-4)


def test_errors_that_are_no_numbers():
    zero = lambda x: jnp.sum(x) * 0
    first_is_zero = compare({"first": zero, "same": zero, "other": jnp.sum}, X)
    assert [row.error for row in first_is_zero.values()] == [0, 0, math.inf]
    nan = compare({"first": jnp.sum, "nan": lambda x: jnp.sum(jnp.sqrt(x - x))}, X)
    assert math.isnan(nan["nan"].error)


def test_layers_are_programs_too():
    scalar = jnp.float32(0.5)
    rows = compare({Tanh: Tanh, "apply": Tanh.apply, 3: jnp.tanh}, scalar)
    assert list(rows) == [str(Tanh), "apply", "3"]
    assert rows["3"].error == pytest.approx(0, abs=1e-6)


def test_a_program_with_a_loop_says_that_its_operations_are_counted_once():
    def step(x, _):
        return jnp.tanh(x @ W), None

    programs = {
        "unrolled": lambda x: jnp.sum(step(step(step(x, 0)[0], 0)[0], 0)[0]),
        "scanned": jax.jit(lambda x: jnp.sum(jax.lax.scan(step, x, length=3)[0])),
    }
    comparison = compare_programs(programs, X, rounds=0)
    assert [row.has_loop for row in comparison.rows] == [False, True]
    assert comparison.rows[1].operations < 0.5 * comparison.rows[0].operations  # XLA's figure
    _, first, second, caption = str(comparison).splitlines()
    assert "≥" not in first
    assert second.count("≥") == 3
    assert "≥" in caption
    assert "scanned" in caption
    assert re.search(r"<td>≥ [\d.,]+ \w?</td>", comparison._repr_html_())  # without a ratio to the unrolled program
    axes = comparison.plot(new_axes())
    assert "loop" in labels(axes)[1]


def new_axes():
    return pytest.importorskip("matplotlib.figure").Figure().subplots()


def labels(axes):
    return [text.get_text() for text in axes.get_legend().get_texts()]


def test_what_is_printed_and_drawn():
    comparison = compare_programs({"plain": loss, "8 <bits>": quantize_saved(8)(loss)}, W, X, rounds=1)
    plain, packed = comparison.rows
    text, html = str(comparison), comparison._repr_html_()
    ratio = f"({packed.held_bytes / plain.held_bytes:.2f})"
    for shown in (text, html):
        assert f"{plain.held_bytes / 1024:.1f}" in shown
        assert ratio in shown
        assert f"{packed.error:.2g}" in shown
        assert f"{plain.peak_bytes / 1024:.0f}" in shown
        assert "optimizer" in shown
    assert "8 <bits>" in text
    assert "8 &lt;bits&gt;" in html
    assert html.count("<tr>") == 3
    axes = new_axes()
    assert comparison.plot(axes) is axes
    points = [line.get_xydata()[0] for line in axes.lines]
    assert labels(axes) == ["plain", "8 <bits>"]
    assert all([axes.get_xlabel(), axes.get_ylabel()])
    x, y = np.transpose(points)
    np.testing.assert_allclose(x[1] / x[0], packed.operations / plain.operations)
    np.testing.assert_allclose(y[1] / y[0], packed.temp_bytes / plain.temp_bytes)


def test_figures_that_a_backend_does_not_have(monkeypatch):
    monkeypatch.setattr(jax.stages.Compiled, "cost_analysis", lambda self: None)
    comparison = compare_programs({"plain": loss, "again": loss}, W, X, rounds=0)
    assert [row.operations for row in comparison.rows] == [None, None]
    assert comparison._repr_html_().count("<td></td>") == 8  # and the errors of the first
    with pytest.raises(ValueError, match="plain, again"):
        comparison.plot()


BAD = {
    "no mapping": (TypeError, ([loss], W, X), "list"),
    "no program": (ValueError, ({}, W, X), "program"),
    "no function": (TypeError, ({"plain": loss, "bad": 3}, W, X), "'bad'.* 3 "),
    "no layer": (TypeError, ({"bad": object}, W, X), "'bad'"),
    "no float array": (TypeError, ({"plain": lambda *args: 1.0}, 1.0, jnp.ones(3, int)), "float array"),
    "no arguments": (TypeError, ({"plain": loss},), "float array"),
    "an array": (TypeError, ({"plain": loss, "bad": lambda w, x: x @ w}, W, X), r"'bad'.*float32\[64,32\]"),
    "an integer": (TypeError, ({"bad": lambda x: jnp.sum(x > 0)}, X), r"'bad'.*int32\[\]"),
    "a complex number": (TypeError, ({"bad": lambda x: jnp.fft.fft(x)[0, 0]}, X), r"'bad'.*complex64\[\]"),
    "auxiliary values": (TypeError, ({"bad": lambda w, x: (loss(w, x), x)}, W, X), "'bad'.*tuple"),
    "nothing": (TypeError, ({"bad": lambda x: None}, X), "'bad'.*None"),
    "a layer of an array": (TypeError, ({"bad": Multiply}, W, W), "'bad'"),
}


@pytest.mark.parametrize(("kind", "arguments", "text"), BAD.values(), ids=BAD)
def test_an_argument_that_cannot_be_compared_is_an_error_that_names_it(kind, arguments, text):
    with pytest.raises(kind, match=text):
        compare_programs(*arguments)


def test_a_negative_number_of_rounds_is_an_error():
    with pytest.raises(ValueError, match=r"rounds.* -1"):
        compare_programs({"plain": loss}, W, X, rounds=-1)


def test_an_exception_in_a_program_keeps_its_type_and_names_the_program_before_any_is_compiled(monkeypatch):
    monkeypatch.setattr(jax.stages.Lowered, "compile", lambda self: pytest.fail("a program was compiled"))
    with pytest.raises(Mine, match="on purpose") as caught:
        compare_programs({"plain": loss, "bad": fail}, W, X)
    assert any("'bad'" in note for note in caught.value.__notes__)
