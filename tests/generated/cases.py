"""A generated case as data: layers, a program that applies them, and the derivatives and transforms around it.

This layer saves and returns u0 = sin(a). Its gradient of `a` is 1.3 * u0 * d, where d is the cotangent of u0:

    Layer(arguments=["a"], body=[Statement("u0", "sin", ("a",))], returned="u0", saved=[("u0", "save")],
          gradients=[[Term(output=0, form="times", coefficient="scaled", saved=(0, 0))]], ...)

A value has the same name wherever a case mentions it:

    a, b, c         tensors among the arguments of a layer
    k0, k1, ...     Python numbers among the arguments of a layer
    u0, u1, ...     what `forward` computes
    o0, o1, ...     the outputs, as `setup_context` gets them
    v0, v1, ...     what `setup_context` computes
    C0, C1, N0      closed-over arrays, of which N0 is a NumPy array
    x0, x1, ...     the inputs of the program
    y0, y1, ...     what the program computes
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
NUMPY_CONSTANT = "N0"

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
IDENTITIES: dict[str, Callable[..., Any]] = {
    "astype": lambda x: x.astype(x.dtype),
    "broadcast": lambda x: jnp.broadcast_to(x, x.shape),
    "real": jnp.real,
    "asarray": jnp.asarray,
    "reshape": lambda x: x.reshape(x.shape),
}
# Coefficients of a gradient, as functions of two saved values.
COEFFICIENTS: dict[str, Callable[..., Any]] = {
    "one": lambda s, t: s,
    "scaled": lambda s, t: 1.3 * s,
    "cos": lambda s, t: jnp.cos(s),
    "times": lambda s, t: s * t,
    "plus": lambda s, t: s + t,
    "square": lambda s, t: 1.0 + s * s,
}
# Forms of a gradient, as functions of a coefficient c and a cotangent d. These are linear in d.
LINEAR: dict[str, Callable[..., Any]] = {
    "times": lambda c, d: c * d,
    "half": lambda c, d: 0.6 * d,
    "negative": lambda c, d: -c * d,
    "flip": lambda c, d: jnp.flip(c * d) if (c * d).ndim else c * d,
    "cumsum": lambda c, d: c * jnp.cumsum(d) if d.ndim else c * d,
}
# These are not linear in d. They grow at most linearly in d, so that rounding errors do not grow with the order.
NOT_LINEAR: dict[str, Callable[..., Any]] = {
    "times tanh": lambda c, d: c * d * jnp.tanh(d),
    "tanh": lambda c, d: jnp.tanh(c * d),
    "of tanh": lambda c, d: c * jnp.tanh(d),
}
FORMS = LINEAR | NOT_LINEAR


@dataclasses.dataclass
class Static:
    """A leaf of a tree that is not differentiated: a Python value or an array of integers."""

    value: Any


@dataclasses.dataclass
class Statement:
    """`name = operation(*operands)`. In `setup_context`, the operation "output" means that `name` is an output."""

    name: str
    operation: str
    operands: tuple[str, ...]

    @property
    def same_as(self) -> str | None:
        """The operand, if JAX returns the operand itself for this operation; else None."""
        return self.operands[0] if self.operation in IDENTITIES or self.operation == "output" else None

    def value(self, scope: dict[str, Any]) -> Any:
        return (OPERATIONS | IDENTITIES)[self.operation](*(scope[name] for name in self.operands))


@dataclasses.dataclass
class Term:
    """A summand of a gradient: a form of a coefficient and of the cotangent of an output."""

    output: int  # position among the outputs
    form: str
    coefficient: str
    saved: tuple[int, int]  # positions of the saved values from which the coefficient is computed

    def value(self, saved: list[Any], cotangent: Any) -> Any:
        return FORMS[self.form](COEFFICIENTS[self.coefficient](*(saved[i] for i in self.saved)), cotangent)


@dataclasses.dataclass
class Layer:
    """A layer. A tree of names and statics is a name, a `Static`, or a list, tuple or dict of such trees."""

    name: str
    dialect: str  # "PyLayer", "Function", or "setup_context", a Function with this method
    arguments: list[Any]  # trees of names and statics
    shapes: dict[str, tuple[int, ...]]  # by name of the input
    body: list[Statement]  # of `forward`
    returned: Any  # a tree of names and statics
    saved: list[tuple[str, str]]  # name, and one of WAYS_TO_SAVE
    gradients: list[list[Term] | None]  # of each input, a sum of terms; None is the gradient None
    setup_statements: list[Statement] = dataclasses.field(default_factory=list)  # of `setup_context`
    non_differentiable: list[str] = dataclasses.field(default_factory=list)  # given to ctx.mark_non_differentiable
    dirty: list[str] = dataclasses.field(default_factory=list)  # given to ctx.mark_dirty
    materialize_grads: bool = True
    keeps_broadcast_shape: bool = False  # a gradient may be larger than its input, for the package to sum
    checks_needs_input_grad: bool = False  # backward computes only gradients that ctx.needs_input_grad asks for
    forward_mode: bool = False
    saved_names: bool = False  # whether what is saved has names, for the policies of jax.checkpoint

    @property
    def inputs(self) -> list[str]:
        return names_in(self.arguments)

    @property
    def outputs(self) -> list[str]:
        return names_in(self.returned)

    @property
    def statics(self) -> dict[str, Any]:
        return {f"k{i}": tree.value for i, tree in enumerate(self.arguments) if isinstance(tree, Static)}

    def origin(self, name: str) -> str:
        """Return the name under which an object was first defined: "a" for u0 = a.astype(a.dtype)."""
        same_as = {s.name: s.same_as for s in [*self.body, *self.setup_statements] if s.same_as}
        while name in same_as:
            name = same_as[name]
        return name

    def fitted(self, gradient: Any, name: str, keep_broadcast: bool) -> Any:
        """Return a gradient in the shape of an input. If `keep_broadcast`, it may have a larger shape."""
        shape = self.shapes[name]
        gradient = jnp.broadcast_to(gradient, jnp.broadcast_shapes(gradient.shape, shape))
        return gradient if keep_broadcast or gradient.shape == shape else gradient.sum().reshape(shape)


@dataclasses.dataclass
class Call:
    """`results = layer(*arguments)` in a program, or `results = operation(*arguments)` if `layer` is None."""

    results: list[str]
    layer: str | None
    arguments: list[str]
    operation: str = ""
    around: tuple[str, Any] = ("", None)  # a transform around the layer, and its parameter


@dataclasses.dataclass
class Block:
    """A block of saved-tensor hooks."""

    hooks: str  # a key of HOOKS in `reference.py`
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
    # From the inside to the outside: derivatives with the positions of the inputs with respect to which they
    # differentiate, and transforms with their parameter.
    steps: list[tuple[str, Any]]

    @property
    def inputs(self) -> list[str]:
        return [name for name in self.values if name not in CONSTANTS]

    def __str__(self) -> str:
        return pprint.pformat(self, width=120, compact=True)


def names_in(tree: Any) -> list[str]:
    return [leaf for leaf in jax.tree.leaves(tree) if isinstance(leaf, str)]


def filled(tree: Any, scope: dict[str, Any]) -> Any:
    """Return a tree with the value of each name and each static."""
    return jax.tree.map(lambda leaf: leaf.value if isinstance(leaf, Static) else scope[leaf], tree)


def names_and_values(tree: Any, values: Any) -> Iterator[tuple[str, Any]]:
    """Yield (name, value) for each name in `tree`, from values in the same structure.

    If a branch of the values is None, each name in it gets None.
    """
    if isinstance(tree, list | tuple):
        for i, part in enumerate(tree):
            yield from names_and_values(part, None if values is None else values[i])
    elif isinstance(tree, dict):
        for key in sorted(tree):
            yield from names_and_values(tree[key], None if values is None else values[key])
    elif isinstance(tree, str):
        yield tree, values


def without_unused_statements(layer: Layer) -> Layer:
    used = {*layer.outputs, *(name for name, _ in layer.saved), *layer.non_differentiable}

    def kept(statements: list[Statement]) -> list[Statement]:
        found = []
        for statement in reversed(statements):
            if statement.name in used:
                used.update(statement.operands)
                found.append(statement)
        return found[::-1]

    setup_statements = kept(layer.setup_statements)
    return dataclasses.replace(layer, setup_statements=setup_statements, body=kept(layer.body))
