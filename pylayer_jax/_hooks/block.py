"""`saved_tensors_hooks` and `disable_saved_tensors_hooks`."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Generator, Sequence
from typing import Any, Final, ParamSpec, Self, TypeVar

import numpy as np

from pylayer_jax._jax.traces import nothing_is_traced, set_current_trace
from pylayer_jax._jax.types import typeof
from pylayer_jax._messages import plural
from pylayer_jax._trees import split

from .active import OFF, PLANNED, Block, active, active_pair, entered_block, innermost_block
from .host import store_of
from .operations import BackwardWatch, enter_block, mark_as_computed
from .pack import IDLE, Hook, Origin, Pair, Step, key_of
from .planned import NotPlannedError, call_planned, name_of

P = ParamSpec("P")
R = TypeVar("R")

_RUNS_LATER = (inspect.isgeneratorfunction, inspect.iscoroutinefunction, inspect.isasyncgenfunction)


def _takes(function: Callable[..., Any], n_arguments: int) -> bool:
    try:
        # A decorator written in Python may change the arguments, so read the signature of its wrapper.
        inspect.signature(function, follow_wrapped=not inspect.isfunction(function)).bind(*[None] * n_arguments)
    except TypeError:
        return False
    except ValueError:
        pass  # a function in C may have no signature
    return True


def check_hook(owner: str, name: str, hook: Any, *counts: int) -> None:
    if not callable(hook):
        raise TypeError(f"{owner}: {name} must be callable, got {hook!r}. Pass a function of one argument.")
    if not any(_takes(hook, count) for count in counts):
        expected = " or ".join(map(str, counts)) + " argument" + "s" * (counts != (1,))
        raise TypeError(f"{owner}: {name} takes {expected}, but {hook!r} does not.")


class Predicate:
    """The predicate `only` of a pair, as a function of an array and its origin."""

    def __init__(self, only: Callable[..., Any]) -> None:
        self._only = only
        self.takes_array_alone = _takes(only, 1)
        self.was_true = False
        self.seen: set[str] = set()  # tensors for which it was False, until it is True

    def __call__(self, array: Any, origin: Origin) -> bool:
        is_true = bool(self._only(array) if self.takes_array_alone else self._only(array, origin))
        self.was_true |= is_true
        if not self.was_true:
            names = ", ".join(origin.keys[:2])  # empty without a plan
            self.seen.add(f"{typeof(array)} of {names}" if names else str(typeof(array)))
        return is_true


def predicate(owner: str, only: Any) -> Predicate | None:
    if only is None:
        return None
    check_hook(owner, "only", only, 1, 2)
    return Predicate(only)


_packed_at_top: Final[set[int]] = set()  # hashes of the keys of the pairs that have packed in a block at top level


def _shown(value: Any) -> str:
    name = value.name if isinstance(value, np.dtype) else getattr(value, "__name__", None)
    return " ".join(repr(value).split()) if name is None else str(name)


class _RemembersInitArguments:
    """Base class, since `inspect.signature` prefers a `__new__` to an `__init__` of the same class."""

    _made_with: tuple[tuple[Any, ...], dict[str, Any]]
    _key: Any
    _was_entered = False  # for the `repr` of a pair whose `__init__` raised an error

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        self = super().__new__(cls)
        self._made_with = (args, kwargs)
        self._key = key_of(self)  # equal to itself alone
        return self


class saved_tensors_hooks(_RemembersInitArguments):  # noqa: N801 - the name in Paddle and torch
    """Pack the tensors that are saved for backward inside a block or a function, and unpack them for backward.

        >>> def pack(x):
        ...     return x.astype(jnp.bfloat16)
        >>> def unpack(packed):
        ...     return packed.astype(jnp.float32)
        >>> def loss(w, x):
        ...     with saved_tensors_hooks(pack, unpack):
        ...         return jnp.sum(jnp.tanh(x @ w))
        >>> jax.grad(loss)(jnp.ones((3, 2)), jnp.ones((4, 3))).shape
        (3, 2)

    The pair packs every tensor that a layer saves with `save_for_backward`, and the residuals of every JAX operation,
    in each iteration of a traced scan. What follows from other residuals by moving values (a transpose, a broadcast),
    by negation or by a cast that widens is computed again. Arrays on `ctx` attributes, constants and PRNG keys are not
    packed.

    Decorate the function that `jax.grad` gets, or put a block inside it. A decorated function is planned as a whole:
    where JAX traces or differentiates it, it is staged anew at each call, as by `jax.checkpoint`, and keeps the fewest
    bytes that backward needs. So its layers get traced arrays in eager mode too, and code that needs numbers is an
    error. A function that changes an argument in place, as modules of flax.nnx do, or that gets a `jax.Ref`, runs as in
    a block. A block packs what each operation keeps when it has run, as in torch: a tensor that two operations keep is
    packed twice.

    Around a call of `jax.grad`, or of a jitted train step, a block packs only the tensors that layers save, since JAX
    shows it no other residuals. The `repr` of a pair counts the tensors that it has packed: none if JAX reuses a
    program that it compiled for an equal pair.

    In eager mode, the hooks get concrete arrays, and the result of `pack_hook` is kept unchanged: a NumPy array stays
    on the host, and an object is released with the function that `jax.vjp` returned. In traced code, JAX traces the
    hooks too, unless `host=True`.

    Derivatives of every order treat `unpack(pack(x))` as the identity, as torch does. Tensors that JAX keeps only for a
    second derivative are not packed. If a block is inside staged code (a jitted function, the body of a scan) that JAX
    differentiates from outside, a second derivative is an error unless the hooks are `differentiable`. Forward mode
    works too; in staged code, its tangents may come from unpacked tensors.

    A block belongs to its thread, so leave it before each `await`. A copied or unpickled pair is a new pair.

    Args:
        pack_hook: takes a tensor and returns any pytree, of arrays and other objects.
        unpack_hook: takes the result of `pack_hook` and returns a tensor of the same shape and dtype as before; the
            weak type and the sharding are restored. It runs when `backward` reads the tensor, perhaps several times.
        host: whether both hooks run on the host, with NumPy arrays, also in compiled programs. On several devices, such
            a program gathers each tensor. The host drops an unpacked result when the same place in the program packs
            again, and all on `close()` or when JAX deletes the program. Inside `jax.checkpoint`, which allows no
            effects, such a block is an error.
        differentiable: whether JAX's derivative of `unpack(pack(x))` is that of the identity, as for a cast or a
            transfer, but not for rounding.
        only: a predicate of an array, or of an array and its origin `info`; a tensor for which it is False is kept as
            without hooks. It may read the shape, dtype and sharding (`jax.typeof(x).sharding`) of the array.
            `info.operation` or `info.layer` computed the tensor, `info.name` is its name (`saved_names`,
            `checkpoint_name`), and `info.inside` has the functions (and their classes) from the block to the operation,
            and then the `jax.named_scope`s, each outermost first: `("loss", "Block", "Attention")`. If the
            predicate takes `info`, the pair decorates functions only.

    Warns:
        UserWarning: once per pair, if a block at top level, or a decorated function with a backward pass in it, has
            packed nothing, if `only` was never True, or if a decorated function runs as in a block.

    Raises:
        TypeError: if a hook is not callable or does not take one argument, or if a hook without `host` needs values in
            traced code.
        ValueError: if `unpack_hook` returns another shape or dtype.
        RuntimeError: if a block is entered inside `disable_saved_tensors_hooks` or left without an entry, or if a layer
            or an operation runs in the block of another asyncio task.
    """

    def __init__(
        self,
        pack_hook: Hook,
        unpack_hook: Hook,
        *,
        host: bool = False,
        differentiable: bool = False,
        only: Callable[..., Any] | None = None,
    ) -> None:
        owner = type(self).__name__
        check_hook(owner, "pack_hook", pack_hook, 1)
        check_hook(owner, "unpack_hook", unpack_hook, 1)
        step = Step(pack_hook, unpack_hook, bool(host), bool(differentiable), predicate(owner, only))
        key = *map(key_of, (pack_hook, unpack_hook, only)), step.host, step.differentiable
        self._set_up(saved_tensors_hooks, key, [step], recomputes_elementwise=False, packs_arguments=True)

    def _set_up(self, defined_in: type[Any], key_parts: tuple[Any, ...], steps: Sequence[Step], **options: Any) -> None:
        # A pair of a subclass with an `__init__` of its own equals only itself, because its hooks may store state.
        if type(self).__init__ is defined_in.__init__:
            self._key = key_of(type(self)), *key_parts
        self._pair = Pair(steps, self._key, store_of(self._key), type(self).__name__, **options)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, saved_tensors_hooks) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    def __repr__(self) -> str:
        args, kwargs = self._made_with
        shown = [*map(_shown, args), *(f"{name}={_shown(x)}" for name, x in kwargs.items())]
        text = f"{type(self).__name__}({', '.join(shown)})"
        if not self._was_entered:
            return text
        n_packed, n_recomputed = self._pair.n_packed, self._pair.n_recomputed
        recomputed = f", {n_recomputed.total()} computed again" if n_recomputed else ""
        n_traced = n_packed[True] + n_recomputed[True]
        traced = f", {n_traced} of them traced" if n_traced else ""
        return f"{text}: {plural(n_packed.total(), 'tensor')} packed{recomputed}{traced}"

    def __reduce__(self) -> tuple[Any, ...]:
        # Open blocks belong to a thread and packed values to a process, so a copy has neither.
        args, kwargs = self._made_with
        return functools.partial(type(self), *args, **kwargs), ()

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        if not callable(function):
            raise TypeError(f"{type(self).__name__} decorates a function, got {function!r}. Or use it in `with`.")
        if any(test(function) for test in _RUNS_LATER):
            raise TypeError(
                f"{type(self).__name__} decorates a function that runs when it is called, and {function!r} runs later. "
                "Put `with` around the differentiated code inside of it."
            )

        is_first_call = True

        @functools.wraps(function)
        def hooked(*args: P.args, **kwargs: P.kwargs) -> R:
            __tracebackhide__ = True
            nonlocal is_first_call
            if active.value is OFF:
                return function(*args, **kwargs)
            is_first, is_first_call = is_first_call, False  # a later call may run a compiled step, unseen by a watch
            if not nothing_is_traced():
                return self._planned(function, args, kwargs)
            has_block, n_used_before = not self._pair.needs_plan, self._pair.n_used
            if not has_block:
                self._begin()
            watch = BackwardWatch()
            with self if has_block else contextlib.nullcontext():
                with set_current_trace(watch) if is_first else contextlib.nullcontext():
                    result = function(*args, **kwargs)
                if (block := entered_block(self._pair)) is not None:
                    block.may_have_backward = watch.was_seen
            if not has_block:
                self._end(self._pair.n_used > n_used_before, watch.was_seen)
            return result

        return hooked

    def _planned(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        __tracebackhide__ = True
        self._begin()
        try:
            result = call_planned(function, self._pair, args, kwargs)
        except NotPlannedError as error:
            reason = str(error)
        else:
            self._pair.warn_of_unmatched()
            mark_as_computed(split(result)[0])  # in a block of other hooks around it
            return result
        name = name_of(function)
        advice = (
            "Return the new state instead; or, for modules of flax.nnx, decorate the function of their arrays, with "
            "split_inputs and merge_inputs of flax.nnx.transforms.general: "
            f"split_inputs(packer(merge_inputs({name})))."
        )
        if self._pair.needs_plan:
            raise TypeError(f"{type(self).__name__} plans {name} as a whole, and cannot, since {reason}. {advice}")
        self._pair.warn_once(
            f"{name} runs as in a `with` block, where nothing is planned across operations and about "
            f"twice as much is kept, since {reason}. {advice}"
        )
        with self:
            return function(*args, **kwargs)

    def _begin(self) -> None:
        """Raise an error where hooks are disabled, or note that this pair is in use."""
        block = innermost_block()
        if block is not None and isinstance(block.value, str):
            block.check_task()
            raise RuntimeError(block.value)
        self._was_entered = True
        self._pair.store.add_owner(self)

    def __enter__(self) -> Self:
        if self._pair.needs_plan:
            raise TypeError(
                f"{type(self).__name__}: a limit, by_name, and an `only` that takes (array, info) decide for a whole "
                "function, and a `with` block packs each operation alone: decorate the function, as in packer(loss)."
            )
        self._begin()
        enter_block(self._pair)
        return self

    def __exit__(self, kind: type[BaseException] | None = None, *_: object) -> None:
        __tracebackhide__ = True
        block = entered_block(self._pair)
        if block is None:
            raise RuntimeError(
                f"{type(self).__name__}: __exit__ without __enter__ in this thread. Use `with`, which calls both."
            )
        is_at_top, was_used = block.is_at_top, self._pair.n_used > block.n_used_at_entry
        with contextlib.nullcontext() if kind is None else contextlib.suppress(RuntimeError):
            block.leave()
        self._end(is_at_top and was_used, is_at_top and block.may_have_backward, is_error=kind is not None)

    def _end(self, was_used: bool, may_have_backward: bool, is_error: bool = False) -> None:
        """Note that the pair was used at top level, or warn of what did nothing."""
        pair = self._pair
        if was_used:
            _packed_at_top.add(hash(pair.key))
        if is_error:
            return
        # A jitted step that JAX compiled in such a block of an equal pair packs without calling the hooks of this pair.
        if may_have_backward and hash(pair.key) not in _packed_at_top:
            pair.warn_once(IDLE)
        pair.warn_of_unmatched()

    def close(self) -> None:
        """Drop the packed values that compiled programs hold for this pair. A backward that needs them then fails.

        Equal pairs share these values, which go when all of them that were entered and still exist are closed. Without
        `close`, a program holds the values of its last run until it runs again or JAX deletes it; JAX keeps a program
        for each call of `jax.lax.scan` outside of `jax.jit`. Deleting the pair drops nothing, since JAX returns from a
        call before the program has run.
        """
        self._pair.store.close(self)


@contextlib.contextmanager
def disable_saved_tensors_hooks(message: str) -> Generator[None]:
    """Forbid entering a pair of hooks, or calling a function that it decorates, inside this block.

        >>> with disable_saved_tensors_hooks("not here"), cast_saved():
        ...     pass
        Traceback (most recent call last):
            ...
        RuntimeError: not here

    Raises:
        RuntimeError: with `message`, if a pair is entered inside this block, or is active around it.
    """
    if active_pair() is not None or active.value is PLANNED:
        raise RuntimeError(message)
    block = Block(message).enter()
    try:
        yield
    finally:
        block.leave()
