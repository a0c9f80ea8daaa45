"""`saved_tensors_report` and the report that it returns: one row per residual, or per group of equal ones.

The second half finds where the values of a jaxpr come from, including the values that an inner jaxpr computes:

    { lambda ; a:f32[8]. let                                 a: an input
        b:f32[8] c:f32[3,8] = scan[                          c: three times its part e
          length=3 jaxpr={ lambda ; d:f32[8]. let
              e:f32[8] = rule_function[name=Tanh] d          e: an operation, saved[0] of the layer Tanh
            in (e, e) } ] a
      in (c,) }

`outputs_of` returns the value c with this history.
"""

from __future__ import annotations

import collections
import dataclasses
import html
import os
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ._hooks import PACK_SCOPE
from ._jax.imports import summarize
from ._jax.jaxprs import inner_jaxprs, is_literal, jaxpr_and_consts, scan_counts
from ._jax.masks import merge, select
from ._jax.primitives import object_of
from ._jax.rule_function import BatchedFunction, rule_function_p
from ._jax.types import is_ref
from ._layer_rule import StagedLayer
from ._trees import is_tensor, split


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
    source: str  # file and line of the call of apply, or of the operation
    note: str


@dataclasses.dataclass(frozen=True, repr=False)
class SavedTensorsReport:
    """The rows of a report, shown as a table."""

    rows: list[SavedTensor]

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

    def __repr__(self) -> str:
        table = self._table()
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        justify = [str.rjust if title in ("times", "bytes", "packed") else str.ljust for title in table[0]]
        lines = ["  ".join(f(cell, n) for f, cell, n in zip(justify, row, widths, strict=True)) for row in table]
        return "\n".join([*map(str.rstrip, lines), self._total()])

    def _repr_html_(self) -> str:
        def line(tag: str, cells: Sequence[str]) -> str:
            return "<tr>" + "".join(f"<{tag}>{html.escape(c)}</{tag}>" for c in cells) + "</tr>"

        titles, *rows = self._table()
        caption, body = html.escape(self._total()), "".join(line("td", row) for row in rows)
        return f"<table><caption>{caption}</caption><thead>{line('th', titles)}</thead><tbody>{body}</tbody></table>"

    def _table(self) -> list[list[str]]:
        """Return the titles, and the cells of each row; with packed sizes only if something is packed."""
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
            f"{unpacked:,} before packing": unpacked != kept,
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

    A row is one residual, or several residuals that differ only in their values: a tensor that a layer saves, by class
    and name; a result of a plain operation; or an input of `fun`, which exists anyway. The largest rows come first, and
    inputs last. A tensor that several layers save has one row; a tensor that is computed again in backward has none.
    Bytes are those of the whole array on all devices. With `host=True`, a row counts the bytes of a number only.

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
    rows = [
        dataclasses.replace(row, times=n * row.times, bytes=n * row.bytes, packed_bytes=n * row.packed_bytes)
        for row, n in collections.Counter(map(_row, arrays_of, arrays_of.values())).items()
    ]
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
    notes = {
        f"the input {tensor.name}": bool(tensor.savers) and is_from_input,
        **{f"also {other}, {saved}": (other, saved) != (layer, name) for other, saved, _ in tensor.savers},
        "in host memory": any(a.aval.memory_space == jax.memory.Space.Host for a in arrays),
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
        source=line_of(equations),
        note="; ".join(note for note, applies in notes.items() if applies),
    )


# -- where values come from -----------------------------------------------------------------------

Equations = tuple[Any, ...]  # an equation, after the equations that hold its jaxpr, outermost first


@dataclasses.dataclass(eq=False)
class Value:
    """One value in a program. A jaxpr that is called twice computes two."""

    aval: Any
    kind: str  # "input", "constant" or "operation"
    name: str  # of the input or the operation
    equations: Equations = ()
    operands: Sequence[Value] = ()
    part: Value | None = None  # the value of an inner jaxpr that each iteration, device or branch contributes
    times: int = 1  # the number of iterations that contribute a part
    copy_of: Value | None = None
    savers: list[tuple[str, str, Equations]] = dataclasses.field(default_factory=list)  # layer, name as in saved[0]

    @property
    def bytes(self) -> int:
        return self.aval.size * self.aval.dtype.itemsize

    def innermost(self) -> tuple[Value, int]:
        """Return the part of the value that one iteration of all loops computes, and the number of iterations."""
        value, times = self, 1
        while value.part is not None:
            value, times = value.part, times * value.times
        return value, times

    def unpacked(self) -> Value:
        """Return the tensor from which pack hooks made the value; the value itself if no hook made it."""
        waiting: list[Value] = [self]
        seen, tensors = set[Value](), list[Value]()
        while waiting:
            value = waiting.pop()
            value = value.copy_of or value
            one, _ = value.innermost()
            if not any(PACK_SCOPE in str(e.source_info.name_stack) for e in one.equations):
                tensors.append(value)
            elif value not in seen:
                seen.add(value)
                waiting += one.operands
        # Hooks also read numbers that they hold, and the index of the device.
        return max(tensors, key=lambda v: (v.kind != "constant", v.aval.size), default=self)


def line_of(equations: Equations) -> str:
    """Return the innermost line outside of installed packages, or the innermost if there is none: `model.py:12`."""
    # The equations of a jitted function of JAX have no line of a user, but the equation that calls it has.
    stacks = [summarize(e.source_info, num_frames=1000).splitlines() for e in reversed(equations)]
    lines = [line for stack in stacks for line in reversed(stack)]  # as in /home/me/model.py:12:4 (loss)
    own = [line for line in lines if "site-packages" not in line and "dist-packages" not in line]
    place = (own or lines or [""])[0].rpartition(" (")[0]
    return ":".join(os.path.basename(place).split(":")[:2])


def outputs_of(jaxpr: Any, inputs: Sequence[Value], within: Equations = ()) -> list[Value]:
    """Return the values that a jaxpr returns; `within` are the equations that hold it."""
    value_of = dict(zip(jaxpr.invars, inputs, strict=True))
    value_of |= {v: Value(v.aval, "constant", "closed over") for v in jaxpr.constvars}

    def read(atoms: Sequence[Any]) -> list[Value]:
        return [Value(a.aval, "constant", str(a.val)) if is_literal(a) else value_of[a] for a in atoms]

    for equation in jaxpr.eqns:
        results = _results((*within, equation), read(equation.invars))
        value_of.update(zip(equation.outvars, results, strict=True))
    return read(jaxpr.outvars)


# The results of these primitives equal their operands. JAX keeps a result beside its operand if it needs both.
_IDENTITIES = frozenset(("name", "optimization_barrier", "pcast", "pvary", "reduce_precision", "stop_gradient"))
# A `cond` returns the residuals of all branches. A branch fills those of other branches by these primitives.
_FILLED = ("broadcast_in_dim", "empty2")


def _results(equations: Equations, operands: list[Value]) -> list[Value]:
    equation = equations[-1]
    name, inner = equation.primitive.name, inner_jaxprs(equation.params)
    results = [Value(v.aval, "operation", name, equations, operands) for v in equation.outvars]
    times = [1] * len(results)
    # A scalar leaves a shard_map as an array with one entry per device.
    if name in _IDENTITIES or (name == "broadcast_in_dim" and results[0].aval.size == 1):
        return [dataclasses.replace(value, copy_of=value.copy_of or value) for value in operands]
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
    elif equation.primitive is rule_function_p and _note_savers(equations, operands, results):
        return results
    elif len(inner) == 1 and _shapes(inner[0].invars, inner[0].outvars) == _shapes(operands, results):
        return outputs_of(inner[0], operands, equations)  # a jitted function, a checkpoint, an identity of ours
    else:
        return results
    return [
        Value(result.aval, v.kind, v.name, v.equations, part=v, times=n, savers=[*v.savers])
        for result, v, n in zip(results, parts, times, strict=True)
    ]


def _slices(wholes: Sequence[Value], variables: Sequence[Any]) -> list[Value]:
    own = {"part": None, "times": 1, "copy_of": None}
    return [dataclasses.replace(whole, aval=v.aval, **own) for whole, v in zip(wholes, variables, strict=True)]


def _shapes(*values: Sequence[Any]) -> list[Any]:
    return [[getattr(v.aval, "shape", None) for v in vs] for vs in values]


def _note_savers(equations: Equations, operands: list[Value], results: list[Value]) -> bool:
    """Enter the layer that an equation applies as the saver of its residuals; return False if it applies none."""
    function = object_of(equations[-1])
    while isinstance(function, BatchedFunction):
        function, operands = function.inner, operands[function.n_consts :]
    if not isinstance(function, StagedLayer):
        return False
    layer = function.call.layer
    names = function.call.residual_names(function.kept, len(function.positions))
    for name, residual in zip(names, function.residuals(operands[function.n_consts :], results), strict=True):
        residual.savers.append((layer.__name__, name, equations))
    for result in results:
        result.name = layer.__name__
    return True
