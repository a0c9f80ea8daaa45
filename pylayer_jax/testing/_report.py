"""The report of `check_layer`: a row per property, and how a failure that is meant is declared."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

from pylayer_jax._methods.once_differentiable import OnceDifferentiableError
from pylayer_jax._trees.messages import plural

from ._comparison import MismatchError, first_line
from ._linear import NotLinearError
from ._other_values import OtherValuesError

__tracebackhide__ = True  # pytest hides the frames of this module

_WIDTH = len("forward over reverse")  # the longest name


@dataclasses.dataclass(frozen=True)
class Row:
    """One property: its name, whether the layer has it, and what was compared or what is wrong."""

    name: str
    passed: bool
    message: str
    kind: type[Exception] | None = None  # of the error, if the property failed

    def __str__(self) -> str:
        return f"{'✓' if self.passed else '✗'} {self.name:<{_WIDTH}}  {self.message}"


def python_arguments(**options: Any) -> str:
    return ", ".join(f"{name}={'FUNCTION' if name == 'reference' else repr(value)}" for name, value in options.items())


@dataclasses.dataclass(frozen=True)
class LayerReport:
    """The results of `check_layer`; prints as one line per property. Its `repr` is one line."""

    layer: str
    rows: tuple[Row, ...]
    has_reference: bool = False
    narrower: tuple[str, ...] = ()  # the dtypes of saved arrays that are narrower than those of the arguments

    @property
    def passed(self) -> bool:
        return all(row.passed for row in self.rows)

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)

    def __getitem__(self, name: str) -> Row:
        return next(row for row in self.rows if row.name == name)

    def __str__(self) -> str:
        return "\n".join([self.layer, *map(str, self.rows), *self.hints()])

    def hints(self, spelled: Callable[..., str] = python_arguments) -> list[str]:
        """How failures that are meant are declared, in lines; empty if nothing failed that can be meant.

        Args:
            spelled: how keyword arguments of `check_layer` are written.
        """
        failed = [row for row in self.rows if not row.passed and row.name in ("gradients", "second order")]
        once = [row.name for row in failed if issubclass(row.kind or Exception, OnceDifferentiableError)]
        differ = [row.name for row in failed if issubclass(row.kind or Exception, MismatchError)]
        hints: list[str] = []
        if any(row.kind is NameError and "axis name" in row.message for row in self.rows):
            hints.append(
                "Does the layer communicate between devices? check_layer runs it on one. Then use "
                "pylayer_jax.testing.check_parallel(Layer, reference,\nargs, mesh=mesh, in_specs=..., out_specs=...)."
            )
        if differ and not self.has_reference:
            hints.append(
                "Is backward meant to give another gradient (straight-through, reversed, clipped)? Then pass "
                f"{spelled(reference=None)}: plain JAX with\nthe meant gradient, as in lambda x: x + "
                f"jax.lax.stop_gradient(jnp.round(x) - x); or {spelled(skip=differ + once)}."
            )
        elif once:
            hints.append(f"Is the layer meant to have no second derivative? Then pass {spelled(skip=once)}.")
        if differ:
            hints.append(self._hint_of_rounding(spelled, differ))
        if any(row.kind is OtherValuesError for row in self.rows):
            hints.append(
                "Does the layer take only values such as those given, as symmetric matrices, or those for which it "
                "converges?\nThen check a function that makes them, as in lambda a: Layer.apply((a + a.T) / 2)."
            )
        if any(row.kind is NotLinearError for row in self.rows):
            hints.append(
                "Is backward meant not to be linear in its cotangents (clipped, normalized)? Then pass "
                f"{spelled(skip=['linear'])}."
            )
        return hints

    def _hint_of_rounding(self, spelled: Callable[..., str], differ: list[str]) -> str:
        tolerances = spelled(rtol=0.03, atol=0.03)
        if not self.narrower:
            return (
                f"Does it round to a narrower dtype? Then pass {spelled(float64=False)}, or tolerances that allow for "
                f"it, as in {tolerances}."
            )
        second = f"; and {spelled(skip=['second order'])}" if "second order" in differ else ""
        return f"It saves {' and '.join(self.narrower)}. Is that rounding meant? Then pass {tolerances}{second}."

    def __repr__(self) -> str:
        failed = [row.name for row in self.rows if not row.passed]
        verdict = f"failed: {', '.join(failed)}" if failed else "passed"
        return f"<{type(self).__name__} of {self.layer}: {plural(len(self.rows), 'property', 'properties')}, {verdict}>"


def row_of(name: str, test: Callable[[], str]) -> Row:
    try:
        return Row(name, True, test())
    except MismatchError as error:
        return Row(name, False, first_line(error), type(error))
    except Exception as error:
        # A note that begins with dashes is the one of JAX about its traceback.
        notes = [note.splitlines()[0] for note in getattr(error, "__notes__", ()) if note and not note.startswith("-")]
        where = "".join(f" ({note})" for note in notes[:1])
        return Row(name, False, f"{_public_type(error).__name__}: {first_line(error)}{where}", type(error))


def _public_type(error: Exception) -> type:
    """The type of an error, or the type that a private type of the library stands for."""
    return next(kind for kind in type(error).__mro__ if not kind.__module__.startswith("pylayer_jax."))
