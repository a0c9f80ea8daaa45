"""Provides `compare_programs`, which compares the memory, the cost and the gradients of several programs.

    program  temporary memory      peak             held     operations  ...  error of gradient
    plain            2.75 MiB  9.00 MiB         5.00 MiB          107 M  ...
    8 bits    1.08 MiB (0.39)  7.33 MiB  0.84 MiB (0.17)   134 M (1.25)  ...             0.0011

A report traces each program first, so that a wrong one raises its error before XLA spends minutes on the others.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import math
import time
import warnings
from collections.abc import Callable, Generator, Mapping, Sequence
from timeit import timeit
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np

from ._jax.jaxprs import all_equations
from ._jax.types import has_tangent, is_tensor
from ._messages import bytes_of, describe
from ._report import function_of, html_table, new_axes, progress, saved_tensors_report, text_table, type_text
from ._trees import split
from .packers import cast_saved, quantize_saved, recompute_saved

_BYTES: Final = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_COUNTS: Final = {"": 1, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
_SECONDS: Final = {"µs": 1e-6, "ms": 1e-3, "s": 1}
_MOST_TRIED: Final = 6
_N_ROUNDED: Final = 2  # the last rows of the comparison of one function
_NEAR: Final = 0.02
_SECONDS_PER_ROUND: Final = 0.01  # a shorter step is repeated in each round


@dataclasses.dataclass(frozen=True)
class ComparedProgram:
    """A row of the table: a program, and the figures of its gradient, which is compiled together with its value."""

    name: str
    program: Callable[..., Any] = dataclasses.field(repr=False)
    temp_bytes: int | None  # temporary memory of the compiled gradient, by XLA; None if XLA does not report it
    peak_bytes: int | None  # temporary memory, arguments and results of the compiled gradient, by XLA
    held_bytes: int  # the bytes that the vjp function holds, without the inputs of the program
    operations: float | None  # floating-point operations, by XLA; None if XLA does not report them
    transcendentals: float | None  # operations such as exp and tanh, which XLA counts apart
    accessed_bytes: float | None  # what the operations read and write, by XLA
    has_loop: bool  # whether the gradient has a loop: XLA counts the operations in the body of a loop once
    trace_seconds: float  # of JAX, for tracing and lowering, after an earlier trace has filled its caches
    compile_seconds: float  # of XLA
    step_seconds: tuple[float, ...] = ()  # of the compiled gradient, one entry per round; empty if it did not run
    value_error: float | None = None  # |v - v_first| / |v_first| of the values; None if nothing was run
    error: float | None = None  # |g - g_first| / |g_first| of the gradients, in the 2-norm; None if nothing was run


@dataclasses.dataclass(frozen=True, repr=False)
class ProgramComparison:
    """Result of `compare_programs`: a table with one row per program."""

    rows: list[ComparedProgram]
    _compiler: _Compiler | None = dataclasses.field(default=None, compare=False)  # set if one function was compared

    def __repr__(self) -> str:
        table = self._table()
        return text_table(table, table[0][1:], self._caption())

    def _repr_html_(self) -> str:
        return html_table(self._table(), self._caption())

    def _table(self) -> list[list[str]]:
        rows = self.rows

        def with_ratios(values: Sequence[float | None], units: Mapping[str, float], once: bool = False) -> list[str]:
            """Return cells with the ratio to the first. In a loop, XLA counts some values `once`."""
            cells = _in_unit(values, units)
            for i, (row, value) in enumerate(zip(rows, values, strict=True)):
                is_comparable = row.has_loop == rows[0].has_loop or not once
                if i and is_comparable and values[0] and value is not None:
                    cells[i] += f" ({value / values[0]:.2f})"
                if row.has_loop and once and cells[i]:
                    cells[i] = f"≥ {cells[i]}"
            return cells

        columns = {
            "program": [r.name for r in rows],
            "temporary memory": with_ratios([r.temp_bytes for r in rows], _BYTES),
            "peak": with_ratios([r.peak_bytes for r in rows], _BYTES),
            "held": with_ratios([r.held_bytes for r in rows], _BYTES),
            "operations": with_ratios([r.operations for r in rows], _COUNTS, once=True),
            "transcendental": with_ratios([r.transcendentals for r in rows], _COUNTS, once=True),
            "bytes accessed": with_ratios([r.accessed_bytes for r in rows], _BYTES, once=True),
            "trace": _in_unit([r.trace_seconds for r in rows], _SECONDS),
            "compile": _in_unit([r.compile_seconds for r in rows], _SECONDS),
        }
        if any(r.step_seconds for r in rows):
            quartiles = [[float(np.quantile(r.step_seconds or 0, q)) for r in rows] for q in (0.25, 0.5, 0.75)]
            unit = _unit(quartiles[1], _SECONDS)
            texts = [[_three_digits(s / _SECONDS[unit]) for s in each] for each in quartiles]
            steps = zip(rows, *texts, strict=True)
            columns["step"] = [f"{m} {unit} [{a}, {b}]" if r.step_seconds else "" for r, a, m, b in steps]
        if any(r.error is not None for r in rows):
            columns["error of value"] = ["" if r is rows[0] else f"{r.value_error:.2g}" for r in rows]
            columns["error of gradient"] = ["" if r is rows[0] else f"{r.error:.2g}" for r in rows]
        return [list(columns), *map(list, zip(*columns.values(), strict=True))]

    def _caption(self) -> str:
        plain, loops = self.rows[0], [r.name for r in self.rows if r.has_loop]
        packed = [r for r in self.rows if r.held_bytes < plain.held_bytes / 2]
        elsewhere = [r.name for r in packed if (r.temp_bytes or 0) > 0.9 * (plain.temp_bytes or math.inf)]
        parts = {
            f"in parentheses: relative to {plain.name}": len(self.rows) > 1,
            "peak: with arguments and results; the state of an optimizer comes on top": True,
            "in brackets: quartiles": any(r.step_seconds for r in self.rows),
            f"≥: XLA counts the operations in the body of a loop once ({', '.join(loops)})": loops,
            f"{', '.join(elsewhere)}: the peak lies elsewhere, not in what is held, and no packer lowers it": elsewhere,
            f"jax {jax.__version__} on {jax.default_backend()}": True,
        }
        return "; ".join(part for part, applies in parts.items() if applies)

    def within(self, memory: float | str) -> ComparedProgram:
        """Return the row with the smallest error of the gradient among those whose peak fits into `memory`.

            >>> comparison = compare_programs(lambda x: jnp.sum(jnp.tanh(jnp.sin(x))), jnp.ones((64, 1024)), rounds=0)
            >>> loss = comparison.within("2 MiB").program

        `memory` is a number of bytes, or a text such as "2 GiB" or "500 MB". It has to hold one gradient with its
        arguments, but not the state of an optimizer. Among errors that differ by at most 1e-5, the fewest operations
        decide. If nothing was run, the first row that fits is returned, an exact one if there is any. If one function
        was compared and does not fit as it is, up to six further limits of `recompute_saved` are compiled, as new rows.

        Raises:
            ValueError: if no program without a NaN fits, if XLA reports no memory, or if the text cannot be read.
        """
        limit = bytes_of(memory, "within")
        if unknown := [r.name for r in self.rows if r.peak_bytes is None]:
            raise ValueError(f"within: XLA tells no memory on this backend for {', '.join(unknown)}.")
        if self._compiler is not None and (self.rows[0].peak_bytes or 0) > limit:
            self._search(self._compiler, limit)
        # If the gradient of the first program has a NaN, no NaN makes another program unusable.
        first_is_nan = math.isnan(self.rows[0].error or 0)
        unusable = [] if first_is_nan else [r for r in self.rows if math.isnan(r.error or 0)]
        usable = [r for r in self.rows if r not in unusable]
        fitting = [r for r in usable if (r.peak_bytes or 0) <= limit]
        if not fitting:
            row = min(usable, key=lambda r: r.peak_bytes or 0)
            peak, more = (_in_unit([x], _BYTES)[0] for x in (row.peak_bytes, (row.peak_bytes or 0) - limit))
            why = "".join(f" The gradient of {r.name} has a NaN." for r in unusable)
            raise ValueError(f"within({memory!r}): no program fits. {row.name} takes least, {peak}: {more} more.{why}")
        if fitting[0].error is None:
            exact = self.rows[:-_N_ROUNDED] if self._compiler is not None else fitting[:1]
            best = [r for r in fitting if r in exact] or fitting[:1]
        else:
            largest = 1e-5 + min(r.error or 0 for r in fitting)
            best = [r for r in fitting if first_is_nan or (r.error or 0) <= largest]
        return min(best, key=lambda r: r.operations or 0)

    def _search(self, compiler: _Compiler, memory: float) -> None:
        """Add rows by bisection, to find the exact one with the fewest operations that fits."""
        rows = self.rows
        with progress() as show:
            for _ in range(_MOST_TRIED):
                exact = sorted(rows[1:-_N_ROUNDED], key=lambda row: row.held_bytes)
                held, peaks = [0, *[row.held_bytes for row in exact]], [row.peak_bytes or 0 for row in exact]
                fitting = [i for i, peak in enumerate(peaks, 1) if peak <= memory]
                best = fitting[-1] if fitting else 1 + peaks.index(min(peaks))
                # Where nothing fits, the peak may be lower on both sides: less is held, or less is computed at once.
                gaps = [*itertools.pairwise(held[best if fitting else best - 1 : best + 2])]
                low, high = max(reversed(gaps), key=lambda gap: gap[1] - gap[0], default=(0, 0))  # of equals, the last
                pair = _with_limit((low + high) / 2)
                if high - low <= _NEAR * high or any(row.name == repr(pair) for row in rows):
                    return
                row, _ = compiler.compile(*compiler.trace(repr(pair), pair(function_of(rows[0].program))))
                rows.insert(len(rows) - _N_ROUNDED, row)
                _show_row(show, rows, -_N_ROUNDED - 1)

    def plot(self, ax: Any = None) -> Any:
        """Draw memory against operations with matplotlib, on `ax` or on new axes, and return the axes.

        Raises:
            ValueError: if XLA did not tell the memory or the operations of a program.
        """
        if unknown := [r.name for r in self.rows if r.temp_bytes is None or r.operations is None]:
            raise ValueError(f"plot: XLA tells no memory or no operations on this backend for {', '.join(unknown)}.")
        memory, operations = [[float(getattr(r, name)) for r in self.rows] for name in ("temp_bytes", "operations")]
        ax = new_axes(4) if ax is None else ax
        memory_unit, operations_unit = _unit(memory, _BYTES), _unit(operations, _COUNTS)
        for row, y, x, marker in zip(self.rows, memory, operations, itertools.cycle("osD^vP*X"), strict=False):
            label = f"{row.name} (a loop: more operations)" if row.has_loop else row.name
            ax.plot(x / _COUNTS[operations_unit], y / _BYTES[memory_unit], marker, label=label, markersize=8)
        ax.margins(x=0.1)
        ax.set_ylim(0, 1.1 * max(memory) / _BYTES[memory_unit] or 1)
        ax.legend(frameon=False)
        ax.set_xlabel(f"operations, {operations_unit}".rstrip(", "))
        ax.set_ylabel(f"temporary memory, {memory_unit}")
        return ax


def compare_programs(
    programs: Mapping[Any, Callable[..., Any]] | Callable[..., Any], /, *args: Any, rounds: int = 9
) -> ProgramComparison:
    """Compile the gradient of each program at `args`, run it, and compare memory, cost and gradients in one table.

        >>> loss = lambda w, x: jnp.mean(jnp.tanh(x @ w) ** 2)
        >>> comparison = compare_programs(loss, jnp.ones((64, 64)), jnp.ones((512, 64)))
        >>> [row.name for row in comparison.rows]
        ['plain', 'recompute_saved()', ..., 'cast_saved()', 'quantize_saved(8)']
        >>> loss = comparison.within("1 MiB").program

    `programs` is a function (or a layer) that takes `args` and returns a scalar. It is compared with itself under the
    pairs in the list above; the limits are half and a quarter of what `recompute_saved()` holds. Or `programs` maps
    names to such functions: `{"plain": loss, "8 bits": quantize_saved(8)(loss)}`. The gradient is with respect to all
    float arrays in the pytrees `args`; other leaves are passed unchanged. To leave out an array, such as a batch of
    data, apply `jax.lax.stop_gradient` to it in the programs. In each of `rounds` rounds, all programs run in turn; 0
    rounds give no step times. If `args` holds a `jax.ShapeDtypeStruct`, no program runs, so that none has to fit into
    memory, and the table has no step times and no errors.

    The table shows XLA's figures of the compiled gradient on one device: the temporary memory; the peak, with arguments
    and results; the operations, those such as `exp` and `tanh` apart; the bytes that they access. Operations in the
    body of a loop count once, those in kernels and callbacks do not count. A backend may leave cells empty. Then come

    - the bytes that the vjp function holds, as `saved_tensors_report` counts them: on all devices, without the inputs;
    - the seconds for tracing with lowering (JAX) and for compiling (XLA); a compilation cache makes both seem fast;
    - the time of a run of the compiled gradient with the value, as median and quartiles over the rounds;
    - the errors of the value and the gradient: the 2-norm of the difference to the first program, relative to it.

    Raises:
        TypeError: if `programs` is not a function or a mapping from names to functions, if none of `args` holds a float
            array, or if a program returns something else than a real scalar.
        ValueError: if `programs` is empty, or `rounds` is negative.
    """
    loss = None if isinstance(programs, Mapping) else programs
    named = programs if isinstance(programs, Mapping) else {"plain": programs}
    expected = 'expected a function, or a dict such as {"plain": loss, "8 bits": quantize_saved(8)(loss)}'
    if not named:
        raise ValueError(f"compare_programs: {expected}; the dict has no program.")
    for name, program in named.items():
        if not callable(function_of(program)):
            raise TypeError(f"compare_programs: {expected}; the program {name!r} is {describe(program)}.")
    if rounds < 0:
        raise ValueError(f"compare_programs: expected rounds >= 0, got {rounds}.")
    compiler = _Compiler(args)
    traced = [compiler.trace(name, program) for name, program in named.items()]
    if loss is not None:
        under = lambda pair: compiler.trace(repr(pair), pair(function_of(loss)))
        *_, held_bytes = exact = under(recompute_saved())
        limits = (held_bytes / 2, held_bytes / 4) if held_bytes else ()
        pairs = [*map(_with_limit, limits), cast_saved(), quantize_saved(8)]
        traced += [exact, *map(under, pairs)]
    compiled: list[tuple[ComparedProgram, Callable[[], Any]]] = []
    with progress() as show:
        for program in traced:
            compiled.append(compiler.compile(*program))
            _show_row(show, [row for row, _ in compiled], -1)
    rows = [row for row, _ in compiled]
    if compiler.has_values and rounds:
        timed = [(step, math.ceil(_SECONDS_PER_ROUND / timeit(step, number=1)), list[float]()) for _, step in compiled]
        for i in range(rounds):  # each with every step, so that a slower machine slows all steps down together
            # In the same order in every round, each step would always run after the same other step.
            for step, n, seconds in reversed(timed) if i % 2 else timed:
                seconds.append(timeit(step, number=n) / n)
        rows = [dataclasses.replace(row, step_seconds=tuple(s)) for row, (_, _, s) in zip(rows, timed, strict=True)]
    return ProgramComparison(rows, None if loss is None else compiler)


def _show_row(show: Callable[[str], None], rows: list[ComparedProgram], index: int) -> None:
    titles, *cells = ProgramComparison(rows)._table()
    show(", ".join(f"{title}: {cell}" for title, cell in zip(titles, cells[index], strict=True)))


def _with_limit(limit: float) -> recompute_saved:
    unit = _unit([limit], _BYTES)
    return recompute_saved(limit=f"{limit / _BYTES[unit]:.4g} {unit}")


@contextlib.contextmanager
def _noted(name: Any) -> Generator[None]:
    """Add the name of the program to an exception. Of a limit that is too small, the table tells."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "recompute_saved: .* more than the limit")
            yield
    except Exception as error:
        error.add_note(f"This happened in the program {name!r} of compare_programs.")
        if "RESOURCE_EXHAUSTED" in str(error):
            error.add_note("With jax.ShapeDtypeStruct in place of the arrays, compare_programs runs no program.")
        raise


class _Compiler:
    def __init__(self, args: tuple[Any, ...]) -> None:
        leaves, self._skeleton = split(args, lambda x: is_tensor(x) or isinstance(x, jax.ShapeDtypeStruct))
        self.has_values = not any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves)
        self._tensors = [jnp.asarray(leaf) if is_tensor(leaf) else leaf for leaf in leaves]
        self._floats = tuple(i for i, tensor in enumerate(self._tensors) if has_tangent(tensor))
        self._first: Any = None  # the value and the gradient of the first program
        if not self._floats:
            raise TypeError(
                "compare_programs: none of the arguments holds a float array, so that there is no gradient. "
                "Pass the programs' arguments after the programs, as arrays: jnp.float32(2.0), not 2.0."
            )

    def _value(self, name: Any, program: Any, *tensors: Any) -> Any:
        result = function_of(program)(*self._skeleton.fill(tensors))
        if is_tensor(result) and not result.shape and jnp.issubdtype(result.dtype, jnp.floating):
            return result
        got = type_text(result) if is_tensor(result) else describe(result)
        raise TypeError(
            f"compare_programs: the program {name!r} returns {got}, expected a real scalar, of which the gradient is "
            "taken. Return one number, such as the sum of the squares, and no auxiliary values."
        )

    def trace(self, name: Any, program: Any) -> tuple[Any, Callable[..., Any], int]:
        with _noted(name):
            report = saved_tensors_report(functools.partial(self._value, name, program), *self._tensors)
            return name, program, report.total_bytes

    def compile(self, name: Any, program: Any, held_bytes: int) -> tuple[ComparedProgram, Callable[[], Any]]:
        value = functools.partial(self._value, name, program)
        with _noted(name):
            start = time.perf_counter()
            traced = jax.jit(jax.value_and_grad(value, self._floats)).trace(*self._tensors)
            lowered = traced.lower()
            middle = time.perf_counter()
            run = lowered.compile()
            end = time.perf_counter()
            memory, cost = run.memory_analysis(), run.cost_analysis() or {}
            kinds = "temp", "argument", "output"
            sizes: list[Any] = [getattr(memory, f"{kind}_size_in_bytes", None) for kind in kinds]
            row = ComparedProgram(
                name=str(name),
                program=program,
                temp_bytes=sizes[0],
                peak_bytes=None if None in sizes else sum(sizes),
                held_bytes=held_bytes,
                operations=cost.get("flops"),
                transcendentals=cost.get("transcendentals", 0.0 if cost else None),
                accessed_bytes=cost.get("bytes accessed"),
                has_loop=any(e.primitive.name in ("scan", "while") for e in all_equations(traced.jaxpr)),
                trace_seconds=middle - start,
                compile_seconds=end - middle,
            )
            step = lambda: jax.block_until_ready(run(*self._tensors))
            if self.has_values:
                result = step()
                self._first = result if self._first is None else self._first
                value_error, error = map(_relative_error, result, self._first)
                row = dataclasses.replace(row, value_error=value_error, error=error)
            return row, step


def _relative_error(got: Any, first: Any) -> float:
    difference, size = (math.sqrt(math.fsum(map(float, squares))) for squares in _sums_of_squares(got, first))
    return difference / size if size else math.inf if difference else 0.0


@jax.jit
def _sums_of_squares(got: Any, first: Any) -> tuple[list[Any], ...]:
    # Sums in bfloat16 would be inexact.
    got, first = jax.tree.map(lambda x: x.astype(jnp.float32) if x.dtype.itemsize < 4 else x, (got, first))
    trees = jax.tree.map(jnp.subtract, got, first), first
    return tuple([jnp.sum(jnp.square(jnp.abs(x))) for x in jax.tree.leaves(tree)] for tree in trees)


def _unit(values: Sequence[float | None], units: Mapping[str, float]) -> str:
    """Return the largest unit in which some value is at least 1, or else the smallest unit."""
    largest = max(min(units.values()), *(v or 0 for v in values))
    return [unit for unit, size in units.items() if size <= largest][-1]


def _in_unit(values: Sequence[float | None], units: Mapping[str, float]) -> list[str]:
    unit = _unit(values, units)
    return ["" if v is None else f"{_three_digits(v / units[unit])} {unit}".strip() for v in values]


def _three_digits(value: float) -> str:
    decimals = 0 if value >= 100 or not value else 1 if value >= 10 else 2
    return f"{value:,.{decimals}f}"
