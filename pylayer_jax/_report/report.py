"""What the layers of a function save for backward, and how large it is."""

from __future__ import annotations

import dataclasses
import html
import math
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pylayer_jax._autodiff.call import residual_tracker
from pylayer_jax._autodiff.saved_state import SavedState
from pylayer_jax._jax import checkpoint_name, compute_together_p, inner_jaxprs, is_key, is_literal, is_tracer, typeof
from pylayer_jax._trees import is_tensor, split

# Code that stands between a user's line and the layer that it applies, as in jax.checkpoint(Layer.apply).
_PACKAGE = os.path.dirname(os.path.dirname(__file__))
_MACHINERY = (_PACKAGE + os.sep, os.path.dirname(jax.__file__) + os.sep)
_COMMANDS = os.path.join(_PACKAGE, "_commands") + os.sep  # whose layers are like a user's
_COLUMNS = ("layer", "saved", "type", "times", "bytes", "packed", "where", "")


@dataclasses.dataclass(frozen=True)
class SavedTensor:
    """One tensor that one application of a layer keeps for `backward`."""

    layer: str  # name of the class
    application: int  # its number among the applications of layers, from 0
    name: str  # saved[0], or ctx.scale for an attribute
    shape: tuple[int, ...]
    dtype: str
    times: int  # iterations of the scans around, each of which keeps one, and examples of a vmap where it is packed
    bytes: int  # of all iterations, before packing; 0 where it is not kept, or already counted
    packed_bytes: int  # the same as it is kept, under the hooks that are active
    source: str  # file and line of the call of apply
    note: str  # why it does not count, or that it is an argument of the function


class SavedTensorsReport:
    """The rows of a report, as a table in a terminal and in a notebook."""

    def __init__(self, rows: list[SavedTensor]) -> None:
        self.rows = rows

    @property
    def total_bytes(self) -> int:
        """Bytes of all tensors before packing, each counted once."""
        return sum(row.bytes for row in self.rows)

    @property
    def total_packed_bytes(self) -> int:
        """Bytes of all tensors as they are kept, each counted once."""
        return sum(row.packed_bytes for row in self.rows)

    def __str__(self) -> str:
        cells = [_COLUMNS, *map(_cells, self.rows)]
        widths = [max(len(row[i]) for row in cells) for i in range(len(_COLUMNS))]
        align = [str.rjust if name in ("times", "bytes", "packed") else str.ljust for name in _COLUMNS]
        lines = ["  ".join(a(c, w) for a, c, w in zip(align, row, widths, strict=True)) for row in cells]
        return "\n".join(line.rstrip() for line in [*lines, self._total()])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        def line(tag: str, cells: Sequence[str]) -> str:
            return "<tr>" + "".join(f"<{tag}>{html.escape(c)}</{tag}>" for c in cells) + "</tr>"

        body = "".join(line("td", _cells(row)) for row in self.rows)
        caption = f"<caption>{html.escape(self._total())}</caption>"
        return f"<table>{caption}<thead>{line('th', _COLUMNS)}</thead><tbody>{body}</tbody></table>"

    def _total(self) -> str:
        kept = f"{self.total_bytes:,} bytes are saved for backward"
        if self.total_packed_bytes != self.total_bytes:
            kept += f", {self.total_packed_bytes:,} as they are packed"
        count = len({row.application for row in self.rows})
        return f"{kept}, in {count} application{'' if count == 1 else 's'} of layers."

    def plot(self, ax: Any = None) -> Any:
        """A bar per application of a layer: bytes saved, and packed where that differs. Needs matplotlib.

        Returns:
            The axes drawn on: `ax`, or new ones.

        Raises:
            ImportError: without matplotlib.
        """
        try:
            import matplotlib.pyplot as plt
        except ImportError as error:
            raise ImportError("saved_tensors_report(...).plot() needs matplotlib: pip install matplotlib") from error
        if ax is None:
            _, ax = plt.subplots()
        applications = sorted({row.application for row in self.rows})
        labels = [next(f"{r.layer} {i}" for r in self.rows if r.application == i) for i in applications]
        plain, packed = (
            [sum(getattr(r, field) for r in self.rows if r.application == i) for i in applications]
            for field in ("bytes", "packed_bytes")
        )
        ax.barh(labels, plain, label="saved", alpha=0.5 if packed != plain else 1.0)
        if packed != plain:
            ax.barh(labels, packed, label="packed")
            ax.legend()
        ax.invert_yaxis()
        ax.set_xlabel("bytes")
        return ax


def _cells(row: SavedTensor) -> tuple[str, ...]:
    kind = f"{row.dtype}[{','.join(map(str, row.shape))}]"
    sizes = f"{row.times}", f"{row.bytes:,}", f"{row.packed_bytes:,}"
    return row.layer, row.name, kind, *sizes, row.source, row.note


def saved_tensors_report(fun: Callable[..., Any], *args: Any, **kwargs: Any) -> SavedTensorsReport:
    """What every layer applied in `fun(*args, **kwargs)` saves for backward, if all float arguments are differentiated.

    `fun`, a function or a layer, is traced and not run, so that arguments may be `jax.ShapeDtypeStruct`s. Hooks
    that are active count, as do the blocks inside `fun`. One row is one tensor that `save_for_backward` or an
    attribute of ctx keeps: its type, its bytes (before and after packing), how many iterations of a scan keep one,
    and where the layer was applied. A tensor that several applications keep counts once, and what `jax.checkpoint`
    computes again counts nothing.

    Raises:
        TypeError: where no argument holds a float array.
    """

    def is_argument(leaf: object) -> bool:
        return is_tensor(leaf) or isinstance(leaf, jax.ShapeDtypeStruct)

    fun = getattr(fun, "apply", fun) if isinstance(fun, type) else fun
    tensors, skeleton = split((args, kwargs), is_argument)
    chosen = [i for i, t in enumerate(tensors) if jnp.issubdtype(t.dtype, jnp.inexact)]
    if not chosen:
        raise TypeError("saved_tensors_report: none of the arguments holds a float array, so that nothing is saved.")

    def residuals(*tensors: Any) -> list[Any]:
        def run(*differentiated: Any) -> list[Any]:
            full = list(tensors)
            for i, t in zip(chosen, differentiated, strict=True):
                full[i] = t
            called, keywords = skeleton.fill(full)
            return split(fun(*called, **keywords))[0]

        _, pullback = jax.vjp(run, *(tensors[i] for i in chosen))
        return jax.tree_util.tree_leaves(pullback)

    follower = Follower()
    with residual_tracker(follower):
        jaxpr = jax.make_jaxpr(residuals)(*tensors).jaxpr
    found: dict[int, list[_Found]] = {}
    producers: dict[int, Any] = {}
    for atom in jaxpr.outvars:
        kept = _resolve(jaxpr, atom, producers)
        if kept.marker is not None:
            found.setdefault(kept.marker, []).append(kept)
    return SavedTensorsReport(_rows(follower.entries, found, set(jaxpr.invars)))


# -- following, while it is traced ------------------------------------------------------------------


@dataclasses.dataclass
class _Entry:
    """One array that an application keeps, and the tensor that it is, or that was packed to it."""

    application: int
    layer: str
    name: str
    tensor: Any  # types
    array: Any
    source: str


def _is_machinery(file: str) -> bool:
    return file.startswith(_MACHINERY) and not file.startswith(_COMMANDS)


class Follower:
    """Marks each array that a layer keeps, so that it can be found among the residuals of the whole."""

    def __init__(self) -> None:
        self.entries: list[_Entry] = []
        self.applications: list[Any] = []

    def call_site(self) -> str:
        """Where `apply` was called, as in `model.py:12`."""
        frame = sys._getframe(1)
        while frame.f_back is not None and _is_machinery(frame.f_code.co_filename):
            frame = frame.f_back
        return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"

    def mark(
        self,
        application: Any,
        saved: SavedState,
        tensors: Sequence[Any],
        arrays: Sequence[Any],
        owners: Sequence[int],
    ) -> list[Any]:
        """The arrays that are kept, marked. `owners` says which of the tensors each of the first was packed from."""
        names = saved.residual_names(len(tensors))
        places = [*owners, *range(saved.packable, len(tensors))]
        marked: list[Any] = []
        # JAX may run a fwd rule more than once, as for each branch of a cond.
        if not any(a is application for a in self.applications):
            self.applications.append(application)
        number = next(n for n, a in enumerate(self.applications) if a is application)
        for array, i in zip(arrays, places, strict=True):
            if array is tensors[i] and places.count(i) > 1:
                # Beside what it was packed to, for the sake of its tangent alone: NOTE [packed tensors].
                marked.append(array)
                continue
            label = f"{_MARK}{len(self.entries)}"
            self.entries.append(
                _Entry(
                    number,
                    application.layer.__name__,
                    names[i],
                    typeof(tensors[i]),
                    typeof(array),
                    application.call_site,
                )
            )
            marked.append(checkpoint_name(array, label) if is_tracer(array) else array)
        return marked


_MARK = "pylayer_jax saved_tensors_report "


# -- finding what is kept in the jaxpr ---------------------------------------------------------------


@dataclasses.dataclass
class _Found:
    marker: int | None
    aval: Any  # of the marked array
    times: int
    root: Any  # what it is a name for, by which equal ones are told: a variable, within the calls on the way to it


# Their outputs are their inputs, as far as memory goes.
_PASS_ON = frozenset({"copy", "name", "optimization_barrier", compute_together_p.name, "reduce_precision"})


def _resolve(jaxpr: Any, atom: Any, producers: dict[int, Any]) -> _Found:
    """Follow a value back to its mark, into loops and calls. `producers` are the equations of each jaxpr met so far."""
    here = producers.get(id(jaxpr))
    if here is None:
        here = producers[id(jaxpr)] = {v: (e, i) for e in jaxpr.eqns for i, v in enumerate(e.outvars)}
    marker, aval = None, atom.aval
    while not is_literal(atom) and atom in here:
        equation, i = here[atom]
        label = _label(equation)
        if marker is None and label.startswith(_MARK):
            marker, aval = int(label.removeprefix(_MARK)), atom.aval
        if label or equation.primitive.name in _PASS_ON:
            atom = equation.invars[i]
            continue
        inner = inner_jaxprs(equation.params)
        if marker is None and inner:
            for body in inner:
                if i < len(body.outvars):
                    found = _resolve(body, body.outvars[i], producers)
                    # A scan stacks what its iterations keep; what it carries has no axis more than in its body.
                    stacked = len(atom.aval.shape) > len(body.outvars[i].aval.shape)
                    if found.marker is not None:
                        times = found.times * (atom.aval.shape[0] if stacked else 1)
                        # A jitted function that is called twice is one jaxpr.
                        return dataclasses.replace(found, times=times, root=(id(equation), found.root))
        break
    return _Found(marker, aval, 1, None if is_literal(atom) else atom)


def _label(equation: Any) -> str:
    # A primitive of its own in JAX today, and one of the coming kind with JAX_REMAT3.
    name = equation.params.get("name", "") if equation.primitive.name == "name" else ""
    coming = getattr(equation.params.get("_prim"), "params", {})
    return name or (coming.get("name", "") if isinstance(coming, dict) else "")


def _rows(entries: list[_Entry], found: dict[int, list[_Found]], arguments: set[Any]) -> list[SavedTensor]:
    seen: dict[Any, str] = {}
    groups: dict[tuple[int, str], list[int]] = {}
    for i, entry in enumerate(entries):
        groups.setdefault((entry.application, entry.name), []).append(i)
    return [_row([(entries[i], found.get(i, [])) for i in members], seen, arguments) for members in groups.values()]


def _row(members: list[tuple[_Entry, list[_Found]]], seen: dict[Any, str], arguments: set[Any]) -> SavedTensor:
    """One tensor, from the arrays that it was packed to."""
    entry = members[0][0]
    shape, times, examples, packed = entry.tensor.shape, 0, 1, 0
    note = "" if any(kept for _, kept in members) else "computed again, or not needed"
    for member, kept in members:
        new = [one for one in kept if one.root not in seen]
        if kept and not new:
            note = f"the same as {seen[kept[0].root]}"
        for one in new:
            seen[one.root] = f"{entry.layer} {entry.application}, {entry.name}"
            note = "an argument of the function" if one.root in arguments else ""
            packed += one.times * _bytes(one.aval)
            if member.array.shape == entry.tensor.shape and member.array.dtype == entry.tensor.dtype:
                shape = one.aval.shape  # as it is, with the examples of a vmap
            else:
                examples = one.aval.size // max(member.array.size, 1)
        times = max(times, sum(one.times for one in new))
    size = times * examples * _bytes(jax.ShapeDtypeStruct(shape, entry.tensor.dtype))
    return SavedTensor(
        entry.layer,
        entry.application,
        entry.name,
        tuple(shape),
        str(entry.tensor.dtype),
        max(times, 1) * examples,
        size,
        packed,
        entry.source,
        note,
    )


def _bytes(aval: Any) -> int:
    if is_key(aval):
        return jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(aval.shape, aval.dtype)).size * 4
    return math.prod(aval.shape) * aval.dtype.itemsize
