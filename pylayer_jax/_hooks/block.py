"""`saved_tensors_hooks` and `disable_saved_tensors_hooks`."""

from __future__ import annotations

import abc
import contextlib
import functools
import inspect
import threading
import types
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from typing import TYPE_CHECKING, Any, ParamSpec, Self, TypeVar

import jax
import numpy as np

from pylayer_jax._jax.tracers import current_trace
from pylayer_jax._trees.messages import plural

from .derived_residuals import Errors
from .open_blocks import Block, Disabled, active, active_pair, innermost_block, mark_nested
from .pair import Hook, Pair, Step
from .trace import HooksTrace, enter_block

P = ParamSpec("P")
R = TypeVar("R")

_RUNS_LATER = (inspect.isgeneratorfunction, inspect.iscoroutinefunction, inspect.isasyncgenfunction)


def _make(kind: type[saved_tensors_hooks], args: tuple[Any, ...], kwargs: dict[str, Any]) -> saved_tensors_hooks:
    return kind(*args, **kwargs)


_TAKES = {
    "pack_hook": "the tensor that is saved, and returns what is kept of it",
    "unpack_hook": "the value that pack_hook returned, and returns the tensor",
    "only": "a tensor, and returns whether it is packed",
}


def _misfit(hook: Callable[..., Any]) -> TypeError | None:
    """Why a function cannot be called with one argument; None if it can, or if that cannot be known."""
    if isinstance(hook, types.FunctionType) and hook.__code__.co_argcount == 1 and not hook.__code__.co_kwonlyargcount:
        return None  # nearly every hook, without the cost of a signature
    try:
        # A decorator of Python may change the arguments.
        signature = inspect.signature(hook, follow_wrapped=not isinstance(hook, types.FunctionType))
    except (TypeError, ValueError):  # an object of C
        return None
    try:
        signature.bind(None)
    except TypeError as error:
        return error
    return None


def _shown(value: Any) -> str:
    """An argument in one line; a function or a dtype by its name."""
    name = value.name if isinstance(value, np.dtype) else getattr(value, "__name__", None)
    return " ".join(repr(value).split()) if name is None else str(name)


class _PairClass(abc.ABCMeta):
    """The class of the classes of pairs: `with quantize_saved:` enters a class, and is an error that says so."""

    if not TYPE_CHECKING:  # a type checker flags it

        def __enter__(cls) -> None:
            raise TypeError(f"{cls.__name__} in `with` is the class. Make a pair of it: with {cls.__name__}(...):")

        def __exit__(cls, *_: object) -> None: ...


class _MadeWith(metaclass=_PairClass):
    """Remembers the arguments of `__init__`, also those of a subclass.

    A base of its own: where a class has both, `inspect.signature` reads `__new__` and not `__init__`.
    """

    _made_with: tuple[tuple[Any, ...], dict[str, Any]]

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        self = super().__new__(cls)
        self._made_with = (args, kwargs)
        return self


class saved_tensors_hooks(_MadeWith):  # noqa: N801 - the name in Paddle and torch
    """Pack the tensors that are saved for backward inside a block or a function, and unpack them for backward.

        def pack(x):
            return x.astype(jnp.bfloat16)

        def unpack(packed):
            return packed.astype(jnp.float32)

        def loss(w, x):
            with saved_tensors_hooks(pack, unpack):
                return jnp.sum(jnp.tanh(x @ w))

        jax.grad(loss)(w, x)

    The pair reaches every tensor that `save_for_backward` saves in a layer, and the residuals of every JAX operation in
    the block. An already jitted function, or a whole scan, is one operation. A tensor is packed once. The block has to
    be around the differentiated code: inside the function that `jax.grad` gets, or around a function that is decorated.
    A block around a call of `jax.grad` itself (or of a jitted train step) reaches the layers in that call, but not its
    plain operations, because JAX does not show them. `repr` of a pair that was entered tells how many tensors it has
    packed: none if the block stands in the wrong place, or around a program that was compiled in a block of an equal
    pair.

    In eager mode the hooks see concrete arrays, and the result of `pack_hook` is kept as it is: a NumPy array stays on
    the host, and an object is released with the function that `jax.vjp` returned. In traced code the hooks are traced
    like any other code; with `host=True` they run on the host, with NumPy arrays.

    Derivatives of every order treat pack and unpack as the identity, as torch does; tensors that only a second
    derivative keeps are not packed. If the block is inside staged code (a jitted function, the body of a scan) that is
    differentiated from outside, a second derivative is an error, unless the pair is `differentiable`. Arrays on `ctx`
    attributes, constants of a compiled program and PRNG keys are not packed.

    A block belongs to the thread: leave it before each `await`.

    A copied or unpickled object is a new one, made with the same arguments; a pickled hook has to be a function of a
    module (or cloudpickle is needed).

    Args:
        pack_hook: from a tensor to anything: JAX keeps arrays in any pytree; other objects are held by reference.
        unpack_hook: from the result of `pack_hook` to a tensor of the same shape and dtype. It is called when
            `backward` asks for its saved tensors, perhaps several times for one pack. The library restores the weak
            type and the sharding.
        host: run both hooks on the host, with NumPy arrays, also in compiled programs. In a compiled program for
            several devices the hooks see the piece of each device, and nothing is gathered; a device that holds a copy
            packs its own. Explicit mesh axes tell the pieces; along automatic ones, where only the compiler knows, the
            first axis of the mesh cuts the first axis of the tensor that it divides, and each other one the last, and
            the compiler moves what it had placed otherwise. In eager mode the hooks see a whole tensor, or each shard
            in this process if other processes hold the rest. The result of `pack_hook` is dropped with the function
            that `jax.vjp` returned. In a compiled program it is dropped after its use, when the same place of the
            program packs again in the same thread (at most 8 threads may share a program; on several devices, in any
            thread; of a loop in eager mode, the same line), and on `close()`; where `backward` never runs, it stays
            until then, or until a million others wait as well. Not under `jax.checkpoint`, which refuses effects. If a
            hook raises on one of several devices that communicate, XLA may end the process, since the others wait for
            it.
        differentiable: whether JAX can differentiate pack, followed by unpack, with the derivative of the identity (a
            cast, a transfer; not rounding).
        only: a predicate of one array, of which it may read shape, dtype and sharding (`jax.typeof(x).sharding`).
            A tensor for which it is False is not packed: JAX keeps it as without hooks.

    Raises:
        TypeError: for hooks that are not callable or do not take one argument, and for a hook that needs values in
            traced code without `host`.
        ValueError: if `unpack_hook` returns another shape or dtype.
        RuntimeError: on entry, inside `disable_saved_tensors_hooks`; on exit, without an entry; and for a layer or an
            operation in the block of another asyncio task.
    """

    def __init__(
        self,
        pack_hook: Hook,
        unpack_hook: Hook,
        *,
        host: bool = False,
        differentiable: bool = False,
        only: Callable[[jax.Array], bool] | None = None,
    ) -> None:
        self._check(pack_hook=pack_hook, unpack_hook=unpack_hook, **({} if only is None else {"only": only}))
        known = (self._errors, bool(host) or self._is_last, self._pack_part)
        self._set_up([Step(pack_hook, unpack_hook, bool(host), bool(differentiable), only, *known)])

    # What is known of the hooks of a ready pair: see `Step`.
    _errors = Errors()
    _is_last = False
    _pack_part: Hook | None = None

    def _set_up(self, steps: Sequence[Step], only: Hook | None = None) -> None:
        self._steps, self._only = tuple(steps), only
        self._open: dict[int, Block] = {}
        self._packed: Counter[bool] | None = None  # before it is entered
        self._pair = Pair(self._steps, self._only, Counter())

    def _check(self, **functions: Any) -> None:
        for name, hook in functions.items():
            if not callable(hook):
                raise TypeError(
                    f"{type(self).__name__}: {name} must be callable, got {hook!r}. Pass a function of one argument."
                )
            if (misfit := _misfit(hook)) is not None:
                raise TypeError(
                    f"{type(self).__name__}: {name} takes one argument, {_TAKES[name]}; {hook!r} does not: {misfit}."
                )

    def __repr__(self) -> str:
        args, kwargs = self._made_with
        made = inspect.signature(type(self)).bind(*args, **kwargs)
        made.apply_defaults()
        shown = [f"{name}={_shown(x)}" for name, x in made.arguments.items() if x is not None and x is not False]
        text = f"{type(self).__name__}({', '.join(shown)})"
        if self._packed is None:
            return text
        traced = f", {self._packed[True]} of them traced" if self._packed[True] else ""
        return f"{text}: {plural(self._packed.total(), 'tensor', 'tensors')} packed{traced}"

    def __reduce__(self) -> tuple[Any, ...]:
        # Open blocks belong to a thread, and what programs hold belongs to a process: a copy has neither.
        return _make, (type(self), *self._made_with)

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        """`function`, which then runs inside a block."""
        if not callable(function):
            raise TypeError(f"{type(self).__name__} decorates a function, got {function!r}. Or use it in `with`.")
        if any(test(function) for test in _RUNS_LATER):
            raise TypeError(
                f"{type(self).__name__} decorates a function that runs when it is called, and {function!r} runs later. "
                "Put `with` around what is differentiated inside of it."
            )

        @functools.wraps(function)
        def hooked(*args: P.args, **kwargs: P.kwargs) -> R:
            __tracebackhide__ = True
            with self:
                trace = current_trace()
                if isinstance(trace, HooksTrace):
                    return trace.call(function, args, kwargs)
                return function(*args, **kwargs)

        return hooked

    def __enter__(self) -> Self:
        block = innermost_block()
        if block is not None and isinstance(block.value, Disabled) and not block.is_of_another_task():
            raise RuntimeError(block.value.message)
        if self._pair.globals_changed():  # a variable that a hook reads was bound anew
            self._pair = Pair(self._steps, self._only, self._pair.packed)
        self._packed = self._pair.packed
        mark_nested()
        self._pair.store.add_owner(self)
        block = enter_block(self._pair)
        self._open[id(block)] = block
        return self

    def __exit__(self, kind: type[BaseException] | None = None, *_: object) -> None:
        __tracebackhide__ = True
        # One object may be entered by several threads and tasks; a generator may be closed by another one.
        blocks = list(self._open.values())
        mine = [block for block in blocks if block.thread == threading.get_ident()]
        mine = [block for block in mine if not block.is_of_another_task()] or mine
        if not blocks:
            raise RuntimeError(f"{type(self).__name__}: __exit__ without __enter__. Use `with`, which calls both.")
        block = (mine or blocks)[-1]
        del self._open[id(block)]
        innermost = active.value
        block.leave()
        if kind is None and innermost is not block and isinstance(innermost, Block) and innermost.is_of_another_task():
            raise innermost.other_task_error()

    def close(self) -> None:
        """Drop everything that compiled programs hold for this pair. A backward that still asks for it fails.

        Pairs of the same functions, or of the same directory on disk, share what they hold, until the last one that was
        entered and is still there is closed. Without `close`, a program holds what its last run packed until it runs
        again, or until JAX lets it go: with its function, but after `jax.clear_caches()` if the program returned a vjp
        function, or was compiled for a loop in eager mode. (Of such loops from one line the last one holds what it
        packed.) That the pair is collected drops nothing, since JAX returns from a call before the program has run.
        """
        self._pair.store.close(self)


@contextlib.contextmanager
def disable_saved_tensors_hooks(message: str) -> Generator[None]:
    """Make it an error to enter a pair of hooks inside a block or a decorated function.

    Raises:
        RuntimeError: with `message`, if a pair is entered inside, or is active outside.
    """
    if active_pair() is not None:
        raise RuntimeError(message)
    block = Block(Disabled(message))
    block.enter()
    try:
        yield
    finally:
        block.leave()
