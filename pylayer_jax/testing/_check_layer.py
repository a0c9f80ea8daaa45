"""`check_layer`: the properties of a correct layer, and the test of each."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp

from pylayer_jax._jax.types import is_ref

from . import _forward_mode, _transforms
from ._as_constant import as_constant
from ._central_differences import Settings
from ._comparison import type_of
from ._equivalence import compare_with_reference
from ._flat_function import flat_function, name_of
from ._layer_under_test import LayerUnderTest, Runs
from ._linear import linear
from ._numerical_gradients import compare_numerically
from ._progress import progress
from ._report import LayerReport, Row, row_of
from ._runs import at_once, jitted_without_leaks, of_some_arguments, of_some_outputs, repeated, run

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

    The report has one row per property:

    - eager: JAX can compute outputs and gradients;
    - jit, vmap, scan, cond, remat, shard_map: the outputs and gradients are the same under this transform. vmap and
      scan run several examples; they also map integer, boolean and key arguments if the layer accepts that. vmap maps
      every choice of arrays, up to a limit; the row says how many. shard_map runs on all devices with replicated
      arguments, or in the mesh of `jax.set_mesh`;
    - gradients, second order: they agree with numerical derivatives, or with those of `reference`; in float64 and in
      the dtypes of the arguments, and for other values too if the layer takes these: each entry is multiplied by a
      random number, of either sign if the argument has both. The row says which were taken;
    - forward mode: `jax.jvp` agrees with reverse mode (and with `reference`), also under jit and vmap. A layer without
      forward mode passes;
    - forward over reverse: `jax.jvp` of the gradients agrees with reverse over reverse, and with forward over forward
      if the layer has forward mode. A layer that refuses forward over reverse passes, and the row gives the reason;
    - arguments: the gradient of an argument is the same if only this argument is differentiated. The row says how many
      arguments are differentiable, because they hold floating-point or complex arrays;
    - cotangents: a missing cotangent (None, after `ctx.set_materialize_grads(False)`) has the effect of zeros;
    - linear: the gradients are linear in the cotangents. The row says whether that is proved. A layer that is not, as
      one that clips its gradient, passes if that of `reference` is the same;
    - not differentiated: the layer may stand where only other gradients are taken, within jit, scan, cond and remat.
      Tensors that an object or a function holds may be traced there;
    - repeatable: a run of the layer on other values, statics or shapes does not change the gradients;
    - leaks: no traced value outlives its trace;
    - saved: the number and the bytes of the arrays kept for backward.

    In a terminal or notebook, a line per property is shown as it is done, until the report is there.

    The checks miss one error: a backward that reads a global variable, if only code outside the layer changes it.

    Args:
        layer: a layer class, or a function of `args` that applies one.
        *args: any pytrees. Floating-point and complex arrays are differentiated; the layer gets statics unchanged.
            They must lie on devices of this process.
        kwargs: arguments that are passed by keyword, checked as `args` are.
        reference: a function of the same arguments in plain JAX whose outputs and derivatives are right, as in
            `assert_equivalent`. It declares a gradient that is meant to differ from that of forward, as that of a
            straight-through estimator does.
        skip: names of properties that are not tested, as in `skip=["second order", "leaks"]`; or one name.
        rtol: relative tolerance; by default the square root of the machine epsilon, and for numerical derivatives the
            default of `gradcheck`. A layer that rounds what it saves to bfloat16 or int8 needs about 0.03.
        atol: absolute tolerance; by default that of `assert_equivalent`, and for numerical derivatives that of
            `gradcheck`. Both scale with the sizes of the arrays.
        seed: seed of the cotangents and tangents.
        float64: compute numerical derivatives in float64 and complex128 if the layer accepts them, as in `gradcheck`.
        raises: if True, raise an error if a property fails or cannot be tested.

    Raises:
        AssertionError: with the whole report, unless `raises` is False.
        TypeError, ValueError: if there is nothing to check, if an argument lies on devices of other processes, or if
            `skip` has an unknown name. TypeError also for a `jax.Ref`, whose state would differ from run to run.
    """
    _, flat = flat_function("check_layer", layer, args, kwargs)
    if any(map(is_ref, flat.skeleton.statics())):
        raise TypeError(
            f"check_layer: an argument holds a jax.Ref, whose state would differ between the many runs of "
            f"{name_of(layer)} that are compared. Check its gradient: gradcheck(lambda x: Layer.apply(ref, x), (x,))."
        )
    flat_reference = None if reference is None else flat_function("check_layer", reference, args, kwargs)[1]
    skip = [skip] if isinstance(skip, str) else skip
    if unknown := [name for name in skip if name not in PROPERTIES]:
        raise ValueError(f"check_layer: skip={unknown}: expected names among {', '.join(PROPERTIES)}.")
    under_test = LayerUnderTest(flat, flat_reference, rtol, atol, seed, float64)
    tests = {name: test for name, test in PROPERTIES.items() if name not in skip}
    rows: list[Row] = []
    with progress() as show:
        for name, test in {"eager": LayerUnderTest.run, **tests}.items():
            rows.append(row_of(name, lambda test=test: under_test.sentence_of(test(under_test))))
            show(str(rows[-1]))
            if not rows[0].passed:
                break
    narrower = under_test.narrower_dtypes() if rows[0].passed and not all(row.passed for row in rows) else ()
    report = LayerReport(name_of(layer), tuple(rows), reference is not None, narrower)
    if raises and not report.passed:
        raise AssertionError(f"check_layer of {report}")
    return report


def _arguments(layer: LayerUnderTest) -> Runs:
    flat = layer.flat
    yield from of_some_arguments(flat, layer.cotangents)
    arguments, arrays = len(set(flat.owners)), len(flat.names)
    count = f"{arguments} of {flat.argument_count} {'is' if arguments == 1 else 'are'} differentiable"
    held = f", with {arrays} arrays" if arrays > arguments else ""
    return f"{count}{held}" + ("; each has the same gradient alone" if arrays > 1 else "")


def _cotangents(layer: LayerUnderTest) -> Runs:
    zeros = {k: jnp.zeros_like(w) for k, w in layer.cotangents.items()}
    for found in of_some_outputs(layer.flat, layer.cotangents):
        expected = [], layer.flat.grads(zeros | found.cotangents)
        yield dataclasses.replace(found, expected=expected, right="backward of zeros for the others")
    return "missing ones count as zeros" if len(zeros) > 1 else "there is one, which cannot be missing"


def _repeatable(layer: LayerUnderTest) -> Runs:
    for found in repeated(layer.flat, layer.cotangents):
        yield dataclasses.replace(found, label=found.label or " by another run", right="the first run")
    return "twice, by one vjp function, with other runs in between"


def _leaks(layer: LayerUnderTest) -> Runs:
    # Other runs of the layer came before: a new trace has to compute the same.
    gradients = jitted_without_leaks(layer.flat, layer.cotangents)
    yield run(" under jit, traced again", layer.cotangents, gradients)
    return "none under jit"


def _gradients(layer: LayerUnderTest) -> str:
    return _derivatives(layer, 1)


def _second_order(layer: LayerUnderTest) -> str:
    return _derivatives(layer, 2)


def _derivatives(layer: LayerUnderTest, order: int) -> str:
    if layer.reference is None:
        settings = Settings(layer.rtol, layer.atol, None, 200, layer.seed, layer.float64)
        return compare_numerically(layer.flat, order, settings, at_once)
    return compare_with_reference(layer.flat, layer.reference, order, layer.rtol, layer.atol, layer.seed)


def _saved(layer: LayerUnderTest) -> str:
    kept = layer.saved()
    size = sum(x.nbytes for x in kept)
    arrays = "1 array" if len(kept) == 1 else f"{len(kept)} arrays"
    return f"{arrays}, {size:,} bytes" + (f": {', '.join(map(type_of, kept))}" if kept else "")


# Each property: its runs, with a sentence about them, or the sentence alone where more than runs are compared.
PROPERTIES: dict[str, Callable[[LayerUnderTest], Runs | str]] = {
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
    "linear": linear,
    "not differentiated": as_constant,
    "repeatable": _repeatable,
    "leaks": _leaks,
    "saved": _saved,
}
