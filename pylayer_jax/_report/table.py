"""The report that users see: one row per saved tensor."""

from __future__ import annotations

import dataclasses
import html
from collections.abc import Callable, Sequence
from typing import Any


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
    bytes_per_device: int  # the part of `bytes` on each device; all of them if no sharding is known
    packed_bytes: int  # of all iterations, after the active hooks packed them
    packed_bytes_per_device: int  # the part of `packed_bytes` on each device
    source: str  # file and line of the call of apply
    note: str  # why the tensor does not count, or that it is an argument of the function


class SavedTensorsReport:
    """The rows of a report. `print` shows a table, as does a notebook or IPython; its `repr` is one line."""

    def __init__(self, rows: list[SavedTensor]) -> None:
        self.rows = rows

    @property
    def total_bytes(self) -> int:
        """Bytes of all tensors before packing, each counted once."""
        return sum(row.bytes for row in self.rows)

    @property
    def total_bytes_per_device(self) -> int:
        """Bytes of all tensors on each device before packing; a tensor whose sharding is not known counts in full."""
        return sum(row.bytes_per_device for row in self.rows)

    @property
    def total_packed_bytes(self) -> int:
        """Bytes of all tensors after packing, each counted once."""
        return sum(row.packed_bytes for row in self.rows)

    @property
    def total_packed_bytes_per_device(self) -> int:
        """Bytes of all tensors on each device after packing; a tensor whose sharding is not known counts in full."""
        return sum(row.packed_bytes_per_device for row in self.rows)

    def __str__(self) -> str:
        columns = self._columns()
        cells = [list(columns), *([cell(row) for cell in columns.values()] for row in self.rows)]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        align = [str.rjust if name in _NUMBERS else str.ljust for name in columns]
        lines = ["  ".join(a(c, w) for a, c, w in zip(align, row, widths, strict=True)) for row in cells]
        return "\n".join(line.rstrip() for line in [*lines, self._total()])

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self._total()}>"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        del cycle  # a report does not hold itself
        printer.text(str(self))  # where IPython shows the value of a line

    def _repr_html_(self) -> str:
        def line(tag: str, cells: Sequence[str]) -> str:
            return "<tr>" + "".join(f"<{tag}>{html.escape(c)}</{tag}>" for c in cells) + "</tr>"

        columns = self._columns()
        body = "".join(line("td", [cell(row) for cell in columns.values()]) for row in self.rows)
        caption = f"<caption>{html.escape(self._total())}</caption>"
        return f"<table>{caption}<thead>{line('th', list(columns))}</thead><tbody>{body}</tbody></table>"

    def _columns(self) -> dict[str, Callable[[SavedTensor], str]]:
        """The columns that say something: the sizes after packing, and on each device, only if these differ."""
        packed = any(row.packed_bytes != row.bytes for row in self.rows)
        sharded = any(
            row.bytes_per_device != row.bytes or row.packed_bytes_per_device != row.packed_bytes for row in self.rows
        )
        left_out = {"packed": not packed, "per device": not sharded, "packed per device": not (packed and sharded)}
        return {name: cell for name, cell in _COLUMNS.items() if not left_out.get(name)}

    def _total(self) -> str:
        columns = self._columns()
        kept = f"{self.total_bytes:,} bytes are saved for backward"
        if "per device" in columns:
            kept += f" ({self.total_bytes_per_device:,} per device)"
        if "packed" in columns:
            kept += f", {self.total_packed_bytes:,} as they are packed"
        if "packed per device" in columns:
            kept += f" ({self.total_packed_bytes_per_device:,} per device)"
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


_NUMBERS = ("times", "bytes", "per device", "packed", "packed per device")
_COLUMNS: dict[str, Callable[[SavedTensor], str]] = {
    "layer": lambda row: row.layer,
    "saved": lambda row: row.name,
    "type": lambda row: f"{row.dtype}[{','.join(map(str, row.shape))}]",
    "times": lambda row: f"{row.times}",
    "bytes": lambda row: f"{row.bytes:,}",
    "per device": lambda row: f"{row.bytes_per_device:,}",
    "packed": lambda row: f"{row.packed_bytes:,}",
    "packed per device": lambda row: f"{row.packed_bytes_per_device:,}",
    "where": lambda row: row.source,
    "": lambda row: row.note,
}
