"""The report that users see: one row per saved tensor."""

from __future__ import annotations

import dataclasses
import html
from collections.abc import Sequence
from typing import Any

_COLUMNS = ("layer", "saved", "type", "times", "bytes", "packed", "where", "")


@dataclasses.dataclass(frozen=True)
class SavedTensor:
    """One tensor that one application of a layer keeps for `backward`."""

    layer: str  # name of the class
    application: int  # the number of the application among those of all layers, from 0
    name: str  # saved[0], or its name in `saved_names` of the class; ctx.scale for an attribute
    shape: tuple[int, ...]
    dtype: str
    times: int  # scan iterations that each keep one; if it is packed, also times the examples of a vmap
    bytes: int  # of all iterations, before packing; 0 if the tensor is not kept, or already counted
    packed_bytes: int  # of all iterations, after the active hooks packed them
    source: str  # file and line of the call of apply
    note: str  # why the tensor does not count, or that it is an argument of the function


class SavedTensorsReport:
    """The rows of a report; prints as a table, in a terminal and in a notebook."""

    def __init__(self, rows: list[SavedTensor]) -> None:
        self.rows = rows

    @property
    def total_bytes(self) -> int:
        """Bytes of all tensors before packing, each counted once."""
        return sum(row.bytes for row in self.rows)

    @property
    def total_packed_bytes(self) -> int:
        """Bytes of all tensors after packing, each counted once."""
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
        """Draw one bar per application of a layer: its bytes, and its packed bytes if these differ.

        Returns:
            The axes with the bars: `ax`, or new ones.

        Raises:
            ImportError: if matplotlib is not installed.
        """
        try:
            import matplotlib.pyplot as plt
        except ImportError as error:
            raise ImportError("saved_tensors_report(...).plot() needs matplotlib: pip install matplotlib") from error
        if ax is None:
            _, ax = plt.subplots()
        applications = sorted({row.application for row in self.rows})
        labels = [next(f"{r.layer} {i}" for r in self.rows if r.application == i) for i in applications]
        saved, packed = (
            [sum(getattr(r, field) for r in self.rows if r.application == i) for i in applications]
            for field in ("bytes", "packed_bytes")
        )
        ax.barh(labels, saved, label="saved", alpha=0.5 if packed != saved else 1.0)
        if packed != saved:
            ax.barh(labels, packed, label="packed")
            ax.legend()
        ax.invert_yaxis()
        ax.set_xlabel("bytes")
        return ax


def _cells(row: SavedTensor) -> tuple[str, ...]:
    kind = f"{row.dtype}[{','.join(map(str, row.shape))}]"
    sizes = f"{row.times}", f"{row.bytes:,}", f"{row.packed_bytes:,}"
    return row.layer, row.name, kind, *sizes, row.source, row.note
