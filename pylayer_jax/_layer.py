"""`PyLayer` and its `apply`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, ClassVar, Literal

import jax
import numpy as np

from ._arguments import Arguments, as_jax, bind, refuse_refs
from ._compat import (
    call_with_symbolic_zeros,
    is_differentiated,
    is_forward_mode_tracer,
    is_missing_forward_mode,
    nothing_is_traced,
)
from ._context import Phase, PyLayerContext, Record
from ._hook_stack import Hooks, beneath_blocks
from ._partition import Carried, flatten
from ._recording import Outputs
from ._rules import Application, add_note, compile_layer

_NOT_A_LAYER_VALUE = (np.ndarray, np.generic, jax.Ref)


class PyLayer:
    """A custom gradient as a class: subclass it, define `forward` and `backward`, call `apply`.

        class Tanh(PyLayer):
            @staticmethod
            def forward(ctx, x):
                y = jnp.tanh(x)
                ctx.save_for_backward(y)
                return y

            @staticmethod
            def backward(ctx, dy):
                (y,) = ctx.saved_tensor()
                return dy * (1 - y**2)

        y = Tanh.apply(x)

    The rule holds under every JAX transform of reverse mode and at every order of differentiation.
    `jax.hessian` and `jax.jvp` of `jax.grad` transpose `backward`, which then has to be linear in its
    cotangents and to apply no layer.

    In eager mode both methods see concrete values. A second derivative stages `forward` once, as `jax.jit`
    would; where it asks for numbers, it runs on concrete values instead. Under `jax.vmap` every output is
    mapped as soon as one argument is.

    Attributes:
        complex_convention: how `backward` reads and writes complex gradients. "jax" (the default): as
            `jax.grad` does. "paddle": as Paddle and torch do, which is the conjugate.
    """

    complex_convention: ClassVar[Literal["jax", "paddle"]] = "jax"
    _rule: ClassVar[Callable[..., tuple[Any, ...]]]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if cls.complex_convention not in ("jax", "paddle"):
            raise ValueError(
                f"{cls.__qualname__}.complex_convention: expected 'jax' or 'paddle', got {cls.complex_convention!r}."
            )
        cls._rule = staticmethod(compile_layer(cls.__qualname__))

    @staticmethod
    def forward(ctx: PyLayerContext, *args: Any, **kwargs: Any) -> Any:
        """Compute the outputs, and keep on `ctx` what `backward` needs. Every layer defines it."""
        raise NotImplementedError(
            f"{ctx._record.layer}.forward is not defined. Add to the class: @staticmethod def forward(ctx, x): ..."
        )

    @staticmethod
    def backward(ctx: PyLayerContext, *args: Any, **kwargs: Any) -> Any:
        """Turn one cotangent per output into one gradient per input. Every differentiated layer defines it."""
        raise NotImplementedError(
            f"{ctx._record.layer}.backward is not defined, but its gradient was asked for. Add to the class: "
            "@staticmethod def backward(ctx, dy): ..."
        )

    @classmethod
    def apply(cls, *args: Any, **kwargs: Any) -> Any:
        """Run the layer on the arguments of `forward`, without the context.

        Arguments may be any pytrees of arrays and of other values. Gradients follow the parameter order
        of `forward`, however the call was written.

        Returns:
            What `forward` returns, in its own container; NumPy arrays come back as `jax.Array`.

        Raises:
            NotImplementedError: where `forward` is missing, or `backward` where a gradient is asked for.
            TypeError: for arguments that do not fit `forward`, for a `jax.Ref`, and in forward mode.
            ValueError: for a `forward` without a tensor among its outputs, or a `backward` whose gradients
                do not fit the inputs.
            jax.errors.UnexpectedTracerError: where `forward` closes over a value that is differentiated.
        """
        if nothing_is_traced():
            return _run_eagerly(cls, args, kwargs)
        return _run_traced(cls, args, kwargs)


def _run_eagerly(layer: type[PyLayer], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    # Nothing is traced, so nothing is differentiated: no rule, no binding, one look at the arguments.
    name = layer.__qualname__
    if any(isinstance(leaf, _NOT_A_LAYER_VALUE) for leaf in flatten((args, kwargs))[0]):
        refuse_refs(name, (args, kwargs))
        args, kwargs = as_jax((args, kwargs))
    count = len(args) + len(kwargs)
    record = Record(name, Phase.FORWARD, lambda: (False,) * count, (args, kwargs))
    try:
        result = layer.forward(PyLayerContext(record), *args, **kwargs)
    except Exception as error:
        if isinstance(error, TypeError):
            bind(name, layer.forward, args, kwargs)  # a call that does not fit gets the better message
        add_note(error, name, "forward")
        raise
    record.phase = Phase.RETURNED
    record.inputs = ()
    if isinstance(result, jax.Array) and not record.marked:
        return result
    outputs = Outputs(name, result, record.marked)
    return outputs.skeleton.fill(outputs.arrays(result))


def _run_traced(layer: type[PyLayer], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    arguments = bind(layer.__qualname__, layer.forward, args, kwargs)
    tensors = arguments.take_tensors()
    if any(map(is_forward_mode_tracer, tensors)):
        raise _no_forward_mode(arguments)
    application = Application(layer, arguments, Hooks.captured(tensors))
    if not any(map(is_differentiated, tensors)) and application.names_closed_over(is_differentiated):
        # JAX would notice only after apply had returned, without a name.
        raise application.closed_over()
    try:
        # A layer packs what it saves by itself.
        with contextlib.nullcontext() if application.hooks is None else beneath_blocks():
            values = call_with_symbolic_zeros(layer._rule, Carried(application), tensors)
    except jax.errors.UnexpectedTracerError as error:
        raise application.closed_over() from error
    except TypeError as error:
        if is_missing_forward_mode(error):
            raise _no_forward_mode(arguments) from None
        raise
    outputs = application.outputs
    assert outputs is not None
    values = [jax.lax.stop_gradient(x) if i in outputs.marked else x for i, x in enumerate(values)]
    return outputs.skeleton.fill(values)


def _no_forward_mode(arguments: Arguments) -> TypeError:
    return TypeError(
        f"{arguments.layer} has no rule for forward-mode differentiation (jax.jvp, jax.jacfwd): it defines backward "
        "alone. Use reverse mode: jax.vjp, jax.grad or jax.jacrev."
    )
