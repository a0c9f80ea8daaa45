"""Renders a table as text, and as HTML for a notebook."""

from __future__ import annotations

import html
from collections.abc import Collection, Sequence


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
