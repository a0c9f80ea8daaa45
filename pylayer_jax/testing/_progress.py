"""The line that shows the property that `check_layer` tests, because some take seconds."""

from __future__ import annotations

import contextlib
import shutil
import sys
from collections.abc import Callable, Generator


@contextlib.contextmanager
def progress_line(title: str, total: int, verbose: bool) -> Generator[Callable[[str], None], None, None]:
    """Hand out a function that shows what runs now, in one line on stderr; the line is removed at the end."""
    width = done = 0

    def write(line: str) -> None:
        nonlocal width
        if verbose:
            line = line[: shutil.get_terminal_size().columns - 1]  # a line that wraps cannot be rewritten
            sys.stderr.write(f"\r{' ' * width}\r{line}")
            sys.stderr.flush()
            width = len(line)

    def show(name: str) -> None:
        nonlocal done
        done += 1
        write(f"{title}: {name} ({done} of {total})")

    try:
        yield show
    finally:
        write("")
