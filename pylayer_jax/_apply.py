"""The descriptor behind `PyLayer.apply`: each class has one `apply` object, with the signature of its `forward`.

NOTE [types of apply]
Type checkers derive the types of `apply` from `forward`, through the overloads of `Apply.__get__`. The first parameter
of `forward` is the context, unless a subclass defines `setup_context`. The overloads distinguish the two cases by the
parameters of `setup_context`: `Function.setup_context` takes any number of arguments, and an override takes three.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar, overload

P = ParamSpec("P")
R = TypeVar("R", covariant=True)


class _Layer(Protocol[P, R]):
    @property
    def forward(self) -> Callable[Concatenate[Any, P], R]: ...


class _FunctionWithContext(Protocol[P, R]):
    @property
    def forward(self) -> Callable[Concatenate[Any, P], R]: ...
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
        self._code = method.__func__.__code__
        self._name = f"_bound_{method.__func__.__qualname__}"  # unique, since an override may call this `apply`

    @overload
    def __get__(self, instance: Any, owner: type[_FunctionWithContext[P, R]]) -> Callable[P, R]: ...
    @overload
    def __get__(self, instance: Any, owner: type[_FunctionWithSetup[P, R]]) -> Callable[P, R]: ...
    @overload
    def __get__(self, instance: Any, owner: type[_Layer[P, R]]) -> Callable[P, R]: ...
    def __get__(self, instance: Any, owner: Any = None) -> Any:
        owner = type(instance) if owner is None else owner
        bound = owner.__dict__.get(self._name)
        # A class made from the members of another class, e.g. by unpickling, also contains `bound` of the other class.
        if bound is None or bound.__self__ is not owner or bound.__func__.__code__ is not self._code:
            bound = types.MethodType(self._function_of(owner), owner)
            setattr(owner, self._name, bound)
        return bound

    def _function_of(self, owner: Any) -> Callable[..., Any]:
        """Return a copy of the function of this class method, with the signature and docstring of `owner.forward`."""
        shared: Any = self.__func__
        function = types.FunctionType(shared.__code__, shared.__globals__, shared.__name__, None, shared.__closure__)
        function.__module__, function.__qualname__ = owner.__module__, f"{owner.__qualname__}.{shared.__name__}"
        # `inspect.signature` follows `__wrapped__`, and drops the first parameter of a bound method, here the context.
        function.__wrapped__ = forward = owner._forward_with_ctx()  # pyright: ignore[reportFunctionMemberAccess]
        defined_in = next(vars(c) for c in owner.__mro__ if "forward" in vars(c))
        is_own = not isinstance(defined_in.get(shared.__name__), Apply)
        function.__doc__ = (forward.__doc__ if is_own else None) or shared.__doc__
        return function
