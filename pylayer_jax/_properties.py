"""What a layer has to be: each property, and how it is tested."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ._comparison import Comparison, type_of
from ._numerical import Settings, compare_numerically
from ._ways import Flat, MismatchError, first_line, jitted_without_leaks


@dataclasses.dataclass(frozen=True)
class Row:
    """One property of a layer: its name, whether the layer has it, and what was compared or why not."""

    name: str
    passed: bool
    message: str

    def __str__(self) -> str:
        return f"{'✓' if self.passed else '✗'} {self.name:<{_WIDTH}}  {self.message}"


@dataclasses.dataclass(frozen=True)
class LayerReport:
    """What `check_layer` found; prints as one line per property."""

    layer: str
    rows: tuple[Row, ...]

    @property
    def passed(self) -> bool:
        return all(row.passed for row in self.rows)

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)

    def __getitem__(self, name: str) -> Row:
        return next(row for row in self.rows if row.name == name)

    def __str__(self) -> str:
        return "\n".join([self.layer, *map(str, self.rows)])


def row_of(name: str, of: Callable[[], str]) -> Row:
    try:
        return Row(name, True, of())
    except MismatchError as error:
        return Row(name, False, first_line(error))
    except Exception as error:
        where = "".join(f" ({note})" for note in getattr(error, "__notes__", ())[:1])
        return Row(name, False, f"{type(error).__name__}: {first_line(error)}{where}")


@dataclasses.dataclass
class Subject:
    """A layer at its arguments, with what eager mode makes of it."""

    flat: Flat
    plain: Flat | None
    rtol: float | None
    atol: float | None
    seed: int
    outputs: list[Any] = dataclasses.field(default_factory=list[Any])
    weights: dict[int, Any] = dataclasses.field(default_factory=dict[int, Any])
    gradients: list[Any] = dataclasses.field(default_factory=list[Any])

    def run(self) -> str:
        flat = self.flat
        self.outputs = flat.outputs(flat.values)
        self.weights = flat.weights(self.outputs, np.random.default_rng(self.seed))
        if not self.weights:
            raise MismatchError("none of the outputs is of floating-point or complex numbers")
        self.gradients = flat.gradient(self.weights)
        returned = ", ".join(map(type_of, self.outputs))
        return f"returns {returned}; gradients of {', '.join(flat.names)}"

    @property
    def same(self) -> Comparison:
        return Comparison(self.rtol, self.atol)

    @property
    def output_names(self) -> list[str]:
        return [f"output {i}" for i in range(len(self.outputs))]

    @property
    def gradient_names(self) -> list[str]:
        return [f"the gradient of {name}" for name in self.flat.names]

    def both(self, outputs: Callable[[list[Any]], list[Any]], way: str) -> None:
        """`outputs`, and their gradients, against those of eager mode."""
        self.same.of_all(outputs(self.flat.values), self.outputs, self.output_names, way)
        gradients = self.pulled(outputs, self.flat.values, self.weights)
        self.same.of_all(gradients, self.gradients, self.gradient_names, way)

    def pulled(self, outputs: Callable[[list[Any]], list[Any]], values: list[Any], weights: dict[int, Any]) -> Any:
        def weighted(values: list[Any]) -> list[Any]:
            returned = outputs(values)
            return [returned[k] for k in weights]

        _, pull = jax.vjp(weighted, values)
        return pull(list(weights.values()))[0]


def _jit(subject: Subject) -> str:
    subject.both(jax.jit(subject.flat.outputs), "of jit")
    gradients = jax.jit(lambda values, weights: subject.flat.at(values).gradient(weights))
    inside = gradients(subject.flat.values, subject.weights)
    subject.same.of_all(inside, subject.gradients, subject.gradient_names, "under jit")
    return "as in eager mode: outputs, gradients, gradients of the jitted layer"


def _remat(subject: Subject) -> str:
    subject.both(jax.checkpoint(subject.flat.outputs), "of jax.checkpoint")
    return "as in eager mode: outputs, gradients"


def _vmap(subject: Subject) -> str:
    return _over_examples(subject, lambda f, batch: jax.vmap(f)(batch), "of vmap")


def _scan(subject: Subject) -> str:
    def scan(f: Callable[[Any], Any], batch: Any) -> Any:
        return jax.lax.scan(lambda _, x: (None, f(x)), None, batch)[1]

    return _over_examples(subject, scan, "of scan")


def _over_examples(subject: Subject, over: Callable[..., Any], way: str) -> str:
    # Three examples, of all values or of the first alone: in the latter case the others are shared.
    flat, stack, count = subject.flat, jnp.stack, 3
    weights = {k: stack([w] * count) for k, w in subject.weights.items()}
    for mapped in (range(len(flat.values)), range(1)):
        examples = [
            [x * jnp.asarray(1 - 0.1 * i, x.dtype) if j in mapped else x for j, x in enumerate(flat.values)]
            for i in range(count)
        ]
        if len(mapped) < len(flat.values):
            way = f"{way}, {flat.names[0]} alone mapped"
        outputs = [stack(ys) for ys in zip(*map(flat.outputs, examples), strict=True)]
        each = [flat.at(example).gradient(subject.weights) for example in examples]
        gradients = [stack(gs) if j in mapped else sum(gs[1:], gs[0]) for j, gs in enumerate(zip(*each, strict=True))]

        def run(values: list[Any], mapped: Sequence[int] = mapped) -> list[Any]:
            def one(batch: list[Any]) -> list[Any]:
                return flat.outputs([*batch, *values[len(mapped) :]])

            return over(one, values[: len(mapped)])

        values = [stack(xs) if j in mapped else xs[0] for j, xs in enumerate(zip(*examples, strict=True))]
        subject.same.of_all(run(values), outputs, subject.output_names, way)
        subject.same.of_all(subject.pulled(run, values, weights), gradients, subject.gradient_names, way)
        if len(flat.values) == 1:
            break
    return f"as in eager mode: outputs and gradients of {count} examples"


def _arguments(subject: Subject) -> str:
    flat = subject.flat
    groups = [[j for j, o in enumerate(flat.owners) if o == owner] for owner in dict.fromkeys(flat.owners)]
    for group in [*groups, *([j] for j in range(len(flat.names)))]:
        names = [subject.gradient_names[j] for j in group]
        alone = flat.gradient(subject.weights, group)
        subject.same.of_all(alone, [subject.gradients[j] for j in group], names, "when it alone is differentiated")
    return "each has the same gradient alone" if len(flat.names) > 1 else "there is one"


def _cotangents(subject: Subject) -> str:
    for k, weight in subject.weights.items():
        zeros = {i: jnp.zeros_like(w) for i, w in subject.weights.items()}
        missing, zero = subject.flat.gradient({k: weight}), subject.flat.gradient({**zeros, k: weight})
        comparison = dataclasses.replace(subject.same, right="backward of zeros for the others")
        comparison.of_all(missing, zero, subject.gradient_names, f"with a cotangent for output {k} alone")
    return "missing ones count as zeros" if len(subject.weights) > 1 else "there is one, which cannot be missing"


def _gradients(subject: Subject) -> str:
    return _derivatives(subject, 1)


def _second_order(subject: Subject) -> str:
    return _derivatives(subject, 2)


def _derivatives(subject: Subject, order: int) -> str:
    if subject.plain is None:
        settings = Settings(subject.rtol, subject.atol, None, 200, subject.seed, True)
        return compare_numerically(subject.flat, order, settings, every_way=False)
    comparison = Comparison(subject.rtol, subject.atol, "the reference")
    comparison.of_order(order, subject.flat, subject.plain, np.random.default_rng(subject.seed))
    return "as those of the reference"


def _repeatable(subject: Subject) -> str:
    flat, weights, names = subject.flat, subject.weights, subject.gradient_names
    comparison = dataclasses.replace(subject.same, right="the first run")
    pull = flat.vjp(weights)
    first = pull()
    comparison.of_all(first, subject.gradients, names, "by another run")
    comparison.of_all(pull(), first, names, "when the vjp function is called a second time")
    pull = flat.vjp(weights)
    flat.at(flat.elsewhere()).gradient(weights)
    comparison.of_all(pull(), first, names, "when the layer ran on other values before backward")
    return "twice, by one vjp function, with another run in between"


def _leaks(subject: Subject) -> str:
    # Traced anew, after other runs of the layer, it has to compute the same.
    gradients = jitted_without_leaks(subject.flat, subject.weights)
    subject.same.of_all(gradients, subject.gradients, subject.gradient_names, "under jit, traced again")
    return "none under jit"


def _saved(subject: Subject) -> str:
    pull = subject.flat.pullback(subject.weights)
    kept = list({id(x): x for x in jax.tree_util.tree_leaves(pull) if isinstance(x, jax.Array) and x.size}.values())
    size = sum(x.nbytes for x in kept)
    arrays = "1 array" if len(kept) == 1 else f"{len(kept)} arrays"
    return f"{arrays}, {size:,} bytes" + (f": {', '.join(map(type_of, kept))}" if kept else "")


PROPERTIES: dict[str, Callable[[Subject], str]] = {
    "jit": _jit,
    "vmap": _vmap,
    "scan": _scan,
    "remat": _remat,
    "gradients": _gradients,
    "second order": _second_order,
    "arguments": _arguments,
    "cotangents": _cotangents,
    "repeatable": _repeatable,
    "leaks": _leaks,
    "saved": _saved,
}
_WIDTH = max(map(len, PROPERTIES))
