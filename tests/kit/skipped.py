"""What to install and to run for the tests that were skipped because a package is missing."""

import os
import re
import sys
from typing import NamedTuple


class Extra(NamedTuple):
    reason: str  # a pattern that the reason of a skip contains
    missing: str
    name: str
    run: str


EXTRAS = (
    Extra(r"(paddle|torch) is not installed", "real Paddle or torch", "frameworks", "frameworks --require-frameworks"),
    Extra(r"\[ecosystem\]", "flax or another library", "ecosystem", "ecosystem --require-ecosystem"),
    Extra(r"\[notebooks\]", "what runs notebooks", "notebooks", "notebooks"),
)


def how_to_run(reasons):
    """One line for each kind of package whose absence is among the reasons, with commands for this environment."""
    python = os.path.relpath(sys.executable) if sys.executable.startswith(os.getcwd() + os.sep) else sys.executable
    for pattern, missing, name, run in EXTRAS:
        count = sum(bool(re.search(pattern, reason)) for reason in reasons)
        if count:
            yield (
                f"Skipped for want of {missing}: {count}. To run them too: "
                f'{python} -m pip install -e ".[{name}]" && {python} -m pytest -n auto -m {run}'
            )
