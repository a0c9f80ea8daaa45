"""The report that users see: one row per saved tensor, or per group of equal ones."""

from __future__ import annotations

import dataclasses
import html
from collections.abc import Callable, Sequence
from typing import Any


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
    bytes_per_device: int | None  # the part of `bytes` on each device; None if only the compiler knows the sharding
    packed_bytes: int  # that the vjp function holds for them
    packed_bytes_per_device: int | None  # the part of `packed_bytes` on each device
    memory: str  # "device" or "host"
    source: str  # file and line of the call of apply, or of the operation
    note: str
    bytes_after: tuple[int, ...] = ()  # each pair of a chain, in order; empty without a chain

    def multiplied(self, count: int) -> SavedTensor:
        """The row of `count` such tensors."""
        known = {name: getattr(self, name) for name in ("times", *_SIZES.values()) if getattr(self, name) is not None}
        sizes: dict[str, Any] = {name: count * number for name, number in known.items()}
        return dataclasses.replace(self, **sizes, bytes_after=tuple(count * size for size in self.bytes_after))


_SIZES = {
    "bytes": "bytes",
    "per device": "bytes_per_device",
    "packed": "packed_bytes",
    "packed per device": "packed_bytes_per_device",
}


def _shown(size: int | None) -> str:
    return "not known" if size is None else f"{size:,}"


class SavedTensorsReport:
    """The rows of a report, shown as a table."""

    def __init__(self, rows: list[SavedTensor]) -> None:
        self.rows = rows

    @property
    def total_bytes(self) -> int:
        """Bytes that the vjp function holds: those of all rows as they are packed, inputs and host memory included."""
        return self._sum("packed_bytes")

    @property
    def total_bytes_per_device(self) -> int | None:
        """The part of `total_bytes` on each device; None if only the compiler knows the sharding of some tensor."""
        if any(row.packed_bytes_per_device is None for row in self.rows):
            return None
        return self._sum("packed_bytes_per_device")

    @property
    def total_unpacked_bytes(self) -> int:
        """What `total_bytes` would be if nothing was packed."""
        return self._sum("bytes")

    @property
    def input_bytes(self) -> int:
        """The part of `total_bytes` that is inputs of the function as they are, which exist anyway."""
        return self._sum("packed_bytes", kind="input")

    @property
    def host_bytes(self) -> int:
        """The part of `total_bytes` in host memory."""
        return self._sum("packed_bytes", memory="host")

    def _sum(self, size: str, **chosen: str) -> int:
        return sum(getattr(r, size) for r in self.rows if all(getattr(r, k) == v for k, v in chosen.items()))

    def __repr__(self) -> str:
        columns = self._columns()
        cells = [list(columns), *([cell(row) for cell in columns.values()] for row in self.rows)]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        align = [str.rjust if name == "times" or name in _SIZES else str.ljust for name in columns]
        lines = ["  ".join(a(c, w) for a, c, w in zip(align, row, widths, strict=True)) for row in cells]
        return "\n".join(line.rstrip() for line in [*lines, self._total()])

    def _repr_html_(self) -> str:
        def line(tag: str, cells: Sequence[str]) -> str:
            return "<tr>" + "".join(f"<{tag}>{html.escape(c)}</{tag}>" for c in cells) + "</tr>"

        columns = self._columns()
        body = "".join(line("td", [cell(row) for cell in columns.values()]) for row in self.rows)
        caption = f"<caption>{html.escape(self._total())}</caption>"
        return f"<table>{caption}<thead>{line('th', list(columns))}</thead><tbody>{body}</tbody></table>"

    def _columns(self) -> dict[str, Callable[[SavedTensor], str]]:
        """The columns that say something: the sizes after packing, and on each device, only if these differ."""
        packed = any(r.packed_bytes != r.bytes for r in self.rows)
        chained = any(r.bytes_after for r in self.rows)
        sharded = any(r.packed_bytes_per_device != r.packed_bytes for r in self.rows)
        shown = {"bytes": True, "per device": sharded, "packed": packed, "packed per device": packed and sharded}
        sizes = {title: (lambda r, s=size: _shown(getattr(r, s))) for title, size in _SIZES.items() if shown[title]}
        return {
            "origin": lambda r: r.layer or r.kind,
            "name": lambda r: r.name,
            "type": lambda r: f"{r.dtype}[{','.join(map(str, r.shape))}]",
            "times": lambda r: f"{r.times}",
            **sizes,
            **({"after each pair": lambda r: " → ".join(f"{b:,}" for b in r.bytes_after)} if chained else {}),
            "where": lambda r: r.source,
            "": lambda r: r.note,
        }

    def _total(self) -> str:
        facts = {
            f"{_shown(self.total_bytes_per_device)} per device": self.total_bytes_per_device != self.total_bytes,
            f"{self.total_unpacked_bytes:,} before packing": self.total_unpacked_bytes != self.total_bytes,
            f"{self.input_bytes:,} of them in inputs of the function": self.input_bytes > 0,
            f"{self.host_bytes:,} of them in host memory": self.host_bytes > 0,
        }
        kept = f"{self.total_bytes:,} bytes are kept for backward"
        return ", ".join([kept, *(fact for fact, is_said in facts.items() if is_said)])

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
