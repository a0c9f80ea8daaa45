"""Turns a function and its arguments into a function of the tensors in these arguments.

f = tensor_function("gradcheck", Linear, ({"w": w, "b": b}, x, "relu"))
f.names                       # ["args[0]['b']", "args[0]['w']", "args[1]"]: the differentiated tensors
f.run()                       # the tensors that Linear.apply returns, in a list
f.gradients({0: dy})          # {"the gradient of args[0]['b']": ..., ...}
f.grad_function({0: dy})      # the function from the values and dy to these gradients
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pylayer_jax._jax.tracers import is_tracer
from pylayer_jax._jax.types import has_tangent, is_key
from pylayer_jax._trees import is_tensor, split

from ._compare import type_of

__tracebackhide__ = True  # pytest hides the frames of this module

# A dict from the position of an output to its cotangent. An output that is not in the dict has no cotangent.
Cotangents = dict[int, Any]


class TensorFunction:
    """A function with its arguments, seen as a function of the tensors in these arguments.

    The `values` are the tensors with respect to which JAX differentiates.
    """

    def __init__(self, function: Callable[..., Any], arguments: Mapping[str, Any], names: Sequence[str] = ()) -> None:
        """Take a function of positional arguments, and a dict from the name of each argument to the argument."""
        self.function = function
        tensors, self.skeleton = split(tuple(arguments.values()))
        self.tensors: list[Any] = [jnp.asarray(x) for x in tensors]
        self.differentiated = [i for i, x in enumerate(self.tensors) if has_tangent(x)]
        places = [path[1:].split("]", 1) for path in self.skeleton.tensor_paths()]  # "[0]['w'][1]" is in args[0]
        self.paths = names or [list(arguments)[int(position)] + path for position, path in places]

    @property
    def names(self) -> list[str]:
        """The names of the differentiated tensors."""
        return [self.paths[i] for i in self.differentiated]

    @property
    def values(self) -> list[Any]:
        """The differentiated tensors."""
        return [self.tensors[i] for i in self.differentiated]

    def with_values(self, values: Sequence[Any]) -> TensorFunction:
        """Return the same function with other values of the differentiated tensors."""
        tensors = dict(enumerate(self.tensors)) | dict(zip(self.differentiated, values, strict=True))
        return self.with_tensors(list(tensors.values()))

    def with_tensors(self, tensors: Sequence[Any]) -> TensorFunction:
        other = copy.copy(self)
        other.tensors = list(tensors)
        return other

    def only(self, j: int) -> TensorFunction:
        """Return the same function, but JAX differentiates with respect to value number `j` only."""
        other = copy.copy(self)
        other.differentiated = [self.differentiated[j]]
        return other

    def run(self) -> list[Any]:
        """Run the function, and return its tensor outputs."""
        return self.run_with_statics()[0]

    def run_with_statics(self) -> tuple[list[Any], list[Any]]:
        """Run the function, and return its tensor outputs and its statics (outputs that are not tensors)."""
        tensors, skeleton = split(self.function(*self.skeleton.fill(self.tensors)))
        return [jnp.asarray(y) for y in tensors], skeleton.statics()

    def outputs(self, values: Sequence[Any]) -> list[Any]:
        """Return the tensor outputs of the function for other values of the differentiated tensors."""
        return self.with_values(values).run()

    def run_differentiated(self) -> tuple[list[Any], list[int]]:
        """Run the function under `jax.vjp`. Return the outputs, and the positions of the outputs with a gradient.

        Integer outputs, and outputs that are marked as not differentiable, have no gradient.
        """

        def run(values: list[Any]) -> tuple[list[Any], tuple[list[Any], list[int]]]:
            outputs = self.outputs(values)
            return outputs, (outputs, [i for i, y in enumerate(outputs) if has_tangent(y) and is_tracer(y)])

        return jax.vjp(run, self.values, has_aux=True)[2]

    def run_with_other_inputs(self) -> Iterator[None]:
        """Run the function on other numbers, flags and shapes, and yield after each run; ignore errors."""
        for kind, change in _CHANGES.items():

            def changed(x: Any, kind: type = kind, change: Callable[[Any], Any] = change) -> Any:
                applies = is_tensor(x) and x.ndim > 0 if kind is jax.Array else type(x) is kind
                return change(x) if applies else x

            if any(changed(x) is not x for x in [*self.tensors, *self.skeleton.statics()]):
                with contextlib.suppress(Exception):
                    self.function(*self.skeleton.fill(list(map(changed, self.tensors)), changed))
                yield

    def selected(self, positions: Collection[int]) -> Callable[..., Cotangents]:
        """Return a function from the values, as positional arguments, to a dict of the outputs at `positions`."""

        def run(*values: Any) -> Cotangents:
            returned = self.outputs(values)
            return {k: returned[k] for k in positions}

        return run

    def vjp(self, outputs: Collection[int]) -> Callable[[Cotangents], Any]:
        """Return the vjp function, from a dict of cotangents for the positions `outputs` to one gradient per value."""
        return jax.vjp(self.selected(outputs), *self.values)[1]

    def grads(self, cotangents: Cotangents) -> list[Any]:
        return list(self.vjp(cotangents)(cotangents))

    def gradients(self, cotangents: Cotangents) -> dict[str, Any]:
        """Return a dict of the gradients, whose keys are the names in messages."""
        return self.named(self.grads(cotangents))

    def named(self, gradients: Sequence[Any]) -> dict[str, Any]:
        """Return a dict of gradients, whose keys are the names in messages: "the gradient of args[0]"."""
        return {f"the gradient of {name}": g for name, g in zip(self.names, gradients, strict=True)}

    def grad_function(self, cotangents: Cotangents) -> TensorFunction:
        """Return the function that maps the differentiated values and the cotangents to the gradients."""

        def gradients(values: list[Any], cotangents: Cotangents) -> list[Any]:
            return self.with_values(values).grads(cotangents)

        where = " of the gradient" if any(name.startswith("cotangent[") for name in self.names) else ""
        names = [*self.names, *(f"cotangent[{k}]{where}" for k in cotangents)]
        return TensorFunction(gradients, {"values": self.values, "cotangents": cotangents}, names)


_CHANGES: dict[type, Callable[[Any], Any]] = {
    float: lambda x: 0.75 * x,
    int: lambda x: x + 1,
    bool: lambda x: not x,
    jax.Array: lambda x: jnp.concatenate([x, x]),
}


def tensor_function(
    checker: str, function: Any, args: Any, kwargs: Mapping[str, Any] | None = None, on_one_device: bool = False
) -> TensorFunction:
    """Return the function that `checker` checks; raise an error if the arguments cannot be checked."""
    call = getattr(function, "apply", None) if isinstance(function, type) else function
    if not callable(call):
        raise TypeError(f"{checker}: expected a layer or a function, got {function!r}.")
    if not isinstance(args, (tuple, list)):
        raise TypeError(
            f"{checker}: expected the arguments as a tuple, got {type(args).__name__}. Pass (x,) for one x."
        )
    keywords = dict(kwargs or {})

    def run(*values: Any) -> Any:
        return call(*values[: len(args)], **dict(zip(keywords, values[len(args) :], strict=True)))

    found = TensorFunction(run, {f"args[{i}]": value for i, value in enumerate(args)} | keywords)
    if not found.differentiated:
        raise ValueError(
            f"{checker}: none of the arguments holds an array of floating-point or complex numbers, so that there is "
            "no gradient to check. Python numbers are statics: pass jnp.float32(1.5) for 1.5."
        )
    for path, x in zip(found.paths, found.tensors, strict=True):
        if not is_tracer(x) and not x.is_fully_addressable:
            raise ValueError(
                f"{checker}: {path} lies on devices of other processes too ({type_of(x)} with {x.sharding}); but "
                f"{checker} compares every entry in one process, and expects arrays of this process. Pass a small "
                "array on jax.local_devices(), or np.asarray(x) if x is fully replicated."
            )
    return found.with_tensors(list(map(gathered, found.tensors))) if on_one_device else found


def name_of(function: Any) -> str:
    owner = getattr(function, "__self__", None)
    named = owner if isinstance(owner, type) else function
    return getattr(named, "__qualname__", type(named).__name__)


# -- arrays of other numbers ----------------------------------------------------------------------


def placed(like: Any, numbers: Any) -> Any:
    """Return an array of `numbers` with the dtype of `like`; if `like` is on several devices, with its sharding."""
    x = jnp.asarray(np.asarray(numbers), like.dtype)
    return jax.device_put(x, like.sharding) if len(like.sharding.device_set) > 1 else x


def gathered(x: Any) -> Any:
    """Return the same array on one device."""
    if is_tracer(x) or len(x.sharding.device_set) == 1:
        return x
    if is_key(x):
        return jax.random.wrap_key_data(gathered(jax.random.key_data(x)), impl=jax.random.key_impl(x))
    return jnp.asarray(np.asarray(x))


def in_double_precision(x: Any) -> Any:
    return x.astype(jnp.complex128 if jnp.iscomplexobj(x) else jnp.float64)


def random_like(like: Any, rng: np.random.Generator) -> Any:
    """Return an array like `like`, with random entries of either sign and of absolute value 0.5 to 1.5."""
    size = rng.uniform(0.5, 1.5, like.shape) * rng.choice([-1.0, 1.0], like.shape)
    if jnp.iscomplexobj(like):
        size = size * np.exp(1j * rng.uniform(0, 2 * np.pi, like.shape))
    return placed(like, size)


def scaled(factor: float, x: Any) -> Any:
    return x * jnp.asarray(factor, x.dtype)
