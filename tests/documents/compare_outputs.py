"""Compare the outputs that a notebook stores with those of a run: the same words, and almost the same numbers."""

import itertools
import math
import re
from collections.abc import Collection, Iterator
from typing import Any

# Times and addresses of objects differ from run to run, and addresses of pages from one version of JAX to another.
VARIES = re.compile(r"\b\d[\d.,]* ?(?:s|ms|us|µs|seconds?|minutes?)\b|0x[0-9a-f]+|https?://\S+")
NUMBER = re.compile(r"(?<![A-Za-z_\d.])\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?(?![A-Za-z_\d])")
BRACKET = re.compile(r"([\[\](),])")  # NumPy aligns numbers with spaces beside brackets
# Another version of XLA rounds otherwise. Numbers below SMALL, such as the error of a gradient, may be all rounding.
RELATIVE, SMALL = 0.02, 1e-4


def texts(cell: Any) -> Iterator[str]:
    """Yield the texts of the outputs of a cell: what it printed, and its last value; no pictures, and no HTML."""
    for output in cell.get("outputs", []):
        text = output.get("text", output.get("data", {}).get("text/plain", ""))
        if output.get("name") != "stderr":
            yield "".join(text)


def differences(stored: Any, run: Any, vary: Collection[int] = ()) -> Iterator[tuple[int, str, str]]:
    """Yield the number of each cell whose outputs differ, and the first line that does, as it is stored and run.

    The numbers in the outputs of the cells `vary` may differ.
    """
    for number, cells in enumerate(zip(stored.cells, run.cells, strict=True)):
        lines = [[line for line in "".join(texts(cell)).splitlines() if line.strip()] for cell in cells]
        pairs = itertools.zip_longest(*lines, fillvalue="")
        yield from itertools.islice(((number, a, b) for a, b in pairs if not are_alike(a, b, number in vary)), 1)


def are_alike(stored: str, run: str, numbers_vary: bool = False) -> bool:
    """Return whether two lines have the same words, and numbers that differ by rounding only, or in any way."""
    masked = [BRACKET.sub(r" \1 ", VARIES.sub("TIME", line)) for line in (stored, run)]
    words = [NUMBER.sub("0", line).split() for line in masked]
    numbers = [[float(n.replace(",", "")) for n in NUMBER.findall(line)] for line in masked]
    close = (math.isclose(a, b, rel_tol=RELATIVE, abs_tol=SMALL) for a, b in zip(*numbers, strict=False))
    return words[0] == words[1] and (numbers_vary or all(close))
