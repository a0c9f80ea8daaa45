"""The public checkers, and the report of `check_layer`."""

from __future__ import annotations

import dataclasses
import functools
import html
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax

from pylayer_jax._jax.types import is_ref
from pylayer_jax._messages import OnceDifferentiableError
from pylayer_jax._report import html_table, progress

from . import _properties
from ._subject import Cases, MismatchError, Options, Subject, first_line, name_of, run_check, tensor_function

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
    """Check a layer under each transform of JAX, and its derivatives in reverse mode and in forward mode.

        >>> report = check_layer(Tanh, x)  # raises an AssertionError if a property fails
        >>> report.passed
        True

    The report has one row per property, with ✓ if the layer has it, ✗ if not, and – if there is nothing to check:

    - eager: JAX can compute the outputs and gradients;
    - jit, vmap, remat, shard_map: the outputs and gradients are the same under this transform. vmap batches each choice
      of arrays, up to a limit, and also integers, booleans and PRNG keys if the layer accepts this. shard_map runs on
      all devices with replicated arguments, or in the mesh of `jax.set_mesh`;
    - gradients, second order: as in `gradcheck` and `gradgradcheck`. The row, and a UserWarning, name each branch that
      no entry of the values takes (of `jnp.where`, `jnp.clip`, `abs`, a mask, ...): pass arguments that take it;
    - forward mode: `jax.jvp` agrees with reverse mode, also under jit and vmap, and if only one argument has a tangent.
      A layer without forward mode passes;
    - forward over reverse: `jax.jvp` of the gradients agrees with reverse over reverse, and with forward over forward
      if the layer has forward mode. A layer whose gradients have no `jax.jvp` passes, and the row gives the reason;
    - arguments: the gradient of an argument is the same if only this argument is differentiated;
    - cotangents: a missing cotangent (None, after `ctx.set_materialize_grads(False)`) has the same effect as zeros;
    - linear: the gradients are linear in the cotangents (the row says whether this is proved), or as in `reference`;
    - repeatable: a run on other values, shapes or statics does not change the gradients of an earlier run;
    - leaks: no traced value outlives its trace under jit.

    The checks cannot notice that `backward` reads a global variable which only code outside the layer changes.

    Args:
        layer: a layer class, or a function of `args` that applies a layer.
        *args: any pytrees. Leaves that are not tensors are passed to the layer unchanged.
        kwargs: keyword arguments, which are checked like `args`.
        reference: as in `gradcheck`, for a layer such as a straight-through estimator.
        skip: one name or several names of properties to leave out, as in `skip=["second order", "leaks"]`.
        rtol: relative tolerance. The default is that of `gradcheck` for numerical derivatives, and the square root of
            the machine epsilon elsewhere. A layer that rounds saved tensors to bfloat16 or int8 needs about 0.03.
        atol: as in `gradcheck`.
        float64: as in `gradcheck`.
        seed: seed of the random cotangents and tangents.
        raises: whether to raise an error if a property fails or cannot be tested.

    Raises:
        AssertionError: if a property fails and `raises` is True. The message is the whole report.
        TypeError, ValueError: if there is nothing to check, if `skip` has an unknown name, or if an argument is a
            `jax.Ref`, whose state would differ between runs.
    """
    function = tensor_function("check_layer", layer, args, kwargs)
    if any(map(is_ref, function.skeleton.statics())):
        raise TypeError(
            f"check_layer: an argument holds a jax.Ref, whose state would differ between the many runs of "
            f"{name_of(layer)} that are compared. Check its gradient: gradcheck(lambda x: Layer.apply(ref, x), (x,))."
        )
    expected = None if reference is None else tensor_function("check_layer", reference, args, kwargs)
    skip = [skip] if isinstance(skip, str) else skip
    if unknown := [name for name in skip if name not in PROPERTIES]:
        raise ValueError(f"check_layer: skip={unknown}: expected names among {', '.join(PROPERTIES)}.")
    checks = {name: check for name, check in PROPERTIES.items() if name not in skip}
    subject = Subject(function, expected, Options(rtol=rtol, atol=atol, seed=seed, float64=float64))
    rows: list[Row] = []
    with progress() as show:
        for name, check in {"eager": _properties.check_eager, **checks}.items():
            rows.append(_row_of(name, check(subject)))
            show(str(rows[-1]))
            if not rows[0].passed:
                break
    report = LayerReport(name_of(layer), tuple(rows), reference is not None, list(map(type, args)) == [tuple])
    if raises and not report.passed:
        raise AssertionError(f"check_layer of {report}")
    if report.passed:
        _warn("check_layer", layer, subject, stacklevel=3)
    return report


PROPERTIES: dict[str, Callable[[Subject], Cases]] = {
    "jit": functools.partial(_properties.check_transform, jax.jit, " of jit"),
    "vmap": _properties.check_vmap,
    "remat": functools.partial(_properties.check_transform, jax.checkpoint, " of jax.checkpoint"),
    "shard_map": _properties.check_shard_map,
    "gradients": _properties.check_gradients,
    "second order": _properties.check_second_order,
    "forward mode": _properties.check_forward_mode,
    "forward over reverse": _properties.check_forward_over_reverse,
    "arguments": _properties.check_arguments,
    "cotangents": _properties.check_cotangents,
    "linear": _properties.check_linear,
    "repeatable": _properties.check_repeatable,
    "leaks": _properties.check_leaks,
}


# -- the report -----------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Row:
    name: str
    passed: bool  # also True if there is nothing to check
    message: str
    error: Exception | None = None  # the error that made the check fail
    n_cases: int = 0  # the number of results that were compared before the check ended

    @property
    def mark(self) -> str:
        return "✗" if not self.passed else "✓" if self.n_cases else "–"

    def __str__(self) -> str:
        return f"{self.mark} {self.name:<{max(map(len, PROPERTIES))}}  {self.message}"


@dataclasses.dataclass(frozen=True, repr=False)
class LayerReport:
    """Result of `check_layer`, printed with one line per property; notebooks show a table."""

    layer: str
    rows: tuple[Row, ...]
    has_reference: bool = False
    has_only_a_tuple: bool = False  # whether the one argument is a tuple, as that of `gradcheck`

    @property
    def passed(self) -> bool:
        return all(row.passed for row in self.rows)

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)

    def __getitem__(self, name: str) -> Row:
        return next(row for row in self.rows if row.name == name)

    def __repr__(self) -> str:
        return "\n".join([self.layer, *map(str, self.rows), *self.hints()])

    def _repr_html_(self) -> str:
        rows = [[row.mark, row.name, row.message] for row in self.rows]
        hints = "".join(f"<p>{html.escape(hint)}</p>" for hint in self.hints())
        return html_table([["", "property", ""], *rows], f"check_layer of {self.layer}") + hints

    def hints(self) -> list[str]:
        derivatives = [row for row in self.rows if row.name in ("gradients", "second order")]
        once = [row.name for row in derivatives if isinstance(row.error, OnceDifferentiableError)]
        differ = [row.name for row in derivatives if isinstance(row.error, MismatchError)]
        mismatched = [row for row in self.rows if isinstance(row.error, MismatchError)]
        is_in_tuple = self.has_only_a_tuple and not self.rows[0].passed
        wants_reference = differ and not self.has_reference
        communicates = any(isinstance(row.error, NameError) and "axis name" in row.message for row in self.rows)
        hints = {
            "check_layer takes the arguments singly, as in check_layer(Layer, x, w), not in a tuple.": is_in_tuple,
            "Does the layer communicate between devices? check_layer runs it on one. Then use assert_equivalent(\n"
            "jax.shard_map(Layer.apply, mesh=mesh, in_specs=..., out_specs=...), reference, args).": communicates,
            "Is backward meant to give another gradient (straight-through, reversed, clipped)? Then pass "
            "reference=FUNCTION: plain JAX with\nthe meant gradient, as in lambda x: x + jax.lax.stop_gradient("
            f"jnp.round(x) - x); or skip={differ + once}.": wants_reference,
            f"Is the layer meant to have no second derivative? Then pass skip={once}.": once and not wants_reference,
            "Does it round what it saves? Then pass tolerances that allow for it, as in rtol=0.03, atol=0.03, and "
            "perhaps\nskip=['second order']. Does it compute in a narrower dtype by NumPy? Then pass "
            "float64=False.": differ,
            "Does the layer take only values such as those given, as symmetric matrices, or those for which it "
            "converges?\nThen check a function that makes them, as in lambda a: "
            "Layer.apply((a + a.T) / 2).": any(" for other values (" in row.message for row in mismatched),
            "Is backward meant not to be linear in its cotangents (clipped, normalized)? Then pass "
            "skip=['linear'].": any(row.name == "linear" for row in mismatched),
        }
        return [hint for hint, applies in hints.items() if applies]


def _row_of(name: str, cases: Cases) -> Row:
    try:
        message, n_cases = run_check(cases)
        return Row(name, True, message, n_cases=n_cases)
    except MismatchError as error:
        return Row(name, False, first_line(error), error)
    except Exception as error:
        notes = [f" ({note})" for note in getattr(error, "__notes__", ()) if note.startswith("This happened")]
        # Name the public base class of a private class of this package.
        public = next(kind for kind in type(error).__mro__ if not kind.__module__.startswith("pylayer_jax."))
        return Row(name, False, f"{public.__name__}: {first_line(error)}{''.join(notes[:1])}", error)


# -- gradcheck, gradgradcheck and assert_equivalent -----------------------------------------------

_OF_GRADIENTS = "gradients", "repeatable", "cotangents", "arguments", "linear", "leaks"  # properties of each order
_ORDERS = ("values", "first order", "second order", "third order")


def gradcheck(
    fun: Callable[..., Any],
    args: Sequence[Any],
    reference: Callable[..., Any] | None = None,
    *,
    rtol: float | None = None,
    atol: float | None = None,
    step: float | None = None,
    limit: int = 200,
    seed: int = 0,
    float64: bool = True,
) -> bool:
    """Compare the gradients of a layer, or of a function that applies layers, with central differences or a reference.

        >>> gradcheck(Tanh, (x,))
        True
        >>> gradcheck(lambda x, w: Tanh.apply(x @ w), (x, w))
        True
        >>> gradcheck(Round, (x,), reference=lambda x: x + jax.lax.stop_gradient(jnp.round(x) - x))
        True

    Gradients in float64 are compared with central differences, and gradients in the dtypes of `args` with those in
    float64. They must be linear in the cotangents, and stay the same in a second run, after a run on other values, if
    only one argument is differentiated, if zero cotangents are missing, and under `jax.jit` where `fun` can be traced.

    Gradients are also compared at random values, if `fun` accepts them, and at `100 * args` and `0.01 * args`, if its
    outputs are finite there; there, `fun` may clip, and its gradients may overflow. Random values are positive if those
    in `args` are. If `fun` needs special values such as symmetric matrices, check a function that makes them:
    `lambda a: Layer.apply((a + a.T) / 2)`.

    Choose arguments away from kinks, where even a right gradient may differ from the central difference. Branches that
    no value takes give a UserWarning. Shapes, dtypes, integers and statics stay as given: check several.

    Args:
        fun: a layer class, or a function of `args` that returns any pytree with tensors.
        args: a tuple of any pytrees. JAX differentiates with respect to the floating-point and complex arrays in them.
        reference: a plain JAX function of the same `args`, whose outputs and gradients are then expected, also if they
            differ from the derivative of the outputs.
        rtol: relative tolerance. The default is the cube root of the machine epsilon for comparisons with central
            differences, and the square root for others.
        atol: absolute tolerance. The default is `sqrt(eps) * max(abs(gradient))`, where `eps` is the machine epsilon.
            The estimated rounding errors are added to both tolerances.
        step: the relative distance by which entries are perturbed: an entry x by `step * max(1, abs(x))`. The default
            is the cube root of the machine epsilon, or less for small entries.
        limit: the largest number of entries of an array that are perturbed one by one. In a larger array, this number
            of random entries and one random direction are perturbed.
        seed: seed of the weights with which the outputs are summed, and of the random entries and directions.
        float64: whether to compute numerical derivatives in float64 and complex128 if `fun` accepts these dtypes.
            Narrower dtypes, also those to which `fun` casts inside, have wider tolerances.

    Raises:
        AssertionError: if a gradient is wrong. The message names the argument and the index with the largest error,
            both values and the tolerance.
        TypeError, ValueError: if there is nothing to check.
    """
    _check("gradcheck", fun, reference, args, [1], Options(rtol, atol, step, limit, seed, float64))
    return True


def gradgradcheck(
    fun: Callable[..., Any],
    args: Sequence[Any],
    reference: Callable[..., Any] | None = None,
    *,
    rtol: float | None = None,
    atol: float | None = None,
    step: float | None = None,
    limit: int = 200,
    seed: int = 0,
    float64: bool = True,
) -> bool:
    """Run `gradcheck`, and then compare second derivatives (reverse over reverse) with its parameters and errors.

        >>> gradgradcheck(Tanh, (x,))
        True

    The arguments and the cotangents are perturbed, as the gradients depend on both.
    """
    _check("gradgradcheck", fun, reference, args, [1, 2], Options(rtol, atol, step, limit, seed, float64))
    return True


def assert_equivalent(
    layer: Callable[..., Any],
    reference: Callable[..., Any],
    args: Sequence[Any],
    *,
    orders: Sequence[int] = (0, 1, 2),
    rtol: float | None = None,
    atol: float | None = None,
    seed: int = 0,
) -> None:
    """Compare the outputs and the reverse-mode derivatives of a layer with those of a function in plain JAX.

        >>> assert_equivalent(Round, lambda x: x + jax.lax.stop_gradient(jnp.round(x) - x), (x,))

    The checks are those of `gradcheck`, also for random values. The layer may run on several devices; the reference
    runs on one, and each device's copy of a result is compared with its result. Pass arguments whose entries differ,
    because equal shards hide mistakes.

    Args:
        layer: a layer class, or a function of `args`, such as a `jax.shard_map` or a jitted function of sharded arrays.
        reference: a function of the same `args` that returns the same tensors, in any containers.
        args: a tuple of any pytrees.
        orders: the orders of the derivatives to compare: 0 for outputs, 1 for gradients, up to 3.
        rtol: relative tolerance. The default is the square root of the machine epsilon.
        atol: absolute tolerance, as in `gradcheck`.
        seed: seed of the random cotangents.

    Raises:
        AssertionError: if a result of the layer is wrong. The message is like that of `gradcheck`.
        TypeError, ValueError: if there is nothing to compare.
    """
    if not orders or any(order not in range(4) for order in orders):
        raise ValueError(f"assert_equivalent: expected orders from 0 to 3, got {tuple(orders)}.")
    _check("assert_equivalent", layer, reference, args, orders, Options(rtol=rtol, atol=atol, seed=seed))


def _check(checker: str, fun: Any, reference: Any, args: Any, orders: Sequence[int], options: Options) -> None:
    expected = None if reference is None else tensor_function(checker, reference, args)
    subject = Subject(tensor_function(checker, fun, args), expected, options)
    for order in range(max(orders) + 1):
        if order > 1:
            subject = subject.derivative
        checks = [PROPERTIES[name] for name in _OF_GRADIENTS] if order else [_properties.check_outputs]
        try:
            for check in checks if order in orders else ():
                run_check(check(subject))
        except MismatchError as error:
            raise AssertionError(f"{checker} of {name_of(fun)}, {_ORDERS[order]}: {error}") from None
    _warn(checker, fun, subject.root, stacklevel=4)


def _warn(checker: str, fun: Any, subject: Subject, stacklevel: int) -> None:
    if subject.not_taken:
        advice = "A wrong gradient there passes: pass arguments of which some entry takes each."
        warnings.warn(f"{checker} of {name_of(fun)}: {subject.not_taken}. {advice}", stacklevel=stacklevel)
