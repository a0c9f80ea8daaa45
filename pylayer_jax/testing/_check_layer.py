"""`check_layer`: the table of the checks of a layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from pylayer_jax._jax.types import is_ref
from pylayer_jax._messages import plural

from . import _forward_mode, _gradients, _runs, _transforms
from ._compare import type_of
from ._report import LayerReport, Row, progress, row_of
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
    - leaks: no traced value outlives its trace under jit;
    - saved: the number and the bytes of the arrays kept for backward.

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
    with progress() as show:
        for name, check in {"eager": _eager, **checks}.items():
            rows.append(row_of(name, lambda check=check: run_check(check(subject))))
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


def _saved(subject: Subject) -> Cases:
    yield from ()
    leaves = jax.tree_util.tree_leaves(subject.function.vjp(subject.cotangents))
    kept = {id(x): x for x in leaves if isinstance(x, jax.Array) and x.size}.values()
    size = sum(x.nbytes for x in kept)
    return f"{plural(len(kept), 'array', 'arrays')}, {size:,} bytes" + (
        f": {', '.join(map(type_of, kept))}" if kept else ""
    )


PROPERTIES: dict[str, Callable[[Subject], Cases]] = {
    "jit": _transforms.jit,
    "vmap": _transforms.vmap,
    "remat": _transforms.remat,
    "shard_map": _transforms.shard_map,
    "gradients": _gradients.gradients,
    "second order": _gradients.second_order,
    "forward mode": _forward_mode.forward_mode,
    "forward over reverse": _forward_mode.forward_over_reverse,
    "arguments": _runs.arguments,
    "cotangents": _runs.cotangents,
    "linear": _runs.linear,
    "repeatable": _runs.repeatable,
    "leaks": _runs.leaks,
    "saved": _saved,
}
