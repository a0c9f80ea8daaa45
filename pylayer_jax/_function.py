"""`Function`: a `PyLayer` with the conventions of `torch.autograd.Function`."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp

from ._arguments import signature_of
from ._context import ContextState, PyLayerContext, own_copy
from ._jax.types import as_arrays, is_array, is_tensor
from ._layer import PyLayer
from ._messages import describe
from ._trees import split


class FunctionCtx(PyLayerContext):
    """The context of a `Function`: a `PyLayerContext` with the additional methods of torch's context."""

    def save_for_backward(self, *tensors: Any) -> None:
        """Save tensors (or None) for `backward`, which reads them as `ctx.saved_tensors`. A later call replaces them.

        Raises:
            RuntimeError: when called outside `forward` and `setup_context`.
            TypeError: for a value that is neither a tensor nor None.
        """
        self._checked_state("save_for_backward", tensors).saved = None
        super().save_for_backward(*tensors)

    def save_for_forward(self, *tensors: Any) -> None:
        """Save tensors (or None) for `jvp`, which reads them as `ctx.saved_tensors`. A later call replaces them.

        Without a call, `jvp` gets the tensors of `save_for_backward`.

        Raises:
            RuntimeError: when called outside `forward` and `setup_context`.
            TypeError: for a value that is neither a tensor nor None.
        """
        state = self._checked_state("save_for_forward", tensors)
        state.saved_for_jvp = tuple(own_copy(x, state, "ctx.save_for_forward(...)") for x in tensors)

    def mark_dirty(self, *tensors: Any) -> None:
        """Require that `forward` returns these tensors: JAX arrays never change in place, so each is a new array.

        Raises:
            RuntimeError: when called outside `forward` and `setup_context`.
            ValueError: when `forward` returns, for a value that is not an output of `forward`.
        """
        advice = (
            "JAX arrays never change in place; the changed tensor is a new array, which forward has to return: "
            "x = x.at[...].set(...); ctx.mark_dirty(x); return x."
        )
        state = self._state_in_forward("mark_dirty")
        state.must_return.extend((x, "mark_dirty", advice) for x in tensors)

    def _checked_state(self, call: str, values: tuple[Any, ...]) -> ContextState:
        state = self._state_in_forward(call)
        for i, value in enumerate(values):
            if value is not None and not is_tensor(value):
                raise TypeError(
                    f"ctx.{call} in {state.layer_name}: expected tensors or None, but argument {i} is "
                    f"{describe(value)}. Keep it as an attribute: ctx.name = value."
                )
        return state


class Function(PyLayer):
    """A custom gradient in the style of `torch.autograd.Function`.

        >>> class Multiply(Function):
        ...     @staticmethod
        ...     def forward(ctx, x, factor):
        ...         ctx.factor = factor
        ...         return x * factor
        ...
        ...     @staticmethod
        ...     def backward(ctx, grad_output):
        ...         return grad_output * ctx.factor, None
        >>> print(jax.grad(Multiply.apply)(1.0, 3))
        3.0

    A class defines either `forward(ctx, ...)`, or both `forward(...)` and `setup_context(ctx, inputs, output)`. A
    `Function` follows torch where a `PyLayer` follows Paddle:

    - `backward` receives one cotangent per output (None for an output that is not a tensor), and returns one gradient
      per argument of the call (with `setup_context`, also per parameter left at its default); further Nones may follow.
    - `ctx.save_for_backward` and `ctx.save_for_forward` take tensors and None.
    - Complex gradients follow torch's convention.

    Unlike in torch, `ctx.mark_dirty` takes only outputs of `forward`, a tensor in a list or dict argument gets a
    gradient too, `jax.vmap` works without `generate_vmap_rule`, and a second derivative is complete or raises an error.
    """

    complex_convention = "paddle"  # torch has the same convention
    _context_class = FunctionCtx
    _torch_convention = True

    if TYPE_CHECKING:  # type checkers then accept a `forward` with or without a context

        @staticmethod
        def forward(*args: Any, **kwargs: Any) -> Any: ...

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls._forward_and_setup = None
        if cls.setup_context is not Function.setup_context and cls.forward is not PyLayer.forward:
            signature = signature_of(cls.forward)
            if "ctx" in signature.parameters:
                raise TypeError(
                    f"{cls.__qualname__} defines setup_context, so that its forward takes no ctx: remove that "
                    "parameter and keep things on ctx in setup_context; or remove setup_context."
                )
            cls._forward_and_setup = staticmethod(_with_setup_context(cls, signature))

    @staticmethod  # see NOTE [types of apply] in `_layer.py`
    def setup_context(ctx: Any, inputs: Any, output: Any, *args: Any, **kwargs: Any) -> Any:
        """Keep on `ctx` the values that `backward` needs, in a class whose `forward` takes no context.

        `inputs` is a tuple of the arguments of `forward`, with defaults, and `output` is its result. Unlike in torch,
        an output that is also an input may be saved: as the input.
        """
        raise NotImplementedError("setup_context is called only where a class overrides it.")


def _with_setup_context(layer: type[Function], signature: inspect.Signature) -> Callable[..., Any]:
    @functools.wraps(layer.forward)
    def forward(ctx: FunctionCtx, *args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        output = layer.forward(*args, **kwargs)
        tensors, skeleton = split(output)
        if not layer.host and not all(map(is_array, tensors)):  # a NumPy output would be a constant in `setup_context`
            # One NumPy array at two positions becomes one JAX array, as NOTE [orders] in `_layer_rule.py` requires.
            arrays = {id(x): x if is_array(x) else jnp.copy(as_arrays([x])[0]) for x in tensors}
            output = skeleton.fill([arrays[id(x)] for x in tensors])
            ctx._state.returned = [(x, arrays[id(x)]) for x in tensors if not is_array(x)]
        layer.setup_context(ctx, (*args, *kwargs.values()), output)
        return output

    context = inspect.Parameter("ctx", inspect.Parameter.POSITIONAL_ONLY)
    forward.__signature__ = signature.replace(parameters=[context, *signature.parameters.values()])  # pyright: ignore[reportAttributeAccessIssue]
    return forward
