"""`check_layer`: the table of the checks of a layer, and its report."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import os
import shutil
import sys
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Any

from pylayer_jax._errors import OnceDifferentiableError
from pylayer_jax._jax.types import is_ref
from pylayer_jax._messages import plural

from . import _forward_mode, _gradients, _runs
from ._compare import MismatchError, first_line, type_of
from ._subject import Cases, Options, Subject, named_outputs, run_check
from ._tensor_function import name_of, tensor_function

__tracebackhide__ = True  # pytest hides the frames of this module


def check_layer(
    layer: Callable[..., Any],
    *args: Any,
    kwargs: Mapping[str, Any] | None = None,
    reference: Callable[..., Any] | None = None,
    skip: str | Sequence[str] = (),
    rtol: float | None = None,
    atol: float | None = None,
    seed: int = 0,
    float64: bool = True,
    raises: bool = True,
) -> LayerReport:
    """Check a layer under each transform of JAX, and its derivatives in both modes.

        >>> report = check_layer(Tanh, x)  # raises an AssertionError if a property fails
        >>> report.passed
        True

    The report has one row per property:

    - eager: JAX can compute outputs and gradients;
    - jit, vmap, remat, shard_map: the outputs and gradients are the same under this transform. vmap runs several
      examples, and maps every choice of arrays, up to a limit; integers, booleans and keys too if the layer accepts
      that. shard_map runs on all devices with replicated arguments, or in the mesh of `jax.set_mesh`;
    - gradients, second order: they match numerical derivatives, or those of `reference`; in float64 and in the dtypes
      of the arguments, and for other values too, as in `gradcheck`;
    - forward mode: `jax.jvp` agrees with reverse mode, also under jit and vmap, and for the tangent of one argument
      alone. A layer without forward mode passes;
    - forward over reverse: `jax.jvp` of the gradients agrees with reverse over reverse, and with forward over forward
      if the layer has forward mode. A layer that refuses it passes, and the row gives the reason;
    - arguments: the gradient of an argument is the same if only this argument is differentiated;
    - cotangents: a missing cotangent (None, after `ctx.set_materialize_grads(False)`) has the effect of zeros;
    - linear: the gradients are linear in the cotangents. The row says whether this is proved. A layer that is not
      linear, such as one that clips its gradient, passes if `reference` has the same gradients;
    - repeatable: a run of the layer on other values, statics or shapes does not change the gradients;
    - leaks: no traced value outlives its trace under jit.

    In a terminal or notebook, each finished property shows a line, until the report is complete. The checks miss a
    backward that reads a global variable which only code outside the layer changes.

    Args:
        layer: a layer class, or a function of `args` that applies one.
        *args: any pytrees, as in `gradcheck`; the layer gets statics unchanged.
        kwargs: arguments that are passed by keyword, checked as `args` are.
        reference: a function of the same arguments in plain JAX whose outputs and derivatives are right. Pass it if
            the gradient is meant to differ from the derivative of forward, as for a straight-through estimator.
        skip: names of properties that are not tested, as in `skip=["second order", "leaks"]`; or one name.
        rtol: relative tolerance; by default that of `gradcheck` for numerical derivatives, and the square root of the
            machine epsilon elsewhere. A layer that rounds saved tensors to bfloat16 or int8 needs about 0.03.
        atol: absolute tolerance, as in `gradcheck`.
        seed: seed of the cotangents and tangents.
        float64: as in `gradcheck`.
        raises: if True, raise an error if a property fails or cannot be tested.

    Raises:
        AssertionError: with the whole report, unless `raises` is False.
        TypeError, ValueError: if there is nothing to check, if an argument lies on devices of other processes, or if
            `skip` has an unknown name. TypeError also for a `jax.Ref`, whose state would differ from run to run.
    """
    function = tensor_function("check_layer", layer, args, kwargs)
    if any(map(is_ref, function.skeleton.statics())):
        raise TypeError(
            f"check_layer: an argument holds a jax.Ref, whose state would differ between the many runs of "
            f"{name_of(layer)} that are compared. Check its gradient: gradcheck(lambda x: Layer.apply(ref, x), (x,))."
        )
    right = None if reference is None else tensor_function("check_layer", reference, args, kwargs, on_one_device=True)
    skip = [skip] if isinstance(skip, str) else skip
    if unknown := [name for name in skip if name not in PROPERTIES]:
        raise ValueError(f"check_layer: skip={unknown}: expected names among {', '.join(PROPERTIES)}.")
    checks = {name: check for name, check in PROPERTIES.items() if name not in skip}
    subject = Subject(function, right, Options(rtol, atol, seed=seed, float64=float64))
    rows: list[Row] = []
    with _progress() as show:
        for name, check in {"eager": _eager, **checks}.items():
            rows.append(_row_of(name, lambda check=check: run_check(check(subject))))
            show(str(rows[-1]))
            if not rows[0].passed:
                break
    report = LayerReport(name_of(layer), tuple(rows), reference is not None)
    if raises and not report.passed:
        raise AssertionError(f"check_layer of {report}")
    return report


def _eager(subject: Subject) -> Cases:
    yield subject.case(" when it is differentiated", named_outputs(subject.function.run_differentiated()[0]))
    returned = ", ".join(map(type_of, subject.outputs))
    return f"returns {returned}; gradients of {', '.join(subject.function.names)}"


PROPERTIES: dict[str, Callable[[Subject], Cases]] = {
    "jit": _runs.jit,
    "vmap": _runs.vmap,
    "remat": _runs.remat,
    "shard_map": _runs.shard_map,
    "gradients": _gradients.gradients,
    "second order": _gradients.second_order,
    "forward mode": _forward_mode.forward_mode,
    "forward over reverse": _forward_mode.forward_over_reverse,
    "arguments": _runs.arguments,
    "cotangents": _runs.cotangents,
    "linear": _runs.linear,
    "repeatable": _runs.repeatable,
    "leaks": _runs.leaks,
}


# -- the report -----------------------------------------------------------------------------------

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
        mismatched = [row for row in failed if isinstance(row.error, MismatchError)]
        hints = {
            "Does the layer communicate between devices? check_layer runs it on one. Then use assert_equivalent(\n"
            "jax.shard_map(Layer.apply, mesh=mesh, in_specs=..., out_specs=...), reference, args).": any(
                isinstance(row.error, NameError) and "axis name" in row.message for row in failed
            ),
            "Is backward meant to give another gradient (straight-through, reversed, clipped)? Then pass "
            "reference=FUNCTION: plain JAX with\nthe meant gradient, as in lambda x: x + jax.lax.stop_gradient("
            f"jnp.round(x) - x); or skip={differ + once}.": differ and not self.has_reference,
            f"Is the layer meant to have no second derivative? Then pass skip={once}.": once
            and (self.has_reference or not differ),
            "Does it round what it saves? Then pass tolerances that allow for it, as in rtol=0.03, atol=0.03, and "
            "perhaps\nskip=['second order']. Does it compute in a narrower dtype? Then pass float64=False.": differ,
            "Does the layer take only values such as those given, as symmetric matrices, or those for which it "
            "converges?\nThen check a function that makes them, as in lambda a: Layer.apply((a + a.T) / 2).": any(
                " for other values (" in row.message for row in mismatched
            ),
            "Is backward meant not to be linear in its cotangents (clipped, normalized)? Then pass "
            "skip=['linear'].": any(row.name == "linear" for row in mismatched),
        }
        return [text for text, applies in hints.items() if applies]

    def __repr__(self) -> str:
        failed = [row.name for row in self.rows if not row.passed]
        verdict = f"failed: {', '.join(failed)}" if failed else "passed"
        return f"<{type(self).__name__} of {self.layer}: {plural(len(self.rows), 'property', 'properties')}, {verdict}>"


def _row_of(name: str, test: Callable[[], str]) -> Row:
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
def _progress() -> Generator[Callable[[str], None]]:
    """Yield a function that shows a line in a terminal or notebook; elsewhere, and in a test, it shows nothing.

    The lines vanish at the end, since the report has them all.
    """
    shown: list[str] = []
    size, encoding = shutil.get_terminal_size(), sys.stdout.encoding or "utf-8"
    is_test = "PYTEST_CURRENT_TEST" in os.environ
    is_terminal = not is_test and sys.stdout.isatty() and os.environ.get("TERM") != "dumb"
    handle: Any = None  # of the display in a notebook
    if not is_test and type(sys.stdout).__module__.startswith("ipykernel"):
        # A display that is updated leaves nothing of its earlier states in the file of the notebook.
        handle = importlib.import_module("IPython.display").display({"text/plain": ""}, raw=True, display_id=True)

    def show(line: str) -> None:
        shown.append(line)
        if handle is not None:
            handle.update({"text/plain": "\n".join(shown)}, raw=True)
        elif is_terminal:
            sys.stdout.write(line[: size.columns - 1].encode(encoding, "replace").decode(encoding) + "\n")
            sys.stdout.flush()

    try:
        yield show
    finally:
        if handle is not None:
            handle.update({"text/plain": ""}, raw=True)
        elif is_terminal and shown:
            sys.stdout.write(f"\x1b[{min(len(shown), size.lines - 1)}A\x1b[J")
