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
from pylayer_jax._jax.types import is_ref
from pylayer_jax._messages import describe
from pylayer_jax._trees import is_tensor, split

from .origins import Value, line_of, outputs_of


@dataclasses.dataclass(frozen=True)
class SavedTensor:
    """One tensor that is kept for backward, or several that differ only in their values."""

    kind: str  # "layer" saves it; "input" of the function, which exists anyway; "copy" of one; "operation"; "constant"
    layer: str  # the class that saves it, also if it is an input; empty if no layer does
    name: str  # saved[0], or its name in `saved_names` of the class; ctx.scale; of the operation, or of the input
    shape: tuple[int, ...]
    dtype: str
    times: int  # how many are kept: by iterations of a scan, by calls from one line
    bytes: int  # of all of them, before packing
    packed_bytes: int  # that the vjp function holds for them
    memory: str  # "device" or "host"
    source: str  # file and line of the call of apply, or of the operation
    note: str

    def multiplied(self, count: int) -> SavedTensor:
        """Return the row of `count` such tensors."""
        sizes = {"bytes": count * self.bytes, "packed_bytes": count * self.packed_bytes}
        return dataclasses.replace(self, times=count * self.times, **sizes)


class SavedTensorsReport:
    """The rows of a report, shown as a table."""

    def __init__(self, rows: list[SavedTensor]) -> None:
        self.rows = rows

    @property
    def total_bytes(self) -> int:
        """Bytes that the vjp function holds: those of all rows as they are packed, inputs and host memory included."""
        return sum(r.packed_bytes for r in self.rows)

    @property
    def total_unpacked_bytes(self) -> int:
        """What `total_bytes` would be if nothing was packed."""
        return sum(r.bytes for r in self.rows)

    @property
    def input_bytes(self) -> int:
        """The part of `total_bytes` that is inputs of the function as they are, which exist anyway."""
        return sum(r.packed_bytes for r in self.rows if r.kind == "input")

    @property
    def host_bytes(self) -> int:
        """The part of `total_bytes` in host memory."""
        return sum(r.packed_bytes for r in self.rows if r.memory == "host")

    def __repr__(self) -> str:
        columns = [[title, *cells] for title, cells in self._columns().items()]
        for column in columns:
            is_number = column[0] in ("times", "bytes", "packed")
            width = max(map(len, column))
            column[:] = [cell.rjust(width) if is_number else cell.ljust(width) for cell in column]
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
        """Return the cells of each column, by its title; packed sizes only where something is packed."""
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
        parts = [f"{kept:,} bytes are kept for backward", f"{unpacked:,} before packing" if unpacked != kept else ""]
        places = {"in inputs of the function": self.input_bytes, "in host memory": self.host_bytes}
        parts += [f"{size:,} of them {place}" if size else "" for place, size in places.items()]
        return ", ".join(filter(None, parts))

    def plot(self, ax: Any = None) -> Any:
        """Draw one bar per row: the bytes that are kept. Needs matplotlib.

        Returns:
            The axes with the bars: `ax`, or new ones.
        """
        if ax is None:
            import matplotlib.pyplot as plt

            _, ax = plt.subplots(layout="constrained", figsize=(6.4, 1.2 + 0.25 * len(self.rows)))
        names = [f"{r.layer or r.kind}  {r.name}  {r.source}".rstrip() for r in self.rows]
        ax.barh(range(len(names)), [r.packed_bytes for r in self.rows])
        ax.set_yticks(range(len(names)), names)
        ax.invert_yaxis()
        ax.set_xlabel("bytes")
        return ax


def saved_tensors_report(fun: Callable[..., Any], *args: Any, **kwargs: Any) -> SavedTensorsReport:
    """List the residuals that `jax.vjp` of `fun(*args, **kwargs)` holds for backward.

        print(saved_tensors_report(lambda x: Tanh.apply(x * 2).sum(), jnp.ones((8, 4))))

        origin  name      type          times  bytes  where
        Tanh    saved[0]  float32[8,4]      1    128  model.py:12
        128 bytes are kept for backward

    `fun` is a function or a layer. `jax.vjp` of it is traced and does not run, so that arguments may be
    `jax.ShapeDtypeStruct`s. All float arguments are differentiated. Active hooks apply, and so do the blocks of hooks
    inside `fun`, each as in a compiled program.

    A row is one residual, or several that differ only in their values: a tensor that a layer saves, by its class and
    name (the one in `saved_names` of the class, if it has one); a result of a plain operation, by the name of the
    operation; or an input of `fun`, which exists anyway. A tensor that several layers save has one row. A tensor that
    `jax.checkpoint` computes again has none.

    Bytes are those of the whole array on all devices; inside `jax.shard_map` the type in a row is that of one device.
    Hooks with `host=True` leave a number in the program, and only its bytes count.

    Raises:
        TypeError: if `fun` is no function, or if no argument holds a float array.
    """
    if not callable(fun):
        raise TypeError(
            f"saved_tensors_report: expected a function or a layer, got {describe(fun)}. Pass the function and its "
            "arguments, as in saved_tensors_report(Tanh.apply, x) for Tanh.apply(x)."
        )

    def is_argument(leaf: object) -> bool:
        return is_tensor(leaf) or isinstance(leaf, jax.ShapeDtypeStruct)

    fun = getattr(fun, "apply", fun) if isinstance(fun, type) else fun
    tensors, skeleton = split((args, kwargs), is_argument)
    differentiated = [i for i, t in enumerate(tensors) if jnp.issubdtype(t.dtype, jnp.inexact)]
    if not differentiated:
        raise TypeError("saved_tensors_report: none of the arguments holds a float array, so that nothing is saved.")

    def residuals(*tensors: Any) -> list[Any]:
        def run(*values: Any) -> list[Any]:
            filled = list(tensors)
            for i, value in zip(differentiated, values, strict=True):
                filled[i] = value
            args, kwargs = skeleton.fill(filled)
            return split(fun(*args, **kwargs))[0]

        _, pullback = jax.vjp(run, *(tensors[i] for i in differentiated))
        return [x for x in jax.tree_util.tree_leaves(pullback) if not is_ref(x)]  # the caller holds a Ref anyway

    jaxpr, _ = jaxpr_and_consts(jax.make_jaxpr(residuals)(*tensors))
    names = [{"[0]": "args", "[1]": "kwargs"}[path[:3]] + path[3:] for path in skeleton.tensor_paths()]
    inputs = [Value(v.aval, "input", name) for v, name in zip(jaxpr.invars, names, strict=True)]
    # Without the empty residuals in which the rule of a layer keeps a number: NOTE [several runs] in _layer_rule.py.
    arrays = [value for value in dict.fromkeys(outputs_of(jaxpr, inputs)) if value.aval.size]
    arrays_of: dict[Value, list[Value]] = {}  # by tensor, the arrays that it was packed to, or the tensor itself
    for array in arrays:
        arrays_of.setdefault(array.unpacked(), []).append(array)
    rows = [_row(tensor, arrays_of[tensor]) for tensor in sorted(arrays_of, key=lambda v: v.number)]
    return SavedTensorsReport([row.multiplied(count) for row, count in collections.Counter(rows).items()])


def _row(tensor: Value, arrays: list[Value]) -> SavedTensor:
    """Return the row of a tensor, from the arrays that it was packed to."""
    one, times = tensor.innermost()
    is_packed = arrays != [tensor]
    size = packed_size = sum(map(_bytes, arrays))
    if is_packed:
        parts = [array.innermost() for array in arrays]
        times *= max(n_iterations for _, n_iterations in parts)
        # Each iteration packs a tensor, and each device its shard.
        size = _bytes(tensor) * max(a.aval.size // part.aval.size for a, (part, _) in zip(arrays, parts, strict=True))
    *_, origin = tensor.chain()
    savers = [saver for value in tensor.chain() for saver in value.savers]
    layer, name, equations = savers[0] if savers else ("", origin.name, origin.equations)
    is_input, is_from_input = not is_packed and tensor.kind == "input", origin.kind == "input"
    is_on_host = any(v.aval.memory_space == jax.memory.Space.Host for v in arrays)
    notes = {
        f"the input {origin.name}": bool(savers) and is_from_input,
        **{f"also {other}, {saved}": (other, saved) != (layer, name) for other, saved, _ in savers},
        "in host memory": is_on_host,
        "packed on the host": any(v.innermost()[0].name == "host_call" for v in arrays),
    }
    return SavedTensor(
        kind="input" if is_input else "layer" if savers else "copy" if is_from_input else origin.kind,
        layer=layer,
        name=name,
        shape=tuple(one.aval.shape),
        dtype=str(one.aval.dtype),
        times=times,
        bytes=size,
        packed_bytes=packed_size,
        memory="host" if is_on_host else "device",
        source=line_of(equations),
        note="; ".join(note for note, applies in notes.items() if applies),
    )


def _bytes(value: Value) -> int:
    return value.aval.size * value.aval.dtype.itemsize
