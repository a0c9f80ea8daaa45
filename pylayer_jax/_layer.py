"""`PyLayer` and its `apply`."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import jax

from pylayer_jax._jax.custom_vjp import call_with_symbolic_zeros
from pylayer_jax._jax.tracers import applied_to, nothing_is_traced
from pylayer_jax._trees.closures import is_live, is_live_constant
from pylayer_jax._trees.opaque import Static

from ._autodiff.layer_call import LayerCall, in_backward, null_context
from ._autodiff.layer_rule import call_without_custom_vjp, compile_layer
from ._autodiff.ref_call import check_refs
from ._autodiff.run_forward import forward_only
from ._autodiff.transpose_backward import NoForwardModeError
from ._hooks.open_blocks import Hooks, outside_hooks_trace
from ._methods.apply_descriptor import Apply
from ._methods.arguments import bind, call_of_apply
from ._methods.context import PyLayerContext
from ._methods.declarations import check_declarations

# The `jax.custom_vjp` functions of each class that was applied: for calls without a Ref, and with one. Not an
# attribute, which a class made from the members of another one would take over; and not made with the class, since an
# unpickled one gets its members later.
_rules: weakref.WeakKeyDictionary[type, dict[bool, Callable[..., tuple[Any, ...]]]] = weakref.WeakKeyDictionary()


def _rule_of(layer: type[PyLayer], takes_refs: bool) -> Callable[..., tuple[Any, ...]]:
    rules = _rules.setdefault(layer, {})
    if takes_refs not in rules:
        rules.setdefault(takes_refs, compile_layer(layer, takes_refs))  # another thread may have been first
    return rules[takes_refs]


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
    `jax.hessian` and `jax.jvp` of `jax.grad` transpose `backward`. Therefore `backward` has to be linear in its
    cotangents there. A layer that `backward` applies to its cotangents counts as the linear map that its `forward` is.

    Every run of `backward` starts from the values that `forward` left on `ctx`: lists, dicts and other containers are
    made anew for each run, other objects are shared.

    Forward mode (`jax.jvp`, `jax.jacfwd`, `jax.linearize`): with `forward_mode = True` the tangent map is the
    transpose of `backward`. A class may instead define a static `jvp(ctx, *tangents)`. It gets one tangent per argument
    of the call and returns one tangent per output, of which None is zero. A missing tangent arrives as zeros, or as
    None after `ctx.set_materialize_grads(False)`; an argument that holds no tensor has None.

    Batching: JAX batches the operations of `forward`. A class may instead define a static
    `vmap(info, in_dims, *args) -> (outputs, out_dims)`, for host code or a kernel that takes a whole batch; `jax.vmap`
    then calls it. `in_dims` has one entry per argument of the call: the axis of the batch, or None (for a pytree, a
    pytree of them). `out_dims` has the same for the outputs. `info.batch_size` is the number of examples. The gradients
    of a batch come from `backward`, which JAX batches; JAX also batches the intermediates that `forward` saves.

    `saved_names` gives saved tensors names for the policies of `jax.checkpoint` (`save_only_these_names`, offloading).
    A tensor within a pytree has its path behind the name, as in `y['w']`. Without it they have none, since a named
    tensor is a new value to JAX: a scan would stack it beside the tensor itself.

    Compiled programs and profiles show the operations of both methods as `Tanh/forward` and `Tanh/backward`.

    In eager mode both methods see concrete values. A second derivative stages `forward` once, as `jax.jit` would; a
    `forward` that needs numbers runs on concrete values instead. Under `jax.vmap` every output is mapped as soon as one
    argument is mapped.

    Attributes:
        complex_convention: how `backward` reads and writes complex gradients. "jax" (the default): as
            `jax.grad` does. "paddle": as Paddle and torch do, which is the conjugate.
        forward_mode: whether forward mode (`jax.jvp` and others) may transpose `backward`, which then has to be linear.
        saved_names: a name for each value that `save_for_backward` saves, in order; None leaves one out. True names
            them `Tanh.saved[0]`, `Tanh.saved[1]`, ...
        generate_vmap_rule: as in torch. True says that JAX batches `forward`, which JAX does anyway.
    """

    complex_convention: ClassVar[Literal["jax", "paddle"]] = "jax"
    forward_mode: ClassVar[bool] = False
    saved_names: ClassVar[tuple[str | None, ...] | Literal[True]] = ()
    generate_vmap_rule: ClassVar[bool] = False
    _context: ClassVar[type[PyLayerContext]] = PyLayerContext
    _torch_convention: ClassVar[bool] = False  # one cotangent per output, one gradient per argument, static or not

    if not TYPE_CHECKING:  # a type checker flags these calls if the class defines neither

        def __new__(cls, *args: Any, **kwargs: Any) -> Any:
            following = super().__new__
            if following is not object.__new__:  # of a class that stands behind this one
                return following(cls, *args, **kwargs)
            if (args or kwargs) and cls.__init__ is object.__init__:
                raise TypeError(f"{cls.__qualname__}(...) does not run the layer: use {call_of_apply(cls)}.")
            return following(cls)

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            following = getattr(super(), "__call__", None)  # noqa: B004 - of a class that stands behind this one
            if following is not None:
                return following(*args, **kwargs)
            layer = type(self)
            raise TypeError(
                f"an object of the layer {layer.__qualname__} is not called: use {call_of_apply(layer)}, on the class "
                "or on an object."
            )

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        check_declarations(cls)

    @classmethod
    def _forward_with_ctx(cls) -> Callable[..., Any]:
        """The function that runs as `forward(ctx, ...)`."""
        return cls.forward

    @classmethod
    def _has_setup_context(cls) -> bool:
        """Whether `setup_context`, and not `forward`, keeps values for `backward`."""
        return False

    @classmethod
    def _jvp_method(cls) -> Callable[..., Any] | None:
        return getattr(cls, "jvp", None)

    @classmethod
    def _has_forward_mode(cls) -> bool:
        return cls.forward_mode or cls._jvp_method() is not None

    @classmethod
    def _has_vmap_method(cls) -> bool:
        return hasattr(cls, "vmap")

    @staticmethod
    def forward(ctx: Any, *args: Any, **kwargs: Any) -> Any:
        """Compute the outputs, and keep on `ctx` the values that `backward` needs. Every layer defines it."""
        raise NotImplementedError(
            f"{ctx._state.layer}.forward is not defined. Add to the class: @staticmethod def forward(ctx, x): ..."
        )

    @staticmethod
    def backward(ctx: Any, *args: Any, **kwargs: Any) -> Any:
        """Turn one cotangent per output into one gradient per input. Every differentiated layer defines it."""
        raise NotImplementedError(
            f"{ctx._state.layer}.backward is not defined, but its gradient was asked for. Add to the class: "
            "@staticmethod def backward(ctx, dy): ..."
        )

    @Apply
    @classmethod
    def apply(cls, *args: Any, **kwargs: Any) -> Any:
        """Run the layer on the arguments of `forward`, without the context.

        Arguments may be any pytrees of arrays and of other values. Gradients follow the parameter order
        of `forward`, however the call was written.

        A `jax.Ref` is an argument without a gradient. Both methods may read and write it. `forward` runs once for each
        application, and again where `jax.checkpoint` computes it again. In a call that takes one, every input counts as
        needed in `ctx.needs_input_grad`, and a cotangent that is missing comes as zeros.

        Returns:
            The outputs of `forward`, in the same container; NumPy arrays come back as `jax.Array`.

        Raises:
            NotImplementedError: if `forward` is missing, or if a gradient is needed and `backward` is missing.
            TypeError: for arguments that do not fit `forward`; in forward mode if the class has none, its `backward` is
                not linear, or an argument is a `jax.Ref`; for a second derivative through a Ref that a method writes,
                or that `forward` keeps; for a Ref whose content is differentiated, or that a class with `vmap` gets.
            ValueError: if no output of `forward` is a tensor, if `forward` changes a container among its arguments in
                place, or if the gradients of `backward` do not fit the inputs.
            jax.errors.UnexpectedTracerError: if `forward` closes over a value that is differentiated.
        """
        __tracebackhide__ = True
        if nothing_is_traced():
            return forward_only(cls, args, kwargs)
        return _run_traced(cls, args, kwargs)


def _run_traced(layer: type[PyLayer], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    __tracebackhide__ = True
    arguments = bind(layer.__qualname__, layer._forward_with_ctx(), args, kwargs)
    tensors = arguments.take_tensors()
    applied, refs = applied_to(tensors), arguments.refs
    without_custom_vjp = layer._has_forward_mode() or in_backward.value or applied.is_transposed
    if refs or not without_custom_vjp:
        # In code that was staged before it is differentiated, JAX says so, without a name.
        if applied.is_in_forward_mode:
            raise NoForwardModeError(arguments.layer, refs)
        # A second derivative of another kind than those that `jax.custom_vjp` has.
        without_custom_vjp = applied.is_in_forward_over_reverse or layer._has_vmap_method()
    call = LayerCall(layer, arguments, Hooks.captured(tensors), applied.is_deferred)
    check_refs(call, tensors)
    # NOTE [hidden tensors]. Staging would take the numbers from `forward`. In eager mode a value that is differentiated
    # is no reason for it, since it is perhaps not used; where it is, JAX refuses it.
    may_be_staged = without_custom_vjp or applied.is_staged or not applied.is_differentiated
    call.reaches_traced_values = bool(call.names_closed_over(is_live if may_be_staged else is_live_constant))
    try:
        # A layer packs its saved tensors itself.
        with null_context if call.hooks is None else outside_hooks_trace():
            if not refs and (without_custom_vjp or call.reaches_traced_values):
                values = call_without_custom_vjp(call, tensors, applied.is_transposed)
            else:
                values = call_with_symbolic_zeros(_rule_of(layer, bool(refs)), Static(call), tensors)
    except jax.errors.UnexpectedTracerError as error:
        raise call.closed_over_error() from error
    outputs = call.outputs
    assert outputs is not None
    values = [jax.lax.stop_gradient(x) if i in outputs.non_differentiable else x for i, x in enumerate(values)]
    return outputs.skeleton.fill(values)
