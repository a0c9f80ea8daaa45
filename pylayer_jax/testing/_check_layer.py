"""`check_layer`: the properties of a correct layer, and the test of each."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pylayer_jax._methods.once_differentiable import OnceDifferentiableError
from pylayer_jax._trees import plural

from . import _forward_mode, _transforms
from ._comparison import MismatchError, first_line, type_of
from ._equivalence import compare_with_reference
from ._flat_function import flat_function, name_of
from ._layer_under_test import LayerUnderTest
from ._numerical import Settings, compare_numerically
from ._progress import progress_line
from ._variants import jitted_without_leaks


@dataclasses.dataclass(frozen=True)
class Row:
    """One property: its name, whether the layer has it, and what was compared or what is wrong."""

    name: str
    passed: bool
    message: str
    kind: type[Exception] | None = None  # of the error, if the property failed

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
        hint = self.hint("reference=FUNCTION", lambda names: f"skip={names}")
        return "\n".join([self.layer, *map(str, self.rows), *([hint] if hint else [])])

    def hint(self, reference: str, skip: Callable[[list[str]], str]) -> str:
        """How a failure that is meant is declared; empty if nothing failed that can be meant.

        Args:
            reference: how a reference is given.
            skip: how a list of properties is left out.
        """
        failed = [row for row in self.rows if not row.passed and row.name in ("gradients", "second order")]
        once = [row.name for row in failed if issubclass(row.kind or Exception, OnceDifferentiableError)]
        differ = [row.name for row in failed if issubclass(row.kind or Exception, MismatchError)]
        if differ and not self.has_reference:
            return (
                f"Is backward meant to give another gradient (straight-through, reversed, clipped)? Then pass "
                f"{reference}: plain JAX with\nthe meant gradient, as in lambda x: x + jax.lax.stop_gradient("
                f"jnp.round(x) - x); or {skip(differ + once)}."
            )
        return f"Is the layer meant to have no second derivative? Then pass {skip(once)}." if once else ""

    def __repr__(self) -> str:
        failed = [row.name for row in self.rows if not row.passed]
        verdict = f"failed: {', '.join(failed)}" if failed else "passed"
        return f"<{type(self).__name__} of {self.layer}: {plural(len(self.rows), 'property', 'properties')}, {verdict}>"


def _public_type(error: Exception) -> type:
    """The type of an error, or the type that a private type of the library stands for."""
    return next(kind for kind in type(error).__mro__ if not kind.__module__.startswith("pylayer_jax."))


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


def check_layer(
    layer: Callable[..., Any],
    *args: Any,
    kwargs: Mapping[str, Any] | None = None,
    reference: Callable[..., Any] | None = None,
    skip: Sequence[str] = (),
    rtol: float | None = None,
    atol: float | None = None,
    seed: int = 0,
    float64: bool = True,
    raises: bool = True,
    verbose: bool = False,
) -> LayerReport:
    """Check a layer under each transform of JAX, and its derivatives in both modes.

    The report has one row per property:

    - eager: JAX can compute outputs and gradients;
    - jit, vmap, scan, cond, remat, shard_map: the outputs and gradients are the same under this transform. vmap and
      scan run several examples; they also map integer, boolean and key arguments if the layer accepts that. shard_map
      runs on all devices with replicated arguments, or in the mesh of `jax.set_mesh`;
    - gradients, second order: they agree with numerical derivatives, or with those of `reference`;
    - forward mode: `jax.jvp` agrees with reverse mode (and with `reference`), also under jit and vmap. A layer without
      forward mode passes;
    - forward over reverse: `jax.jvp` of the gradients agrees with reverse over reverse, and with forward over forward
      if the layer has forward mode. A layer that refuses forward over reverse passes, and the row gives the reason;
    - arguments: the gradient of an argument is the same if only this argument is differentiated. The row says how many
      arguments are differentiable, because they hold floating-point or complex arrays;
    - cotangents: a missing cotangent (None, after `ctx.set_materialize_grads(False)`) has the effect of zeros;
    - repeatable: a run of the layer on other values, statics or shapes does not change the gradients;
    - leaks: no traced value outlives its trace;
    - saved: the number and the bytes of the arrays kept for backward.

    The checks miss one error: a backward that reads a global variable, if only code outside the layer changes it.

    Args:
        layer: a layer class, or a function of `args` that applies one.
        *args: any pytrees. Floating-point and complex arrays are differentiated; the layer gets statics unchanged.
            They must lie on devices of this process.
        kwargs: arguments that are passed by keyword, checked as `args` are.
        reference: a function of the same arguments in plain JAX whose outputs and derivatives are right, as in
            `assert_equivalent`. It declares a gradient that is meant to differ from that of forward, as that of a
            straight-through estimator does.
        skip: names of properties that are not tested, as in `skip=["second order"]`.
        rtol: relative tolerance; by default the square root of the machine epsilon, and for numerical derivatives the
            default of `gradcheck`.
        atol: absolute tolerance; by default that of `assert_equivalent`, and for numerical derivatives that of
            `gradcheck`.
        seed: seed of the cotangents and tangents.
        float64: compute numerical derivatives in float64 and complex128 if the layer accepts them, as in `gradcheck`.
        raises: if True, raise an error if a property fails or cannot be tested.
        verbose: show the property that is being tested on stderr, in one line that is rewritten and at the end removed.

    Raises:
        AssertionError: with the whole report, unless `raises` is False.
        TypeError, ValueError: if there is nothing to check, if an argument lies on devices of other processes, or if
            `skip` has an unknown name.
    """
    _, flat = flat_function("check_layer", layer, args, kwargs)
    flat_reference = None if reference is None else flat_function("check_layer", reference, args, kwargs)[1]
    if unknown := [name for name in skip if name not in PROPERTIES]:
        raise ValueError(f"check_layer: skip={unknown}: expected names among {', '.join(PROPERTIES)}.")
    under_test = LayerUnderTest(flat, flat_reference, rtol, atol, seed, float64)
    tests = {name: test for name, test in PROPERTIES.items() if name not in skip}
    with progress_line(name_of(layer), len(tests) + 1, verbose) as show:
        show("eager")
        rows = [row_of("eager", under_test.run)]
        for name, test in tests.items() if rows[0].passed else ():
            show(name)
            rows.append(row_of(name, lambda test=test: test(under_test)))
    report = LayerReport(name_of(layer), tuple(rows), reference is not None)
    if raises and not report.passed:
        raise AssertionError(f"check_layer of {report}")
    return report


def _arguments(layer: LayerUnderTest) -> str:
    flat = layer.flat
    groups = [[j for j, o in enumerate(flat.owners) if o == owner] for owner in dict.fromkeys(flat.owners)]
    for group in [*groups, *([j] for j in range(len(flat.names)))]:
        names = [layer.gradient_names[j] for j in group]
        alone = flat.grads(layer.cotangents, group)
        layer.comparison.of_all(alone, [layer.gradients[j] for j in group], names, "when it alone is differentiated")
    arguments, arrays = len(groups), len(flat.names)
    count = f"{arguments} of {flat.argument_count} {'is' if arguments == 1 else 'are'} differentiable"
    held = f", with {arrays} arrays" if arrays > arguments else ""
    return f"{count}{held}" + ("; each has the same gradient alone" if arrays > 1 else "")


def _cotangents(layer: LayerUnderTest) -> str:
    everything = layer.cotangents
    zeros = {k: jnp.zeros_like(w) for k, w in everything.items()}
    given = [({k: w}, f"with a cotangent for output {k} alone") for k, w in everything.items()]
    if len(everything) > 2:
        given += [({i: w for i, w in everything.items() if i != k}, f"without one for output {k}") for k in everything]
    comparison = dataclasses.replace(layer.comparison, right="backward of zeros for the others")
    for cotangents, label in given:
        missing = layer.flat.grads(cotangents)
        comparison.of_all(missing, layer.flat.grads(zeros | cotangents), layer.gradient_names, label)
    return "missing ones count as zeros" if len(everything) > 1 else "there is one, which cannot be missing"


def _gradients(layer: LayerUnderTest) -> str:
    return _derivatives(layer, 1)


def _second_order(layer: LayerUnderTest) -> str:
    return _derivatives(layer, 2)


def _derivatives(layer: LayerUnderTest, order: int) -> str:
    if layer.reference is None:
        settings = Settings(layer.rtol, layer.atol, None, 200, layer.seed, layer.float64)
        return compare_numerically(layer.flat, order, settings, all_variants=False)
    compare_with_reference(layer.flat, layer.reference, order, layer.rtol, layer.atol, layer.random)
    return "as those of the reference"


def _repeatable(layer: LayerUnderTest) -> str:
    flat, cotangents, names = layer.flat, layer.cotangents, layer.gradient_names
    comparison = dataclasses.replace(layer.comparison, right="the first run")
    pull = flat.vjp(cotangents)
    first = pull(cotangents)
    comparison.of_all(first, layer.gradients, names, "by another run")
    comparison.of_all(pull(cotangents), first, names, "when the vjp function is called a second time")
    pull = flat.vjp(cotangents)
    flat.with_values(flat.scaled_values()).grads(cotangents)
    comparison.of_all(pull(cotangents), first, names, "when the layer ran on other values before backward")
    for _ in flat.run_with_other_inputs():
        comparison.of_all(
            pull(cotangents), first, names, "when the layer ran on other statics or shapes before backward"
        )
    return "twice, by one vjp function, with other runs in between"


def _leaks(layer: LayerUnderTest) -> str:
    # Other runs of the layer came before: a new trace has to compute the same.
    gradients = jitted_without_leaks(layer.flat, layer.cotangents)
    layer.comparison.of_all(gradients, layer.gradients, layer.gradient_names, "under jit, traced again")
    return "none under jit"


def _saved(layer: LayerUnderTest) -> str:
    pull = layer.flat.vjp(layer.cotangents)
    kept = list({id(x): x for x in jax.tree_util.tree_leaves(pull) if isinstance(x, jax.Array) and x.size}.values())
    size = sum(x.nbytes for x in kept)
    arrays = "1 array" if len(kept) == 1 else f"{len(kept)} arrays"
    return f"{arrays}, {size:,} bytes" + (f": {', '.join(map(type_of, kept))}" if kept else "")


PROPERTIES: dict[str, Callable[[LayerUnderTest], str]] = {
    "jit": _transforms.jit,
    "vmap": _transforms.vmap,
    "scan": _transforms.scan,
    "cond": _transforms.cond,
    "remat": _transforms.remat,
    "shard_map": _transforms.shard_map,
    "gradients": _gradients,
    "second order": _second_order,
    "forward mode": _forward_mode.forward_mode,
    "forward over reverse": _forward_mode.forward_over_reverse,
    "arguments": _arguments,
    "cotangents": _cotangents,
    "repeatable": _repeatable,
    "leaks": _leaks,
    "saved": _saved,
}
_WIDTH = max(map(len, PROPERTIES))
