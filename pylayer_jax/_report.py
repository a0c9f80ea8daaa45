"""Provides `saved_tensors_report`, which lists the residuals of a function in a table.

The second half of this module finds the origin of each value in a jaxpr, also if an inner jaxpr computes the value:

    { lambda ; a:f32[8]. let                                 a: an input
        b:f32[8] c:f32[3,8] = scan[                          c: three parts e, one per iteration
          length=3 jaxpr={ lambda ; d:f32[8]. let
              e:f32[8] = rule_function[name=Tanh] d          e: an operation, saved[0] of the layer Tanh
            in (e, e) } ] a
      in (c,) }

For the jaxpr above, `outputs_of` returns the `Value` of the variable c. In the `Value` of the variable c, the attribute
`part` is the `Value` of the variable e. `outputs_of` also returns a `Note`. This note says that the layer Tanh saves
the variable e under the name saved[0].
"""

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
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp

from ._hooks import PACK_SCOPE, Mark, hooks_ignored, names_recorded, tensors_marked
from ._jax.jaxprs import inner_jaxprs, is_literal, jaxpr_and_consts, scan_counts
from ._jax.jaxprs import line_of as source_line
from ._jax.rule_function import BatchedFunction, Identity, PartialFunction, merge, payload_of, rule_function_p, select
from ._jax.types import is_ref, is_tensor
from ._layer_rule import StagedLayer
from ._trees import split

# -- tables ---------------------------------------------------------------------------------------------------


def text_table(titles: Sequence[str], rows: Sequence[Sequence[str]], right: Collection[str], caption: str) -> str:
    """Return a table as lines of text, with the caption below; the columns named in `right` are aligned to the right.

    >>> print(text_table(["name", "bytes"], [["x", "1"], ["weights", "1,024"]], right=["bytes"], caption="two tensors"))
    name     bytes
    x            1
    weights  1,024
    two tensors
    """
    table = [titles, *rows]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    justify = [str.rjust if title in right else str.ljust for title in titles]
    lines = ["  ".join(f(cell, n) for f, cell, n in zip(justify, row, widths, strict=True)) for row in table]
    return "\n".join([*map(str.rstrip, lines), caption])


def html_table(titles: Sequence[str], rows: Sequence[Sequence[str]], caption: str) -> str:
    """Return a table as HTML, with all text escaped."""

    def line(tag: str, cells: Sequence[str]) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(c)}</{tag}>" for c in cells) + "</tr>"

    head, body = line("th", titles), "".join(line("td", row) for row in rows)
    return f"<table><caption>{html.escape(caption)}</caption><thead>{head}</thead><tbody>{body}</tbody></table>"


@contextlib.contextmanager
def progress() -> Generator[Callable[[str], None]]:
    """Yield a function that shows a line in a terminal or notebook, and shows nothing elsewhere or in a test.

    At the end, all lines are removed from the screen, because the report repeats them.
    """
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
    """One row of a report: a residual, or several residuals that differ only in their values."""

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


@dataclasses.dataclass(frozen=True, repr=False)
class SavedTensorsReport:
    """Result of `saved_tensors_report`: a table with one row per residual, or per group of similar residuals."""

    rows: list[SavedTensor]
    total_unpacked_bytes: int  # the bytes that the vjp function would hold without any block of hooks

    @property
    def total_bytes(self) -> int:
        """The number of bytes that the vjp function holds on the device, without the inputs, which the caller holds."""
        return _device_bytes(self.rows)

    @property
    def host_bytes(self) -> int:
        """The number of bytes that the vjp function holds in host memory."""
        return sum(r.host_bytes for r in self.rows)

    @property
    def recomputed_bytes(self) -> int:
        """The number of bytes in tensors that are not kept, because backward computes them again from other tensors."""
        return sum(r.bytes for r in self.rows if r.is_recomputed)

    @property
    def input_bytes(self) -> int:
        """The total size in bytes of those inputs of the function that the vjp function holds without packing."""
        return sum(r.packed_bytes for r in self.rows if r.kind == "input")

    def __repr__(self) -> str:
        titles, *rows = self._table()
        return text_table(titles, rows, ("times", "bytes", "packed"), self._total())

    def _repr_html_(self) -> str:
        titles, *rows = self._table()
        return html_table(titles, rows, self._total())

    def _table(self) -> list[list[str]]:
        """Return the cells of the table, with the row of titles first.

        If any residual is packed, the table also has a column for packed sizes.
        """
        is_packed = any(r.packed_bytes != r.bytes for r in self.rows)
        table = [["origin", "name", "type", "times", "bytes", *(["packed"] if is_packed else []), "where", ""]]
        for r in self.rows:
            sizes = [f"{r.bytes:,}", *([f"{r.packed_bytes:,}"] if is_packed else [])]
            shape = ",".join(map(str, r.shape))
            table.append([r.layer or r.kind, r.name, f"{r.dtype}[{shape}]", f"{r.times}", *sizes, r.source, r.note])
        return table

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
        """Draw one bar of length `packed_bytes` per row, on `ax` or on new axes. Return the axes. Needs matplotlib."""
        if ax is None:
            import matplotlib.pyplot as plt

            _, ax = plt.subplots(layout="constrained", figsize=(6.4, 1.2 + 0.25 * len(self.rows)))
        names = [f"{r.layer or r.kind}  {r.name}  {r.source}".rstrip() for r in self.rows]
        ax.barh(range(len(names)), [r.packed_bytes for r in self.rows], tick_label=names)
        ax.invert_yaxis()
        ax.set_xlabel("bytes")
        return ax


def _device_bytes(rows: Sequence[SavedTensor]) -> int:
    return sum(r.packed_bytes - r.host_bytes for r in rows if r.kind != "input")


def saved_tensors_report(fun: Callable[..., Any], *args: Any, **kwargs: Any) -> SavedTensorsReport:
    """List the residuals that `jax.vjp` of `fun` at `args` and `kwargs` holds for backward.

        >>> print(saved_tensors_report(lambda x: Tanh.apply(x).sum(), jnp.ones((8, 4))))
        origin  name      type          times  bytes  where
        Tanh    saved[0]  float32[8,4]      1    128  ...
        128 bytes are kept for backward

    `fun` is a function or a layer. JAX traces `fun` and does not run it, so the arguments may be
    `jax.ShapeDtypeStruct`s. All float arguments are differentiated. Saved-tensor hooks around the call and inside `fun`
    apply as in a compiled program.

    Each row of the report describes one residual, or several residuals that differ only in their values. A residual is
    a tensor that a layer saves, a result of a plain operation, or an input of `fun`. An input takes no extra memory,
    because the caller holds the input. Hooks use the same names: a predicate `only` gets them in `info`, and `by_name`
    takes them as keys. The largest rows come first, and inputs come last. If several layers save one tensor, the tensor
    has one row. Saved-tensor hooks may compute a tensor again in the backward pass instead of keeping it. If the
    backward pass recomputes a tensor instead of reading a kept array, the report shows 0 packed bytes for this tensor.
    The size of an array is that of the whole array, on all devices. Hooks with `host=True` hold a packed tensor outside
    of the compiled program. In place of the tensor, the compiled program keeps a number with 4 bytes. The row of the
    tensor in the report counts these 4 bytes. JAX traces `fun` once with hooks, and once without them, to compute
    `total_unpacked_bytes`.

    Raises:
        TypeError: if no argument holds a float array.
    """
    fun = getattr(fun, "apply", fun) if isinstance(fun, type) else fun
    tensors, skeleton = split((args, kwargs), lambda x: is_tensor(x) or isinstance(x, jax.ShapeDtypeStruct))
    if not any(map(_is_inexact, tensors)):
        raise TypeError("saved_tensors_report: none of the arguments holds a float array, so that nothing is saved.")

    def run(*tensors: Any) -> Any:
        args, kwargs = skeleton.fill(tensors)
        return fun(*args, **kwargs)

    def run_with_names(*tensors: Any) -> Any:
        with names_recorded():
            return run(*tensors)

    names = [_argument_name(path) for path in skeleton.tensor_paths()]
    with hooks_ignored():
        unpacked = _rows(*_residuals(run, tensors, names))
    with tensors_marked():  # each kept tensor gets a `Mark`, a further residual of size 0
        rows = _rows(*_residuals(run_with_names, tensors, names))
    return SavedTensorsReport(rows, _device_bytes(unpacked))


def _is_inexact(tensor: Any) -> bool:
    return jnp.issubdtype(tensor.dtype, jnp.inexact)


def _argument_name(path: str) -> str:
    """Return `args[1]['w']` for the path `[0][1]['w']` in the tuple (args, kwargs)."""
    return ("args" if path.startswith("[0]") else "kwargs") + path[3:]


def _residuals(
    run: Callable[..., Any], tensors: Sequence[Any], names: Sequence[str]
) -> tuple[list[Value], dict[Value, list[Note]]]:
    """Return the distinct residuals of `run(*tensors)`, and the `Note`s on each value. `names` names the tensors."""
    is_float = [_is_inexact(t) for t in tensors]

    def residuals(*tensors: Any) -> list[Any]:
        def run_floats(*floats: Any) -> list[Any]:
            return split(run(*merge(is_float, floats, tensors)))[0]

        _, pullback = jax.vjp(run_floats, *select(tensors, is_float))
        return [x for x in jax.tree_util.tree_leaves(pullback) if not is_ref(x)]  # the caller holds the Refs

    jaxpr, _ = jaxpr_and_consts(jax.make_jaxpr(residuals)(*tensors))
    inputs = [Value(v.aval, "input", name) for v, name in zip(jaxpr.invars, names, strict=True)]
    values, notes = outputs_of(jaxpr, inputs)
    # A variable that is returned several times is kept once.
    value_of_variable = dict(zip(map(id, jaxpr.outvars), values, strict=True))
    return list(value_of_variable.values()), _by_value(notes)


def _rows(values: Sequence[Value], notes_of: Mapping[Value, list[Note]]) -> list[SavedTensor]:
    """Return one row per group of equal residuals. The largest rows come first, and inputs come last."""
    # Leave out residuals of size 0. The residuals of size 0 are the results of `Mark`s, and run numbers. NOTE [several
    # runs] in _custom_vjp.py describes the run numbers.
    kept = [value for value in values if value.aval.size]
    arrays_of: dict[Value, list[Value]] = {}  # from a tensor to its packed arrays, or to the tensor if it is not packed
    for array in kept:
        arrays_of.setdefault(array.tensor or array, []).append(array)
    single = [row for tensor, arrays in arrays_of.items() for row in _rows_of_tensor(tensor, arrays, notes_of)]
    single += [_recomputed_row(value) for value in values if value.kind == "recomputed"]
    rows = [
        dataclasses.replace(
            row,
            times=n * row.times,
            bytes=n * row.bytes,
            packed_bytes=n * row.packed_bytes,
            host_bytes=n * row.host_bytes,
        )
        for row, n in collections.Counter(single).items()
    ]
    return sorted(rows, key=lambda r: (r.kind == "input", -r.packed_bytes, -r.bytes))


def _recomputed_row(value: Value) -> SavedTensor:
    """Return the report row of a tensor that the backward pass recomputes.

    `value` describes the empty array that the `Mark` of this tensor returned.
    """
    one, times = value.innermost()
    start = one.aval.shape.index(0)  # a `Mark` adds an axis of length 0 to the shape of its tensor
    return SavedTensor(
        kind="layer" if one.layer else "operation",
        layer=one.layer,
        name=one.name,
        shape=(*one.aval.shape[:start], *one.aval.shape[start + 1 :]),
        dtype=str(one.aval.dtype),
        times=times,
        bytes=math.prod(n for n in value.aval.shape if n) * value.aval.dtype.itemsize,
        packed_bytes=0,
        source=line_of(one.equations),
        note=f"computed again from {one.recomputed_from}",
        is_recomputed=True,
    )


def _rows_of_tensor(tensor: Value, arrays: list[Value], notes_of: Mapping[Value, list[Note]]) -> list[SavedTensor]:
    """Return the rows of a tensor.

    A kept input has one row for the input itself, and a second row if `arrays` contains other arrays. Any other tensor
    has one row.
    """
    is_kept_input = tensor.kind == "input" and tensor.part is None and tensor in arrays
    if not is_kept_input:
        return [_row(tensor, arrays, notes_of)]
    others = [a for a in arrays if a is not tensor] + [tensor] * (arrays.count(tensor) - 1)
    rows = [_row(tensor, others, notes_of)] if others else []
    return [dataclasses.replace(_row(tensor, [tensor], notes_of), kind="input"), *rows]


def _row(tensor: Value, arrays: list[Value], notes_of: Mapping[Value, list[Note]]) -> SavedTensor:
    """Return the row of a tensor.

    JAX keeps `arrays` for the tensor: the tensor itself, arrays that a pack hook made from the tensor, or both.
    """
    one, n_iterations = tensor.innermost()
    packed = [(a, *a.innermost()) for a in arrays if a is not tensor]
    if packed:  # count each iteration that packs the tensor, and all shards of it
        times = n_iterations * max(n for _, _, n in packed)
        n_bytes = tensor.bytes * max(a.aval.size // part.aval.size for a, part, _ in packed)
    else:  # count each copy that JAX keeps
        times, n_bytes = n_iterations * len(arrays), tensor.bytes * len(arrays)
    notes = _notes_on(tensor, notes_of)
    savers = [note for note in notes if note.layer]
    layer, name, equations = savers[0][1:] if savers else ("", _name(tensor, notes), tensor.equations)
    is_from_input = tensor.kind == "input"
    remarks = {
        f"the input {tensor.name}": bool(savers) and is_from_input,
        **{f"also {n.layer}, {n.name}": (n.layer, n.name) != (layer, name) for n in savers},
        "in host memory": any(map(_is_on_host, arrays)),
        "packed on the host": any(part.name == "host_call" for _, part, _ in packed),
    }
    return SavedTensor(
        kind="layer" if layer else "copy" if is_from_input else tensor.kind,
        layer=layer,
        name=name,
        shape=tuple(one.aval.shape),
        dtype=str(one.aval.dtype),
        times=times,
        bytes=n_bytes,
        packed_bytes=sum(a.bytes for a in arrays),
        host_bytes=sum(a.bytes for a in arrays if _is_on_host(a)),
        source=line_of(equations),
        note="; ".join(remark for remark, applies in remarks.items() if applies),
    )


def _is_on_host(value: Value) -> bool:
    return value.aval.memory_space == jax.memory.Space.Host


# -- values and notes on them ---------------------------------------------------------------------

Equations = tuple[Any, ...]  # from the outermost equation to the innermost; each holds the jaxpr of the next equation


@dataclasses.dataclass(frozen=True, eq=False)
class Value:
    """A value that a program computes. If a program calls a jaxpr twice, each variable of the jaxpr has two values."""

    aval: Any
    kind: str  # "input", "constant", "operation"; of the result of a `Mark`: "mark", or "recomputed" for its tensor
    name: str  # the name of the input, the operation or the layer; of the result of a `Mark`: the name of the tensor
    equations: Equations = ()
    tensor: Value | None = None  # the tensor from which a pack hook computed the value
    part: Value | None = None  # if a scan, shard_map or cond returns the value: the value that its inner jaxpr returns
    times: int = 1  # the number of iterations, each of which computes one `part`
    whole: Value | None = None  # for a slice, which an inner jaxpr gets: the operand of the scan or shard_map
    layer: str = ""  # of the result of a `Mark`: the layer that saved the tensor
    recomputed_from: str | None = None  # of the result of a `Mark`: the names of other tensors

    @property
    def bytes(self) -> int:
        return self.aval.size * self.aval.dtype.itemsize

    def innermost(self) -> tuple[Value, int]:
        """Return the slice of this value that one iteration of the innermost loop computes, and the slice count."""
        value, times = self, 1
        while value.part is not None:
            value, times = value.part, times * value.times
        return value, times

    def unsliced(self) -> Value:
        return self if self.whole is None else self.whole.unsliced()


class Note(NamedTuple):
    """A note about a computed value: which layer saves the value, or which name a `Mark` gives to the value."""

    value: Value
    layer: str  # the layer that saves the value; empty for a `Mark`
    name: str  # the name of the value in the layer, or the name that a block recorded
    equations: Equations  # the equation that applies the layer


def _by_value(notes: Sequence[Note]) -> dict[Value, list[Note]]:
    notes_of: dict[Value, list[Note]] = {}
    for note in notes:
        notes_of.setdefault(note.value.unsliced(), []).append(note)
    return notes_of


def _notes_on(value: Value, notes_of: Mapping[Value, list[Note]]) -> list[Note]:
    """Return the notes on `value.unsliced()`, on all slices of this array, and on the `part` of this array."""
    whole = value.unsliced()
    on_part = [] if whole.part is None else _notes_on(whole.part, notes_of)
    return [*on_part, *notes_of.get(whole, ())]


def _name(value: Value, notes: Sequence[Note]) -> str:
    """Return the name that the last `Mark` gave to a value, or `value.name` if no `Mark` named the value."""
    return [value.name, *(note.name for note in notes if not note.layer)][-1]


def line_of(equations: Equations) -> str:
    """Return the innermost source line of user code, such as `model.py:12`."""
    # An equation inside a jitted function of JAX itself has no line of user code. The equation that calls this jitted
    # function has a line of user code.
    return source_line([equation.source_info for equation in equations])


# -- origins of values ----------------------------------------------------------------------------


def outputs_of(jaxpr: Any, inputs: Sequence[Value], within: Equations = ()) -> tuple[list[Value], list[Note]]:
    """Return a `Value` for each output of a jaxpr, and a list of the `Note`s of all layers and `Mark`s in the jaxpr.

    `within` lists the nested equations that contain the jaxpr, from the outermost equation to the innermost.
    """
    value_of = dict(zip(jaxpr.invars, inputs, strict=True))
    value_of |= {v: Value(v.aval, "constant", "closed over") for v in jaxpr.constvars}
    notes: list[Note] = []

    def read(atoms: Sequence[Any]) -> list[Value]:
        return [Value(a.aval, "constant", str(a.val)) if is_literal(a) else value_of[a] for a in atoms]

    for equation in jaxpr.eqns:
        results, new_notes = _results((*within, equation), read(equation.invars))
        value_of.update(zip(equation.outvars, results, strict=True))
        notes += new_notes
    return read(jaxpr.outvars), notes


def _results(equations: Equations, operands: list[Value]) -> tuple[list[Value], list[Note]]:
    """Return the results of the last equation, and a list of the `Note`s of all layers and `Mark`s in this equation."""
    equation = equations[-1]
    name = equation.primitive.name
    if _returns_operands(equation):
        return operands, []
    if name in _PARTS:
        parts, times, notes = _PARTS[name](equations, operands)
        outputs = zip(equation.outvars, parts, times, strict=True)
        return [dataclasses.replace(v, aval=out.aval, part=v, times=n, whole=None) for out, v, n in outputs], notes
    function = _nested_functions(equation)[-1] if equation.primitive is rule_function_p else None
    if isinstance(function, StagedLayer):
        return _layer_results(equations, operands)
    if isinstance(function, Mark):
        return _mark_results(equation, function, operands)
    if _only_calls(equation):
        return outputs_of(inner_jaxprs(equation.params)[0], operands, equations)
    return _operation_results(equations, operands, name), []


def _operation_results(equations: Equations, operands: list[Value], name: str) -> list[Value]:
    outvars = equations[-1].outvars
    if not any(PACK_SCOPE in str(e.source_info.name_stack) for e in equations):
        return [Value(v.aval, "operation", name, equations) for v in outvars]
    # An equation of a pack hook may also have constants and the index of the device as operands. So the packed tensor
    # is the largest operand that is not a constant.
    tensors = [v.tensor or v for v in operands]
    tensor = max(tensors, key=lambda v: (v.kind != "constant", v.aval.size), default=None)
    return [Value(v.aval, "constant", name, equations, tensor) for v in outvars]


# The result of each of these operations equals its operand. If both the operand and the result are residuals, JAX keeps
# two copies of one tensor.
_IDENTITIES: Final = frozenset(("name", "optimization_barrier", "pcast", "pvary", "stop_gradient"))


def _returns_operands(equation: Any) -> bool:
    """Return whether an equation returns its operands unchanged."""
    name, params = equation.primitive.name, equation.params
    if equation.primitive is rule_function_p:
        return isinstance(payload_of(equation), Identity)
    if name == "reduce_precision":  # `jax.checkpoint` applies it to what a policy saves, and keeps all bits
        info = jnp.finfo(equation.outvars[0].aval.dtype)
        return params["exponent_bits"] >= info.nexp and params["mantissa_bits"] >= info.nmant
    if name == "broadcast_in_dim":  # a shard_map returns a scalar residual as an array with one entry per device
        return equation.outvars[0].aval.size == 1
    return name in _IDENTITIES


def _only_calls(equation: Any) -> bool:
    """Return whether an equation only calls a jaxpr, as that of a jitted function or a checkpoint does."""
    inner = inner_jaxprs(equation.params)
    return len(inner) == 1 and _shapes(inner[0].invars, inner[0].outvars) == _shapes(equation.invars, equation.outvars)


def _shapes(*values: Sequence[Any]) -> list[Any]:
    return [[getattr(v.aval, "shape", None) for v in vs] for vs in values]


# -- equations with inner jaxprs, whose outputs are parts of the results --------------------------

Parts = tuple[list[Value], list[int], list[Note]]  # the parts, how many iterations compute each of them, and notes


def _scan_parts(equations: Equations, operands: list[Value]) -> Parts:
    params = equations[-1].params
    (inner,) = inner_jaxprs(params)
    n_consts, n_carry = scan_counts(params)
    n_before = n_consts + n_carry
    carry = [Value(v.aval, "operation", "scan", equations) for v in inner.invars[n_consts:n_before]]
    slices = _slices(operands[n_before:], inner.invars[n_before:])
    parts, notes = outputs_of(inner, [*operands[:n_consts], *carry, *slices], equations)
    return parts, [1] * n_carry + [params["length"]] * (len(parts) - n_carry), notes


def _shard_map_parts(equations: Equations, operands: list[Value]) -> Parts:
    (inner,) = inner_jaxprs(equations[-1].params)
    parts, notes = outputs_of(inner, _slices(operands, inner.invars), equations)
    return parts, [1] * len(parts), notes


# A `cond` returns the residuals of all its branches. In place of the residuals of the other branches, each branch
# returns placeholders. These primitives compute the placeholders.
_PLACEHOLDERS: Final = ("broadcast_in_dim", "empty2")


def _cond_parts(equations: Equations, operands: list[Value]) -> Parts:
    branches = [outputs_of(branch, operands[1:], equations) for branch in inner_jaxprs(equations[-1].params)]
    notes = [note for _, of_branch in branches for note in of_branch]
    notes_of = _by_value(notes)

    def preference(value: Value) -> tuple[bool, bool, bool]:
        on_value = _notes_on(value, notes_of)
        is_saved = any(note.layer for note in on_value)
        return is_saved, value.kind != "constant", _name(value, on_value) not in _PLACEHOLDERS

    parts = [max(values, key=preference) for values in zip(*(values for values, _ in branches), strict=True)]
    return parts, [1] * len(parts), notes


_PARTS: Final[dict[str, Callable[[Equations, list[Value]], Parts]]] = {
    "scan": _scan_parts,
    "shard_map": _shard_map_parts,
    "cond": _cond_parts,
}


def _slices(wholes: Sequence[Value], variables: Sequence[Any]) -> list[Value]:
    pairs = zip(wholes, variables, strict=True)
    return [dataclasses.replace(v, aval=x.aval, part=None, times=1, whole=v) for v, x in pairs]


# -- layers and marks -----------------------------------------------------------------------------


def _layer_results(equations: Equations, operands: list[Value]) -> tuple[list[Value], list[Note]]:
    """Return the results of a layer, and a note on each value that the layer saves."""
    *wrappers, function = _nested_functions(equations[-1])
    layer = function.call.layer.__name__
    results = _operation_results(equations, operands, layer)
    outputs: list[Any] = results
    for wrapper in wrappers:
        operands, outputs = _inside(wrapper, operands, outputs)
    names = function.call.residual_names(function.kept, len(function.positions))
    residuals = function.residuals(operands[function.n_consts :], outputs)
    saved = [(v, name) for v, name in zip(residuals, names, strict=True) if v is not None]
    return results, [Note(v, layer, name, equations) for v, name in saved]


def _mark_results(equation: Any, mark: Mark, operands: list[Value]) -> tuple[list[Value], list[Note]]:
    """Return the result of a `Mark`, and a list of at most one `Note`.

    The `Note` gives a name to the operand of the `Mark`.
    """
    tensor, origin = operands[-1], mark.origin  # the operands before it are constants of batched code
    name = origin.name or origin.operation
    kind = "mark" if mark.recomputed_from is None else "recomputed"
    result = Value(
        equation.outvars[0].aval,
        kind,
        name,
        tensor.equations,
        layer=origin.layer,
        recomputed_from=mark.recomputed_from,
    )
    return [result], [Note(tensor, "", name, ())] if tensor.kind == "operation" and name else []


def _nested_functions(equation: Any) -> list[Any]:
    """Return the function of a `rule_function` equation and all functions nested in it, outermost first."""
    functions = [payload_of(equation)]
    while isinstance(functions[-1], (BatchedFunction, PartialFunction)):
        outer = functions[-1]
        functions.append(outer.inner if isinstance(outer, BatchedFunction) else outer.whole)
    return functions


def _inside(
    function: BatchedFunction | PartialFunction, operands: list[Value], outputs: list[Any]
) -> tuple[list[Value], list[Any]]:
    """Convert the operands and outputs of a batched or partial `function` to those of its inner function.

    A `PartialFunction` computes only some of the outputs of another function, the attribute `whole`. In the returned
    list, None takes the place of every other output.
    """
    if isinstance(function, BatchedFunction):
        return operands[function.n_consts :], outputs
    computed = dict(zip(function.positions, outputs, strict=False))  # residuals for another part follow
    return operands[function.n_residuals :], [computed.get(i) for i in range(len(function.whole.jaxpr.outvars))]
