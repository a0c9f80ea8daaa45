"""Provides `saved_tensors_report`, which lists the residuals of a function in a table.

The second half of this module finds the origin of each value in a jaxpr, also if an inner jaxpr computes the value:

    { lambda ; a:f32[8]. let                                 a: an input
        b:f32[8] c:f32[3,8] = scan[                          c: three parts e, one per iteration
          length=3 jaxpr={ lambda ; d:f32[8]. let
              e:f32[8] = rule_function[name=Tanh] d          e: an operation, saved[0] of the layer Tanh
            in (e, e) } ] a
      in (c,) }

For this jaxpr, `outputs_of` returns the `Value` of c. The attribute `part` of this value is the `Value` of e.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import html
import math
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ._hooks import PACK_SCOPE, Mark, hooks_ignored, names_recorded, tensors_marked
from ._jax.jaxprs import inner_jaxprs, is_literal, jaxpr_and_consts, scan_counts
from ._jax.jaxprs import line_of as source_line
from ._jax.rule_function import BatchedFunction, Identity, PartialFunction, merge, payload_of, rule_function_p, select
from ._jax.types import is_ref
from ._layer_rule import StagedLayer
from ._trees import is_tensor, split

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


@dataclasses.dataclass(frozen=True)
class SavedTensor:
    """One row of a report: a residual, or several residuals that differ only in their values."""

    kind: str  # "layer" if a layer saves the tensor, or "input", "copy" (of an input), "operation", "constant"
    layer: str  # the class of the layer that saves the tensor; empty if no layer saves it
    name: str  # saved[0], a name in `saved_names` of the class or of `checkpoint_name`, an operation or an input
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
        return sum(r.packed_bytes - r.host_bytes for r in self.rows if r.kind != "input")

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
        """The number of bytes in the inputs that the vjp function holds unpacked."""
        return sum(r.packed_bytes for r in self.rows if r.kind == "input")

    def __repr__(self) -> str:
        titles, *rows = self._table()
        return text_table(titles, rows, ("times", "bytes", "packed"), self._total())

    def _repr_html_(self) -> str:
        titles, *rows = self._table()
        return html_table(titles, rows, self._total())

    def _table(self) -> list[list[str]]:
        """Return the row of titles and the rows of cells, with a column of packed sizes if a residual is packed."""
        is_packed = any(r.packed_bytes != r.bytes for r in self.rows)
        table = [["origin", "name", "type", "times", "bytes", *["packed"] * is_packed, "where", ""]]
        for r in self.rows:
            sizes = [f"{r.bytes:,}", *[f"{r.packed_bytes:,}"] * is_packed]
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
        """Draw one bar per row, as long as its packed bytes, on `ax` or new axes; return the axes. Needs matplotlib."""
        if ax is None:
            import matplotlib.pyplot as plt

            _, ax = plt.subplots(layout="constrained", figsize=(6.4, 1.2 + 0.25 * len(self.rows)))
        names = [f"{r.layer or r.kind}  {r.name}  {r.source}".rstrip() for r in self.rows]
        ax.barh(range(len(names)), [r.packed_bytes for r in self.rows], tick_label=names)
        ax.invert_yaxis()
        ax.set_xlabel("bytes")
        return ax


def saved_tensors_report(fun: Callable[..., Any], *args: Any, **kwargs: Any) -> SavedTensorsReport:
    """List the residuals that `jax.vjp` of `fun` at `args` and `kwargs` holds for backward.

        >>> print(saved_tensors_report(lambda x: Tanh.apply(x).sum(), jnp.ones((8, 4))))
        origin  name      type          times  bytes  where
        Tanh    saved[0]  float32[8,4]      1    128  ...
        128 bytes are kept for backward

    `fun` is a function or a layer. JAX traces `fun` and does not run it, so the arguments may be
    `jax.ShapeDtypeStruct`s. All float arguments are differentiated. Saved-tensor hooks around the call and inside `fun`
    apply as in a compiled program.

    A row is one residual, or several residuals that differ only in their values. A residual is a tensor that a layer
    saves, a result of a plain operation, or an input of `fun`, which exists anyway. Hooks use the same names: a
    predicate `only` gets them in `info`, and `by_name` takes them as keys. The largest rows come first, and inputs come
    last. If several layers save one tensor, the tensor has one row. Under hooks, a tensor that backward computes again
    has a row of 0 packed bytes. The size of an array is that of the whole array, on all devices. For a tensor that
    hooks with `host=True` packed, a row of the report counts the 4 bytes of its token. JAX traces `fun` twice: the
    second time without hooks, to compute `total_unpacked_bytes`.

    Raises:
        TypeError: if no argument holds a float array.
    """
    fun = getattr(fun, "apply", fun) if isinstance(fun, type) else fun
    tensors, skeleton = split((args, kwargs), lambda x: is_tensor(x) or isinstance(x, jax.ShapeDtypeStruct))
    is_float = [jnp.issubdtype(t.dtype, jnp.inexact) for t in tensors]
    if not any(is_float):
        raise TypeError("saved_tensors_report: none of the arguments holds a float array, so that nothing is saved.")

    names = [{"[0]": "args", "[1]": "kwargs"}[path[:3]] + path[3:] for path in skeleton.tensor_paths()]

    def rows_of(block: contextlib.AbstractContextManager[Any]) -> list[SavedTensor]:
        def residuals(*tensors: Any) -> list[Any]:
            def run(*floats: Any) -> list[Any]:
                args, kwargs = skeleton.fill(merge(is_float, floats, tensors))
                with block:
                    return split(fun(*args, **kwargs))[0]

            _, pullback = jax.vjp(run, *select(tensors, is_float))
            return [x for x in jax.tree_util.tree_leaves(pullback) if not is_ref(x)]  # the caller holds the Refs

        jaxpr, _ = jaxpr_and_consts(jax.make_jaxpr(residuals)(*tensors))
        inputs = [Value(v.aval, "input", name) for v, name in zip(jaxpr.invars, names, strict=True)]
        # A variable that is returned several times is kept once.
        return _rows(dict(zip(map(id, jaxpr.outvars), outputs_of(jaxpr, inputs), strict=True)).values())

    with hooks_ignored():
        plain = rows_of(contextlib.nullcontext())
    with tensors_marked():
        rows = rows_of(names_recorded())
    return SavedTensorsReport(rows, SavedTensorsReport(plain, 0).total_bytes)


def _rows(values: Iterable[Value]) -> list[SavedTensor]:
    """Return one row per group of equal residuals. The largest rows come first, and inputs come last."""
    # Leave out residuals of size 0, which only encode the number of a run: see NOTE [several runs] in _custom_vjp.py.
    kept = [value for value in values if value.aval.size]
    arrays_of: dict[Value, list[Value]] = {}  # from a tensor to its packed arrays, or to [tensor] if it is not packed
    for array in kept:
        arrays_of.setdefault(array.tensor or array, []).append(array)
    single = [
        *map(_row, arrays_of, arrays_of.values()),
        *[_recomputed_row(v) for v in values if v.kind == "recomputed"],
    ]
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
    """Return the row of a tensor that backward computes again, from the result of its `Mark`."""
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
        note="computed again",
        is_recomputed=True,
    )


def _row(tensor: Value, arrays: list[Value]) -> SavedTensor:
    """Return the row of a tensor that is packed as `arrays`."""
    is_packed, is_from_input = arrays != [tensor], tensor.kind == "input"
    one, times = tensor.innermost()
    # The row counts a packed tensor once per iteration that packs it, and adds the shards that devices pack. The row
    # counts an unpacked tensor once per copy that JAX keeps.
    parts = [(a, *a.innermost()) for a in arrays if a is not tensor]
    layer, name, equations = (*tensor.savers, ("", tensor.name, tensor.equations))[0]
    is_input = is_from_input and tensor.part is None and not is_packed
    notes = {
        f"the input {tensor.name}": bool(tensor.savers) and is_from_input,
        **{f"also {other}, {saved}": (other, saved) != (layer, name) for other, saved, _ in tensor.savers},
        "in host memory": any(map(_is_on_host, arrays)),
        "packed on the host": any(part.name == "host_call" for _, part, _ in parts),
    }
    return SavedTensor(
        kind="input" if is_input else "layer" if layer else "copy" if is_from_input else tensor.kind,
        layer=layer,
        name=name,
        shape=tuple(one.aval.shape),
        dtype=str(one.aval.dtype),
        times=times * max((n_iterations for _, _, n_iterations in parts), default=len(arrays)),
        bytes=tensor.bytes * max((a.aval.size // part.aval.size for a, part, _ in parts), default=len(arrays)),
        packed_bytes=sum(a.bytes for a in arrays),
        host_bytes=sum(a.bytes for a in arrays if _is_on_host(a)),
        source=line_of(equations),
        note="; ".join(note for note, applies in notes.items() if applies),
    )


def _is_on_host(value: Value) -> bool:
    return value.aval.memory_space == jax.memory.Space.Host


# -- origins of values ----------------------------------------------------------------------------

Equations = tuple[Any, ...]  # from the outermost equation to the innermost; each holds the jaxpr of the next equation


@dataclasses.dataclass(eq=False)
class Value:
    """A value that a program computes. If a program calls a jaxpr twice, each variable of the jaxpr has two values."""

    aval: Any
    kind: str  # "input", "constant" or "operation"; "recomputed" for the mark of a tensor that is not kept
    name: str  # the name of the input or of the operation, or the name that a block has recorded
    equations: Equations = ()
    tensor: Value | None = None  # the tensor from which a pack hook computed the value
    part: Value | None = None  # the value in the inner jaxpr of a scan, shard_map or cond from which JAX makes it
    times: int = 1  # the number of iterations, each of which computes one `part`
    layer: str = ""  # for a mark: the layer that saved the tensor
    savers: list[tuple[str, str, Equations]] = dataclasses.field(default_factory=list)  # (layer, name, equations)

    @property
    def bytes(self) -> int:
        return self.aval.size * self.aval.dtype.itemsize

    def innermost(self) -> tuple[Value, int]:
        """Return the slice of this value from one iteration of the innermost loop, and the number of iterations."""
        value, times = self, 1
        while value.part is not None:
            value, times = value.part, times * value.times
        return value, times


def line_of(equations: Equations) -> str:
    """Return the innermost source line of user code, such as `model.py:12`."""
    # The equations in a jitted function of JAX itself have no line of user code, but the equation that calls it has.
    return source_line([equation.source_info for equation in equations])


def outputs_of(jaxpr: Any, inputs: Sequence[Value], within: Equations = ()) -> list[Value]:
    """Return the output values of a jaxpr; `within` lists the equations that hold the jaxpr, outermost first."""
    value_of = dict(zip(jaxpr.invars, inputs, strict=True))
    value_of |= {v: Value(v.aval, "constant", "closed over") for v in jaxpr.constvars}

    def read(atoms: Sequence[Any]) -> list[Value]:
        return [Value(a.aval, "constant", str(a.val)) if is_literal(a) else value_of[a] for a in atoms]

    for equation in jaxpr.eqns:
        results = _results((*within, equation), read(equation.invars))
        value_of.update(zip(equation.outvars, results, strict=True))
    return read(jaxpr.outvars)


# The results of these primitives equal their operands. If both an operand and its equal result are residuals, JAX keeps
# two copies.
_IDENTITIES = frozenset(("name", "optimization_barrier", "pcast", "pvary", "reduce_precision", "stop_gradient"))
# A `cond` returns the residuals of all branches. By these primitives, each branch makes the residuals of the other
# branches.
_FILLED = ("broadcast_in_dim", "empty2")


def _results(equations: Equations, operands: list[Value]) -> list[Value]:
    equation = equations[-1]
    name, inner = equation.primitive.name, inner_jaxprs(equation.params)
    in_hook = any(PACK_SCOPE in str(e.source_info.name_stack) for e in equations)
    # A pack hook may also read constants and the index of the device. So the packed tensor is the largest of the other
    # operands.
    tensors = [v.tensor or v for v in operands] if in_hook else []
    tensor = max(tensors, key=lambda v: (v.kind != "constant", v.aval.size), default=None)
    kind = "constant" if in_hook else "operation"
    results = [Value(v.aval, kind, name, equations, tensor) for v in equation.outvars]
    times = [1] * len(results)
    if equation.primitive is rule_function_p and isinstance(payload_of(equation), Identity):
        return operands
    # A shard_map returns a scalar residual as an array with one entry per device.
    if name in _IDENTITIES or (name == "broadcast_in_dim" and results[0].aval.size == 1):
        return operands
    if name == "scan":
        n_consts, n_carry = scan_counts(equation.params)
        n_before = n_consts + n_carry
        carry = [Value(v.aval, "operation", name, equations) for v in inner[0].invars[n_consts:n_before]]
        slices = _slices(operands[n_before:], inner[0].invars[n_before:])
        parts = outputs_of(inner[0], [*operands[:n_consts], *carry, *slices], equations)
        times[n_carry:] = [equation.params["length"]] * (len(results) - n_carry)
    elif name == "cond":
        branches = [outputs_of(branch, operands[1:], equations) for branch in inner]
        is_computed = lambda v: (bool(v.savers), v.kind != "constant", v.name not in _FILLED)  # noqa: E731
        parts = [max(values, key=is_computed) for values in zip(*branches, strict=True)]
    elif name == "shard_map":
        parts = outputs_of(inner[0], _slices(operands, inner[0].invars), equations)
    elif equation.primitive is rule_function_p and (
        _note_savers(equations, operands, results) or _note_mark(equation, operands, results)
    ):
        return results
    elif len(inner) == 1 and _shapes(inner[0].invars, inner[0].outvars) == _shapes(operands, results):
        return outputs_of(inner[0], operands, equations)  # such as a jitted function or a checkpoint
    else:
        return results
    return [
        Value(result.aval, v.kind, v.name, v.equations, v.tensor, v, n, v.layer, [*v.savers])
        for result, v, n in zip(results, parts, times, strict=True)
    ]


def _slices(wholes: Sequence[Value], variables: Sequence[Any]) -> list[Value]:
    pairs = zip(wholes, variables, strict=True)
    return [dataclasses.replace(whole, aval=v.aval, part=None, times=1) for whole, v in pairs]


def _shapes(*values: Sequence[Any]) -> list[Any]:
    return [[getattr(v.aval, "shape", None) for v in vs] for vs in values]


def _note_savers(equations: Equations, operands: list[Value], results: list[Value]) -> bool:
    """Add the layer that the last equation applies to the `savers` of each residual of this equation.

    Return False if it applies none.
    """
    function, operands, values = _unwrapped(equations[-1], operands, results)
    if not isinstance(function, StagedLayer):
        return False
    layer = function.call.layer
    names = function.call.residual_names(function.kept, len(function.positions))
    for name, residual in zip(names, function.residuals(operands[function.n_consts :], values), strict=True):
        if residual is not None:
            residual.savers.append((layer.__name__, name, equations))
    for result in results:
        result.name = layer.__name__
    return True


def _note_mark(equation: Any, operands: list[Value], results: list[Value]) -> bool:
    """Give the operand of a `Mark` the name that the mark holds. Return False if the equation has no `Mark`."""
    function, operands, _ = _unwrapped(equation, operands, results)
    if not isinstance(function, Mark):
        return False
    (tensor,), (result,), origin = operands, results, function.origin
    name = origin.name or origin.operation
    if tensor.kind == "operation" and name:
        tensor.name = name
    result.kind, result.layer, result.equations = "mark", origin.layer, tensor.equations
    if function.is_recomputed:
        result.kind, result.name = "recomputed", name
    return True


def _unwrapped(equation: Any, operands: list[Value], results: list[Value]) -> tuple[Any, list[Value], list[Any]]:
    """Return the function inside the batched and partial functions of an equation, its operands, and its values.

    A value that the equation does not compute is None.
    """
    function, values = payload_of(equation), list[Any](results)
    while isinstance(function, (BatchedFunction, PartialFunction)):
        if isinstance(function, BatchedFunction):
            function, operands = function.inner, operands[function.n_consts :]
        else:
            found = dict(zip(function.positions, values, strict=False))
            function, operands = function.whole, operands[function.n_residuals :]
            values = [found.get(i) for i in range(len(function.jaxpr.outvars))]
    return function, operands, values
