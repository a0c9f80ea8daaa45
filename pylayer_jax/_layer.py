"""`PyLayer` and its `apply`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, ClassVar, Literal, TypeVar, cast

import jax
import numpy as np

from ._autodiff.call import Application
from ._autodiff.custom_vjp import compile_layer
from ._autodiff.eager_call import One
from ._autodiff.eager_call import bind as bind_opaque
from ._hooks.active import Hooks, beneath_blocks
from ._jax.names import (
    call_with_symbolic_zeros,
    is_differentiated,
    is_forward_mode_tracer,
    is_missing_forward_mode,
    nothing_is_traced,
)
from ._methods.arguments import Arguments, as_jax, bind, refuse_refs
from ._methods.context import Phase, PyLayerContext, Record, add_note
from ._methods.outputs import Outputs
from ._trees.partition import Carried, flatten

_NOT_A_LAYER_VALUE = (np.ndarray, np.generic, jax.Ref)


class _OneObject(classmethod):
    def __init__(self, function: Any) -> None:
        super().__init__(function)
        self._name = f"_bound_{id(self)}"  # a subclass may have an `apply` of its own, which calls this one

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        owner = type(instance) if owner is None else owner
        bound = vars(owner).get(self._name)
        if bound is None:
            bound = super().__get__(instance, owner)
            setattr(owner, self._name, bound)
        return bound


_Method = TypeVar("_Method")


def one_object(method: _Method) -> _Method:
    """A class method that is the same object at each access: `jax.jit(Tanh.apply)` compiles once per object."""
    found: Any = method
    return cast(_Method, _OneObject(found.__func__))


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
    cotangents, and a layer that it applies needs forward mode.

    Forward mode (`jax.jvp`, `jax.jacfwd`, `jax.linearize`): with `forward_mode = True` the tangent map is the
    transpose of `backward`. A class may instead define a static `jvp(ctx, *tangents)`, which gets one tangent per
    argument passed (zeros where there is none, or None after `ctx.set_materialize_grads(False)`; None where the
    argument holds no tensor) and returns one per output, where None is zero.

    Batching: JAX batches what `forward` does. A class may instead define a static
    `vmap(info, in_dims, *args) -> (outputs, out_dims)`, for host code or a kernel that takes a whole batch, which
    `jax.vmap` then calls. `in_dims` has one entry per argument passed, the axis of the batch or None (a pytree of
    them for a pytree); `out_dims` is the same for the outputs. `info.batch_size` is the number of examples.
    Gradients of a batch are those of `backward`, batched by JAX; what `forward` saves that is neither an input nor
    an output is batched by JAX too.

    What is saved has a name for the policies of `jax.checkpoint` (`save_only_these_names`, offloading):
    `Tanh.saved[0]` above, and `Tanh.saved[0]['w']` within a pytree.

    In eager mode both methods see concrete values. A second derivative stages `forward` once, as `jax.jit`
    would; where it asks for numbers, it runs on concrete values instead. Under `jax.vmap` every output is
    mapped as soon as one argument is.

    Attributes:
        complex_convention: how `backward` reads and writes complex gradients. "jax" (the default): as
            `jax.grad` does. "paddle": as Paddle and torch do, which is the conjugate.
        forward_mode: whether `jax.jvp` and the like may transpose `backward`, which has to be linear then.
        saved_names: names for what `save_for_backward` saves, in its order, instead of `Tanh.saved[0]`.
        generate_vmap_rule: as in torch: True says that JAX batches `forward`, which it does anyway.
    """

    complex_convention: ClassVar[Literal["jax", "paddle"]] = "jax"
    forward_mode: ClassVar[bool] = False
    saved_names: ClassVar[tuple[str, ...]] = ()
    generate_vmap_rule: ClassVar[bool] = False
    _context: ClassVar[type[PyLayerContext]] = PyLayerContext
    _one_per_value: ClassVar[bool] = False  # one cotangent per output, one gradient per argument, static or not
    _rule: ClassVar[Callable[..., tuple[Any, ...]]]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if cls.complex_convention not in ("jax", "paddle"):
            raise ValueError(
                f"{cls.__qualname__}.complex_convention: expected 'jax' or 'paddle', got {cls.complex_convention!r}."
            )
        if cls.generate_vmap_rule and cls._batches_itself():
            raise RuntimeError(
                f"{cls.__qualname__} has both generate_vmap_rule = True and a vmap method. Remove vmap to let JAX "
                "batch forward, or set generate_vmap_rule = False to have vmap called."
            )
        names: Any = cls.saved_names  # what the annotation promises is checked here
        if not isinstance(names, tuple) or not all(isinstance(name, str) for name in names):
            raise TypeError(f"{cls.__qualname__}.saved_names: expected a tuple of strings, got {names!r}.")
        cls._rule = staticmethod(compile_layer(cls.__qualname__))

    @classmethod
    def _body(cls) -> Callable[..., Any]:
        """What runs as `forward(ctx, ...)`."""
        return cls.forward

    @classmethod
    def _splits(cls) -> bool:
        """Whether what is kept is told apart from `forward`, by `setup_context`."""
        return False

    @classmethod
    def _tangent_map(cls) -> Callable[..., Any] | None:
        return getattr(cls, "jvp", None)

    @classmethod
    def _has_forward_mode(cls) -> bool:
        return cls.forward_mode or cls._tangent_map() is not None

    @classmethod
    def _batches_itself(cls) -> bool:
        return hasattr(cls, "vmap")

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

    @one_object
    @classmethod
    def apply(cls, *args: Any, **kwargs: Any) -> Any:
        """Run the layer on the arguments of `forward`, without the context.

        Arguments may be any pytrees of arrays and of other values. Gradients follow the parameter order
        of `forward`, however the call was written.

        Returns:
            What `forward` returns, in its own container; NumPy arrays come back as `jax.Array`.

        Raises:
            NotImplementedError: where `forward` is missing, or `backward` where a gradient is asked for.
            TypeError: for arguments that do not fit `forward`, for a `jax.Ref`, and in forward mode where the class
                has none, or its `backward` is not linear.
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
        result = layer._body()(layer._context(record), *args, **kwargs)
    except Exception as error:
        if isinstance(error, TypeError):
            bind(name, layer._body(), args, kwargs)  # a call that does not fit gets the better message
        add_note(error, name, "forward")
        raise
    record.phase = Phase.RETURNED
    record.inputs = ()
    if isinstance(result, jax.Array) and not record.marked and not record.dirty:
        return result
    outputs = Outputs(name, result, record)
    return outputs.skeleton.fill(outputs.arrays(result))


def _run_traced(layer: type[PyLayer], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    arguments = bind(layer.__qualname__, layer._body(), args, kwargs)
    tensors = arguments.take_tensors()
    if any(map(is_forward_mode_tracer, tensors)) and not layer._has_forward_mode():
        raise _no_forward_mode(arguments)
    application = Application(layer, arguments, Hooks.captured(tensors))
    if not any(map(is_differentiated, tensors)) and application.names_closed_over(is_differentiated):
        # JAX would notice only after apply had returned, without a name.
        raise application.closed_over()
    try:
        # A layer packs what it saves by itself.
        with contextlib.nullcontext() if application.hooks is None else beneath_blocks():
            if layer._has_forward_mode() or layer._batches_itself():
                values = bind_opaque(One(application), tensors)
            else:
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
        f"{arguments.layer} has no rule for forward-mode differentiation (jax.jvp, jax.jacfwd, jax.linearize): it "
        "defines backward alone. Add forward_mode = True to the class, which derives the rule from a backward that is "
        "linear in its cotangents; or a static jvp(ctx, *tangents). Or use reverse mode: jax.vjp, jax.grad, jax.jacrev."
    )
