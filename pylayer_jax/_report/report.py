"""`saved_tensors_report` and the report that it returns: one row per residual, or per group of equal ones."""

from __future__ import annotations

import collections
import dataclasses
import html
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pylayer_jax._jax.jaxprs import jaxpr_and_consts
from pylayer_jax._jax.masks import merge, select
from pylayer_jax._jax.types import is_ref
from pylayer_jax._trees import is_tensor, split

from .origins import Value, line_of, outputs_of


@dataclasses.dataclass(frozen=True)
class SavedTensor:
    """One tensor that is kept for backward, or several that differ only in their values."""

    kind: str  # "layer" (saves it); "input" of the function (exists anyway); "copy" of one; "operation"; "constant"
    layer: str  # the class that saves it, also if it is an input; empty if no layer does
    name: str  # saved[0], or from `saved_names` of the class; ctx.scale; or the name of the operation or input
    shape: tuple[int, ...]
    dtype: str
    times: int  # how many are kept, in iterations of a scan or calls from one line
    bytes: int  # of all these tensors, before packing
    packed_bytes: int  # that the vjp function holds for these tensors
    memory: str  # "device" or "host"
    source: str  # file and line of the call of apply, or of the operation
    note: str


class SavedTensorsReport:
    """The rows of a report, shown as a table."""

    def __init__(self, rows: list[SavedTensor]) -> None:
        self.rows = rows

    @property
    def total_bytes(self) -> int:
        """Bytes that the vjp function holds beside the inputs of the function, which the caller holds anyway."""
        return sum(r.packed_bytes for r in self.rows if r.kind != "input")

    @property
    def total_unpacked_bytes(self) -> int:
        """Bytes that the vjp function would hold beside the inputs if nothing was packed."""
        return sum(r.bytes for r in self.rows if r.kind != "input")

    @property
    def input_bytes(self) -> int:
        """Bytes of the inputs that the vjp function holds as they are."""
        return sum(r.packed_bytes for r in self.rows if r.kind == "input")

    @property
    def host_bytes(self) -> int:
        """The part of `total_bytes` in host memory."""
        return sum(r.packed_bytes for r in self.rows if r.memory == "host")

    def __repr__(self) -> str:
        columns = [[title, *cells] for title, cells in self._columns().items()]
        for column in columns:
            justify = str.rjust if column[0] in ("times", "bytes", "packed") else str.ljust
            column[:] = [justify(cell, max(map(len, column))) for cell in column]
        lines = ["  ".join(row).rstrip() for row in zip(*columns, strict=True)]
        return "\n".join([*lines, self._total()])

    def _repr_html_(self) -> str:
        def line(tag: str, cells: Sequence[str]) -> str:
            return "<tr>" + "".join(f"<{tag}>{html.escape(c)}</{tag}>" for c in cells) + "</tr>"

        columns = self._columns()
        body = "".join(line("td", row) for row in zip(*columns.values(), strict=True))
        caption = f"<caption>{html.escape(self._total())}</caption>"
        return f"<table>{caption}<thead>{line('th', list(columns))}</thead><tbody>{body}</tbody></table>"

    def _columns(self) -> dict[str, list[str]]:
        """Return the cells of each column, by its title; a column of packed sizes only if something is packed."""
        rows, is_packed = self.rows, any(r.packed_bytes != r.bytes for r in self.rows)
        return {
            "origin": [r.layer or r.kind for r in rows],
            "name": [r.name for r in rows],
            "type": [f"{r.dtype}[{','.join(map(str, r.shape))}]" for r in rows],
            "times": [f"{r.times}" for r in rows],
            "bytes": [f"{r.bytes:,}" for r in rows],
            **({"packed": [f"{r.packed_bytes:,}" for r in rows]} if is_packed else {}),
            "where": [r.source for r in rows],
            "": [r.note for r in rows],
        }

    def _total(self) -> str:
        kept, unpacked = self.total_bytes, self.total_unpacked_bytes
        parts = {
            f"{kept:,} bytes are kept for backward": True,
            f"{unpacked:,} before packing": unpacked != kept,
            f"{self.host_bytes:,} of them in host memory": self.host_bytes,
            f"beside {self.input_bytes:,} in inputs of the function": self.input_bytes,
        }
        return ", ".join(part for part, applies in parts.items() if applies)

    def plot(self, ax: Any = None) -> Any:
        """Draw one bar per row, its bytes as packed, on `ax` or on new axes; return the axes. Needs matplotlib."""
        if ax is None:
            import matplotlib.pyplot as plt

            _, ax = plt.subplots(layout="constrained", figsize=(6.4, 1.2 + 0.25 * len(self.rows)))
        names = [f"{r.layer or r.kind}  {r.name}  {r.source}".rstrip() for r in self.rows]
        ax.barh(range(len(names)), [r.packed_bytes for r in self.rows], tick_label=names)
        ax.invert_yaxis()
        ax.set_xlabel("bytes")
        return ax


def saved_tensors_report(fun: Callable[..., Any], *args: Any, **kwargs: Any) -> SavedTensorsReport:
    """List the residuals that `jax.vjp` of `fun(*args, **kwargs)` holds for backward.

        >>> print(saved_tensors_report(lambda x: Tanh.apply(x).sum(), jnp.ones((8, 4))))
        origin  name      type          times  bytes  where
        Tanh    saved[0]  float32[8,4]      1    128  ...
        128 bytes are kept for backward

    `fun` is a function or a layer. It is traced and does not run: arguments may be `jax.ShapeDtypeStruct`s. All float
    arguments are differentiated. Hooks around the call and inside `fun` apply as in a compiled program.

    A row is one residual, or several residuals that differ only in their values. It shows a tensor that a layer saves,
    with the class of the layer and a name (from `saved_names`, if the class has them); a result of a plain operation,
    with the name of the operation; or an input of `fun`, which exists anyway. The largest rows come first, and inputs
    last. A tensor that several layers save has one row; a tensor that is computed again in backward has none. Bytes are
    those of the whole array on all devices. For hooks with `host=True`, the row counts only the bytes of a number in
    the program.

    Raises:
        TypeError: if no argument holds a float array.
    """
    fun = getattr(fun, "apply", fun) if isinstance(fun, type) else fun
    tensors, skeleton = split((args, kwargs), lambda x: is_tensor(x) or isinstance(x, jax.ShapeDtypeStruct))
    is_float = [jnp.issubdtype(t.dtype, jnp.inexact) for t in tensors]
    if not any(is_float):
        raise TypeError("saved_tensors_report: none of the arguments holds a float array, so that nothing is saved.")

    def residuals(*tensors: Any) -> list[Any]:
        def run(*floats: Any) -> list[Any]:
            args, kwargs = skeleton.fill(merge(is_float, floats, tensors))
            return split(fun(*args, **kwargs))[0]

        _, pullback = jax.vjp(run, *select(tensors, is_float))
        return [x for x in jax.tree_util.tree_leaves(pullback) if not is_ref(x)]  # the caller holds a Ref anyway

    jaxpr, _ = jaxpr_and_consts(jax.make_jaxpr(residuals)(*tensors))
    names = [{"[0]": "args", "[1]": "kwargs"}[path[:3]] + path[3:] for path in skeleton.tensor_paths()]
    inputs = [Value(v.aval, "input", name) for v, name in zip(jaxpr.invars, names, strict=True)]
    # Leave out the empty residuals in which the rule of a layer keeps a number: NOTE [several runs] in _front.py.
    arrays = [value for value in dict.fromkeys(outputs_of(jaxpr, inputs)) if value.aval.size]
    arrays_of: dict[Value, list[Value]] = {}  # by tensor, the arrays that it was packed to, or the tensor itself
    for array in arrays:
        arrays_of.setdefault(array.unpacked(), []).append(array)
    counts = collections.Counter(_row(x, arrays_of[x]) for x in sorted(arrays_of, key=lambda x: x.number))
    rows = [_multiplied(row, count) for row, count in counts.items()]
    return SavedTensorsReport(sorted(rows, key=lambda r: (r.kind == "input", -r.packed_bytes)))


def _row(tensor: Value, arrays: list[Value]) -> SavedTensor:
    """Return the row of a tensor, from the arrays that it was packed to."""
    # A tensor with a name of `saved_names` is a copy to JAX.
    is_packed, is_from_input = [a.copy_of or a for a in arrays] != [tensor], tensor.kind == "input"
    one, times = tensor.innermost()
    # Each iteration packs a tensor, and each device its shard. Without hooks there may be copies under other names.
    parts = [(a, *a.innermost()) for a in arrays if (a.copy_of or a) is not tensor]
    layer, name, equations = (*tensor.savers, ("", tensor.name, tensor.equations))[0]
    is_input = is_from_input and tensor.part is None and not is_packed
    is_on_host = any(a.aval.memory_space == jax.memory.Space.Host for a in arrays)
    notes = {
        f"the input {tensor.name}": bool(tensor.savers) and is_from_input,
        **{f"also {other}, {saved}": (other, saved) != (layer, name) for other, saved, _ in tensor.savers},
        "in host memory": is_on_host,
        "packed on the host": any(part.name == "host_call" for _, part, _ in parts),
    }
    return SavedTensor(
        kind="input" if is_input else "layer" if layer else "copy" if is_from_input else tensor.kind,
        layer=layer,
        name=name,
        shape=tuple(one.aval.shape),
        dtype=str(one.aval.dtype),
        times=times * max((n_iterations for _, _, n_iterations in parts), default=len(arrays)),
        bytes=_bytes(tensor) * max((a.aval.size // part.aval.size for a, part, _ in parts), default=len(arrays)),
        packed_bytes=sum(map(_bytes, arrays)),
        memory="host" if is_on_host else "device",
        source=line_of(equations),
        note="; ".join(note for note, applies in notes.items() if applies),
    )


def _multiplied(row: SavedTensor, n: int) -> SavedTensor:
    return dataclasses.replace(row, times=n * row.times, bytes=n * row.bytes, packed_bytes=n * row.packed_bytes)


def _bytes(value: Value) -> int:
    return value.aval.size * value.aval.dtype.itemsize
