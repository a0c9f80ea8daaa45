"""Lines that tell a person how far a check is. They vanish at its end, since the report has them all."""

from __future__ import annotations

import contextlib
import importlib
import os
import shutil
import sys
from collections.abc import Callable, Generator
from typing import Any

__tracebackhide__ = True  # pytest hides the frames of this module


@contextlib.contextmanager
def progress() -> Generator[Callable[[str], None]]:
    """A function that shows a line, in a terminal or notebook; elsewhere, and in a test, it does nothing."""
    shown: list[str] = []
    if "PYTEST_CURRENT_TEST" in os.environ:
        yield shown.append
    elif type(sys.stdout).__module__.startswith("ipykernel"):
        # A display that is updated leaves nothing of its earlier states in the file of the notebook.
        display = importlib.import_module("IPython.display").display
        handle: Any = display({"text/plain": ""}, raw=True, display_id=True)

        def show(line: str) -> None:
            shown.append(line)
            handle.update({"text/plain": "\n".join(shown)}, raw=True)

        try:
            yield show
        finally:
            handle.update({"text/plain": ""}, raw=True)
    elif sys.stdout.isatty() and os.environ.get("TERM") != "dumb":
        size = shutil.get_terminal_size()

        def write(line: str) -> None:
            shown.append(line)
            encoding = sys.stdout.encoding or "utf-8"
            sys.stdout.write(line[: size.columns - 1].encode(encoding, "replace").decode(encoding) + "\n")
            sys.stdout.flush()

        try:
            yield write
        finally:
            up = min(len(shown), size.lines - 1)
            sys.stdout.write(f"\x1b[{up}A\x1b[J" if up else "")
    else:
        yield shown.append
