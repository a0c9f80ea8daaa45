"""Provides `saved_tensors_report`, which lists the residuals of a function in a table."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import html
import importlib
import math
import os
import shutil
import sys
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from ._hooks import Mark, Origin, Program, Source, hooks_ignored, is_reported, stage_named
from ._jax.jaxprs import jaxpr_and_consts
from ._jax.jaxprs import line_of as source_line
from ._jax.rule_function import merge, select
from ._jax.traces import current, eval_jaxpr
from ._jax.types import as_arrays, has_tangent, is_ref, is_tensor, typeof
from ._trees import split

# -- tables ---------------------------------------------------------------------------------------------------


def text_table(titles: Sequence[str], rows: Sequence[Sequence[str]], right: Collection[str], caption: str) -> str:
    table = [titles, *rows]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    justify = [str.rjust if title in right else str.ljust for title in titles]
    lines = ["  ".join(f(cell, n) for f, cell, n in zip(justify, row, widths, strict=True)) for row in table]
    return "\n".join([*map(str.rstrip, lines), caption])


def type_of(x: Any) -> str:
    return f"{x.dtype}[{','.join(map(str, x.shape))}]"


def html_table(titles: Sequence[str], rows: Sequence[Sequence[str]], caption: str) -> str:
    def line(tag: str, cells: Sequence[str]) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(c)}</{tag}>" for c in cells) + "</tr>"

    head, body = line("th", titles), "".join(line("td", row) for row in rows)
    return f"<table><caption>{html.escape(caption)}</caption><thead>{head}</thead><tbody>{body}</tbody></table>"


@contextlib.contextmanager
def progress() -> Generator[Callable[[str], None]]:
    """Yield a function that shows a line until the end, in a terminal or notebook, but not in a test."""
    shown: list[str] = []
    size, encoding = shutil.get_terminal_size(), sys.stdout.encoding or "utf-8"
    is_test = "PYTEST_CURRENT_TEST" in os.environ
    is_terminal = not is_test and sys.stdout.isatty() and os.environ.get("TERM") != "dumb"
    handle: Any = None  # the handle of a display in a notebook
    if not is_test and type(sys.stdout).__module__.startswith("ipykernel"):
        # A notebook file stores every printed line, but only the last state of a display.
        handle = importlib.import_module("IPython.display").display({"text/plain": ""}, raw=True, display_id=True)

    def show(line: str) -> None:
        shown.append(line)
        if handle is not None:
            handle.update({"text/plain": "\n".join(shown)}, raw=True)
        elif is_terminal:
            sys.stdout.write(line[: size.columns - 1].encode(encoding, "replace").decode(encoding) + "\n")
            sys.stdout.flush()

    try:
        yield show
    finally:
        if handle is not None:
            handle.update({"text/plain": ""}, raw=True)
        elif is_terminal and shown:
            sys.stdout.write(f"\x1b[{min(len(shown), size.lines - 1)}A\x1b[J")


@dataclasses.dataclass(frozen=True)
class SavedTensor:
    """One row of a report: a residual, or several that differ only in their values."""

    kind: str  # "input"; or "layer" if a layer saves the tensor; or "copy" (of an input), "operation", "constant"
    layer: str  # the class of the layer that saves the tensor; empty if no layer saves it
    name: str  # "saved[0]", a name from `saved_names` or `checkpoint_name`, or the name of the operation or input
    shape: tuple[int, ...]
    dtype: str
    times: int  # the number of residuals in this row: one per iteration of a scan, or per call from one line
    bytes: int  # the size of all residuals in this row, before packing
    packed_bytes: int  # the number of bytes that the vjp function holds for this row; 0 if backward recomputes it
    source: str  # the file and line of the call of `apply`, or of the operation
    note: str
    host_bytes: int = 0  # the part of `packed_bytes` that is in host memory
    is_recomputed: bool = False  # whether backward computes the tensor again from other rows
    inside: tuple[str, ...] = ()  # as `info.inside` of a predicate `only`: functions, classes and named scopes


@dataclasses.dataclass(frozen=True, repr=False)
class SavedTensorsReport:
    """Result of `saved_tensors_report`: a table of residuals."""

    rows: list[SavedTensor]
    total_unpacked_bytes: int  # the bytes that the vjp function would hold without any block of hooks

    @property
    def total_bytes(self) -> int:
        """The bytes that the vjp function holds on the device, without the inputs, which the caller holds."""
        return _device_bytes(self.rows)

    @property
    def host_bytes(self) -> int:
        """The bytes that the vjp function holds in host memory."""
        return sum(r.host_bytes for r in self.rows)

    @property
    def recomputed_bytes(self) -> int:
        """The bytes of tensors that backward computes again."""
        return sum(r.bytes for r in self.rows if r.is_recomputed)

    @property
    def input_bytes(self) -> int:
        """The bytes of inputs that the vjp function holds without packing."""
        return sum(r.packed_bytes for r in self.rows if r.kind == "input")

    def __repr__(self) -> str:
        titles, *rows = self._table()
        return text_table(titles, rows, ("times", "bytes", "packed"), self._total())

    def _repr_html_(self) -> str:
        titles, *rows = self._table()
        return html_table(titles, rows, self._total())

    def _table(self) -> list[list[str]]:
        """Return the cells, with the row of titles first, without columns that would be empty."""
        inputs = [r for r in self.rows if r.kind == "input" and not r.layer]
        table = [["origin", "inside", "name", "type", "times", "bytes", "packed", "where", ""]]
        for r in [r for r in self.rows if len(inputs) < 2 or r not in inputs]:
            sizes = f"{r.times}", f"{r.bytes:,}", f"{r.packed_bytes:,}"
            table.append([r.layer or r.kind, "/".join(r.inside[-2:]), r.name, type_of(r), *sizes, r.source, r.note])
        if len(inputs) > 1:
            sums = [sum(getattr(r, name) for r in inputs) for name in ("times", "bytes", "packed_bytes")]
            table.append(["input", "", "", f"{len(inputs)} inputs", *(f"{n:,}" for n in sums), "", ""])
        is_shown = {
            "inside": any(r.inside for r in self.rows),
            "packed": any(r.packed_bytes != r.bytes for r in self.rows),
        }
        return [select(cells, [is_shown.get(title, True) for title in table[0]]) for cells in table]

    def _total(self) -> str:
        kept, unpacked = self.total_bytes, self.total_unpacked_bytes
        parts = {
            f"{kept:,} bytes are kept for backward": True,
            f"{self.host_bytes:,} in host memory": self.host_bytes,
            f"{unpacked:,} without packing": unpacked != kept or self.recomputed_bytes,
            f"{self.recomputed_bytes:,} are computed again": self.recomputed_bytes,
            f"beside {self.input_bytes:,} in inputs of the function": self.input_bytes,
        }
        return ", ".join(part for part, applies in parts.items() if applies)

    def plot(self, ax: Any = None) -> Any:
        """Draw a bar of `packed_bytes` per row with matplotlib, on `ax` or on new axes, and return the axes."""
        if ax is None:
            import matplotlib.pyplot as plt

            _, ax = plt.subplots(layout="constrained", figsize=(6.4, 1.2 + 0.25 * len(self.rows)))
        names = [f"{r.layer or r.kind}  {r.name}  {r.source}".rstrip() for r in self.rows]
        ax.barh(range(len(names)), [r.packed_bytes for r in self.rows], tick_label=names)
        ax.invert_yaxis()
        ax.set_xlabel("bytes")
        return ax


def function_of(layer: Any) -> Any:
    """Return a function, or what a layer class applies; None for another class."""
    return getattr(layer, "apply", None) if isinstance(layer, type) else layer


def _device_bytes(rows: Sequence[SavedTensor]) -> int:
    return sum(r.packed_bytes - r.host_bytes for r in rows if r.kind != "input")


def saved_tensors_report(fun: Callable[..., Any], *args: Any, **kwargs: Any) -> SavedTensorsReport:
    """List the residuals that `jax.vjp` of `fun` at `args` and `kwargs` holds for backward.

        >>> print(saved_tensors_report(lambda x: Tanh.apply(x).sum(), jnp.ones((8, 4))))
        origin  name      type          times  bytes  where
        Tanh    saved[0]  float32[8,4]      1    128  ...
        128 bytes are kept for backward

    `fun` is a function or a layer. JAX only traces it, so the arguments may be `jax.ShapeDtypeStruct`s. All float
    arguments are differentiated. Saved-tensor hooks around the call and inside `fun` apply as in a compiled program; a
    second trace, without them, gives `total_unpacked_bytes`.

    A row is a residual, or several that differ only in their values: a tensor that layers save, a result of a plain
    operation, or an input of `fun`, which takes no extra memory, because the caller holds it. The names are those that
    a predicate `only` gets in `info`, and that `by_name` takes as keys; `inside` shows the last two of `info.inside`.
    The largest rows come first, and the inputs last, in one line. A tensor that backward computes again has 0 packed
    bytes, and one that hooks with `host=True` pack has 4, for the number that the program keeps instead. Sizes are
    those of whole arrays, on all devices.

    Raises:
        TypeError: if no argument holds a float array.
    """
    fun = function_of(fun) or fun
    tensors, skeleton = split((args, kwargs), lambda x: is_tensor(x) or isinstance(x, jax.ShapeDtypeStruct))
    if not any(map(has_tangent, tensors)):
        raise TypeError("saved_tensors_report: none of the arguments holds a float array, so that nothing is saved.")

    def run(*tensors: Any) -> Any:
        args, kwargs = skeleton.fill(tensors)
        return fun(*args, **kwargs)

    # The path of `args[1]['w']` in the tuple (args, kwargs) is `[0][1]['w']`.
    names = [("args" if path.startswith("[0]") else "kwargs") + path[3:] for path in skeleton.tensor_paths()]
    entry = current()
    with hooks_ignored():
        unpacked = _rows(run, tensors, names, entry)
    with is_reported(True):  # each tensor that a plan keeps gets a `Mark`, a further residual of size 0
        rows = _rows(run, tensors, names, entry)
    return SavedTensorsReport(rows, _device_bytes(unpacked))


class _Residual(NamedTuple):
    """An array that JAX keeps for a tensor: the tensor itself, or what a pack hook made of it."""

    variable: Any
    tensor: Source
    operand: Any  # a key of the operand of the pack hook; None if the tensor is not packed
    times: int  # the number of parts of the tensor, such as one per iteration of a scan
    bytes: int  # the size of all parts of the tensor, before packing
    is_of_host_call: bool

    @property
    def packed_bytes(self) -> int:
        return _size(self.variable.aval)

    @property
    def is_on_host(self) -> bool:
        return self.variable.aval.memory_space == jax.memory.Space.Host


def _size(aval: Any) -> int:
    return aval.size * aval.dtype.itemsize


def _rows(run: Callable[..., Any], tensors: Sequence[Any], names: Sequence[str], entry: Any) -> list[SavedTensor]:
    """Return one row per group of equal residuals, the largest first and the inputs last."""
    is_float = list(map(has_tangent, tensors))
    code, consts, _ = stage_named(lambda *xs: (as_arrays(split(run(*xs))[0]), None), list(map(typeof, tensors)), "run")

    def residuals(*tensors: Any) -> list[Any]:
        run_floats = lambda *floats: eval_jaxpr(code, (), *consts, *merge(is_float, floats, tensors))  # noqa: E731
        _, pullback = jax.vjp(run_floats, *select(tensors, is_float))
        return [x for x in jax.tree_util.tree_leaves(pullback) if not is_ref(x)]  # the caller holds the Refs

    jaxpr, _ = jaxpr_and_consts(jax.make_jaxpr(residuals)(*tensors))
    program = Program(jaxpr, code)
    name_of_input = dict(zip(jaxpr.invars, names, strict=True))
    groups: dict[Any, list[_Residual]] = {}
    single: list[SavedTensor] = []
    for v in {id(v): v for v in jaxpr.outvars}.values():  # a variable that is returned several times is kept once
        source = program.source(v)
        # Residuals of size 0 are the results of `Mark`s, and run numbers: see NOTE [several runs] in _layer_rule.py.
        if v.aval.size:
            found = _residual(v, source)
            key = found.tensor.key, found.times, found.tensor.aval.shape, found.operand
            # An input that JAX keeps both as such and in other arrays gets two rows.
            is_held = source.is_input and not source.is_part and (key, True) not in groups
            groups.setdefault((key, is_held), []).append(found)
        elif isinstance(source.function, Mark) and source.function.recomputed_from is not None:
            single.append(_recomputed_row(v, source, entry))
    single += [_row(program, group, is_held, name_of_input, entry) for (_, is_held), group in groups.items()]
    summed = "times", "bytes", "packed_bytes", "host_bytes"
    rows = [
        dataclasses.replace(row, **{name: n * getattr(row, name) for name in summed})
        for row, n in collections.Counter(single).items()
    ]
    return sorted(rows, key=lambda r: (r.kind == "input", -r.packed_bytes, -r.bytes))


def _residual(variable: Any, source: Source) -> _Residual:
    if source.packed is None:
        return _Residual(variable, source, None, source.times, _size(variable.aval), False)
    tensor, operand = source.packed
    # Count each iteration that packs the tensor, and all shards of it.
    size = tensor.times * _size(tensor.aval) * (variable.aval.size // source.aval.size)
    return _Residual(variable, tensor, operand, tensor.times * source.times, size, source.name == "host_call")


def _recomputed_row(variable: Any, source: Source, entry: Any) -> SavedTensor:
    """Return the row of a recomputed tensor; `variable` is the empty array that its `Mark` returned."""
    mark, shape, all_parts = source.function, list(source.aval.shape), list(variable.aval.shape)
    for lengths in (shape, all_parts):
        lengths.remove(0)  # a `Mark` adds an axis of length 0 to the shape of its tensor
    equations = source.operands[-1].equations
    return SavedTensor(
        kind="layer" if mark.origin.layer else "operation",
        layer=mark.origin.layer,
        name=mark.origin.name or mark.origin.operation,
        shape=tuple(shape),
        dtype=str(source.aval.dtype),
        times=source.times,
        bytes=math.prod(all_parts) * variable.aval.dtype.itemsize,
        packed_bytes=0,
        source=line_of(equations),
        note=f"computed again from {mark.recomputed_from}",
        is_recomputed=True,
        inside=_inside(equations, mark.origin, entry),
    )


def _row(
    program: Program, kept: list[_Residual], is_held: bool, name_of_input: Mapping[Any, str], entry: Any
) -> SavedTensor:
    """Return the row of a tensor for which JAX keeps arrays: copies of it, or what a pack hook made of it."""
    tensor, n = kept[0].tensor, 1 if kept[0].operand is not None else len(kept)  # each unpacked array is a copy
    notes = tensor.notes
    savers = [note for note in notes if note.layer]
    input_name = name_of_input.get(tensor.variable, "") if tensor.is_input else ""
    kind = "copy" if tensor.is_input else "operation" if tensor.equations else "constant"
    names = [input_name or program.operation(tensor), *[note.name for note in notes if not note.layer]]
    layer, name, equations = savers[0][:3] if savers else ("", names[-1], tensor.equations)
    origins = [note.origin for note in notes[::-1] if note.origin is not None]
    entries = [o.block for o in origins if o.block is not None]  # for a layer that is decorated itself
    remarks = {
        f"the input {input_name}": bool(savers) and tensor.is_input,
        **{f"also {n.layer}, {n.name}": (n.layer, n.name) != (layer, name) for n in savers},
        "in host memory": any(x.is_on_host for x in kept),
        "packed on the host": any(x.is_of_host_call for x in kept),
    }
    return SavedTensor(
        kind="input" if is_held else "layer" if layer else kind,
        layer=layer,
        name=name,
        shape=tuple(tensor.aval.shape),
        dtype=str(tensor.aval.dtype),
        times=n * kept[0].times,
        bytes=n * max(x.bytes for x in kept),
        packed_bytes=sum(x.packed_bytes for x in kept),
        host_bytes=sum(x.packed_bytes for x in kept if x.is_on_host),
        source=line_of(equations) or source_line(entries[:1]),
        note="; ".join(remark for remark, applies in remarks.items() if applies),
        inside=_inside(equations, next(iter(origins), None), entry),
    )


def _inside(equations: Sequence[Any], origin: Origin | None, entry: Any) -> tuple[str, ...]:
    """Return the names that a decorated function would see, or those from the call of the report."""
    if origin is not None and origin.block is not None:
        return origin.inside
    return Origin(sources=tuple(e.source_info for e in equations), block=entry).inside if equations else ()


def line_of(equations: Sequence[Any]) -> str:
    # Only the call of a jitted function of JAX itself has a line of user code, not an equation inside it.
    return source_line([equation.source_info for equation in equations])
