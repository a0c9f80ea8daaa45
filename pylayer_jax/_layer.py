"""`PyLayer`, the base class of layers."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import functools
import types
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Concatenate, Final, Literal, ParamSpec, Protocol, TypeVar, overload

import jax

from ._arguments import bind, call_of_apply
from ._call import LayerCall, in_transposable_backward
from ._context import PyLayerContext
from ._hooks.operations import mark_as_computed, saver_of
from ._hooks.saving import past_blocks
from ._jax.rule_function import apply, select
from ._jax.traces import TraceState, is_differentiated, is_in_forward_mode, is_tracer, is_unknown, nothing_is_traced
from ._jax.transparency import forbid_derivative
from ._layer_rule import TracedCall, custom_vjp_of, ref_error
from ._messages import NoForwardModeError, OnceDifferentiableError, describe
from ._trees import split

# Flag -> (class of the error, *allowed values).
_VALUES: Final[dict[str, tuple[Any, ...]]] = {
    "complex_convention": (ValueError, "jax", "paddle"),
    "forward_mode": (TypeError, True, False),
    "host": (TypeError, True, False, "forward"),
    "host_vmap": (TypeError, "sequential", "broadcast"),
}
_FLAGS = (*_VALUES, "generate_vmap_rule", "saved_names")


def check_declarations(layer: Any) -> None:
    name = layer.__qualname__
    for member, value in vars(layer).items():
        # `hosts`, which a user may mean, is 0.89 similar to `host`. With a value of `host`, it is a misspelling.
        has_value_of_host = value is True or (isinstance(value, str) and value in ("forward", "broadcast"))
        near = difflib.get_close_matches(member.lower(), _FLAGS, 1, cutoff=0.85 if has_value_of_host else 0.9)
        is_method = callable(value) or isinstance(value, (staticmethod, classmethod))
        if near and not is_method and not member.startswith("_") and near[0] not in vars(layer):
            raise TypeError(
                f"{name}.{member}: a layer has no such attribute, and {near[0]} is not set. Did you mean {near[0]}?"
            )
    for flag, (error, *values) in _VALUES.items():
        found = getattr(layer, flag)
        if not any(found is x or (isinstance(found, str) and found == x) for x in values):
            raise error(f"{name}.{flag}: expected {' or '.join(map(repr, values))}, got {describe(found)}.")
    if layer.host and (layer.forward_mode or hasattr(layer, "jvp")):
        given = "forward_mode = True" if layer.forward_mode else "a jvp method"
        raise TypeError(
            f"{name} has {given} and host = {layer.host!r}, but a layer of NumPy has no forward mode. Remove {given}, "
            "and use reverse mode: jax.grad, jax.vjp, jax.jacrev."
        )
    if layer.host == "forward" and hasattr(layer, "result_types"):
        raise TypeError(
            f"{name} has result_types and host = 'forward'. What forward keeps is known from a run on example arrays, "
            "so declaring the results saves no run. Remove result_types; example(*args) chooses the arrays."
        )
    if layer.generate_vmap_rule and hasattr(layer, "vmap"):
        raise RuntimeError(
            f"{name} has both generate_vmap_rule = True and a vmap method. Remove vmap to let JAX batch forward, or "
            "set generate_vmap_rule = False to have vmap called."
        )
    names = layer.saved_names
    if names is not True and not (isinstance(names, tuple) and all(isinstance(x, (str, type(None))) for x in names)):
        raise TypeError(
            f"{name}.saved_names: expected True, or a tuple with a string or None for each saved value; got {names!r}."
        )


Method = TypeVar("Method", bound=Callable[..., Any])


def once_differentiable(backward: Method) -> Method:
    """Declare that `backward` has no derivative, because it is host code, or its derivative would be wrong.

        >>> class Once(Tanh):
        ...     @staticmethod
        ...     @once_differentiable
        ...     def backward(ctx, dy):
        ...         return Tanh.backward(ctx, dy)
        >>> try:
        ...     jax.grad(jax.grad(Once.apply))(0.0)
        ... except RuntimeError:
        ...     print("no second derivative")
        no second derivative

    Raises:
        RuntimeError: if a second derivative goes through the decorated `backward`.
    """
    if isinstance(backward, (staticmethod, classmethod)):
        found: Any = type(backward)(once_differentiable(backward.__func__))
        return found

    error = lambda: OnceDifferentiableError(
        f"{backward.__qualname__} is marked @once_differentiable, but a second derivative goes through it. "
        "Remove the decorator if backward is made of differentiable operations."
    )

    @functools.wraps(backward)
    def guarded(*args: Any) -> Any:
        __tracebackhide__ = True
        first = next((i for i, value in enumerate(args) if isinstance(value, PyLayerContext)), None)
        if first is None:  # a test calls `backward` with a context of its own
            return backward(*args)
        # Guard the inputs of `backward`: for its outputs, the error would come after host code in it has run.
        ctx = args[first]  # cls may precede ctx
        state = ctx._state
        tensors, skeleton = split((state.read_saved(), dict(vars(ctx)), args[first + 1 :]))
        saved, attributes, cotangents = skeleton.fill(forbid_derivative(tensors, error))
        ctx = type(ctx)(dataclasses.replace(state, saved=saved))
        vars(ctx).update(attributes)
        return backward(*args[:first], ctx, *cotangents)

    decorated: Any = guarded
    decorated.second_derivative_error = error
    return decorated


# -- the descriptor of `apply` ------------------------------------------------------------------------------
#
# NOTE [types of apply]
# Type checkers derive the types of `apply` from `forward`, by the overloads of `Apply.__get__`. Its first parameter
# is the context, unless a subclass defines `setup_context`: that of `Function` takes any number of arguments, and an
# override takes three.


P = ParamSpec("P")
R = TypeVar("R", covariant=True)


class _Layer(Protocol[P, R]):
    @property
    def forward(self) -> Callable[Concatenate[Any, P], R]: ...


class _FunctionWithContext(_Layer[P, R], Protocol[P, R]):
    @property
    def setup_context(self) -> Callable[[Any, Any, Any, Any], Any]: ...


class _FunctionWithSetup(Protocol[P, R]):
    @property
    def forward(self) -> Callable[P, R]: ...
    @property
    def setup_context(self) -> Callable[[Any, Any, Any], Any]: ...


class Apply(classmethod):
    """A class method that returns the same object at each access, so that `jax.jit(Tanh.apply)` compiles only once.

    The object has the signature, the types and the docstring of `forward`, without the context parameter.
    """

    def __init__(self, method: Any) -> None:
        super().__init__(method.__func__)
        self._name = f"_bound_{method.__func__.__qualname__}"  # unique, since an override may call this `apply`

    @overload
    def __get__(self, instance: Any, owner: type[_FunctionWithContext[P, R]]) -> Callable[P, R]: ...
    @overload
    def __get__(self, instance: Any, owner: type[_FunctionWithSetup[P, R]]) -> Callable[P, R]: ...
    @overload
    def __get__(self, instance: Any, owner: type[_Layer[P, R]]) -> Callable[P, R]: ...
    def __get__(self, instance: Any, owner: Any) -> Any:
        bound, shared = owner.__dict__.get(self._name), self.__func__
        # A class that is made from the attributes of another, as in unpickling, has the bound method of that one.
        if bound is not None and bound.__self__ is owner and bound.__func__.__code__ is shared.__code__:
            return bound
        function = types.FunctionType(shared.__code__, shared.__globals__, shared.__name__, None, shared.__closure__)
        function.__module__, function.__qualname__ = owner.__module__, f"{owner.__qualname__}.{shared.__name__}"
        # `inspect.signature` reads `forward(ctx, x)` from here, and shows `(x)`, because `apply` is a bound method.
        function.__wrapped__ = forward = owner._forward_with_ctx()  # pyright: ignore[reportFunctionMemberAccess]
        defined_in = next(vars(c) for c in owner.__mro__ if "forward" in vars(c))
        is_own = not isinstance(defined_in.get(shared.__name__), Apply)
        function.__doc__ = (forward.__doc__ if is_own else None) or shared.__doc__
        bound = types.MethodType(function, owner)
        setattr(owner, self._name, bound)
        return bound


class PyLayer:
    """Base class of custom gradients: subclass `PyLayer`, define `forward` and `backward`, and call `apply`.

        >>> class Tanh(PyLayer):
        ...     @staticmethod
        ...     def forward(ctx, x):
        ...         y = jnp.tanh(x)
        ...         ctx.save_for_backward(y)
        ...         return y
        ...
        ...     @staticmethod
        ...     def backward(ctx, dy):
        ...         (y,) = ctx.saved_tensor()
        ...         return dy * (1 - y**2)
        >>> print(jax.grad(Tanh.apply)(0.0))
        1.0

    Every reverse-mode transformation uses `backward`, at every order of differentiation. In forward mode and for
    `jax.hessian`, JAX transposes `backward`, which then has to be linear in its cotangents. Runs of `backward` share
    the objects that `forward` kept on `ctx`, except containers, which are copied. In eager mode, a first derivative
    runs both methods on concrete values; a second derivative traces `forward`.

    A class may also define these static methods:

    - `jvp(ctx, *tangents)`, the rule for forward mode. It gets one tangent per argument of the call (None for an
      argument without tensors), and returns one per output (None for zero). A missing tangent is passed as zeros, or as
      None after `ctx.set_materialize_grads(False)`.
    - `vmap(info, in_dims, *args) -> (outputs, out_dims)`, which `jax.vmap` calls in place of `forward`; for gradients,
      JAX batches `backward`. `in_dims` has the batch axis of each argument of the call, or None (for a pytree, a pytree
      of axes), and `out_dims` that of each output. `info.batch_size` is the number of examples.

    Attributes:
        complex_convention: the convention for complex gradients in `backward`: "jax", the default, or "paddle", that of
            Paddle and torch, whose gradients are the complex conjugates of those of `jax.grad`.
        forward_mode: whether forward mode (`jax.jvp`, `jax.jacfwd`, `jax.linearize`) may transpose `backward`.
        saved_names: a name, or None, for each value of `save_for_backward`, for the policies of `jax.checkpoint`. True
            gives the names `Tanh.saved[0]`, `Tanh.saved[1]`, ... For a tensor in a pytree, its path follows the name,
            as in `y['w']`. Names cost memory in a scan: JAX stacks a named tensor in addition to the tensor itself.
        host: True if `forward` and `backward` are NumPy code, which gets and returns NumPy arrays under every
            transformation, and may keep any object on `ctx`. "forward" if `backward` is JAX code, so that it has a
            derivative. Under a transformation, the types of the outputs come from a static method
            `result_types(*args)`, which gets and returns `jax.ShapeDtypeStruct` objects in place of arrays; or from a
            run of `forward` on example arrays: the result of a static method `example(*args)`, or random numbers from 0
            to 1, and zeros for integers.
        host_vmap: how `jax.vmap` runs a layer with `host`: "sequential", the default, calls the methods for one example
            at a time. "broadcast" calls them once, with arrays that have the batch axes in front.
        generate_vmap_rule: a flag of torch. JAX batches `forward` by default, so True only forbids a `vmap` method.
    """

    complex_convention: ClassVar[Literal["jax", "paddle"]] = "jax"
    forward_mode: ClassVar[bool] = False
    saved_names: ClassVar[tuple[str | None, ...] | Literal[True]] = ()
    host: ClassVar[Literal[True, False, "forward"]] = False
    host_vmap: ClassVar[Literal["sequential", "broadcast"]] = "sequential"
    generate_vmap_rule: ClassVar[bool] = False
    _context_class: ClassVar[type[PyLayerContext]] = PyLayerContext
    _forward_and_setup: ClassVar[Any] = None  # of a `Function` with setup_context: a forward(ctx, ...) that calls both
    _torch_convention: ClassVar[bool] = False  # whether cotangents and gradients have entries for statics too

    if not TYPE_CHECKING:  # hidden from type checkers, which then report calls such as Tanh(x)

        def __new__(cls, *args: Any, **kwargs: Any) -> Any:
            if (args or kwargs) and cls.__init__ is object.__init__:
                raise TypeError(f"{cls.__qualname__}(...) does not run the layer: use {call_of_apply(cls)}.")
            return super().__new__(cls)

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            raise TypeError(f"an object of a layer is not called: use {call_of_apply(type(self))}.")

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        check_declarations(cls)

    @classmethod
    def _forward_with_ctx(cls) -> Callable[..., Any]:
        return cls._forward_and_setup or cls.forward

    @classmethod
    def _has_backward(cls) -> bool:
        return cls.backward is not PyLayer.backward

    @staticmethod
    def forward(ctx: Any, *args: Any, **kwargs: Any) -> Any:
        """Compute the outputs, and keep on `ctx` the values that `backward` needs."""
        raise NotImplementedError(
            f"{ctx._state.layer_name}.forward is not defined. Add to the class: @staticmethod def forward(ctx, x): ..."
        )

    @staticmethod
    def backward(ctx: Any, *args: Any, **kwargs: Any) -> Any:
        """Turn one cotangent per output into one gradient per input."""
        raise NotImplementedError(
            f"{ctx._state.layer_name}.backward is not defined, but its gradient was asked for. Add to the class: "
            "@staticmethod def backward(ctx, dy): ..."
        )

    @Apply
    @classmethod
    def apply(cls, *args: Any, **kwargs: Any) -> Any:
        """Run the layer on the arguments of `forward`, except the context.

        An argument may be any pytree of arrays and other values. Gradients follow the parameter order of `forward`,
        also for keywords in another order. `forward` and `backward` may read and write an argument that is a `jax.Ref`,
        which has no gradient; such a call has only a first derivative, in reverse mode.

        Returns:
            The outputs of `forward`, in the same containers, with each NumPy array converted to a `jax.Array`.

        Raises:
            NotImplementedError: if `forward` is missing, or if a gradient is needed and `backward` is missing.
            TypeError: for arguments that do not fit `forward`, and for a derivative that the layer does not have.
            ValueError: if no output of `forward` is a tensor, if `forward` changes a container among its arguments in
                place, or if the gradients of `backward` do not fit the inputs.
            jax.errors.UnexpectedTracerError: if `forward` closes over a value that is differentiated.
        """
        __tracebackhide__ = True
        arguments, tensors = bind(cls, args, kwargs)
        call = LayerCall(cls, arguments)
        if nothing_is_traced():
            return call.run_undifferentiated(tensors)
        state = TraceState()
        if not (state.is_staged or state.is_differentiated or any(map(is_tracer, tensors))):
            return call.run_undifferentiated(tensors)  # in a `jax.vmap` that does not batch the arguments
        call.saver = saver_of(cls.__name__, tensors, is_exact=cls.host is True)
        traced_call = TracedCall(call, is_deferred=state.is_staged and not state.differentiates(tensors))
        # The layer packs its saved tensors itself, so the hooks around the call must not pack them again.
        with contextlib.nullcontext() if call.saver is None else past_blocks():
            try:
                values = _bind(traced_call, tensors, state)
            except jax.errors.UnexpectedTracerError as error:
                raise call.closed_over_error() from error
        if call.saver is not None:
            mark_as_computed(values)
        assert call.outputs is not None
        # A custom_vjp function makes tangents for outputs that are marked non-differentiable. Remove these tangents.
        values = [jax.lax.stop_gradient(x) if i in call.outputs.marked else x for i, x in enumerate(values)]
        return call.outputs.skeleton.fill(values)


def _bind(traced_call: TracedCall, tensors: list[Any], state: TraceState) -> Sequence[Any]:
    """Bind the custom_vjp function of the class or, where JAX does not allow it, a `RuleFunction`."""
    __tracebackhide__ = True
    call, is_deferred = traced_call.call, traced_call.is_deferred
    layer, types = call.layer, call.arguments.types
    takes_refs = any(call.arguments.ref_mask)
    has_forward_mode = layer.forward_mode or hasattr(layer, "jvp") or in_transposable_backward.value
    if state.is_forward_mode and (takes_refs or not has_forward_mode) and any(map(is_in_forward_mode, tensors)):
        # JAX raises its own error, without the layer's name, for code that is staged first and differentiated later.
        raise ref_error(call) if takes_refs else NoForwardModeError(layer)
    if takes_refs:
        refs = select(tensors, call.arguments.ref_mask)
        if hasattr(layer, "vmap") or any(map(is_differentiated, refs)):  # JAX would not call `vmap`
            raise ref_error(call)
        if is_deferred:
            # No code uses these values, so the compiled program does not read the Refs for this check.
            forbid_derivative([ref[...] for ref in refs], lambda: ref_error(call))
        return custom_vjp_of(layer, takes_refs=True)(traced_call, *tensors)
    lacks_custom_vjp = state.has_unknown_trace or any(map(is_unknown, tensors))
    needs_rule_function = (
        has_forward_mode  # a custom_vjp function has none, and JAX cannot transpose it in a `backward`
        or hasattr(layer, "vmap")  # JAX would batch the code of `forward`
        or state.is_forward_over_reverse  # JAX would apply forward mode to the custom_vjp function
        or lacks_custom_vjp  # jax.linear_transpose and an eager shard_map have no rule for custom_vjp functions
        or (is_deferred and call.saver is not None)  # JAX traces a fwd rule separately, which would pack a second time
        or (is_deferred and traced_call.stage(types)[1])  # a custom_vjp function cannot close over values
    )
    if not needs_rule_function:
        return custom_vjp_of(layer, takes_refs=False)(traced_call, *tensors)
    if not (state.is_staged or lacks_custom_vjp):
        return apply(traced_call, tensors)
    staged, consts = traced_call.stage(types)
    return apply(staged.packing(), [*consts, *tensors])
