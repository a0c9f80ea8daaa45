"""The report of `check_layer`: a row per property, shown when it is checked, and hints about intended failures."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import os
import shutil
import sys
from collections.abc import Callable, Generator, Iterator
from typing import Any

from pylayer_jax._errors import OnceDifferentiableError
from pylayer_jax._messages import plural

from ._compare import MismatchError, first_line

__tracebackhide__ = True  # pytest hides the frames of this module

_WIDTH = len("forward over reverse")  # the longest name


@dataclasses.dataclass(frozen=True)
class Row:
    """One property: its name, whether the layer has it, and a message about the comparison or the failure."""

    name: str
    passed: bool
    message: str
    error: Exception | None = None  # if the property failed

    def __str__(self) -> str:
        return f"{'✓' if self.passed else '✗'} {self.name:<{_WIDTH}}  {self.message}"


@dataclasses.dataclass(frozen=True)
class LayerReport:
    """The results of `check_layer`; prints as one line per property. Its `repr` is one line."""

    layer: str
    rows: tuple[Row, ...]
    has_reference: bool = False

    @property
    def passed(self) -> bool:
        return all(row.passed for row in self.rows)

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)

    def __getitem__(self, name: str) -> Row:
        return next(row for row in self.rows if row.name == name)

    def __str__(self) -> str:
        return "\n".join([self.layer, *map(str, self.rows), *self.hints()])

    def hints(self) -> list[str]:
        """Return hints how to declare intended failures; empty if no failure can be intended."""
        failed = [row for row in self.rows if not row.passed]
        derivatives = [row for row in failed if row.name in ("gradients", "second order")]
        once = [row.name for row in derivatives if isinstance(row.error, OnceDifferentiableError)]
        differ = [row.name for row in derivatives if isinstance(row.error, MismatchError)]
        hints: list[str] = []
        if any(isinstance(row.error, NameError) and "axis name" in row.message for row in failed):
            hints.append(
                "Does the layer communicate between devices? check_layer runs it on one. Then use assert_equivalent(\n"
                "jax.shard_map(Layer.apply, mesh=mesh, in_specs=..., out_specs=...), reference, args)."
            )
        if differ and not self.has_reference:
            hints.append(
                "Is backward meant to give another gradient (straight-through, reversed, clipped)? Then pass "
                "reference=FUNCTION: plain JAX with\nthe meant gradient, as in lambda x: x + "
                f"jax.lax.stop_gradient(jnp.round(x) - x); or skip={differ + once}."
            )
        elif once:
            hints.append(f"Is the layer meant to have no second derivative? Then pass skip={once}.")
        if differ:
            hints.append(
                "Does it round what it saves? Then pass tolerances that allow for it, as in rtol=0.03, atol=0.03, and "
                "perhaps\nskip=['second order']. Does it compute in a narrower dtype? Then pass float64=False."
            )
        if any(isinstance(row.error, MismatchError) and " for other values (" in row.message for row in failed):
            hints.append(
                "Does the layer take only values such as those given, as symmetric matrices, or those for which it "
                "converges?\nThen check a function that makes them, as in lambda a: Layer.apply((a + a.T) / 2)."
            )
        if any(isinstance(row.error, MismatchError) and row.name == "linear" for row in failed):
            hints.append(
                "Is backward meant not to be linear in its cotangents (clipped, normalized)? Then pass skip=['linear']."
            )
        return hints

    def __repr__(self) -> str:
        failed = [row.name for row in self.rows if not row.passed]
        verdict = f"failed: {', '.join(failed)}" if failed else "passed"
        return f"<{type(self).__name__} of {self.layer}: {plural(len(self.rows), 'property', 'properties')}, {verdict}>"


def row_of(name: str, test: Callable[[], str]) -> Row:
    try:
        return Row(name, True, test())
    except MismatchError as error:
        return Row(name, False, first_line(error), error)
    except Exception as error:
        # A note that begins with dashes is JAX's note about its traceback.
        notes = [note.splitlines()[0] for note in getattr(error, "__notes__", ()) if note and not note.startswith("-")]
        where = "".join(f" ({note})" for note in notes[:1])
        return Row(name, False, f"{_public_type(error).__name__}: {first_line(error)}{where}", error)


def _public_type(error: Exception) -> type:
    """Return the type of an error, or for a private type of the library its public base."""
    return next(kind for kind in type(error).__mro__ if not kind.__module__.startswith("pylayer_jax."))


# -- rows as they are done ------------------------------------------------------------------------


@contextlib.contextmanager
def progress() -> Generator[Callable[[str], None]]:
    """Yield a function that shows a line in a terminal or notebook; elsewhere, and in a test, it shows nothing.

    The lines vanish at the end, since the report has them all.
    """
    shown: list[str] = []
    size, encoding = shutil.get_terminal_size(), sys.stdout.encoding or "utf-8"

    def write(line: str) -> None:
        shown.append(line)
        sys.stdout.write(line[: size.columns - 1].encode(encoding, "replace").decode(encoding) + "\n")
        sys.stdout.flush()

    def update(line: str) -> None:
        shown.append(line)
        handle.update({"text/plain": "\n".join(shown)}, raw=True)

    if "PYTEST_CURRENT_TEST" in os.environ:
        yield shown.append
    elif type(sys.stdout).__module__.startswith("ipykernel"):
        # A display that is updated leaves nothing of its earlier states in the file of the notebook.
        display = importlib.import_module("IPython.display").display
        handle: Any = display({"text/plain": ""}, raw=True, display_id=True)
        try:
            yield update
        finally:
            handle.update({"text/plain": ""}, raw=True)
    elif sys.stdout.isatty() and os.environ.get("TERM") != "dumb":
        try:
            yield write
        finally:
            up = min(len(shown), size.lines - 1)
            sys.stdout.write(f"\x1b[{up}A\x1b[J" if up else "")
    else:
        yield shown.append
