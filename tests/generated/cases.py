"""A generated case as data: layers, a program that applies them, and the derivatives and transforms around it.

    f(x) = sin(x), saved; backward gives 1.3 s0 d:  Layer(body=[Statement("u0", "sin", ("a",))], returned="u0",
        saved=[("u0", "save")], gradients=[[Term(0, "times", "scaled", (0, 0))]], ...)

Names: a, b, c are the tensors among the arguments of a layer, u0, u1, ... what `forward` computes, o0, ... and v0, ...
what `setup_context` has and computes, k0, ... Python numbers among the arguments; C0, C1 closed-over arrays, N0 a
closed-over NumPy array; x0, x1, ... the inputs of the program, y0, y1, ... its values.
"""

from __future__ import annotations

import dataclasses
import pprint
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

CONSTANTS = ("C0", "C1", "N0")

# The operations of statements. They are functions of JAX, because the result of a NumPy operation on N0 would be a
# constant.
OPERATIONS: dict[str, Callable[..., Any]] = {
    "sin": jnp.sin,
    "cos": jnp.cos,
    "tanh": jnp.tanh,
    "square": jnp.square,
    "scale": lambda x: jnp.multiply(0.7, x),
    "plus zero": lambda x: jnp.add(x, 0),
    "negate": jnp.negative,
    "times": jnp.multiply,
    "plus": jnp.add,
    "minus": jnp.subtract,
    "sin times": lambda x, y: jnp.sin(x) * y,
    "name": lambda x: checkpoint_name(x, "named"),  # for the policies of jax.checkpoint
    "output": lambda x: x,  # in setup_context
}
# Operations for which JAX returns the operand itself, always or under a trace.
NOTHING: dict[str, Callable[..., Any]] = {
    "astype": lambda x: x.astype(x.dtype),
    "broadcast": lambda x: jnp.broadcast_to(x, x.shape),
    "real": jnp.real,
    "asarray": jnp.asarray,
    "reshape": lambda x: x.reshape(x.shape),
}
COEFFICIENTS: dict[str, Callable[..., Any]] = {
    "one": lambda s, t: s,
    "scaled": lambda s, t: 1.3 * s,
    "cos": lambda s, t: jnp.cos(s),
    "times": lambda s, t: s * t,
    "plus": lambda s, t: s + t,
    "square": lambda s, t: 1.0 + s * s,
}
# What a gradient is made of, from a coefficient and a cotangent.
LINEAR: dict[str, Callable[..., Any]] = {
    "times": lambda c, d: c * d,
    "half": lambda c, d: 0.6 * d,
    "negative": lambda c, d: -c * d,
    "flip": lambda c, d: jnp.flip(c * d) if (c * d).ndim else c * d,
    "cumsum": lambda c, d: c * jnp.cumsum(d) if d.ndim else c * d,
}
# Nearly linear for large cotangents, so that rounding does not grow.
NOT_LINEAR: dict[str, Callable[..., Any]] = {
    "times tanh": lambda c, d: c * d * jnp.tanh(d),
    "tanh": lambda c, d: jnp.tanh(c * d),
    "of tanh": lambda c, d: c * jnp.tanh(d),
}
FORMS = LINEAR | NOT_LINEAR


@dataclasses.dataclass
class Static:
    """A value in a tree that is no tensor of the case; an array of integers is one, too."""

    value: Any


REF = "ref"  # the name of a `jax.Ref` among the arguments


@dataclasses.dataclass
class Statement:
    name: str
    operation: str
    operands: tuple[str, ...]

    @property
    def same_as(self) -> str | None:
        """The operand, where this is the same object under another name."""
        return self.operands[0] if self.operation in NOTHING or self.operation == "output" else None

    def value(self, scope: dict[str, Any]) -> Any:
        return (OPERATIONS | NOTHING)[self.operation](*(scope[name] for name in self.operands))


@dataclasses.dataclass
class Term:
    """A part of a gradient."""

    output: int
    form: str
    coefficient: str
    saved: tuple[int, int]  # of which the coefficient is made

    def value(self, saved: list[Any], cotangent: Any) -> Any:
        return FORMS[self.form](COEFFICIENTS[self.coefficient](*(saved[i] for i in self.saved)), cotangent)


@dataclasses.dataclass
class Layer:
    name: str
    dialect: str
    arguments: list[Any]  # trees of names and statics
    kinds: list[str]  # how each is passed: "positional", "default", "rest", "keyword", "more"
    shapes: dict[str, tuple[int, ...]]  # of the inputs
    body: list[Statement]
    returned: Any  # a tree of names and statics
    saved: list[tuple[str, str]]  # name, how
    gradients: list[list[Term] | None]  # per input
    later: list[Statement] = dataclasses.field(default_factory=list)  # in setup_context
    marked: list[str] = dataclasses.field(default_factory=list)
    dirty: list[str] = dataclasses.field(default_factory=list)
    by_name: bool = False  # positional arguments are passed by keyword, last first
    materialize: bool = True
    per_slot: bool = False  # one gradient per argument that holds a tensor, and not one per argument
    wide: bool = False  # gradients stay in the shape of the outputs
    left_out: bool = False  # backward omits trailing gradients that are not needed
    surplus: int = 0  # Nones behind the gradients of a Function
    asks: bool = False  # computes a gradient only where ctx.needs_input_grad
    forward_mode: bool = False
    has_names: bool = False  # of what is saved, for the policies of jax.checkpoint
    writes: str = ""  # the method that writes to the Ref, if there is one

    @property
    def inputs(self) -> list[str]:
        return [leaf for leaf in names_in(self.arguments) if leaf != REF]

    @property
    def outputs(self) -> list[str]:
        return names_in(self.returned)

    @property
    def statics(self) -> dict[str, Any]:
        return {f"k{i}": tree.value for i, tree in enumerate(self.arguments) if isinstance(tree, Static)}

    def origin(self, name: str) -> str:
        """The name under which the object was made."""
        same_as = {s.name: s.same_as for s in [*self.body, *self.later] if s.same_as}
        while name in same_as:
            name = same_as[name]
        return name

    def fitted(self, gradient: Any, name: str, wide: bool) -> Any:
        """A gradient in the shape of the input, or in that of the outputs where this is larger."""
        shape = self.shapes[name]
        gradient = jnp.broadcast_to(gradient, jnp.broadcast_shapes(gradient.shape, shape))
        return gradient if wide or gradient.shape == shape else gradient.sum().reshape(shape)


@dataclasses.dataclass
class Call:
    """`results = layer(*arguments)` of a program; an operation of plain JAX has its name in place of a layer."""

    results: list[str]
    layer: str | None
    arguments: list[str]
    operation: str = ""
    around: tuple[str, Any] = ("", None)  # a transform around the layer


@dataclasses.dataclass
class Block:
    """A block of hooks."""

    pair: str
    form: str  # "with" or "decorator"
    differentiable: bool


@dataclasses.dataclass
class Case:
    seed: int
    dtype: str
    shape: tuple[int, ...]
    values: dict[str, Any]  # of constants and inputs
    layers: list[Layer]
    calls: list[Call]
    results: list[str]
    blocks: dict[str, Block]  # "inside": around what the program does; "outside": around everything
    steps: list[tuple[str, Any]]  # transforms, and derivatives with the positions that they differentiate

    @property
    def inputs(self) -> list[str]:
        return [name for name in self.values if name not in CONSTANTS]

    def __str__(self) -> str:
        return pprint.pformat(self, width=120, compact=True)


def names_in(tree: Any) -> list[str]:
    return [leaf for leaf in jax.tree.leaves(tree) if isinstance(leaf, str)]


def filled(tree: Any, scope: dict[str, Any]) -> Any:
    return jax.tree.map(lambda leaf: leaf.value if isinstance(leaf, Static) else scope[leaf], tree)


def pairs(tree: Any, value: Any) -> Iterator[tuple[str, Any]]:
    """Each name in a tree with what the value has in its place; None for all of a branch that is None."""
    if isinstance(tree, list | tuple):
        for i, part in enumerate(tree):
            yield from pairs(part, None if value is None else value[i])
    elif isinstance(tree, dict):
        for key in sorted(tree):
            yield from pairs(tree[key], None if value is None else value[key])
    elif isinstance(tree, str):
        yield tree, value


def is_slot(tree: Any) -> bool:
    """Whether an argument holds a tensor."""
    leaves = jax.tree.leaves(tree)
    return any(leaf != REF if isinstance(leaf, str) else hasattr(leaf.value, "dtype") for leaf in leaves)


def without_what_is_not_used(layer: Layer) -> None:
    used = {*layer.outputs, *(name for name, _ in layer.saved), *layer.marked}
    for statements in (layer.later, layer.body):
        for statement in reversed(list(statements)):
            if statement.name in used:
                used |= set(statement.operands)
            else:
                statements.remove(statement)
