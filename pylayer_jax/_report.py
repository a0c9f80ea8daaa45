"""Provides `saved_tensors_report`, which lists the residuals of a function in a table."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import html
import math
import os
import shutil
import sys
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from typing import Any

import jax

from ._hooks.active import OFF, active, is_reported
from ._hooks.origins import Program, Source
from ._hooks.pack import Origin
from ._hooks.planned import stage_calls
from ._jax.jaxprs import jaxpr_and_consts, line_of
from ._jax.rule_function import merge, select
from ._jax.traces import current, eval_jaxpr
from ._jax.types import as_arrays, has_tangent, is_ref, is_tensor, typeof
from ._trees import split

# -- tables ---------------------------------------------------------------------------------------------------


def text_table(table: Sequence[Sequence[str]], right: Collection[str], caption: str) -> str:
    """Return rows of cells, that of the titles first, as text."""
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    justify = [str.rjust if title in right else str.ljust for title in table[0]]
    lines = ["  ".join(f(cell, n) for f, cell, n in zip(justify, row, widths, strict=True)) for row in table]
    return "\n".join([*map(str.rstrip, lines), caption])


def type_text(x: Any) -> str:
    return f"{x.dtype}[{','.join(map(str, x.shape))}]"


def html_table(table: Sequence[Sequence[str]], caption: str) -> str:
    line = lambda tag, cells: "<tr>" + "".join(f"<{tag}>{html.escape(c)}</{tag}>" for c in cells) + "</tr>"
    head, body = line("th", table[0]), "".join(line("td", row) for row in table[1:])
    return f"<table><caption>{html.escape(caption)}</caption><thead>{head}</thead><tbody>{body}</tbody></table>"


def new_axes(height: float) -> Any:
    import matplotlib.pyplot as plt

    return plt.subplots(layout="constrained", figsize=(6.4, height))[1]


@contextlib.contextmanager
def progress() -> Generator[Callable[[str], None]]:
    """Yield a function that shows a line in place of the last one, in a terminal or notebook, but not in a test."""
    is_person = sys.stderr.isatty() or type(sys.stderr).__module__.startswith("ipykernel")
    is_shown = is_person and "PYTEST_CURRENT_TEST" not in os.environ
    width = shutil.get_terminal_size().columns - 1

    def show(line: str) -> None:
        if is_shown:
            sys.stderr.write(f"{line[:width]:{width}}\r")
            sys.stderr.flush()

    try:
        yield show
    finally:
        show("")


@dataclasses.dataclass(frozen=True)
class SavedTensor:
    """One row of a report: a residual, or several that differ only in their values."""

    kind: str  # "input"; or "layer" if a layer saves the tensor; or "copy" (of an input), "operation", "constant"
    layer: str  # the class of the layer that computed the tensor, else that saves it; empty if no layer saves it
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
        return sum(r.packed_bytes - r.host_bytes for r in self.rows if r.kind != "input")

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
        return text_table(self._table(), ("times", "bytes", "packed"), self._total())

    def _repr_html_(self) -> str:
        return html_table(self._table(), self._total())

    def _table(self) -> list[list[str]]:
        """Return the cells, with the row of titles first, without columns that would be empty."""
        inputs = [r for r in self.rows if r.kind == "input" and not r.layer]
        table = [["origin", "inside", "name", "type", "times", "bytes", "packed", "where", ""]]
        for r in [r for r in self.rows if len(inputs) < 2 or r not in inputs]:
            sizes = f"{r.times}", f"{r.bytes:,}", f"{r.packed_bytes:,}"
            table.append([r.layer or r.kind, "/".join(r.inside[-2:]), r.name, type_text(r), *sizes, r.source, r.note])
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
        ax = new_axes(1.2 + 0.25 * len(self.rows)) if ax is None else ax
        names = [f"{r.layer or r.kind}  {r.name}  {r.source}".rstrip() for r in self.rows]
        ax.barh(range(len(names)), [r.packed_bytes for r in self.rows], tick_label=names)
        ax.invert_yaxis()
        ax.set_xlabel("bytes")
        return ax


def function_of(layer: Any) -> Any:
    """Return a function, or what a layer class applies; None for another class."""
    return getattr(layer, "apply", None) if isinstance(layer, type) else layer


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
    with active(OFF):
        unpacked = SavedTensorsReport(_rows(run, tensors, names, entry), 0).total_bytes
    with is_reported(True):  # each tensor that a plan keeps gets a `ReportMark`, a further residual of size 0
        rows = _rows(run, tensors, names, entry)
    return SavedTensorsReport(rows, unpacked)


def _size(aval: Any) -> int:
    """Return the bytes of an array; of the empty result of a `ReportMark`, those of its tensor."""
    return math.prod(n for n in aval.shape if n) * aval.dtype.itemsize


def _rows(run: Callable[..., Any], tensors: Sequence[Any], names: Sequence[str], entry: Any) -> list[SavedTensor]:
    """Return one row per group of equal residuals, the largest first and the inputs last."""
    is_float = list(map(has_tangent, tensors))
    code, consts, _ = stage_calls(lambda *xs: (as_arrays(split(run(*xs))[0]), None), list(map(typeof, tensors)), "run")

    def residuals(*tensors: Any) -> list[Any]:
        run_floats = lambda *floats: eval_jaxpr(code, (), *consts, *merge(is_float, floats, tensors))
        _, pullback = jax.vjp(run_floats, *select(tensors, is_float))
        return [x for x in jax.tree_util.tree_leaves(pullback) if not is_ref(x)]  # the caller holds the Refs

    jaxpr, _ = jaxpr_and_consts(jax.make_jaxpr(residuals)(*tensors))
    program = Program(jaxpr, code)
    name_of_input = dict(zip(jaxpr.invars, names, strict=True))
    groups: dict[Any, list[tuple[Any, Source]]] = {}
    for v in {id(v): v for v in jaxpr.outvars}.values():  # a variable that is returned several times is kept once
        source = program.source(v)
        tensor, packing = source.packed or (source, None)
        # Residuals of size 0 are those of `ReportMark`s, and run numbers: see NOTE [several runs] in _layer_rule.py.
        if v.aval.size or (source.recomputed_from and tensor.aval.size):
            key = tensor.key, source.times, tensor.times, tensor.aval.shape, packing
            # An input that JAX keeps both as such and in other arrays gets two rows.
            is_held = source.is_input and not source.is_part and (key, True) not in groups
            groups.setdefault((key, is_held), []).append((v, source))
    single = [_row(program, kept, is_held, name_of_input, entry) for (_, is_held), kept in groups.items()]
    summed = "times", "bytes", "packed_bytes", "host_bytes"
    rows = [
        dataclasses.replace(row, **{name: n * getattr(row, name) for name in summed})
        for row, n in collections.Counter(single).items()
    ]
    return sorted(rows, key=lambda r: (r.kind == "input", -r.packed_bytes, -r.bytes))


def _row(
    program: Program, kept: Sequence[tuple[Any, Source]], is_held: bool, name_of_input: Mapping[Any, str], entry: Any
) -> SavedTensor:
    """Return the row of a tensor for which JAX keeps arrays: copies of it, or what a pack hook made of it."""
    source = kept[0][1]
    tensor, _ = source.packed or (source, None)
    n_copies, n_parts = (1, tensor.times) if source.packed else (len(kept), 1)  # each array not packed is a copy
    # Count each iteration that packs the tensor, and all shards of it, which are parts of v.
    sizes = [n_parts * _size(tensor.aval) * _size(v.aval) // _size(x.aval) for v, x in kept]
    arrays = [] if source.recomputed_from else [v.aval for v, _ in kept]
    host_bytes = sum(_size(a) for a in arrays if a.memory_space == jax.memory.Space.Host)
    marked = program.origin_of_marked.get(tensor.key)
    origin = marked or program.origin(tensor, Origin(entry=entry))
    input_name = name_of_input.get(tensor.variable, "") if tensor.is_input else ""
    savers = [note for note in tensor.notes if note.layer]
    sources = savers[0].sources if savers else [e.source_info for e in tensor.equations]
    layer = origin.layer if origin.name else ""
    remarks = {
        f"the input {input_name}": bool(savers) and tensor.is_input,
        **{f"also {n.layer}, {n.name}": (n.layer, n.name) != (origin.layer, origin.name) for n in savers},
        "in host memory": host_bytes,
        "packed on the host": any(x.name == "host_call" for _, x in kept),
        f"computed again from {source.recomputed_from}": source.recomputed_from,
    }
    kind = "copy" if tensor.is_input else "operation" if tensor.equations else "constant"
    return SavedTensor(
        kind="input" if is_held else "layer" if layer else kind,
        layer=layer,
        name=origin.name or input_name or origin.operation or program.operation(tensor),
        shape=tuple(tensor.aval.shape),
        dtype=str(tensor.aval.dtype),
        times=n_copies * n_parts * source.times,
        bytes=n_copies * max(sizes),
        packed_bytes=sum(map(_size, arrays)),
        host_bytes=host_bytes,
        # Only the call of a jitted function of JAX itself has a line of user code, not an equation inside it.
        source=line_of(sources) or line_of([marked.entry] if marked else []),
        note="; ".join(remark for remark, applies in remarks.items() if applies),
        is_recomputed=source.recomputed_from is not None,
        inside=origin.inside,
    )
