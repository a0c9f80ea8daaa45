"""`saved_tensors_hooks` and `disable_saved_tensors_hooks`."""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
import weakref
from collections.abc import Callable, Generator
from typing import Any

from pylayer_jax._jax.names import current_trace, nothing_is_traced, set_current_trace

from .active import Hook, Pair, Refusal, active, active_pair, beneath, mark_nested
from .operations import HooksTrace

_RUNS_LATER = (inspect.isgeneratorfunction, inspect.iscoroutinefunction, inspect.isasyncgenfunction)


class _Block(contextlib.ExitStack):
    is_left = False


class _Opened(threading.local):
    """The blocks of this thread that were not closed yet, of all pairs, the innermost last."""

    def __init__(self) -> None:
        self.blocks: list[_Block] = []


_opened = _Opened()


class saved_tensors_hooks:  # noqa: N801 - the name in Paddle and torch
    """Pack what is saved for backward inside a block or a function, and unpack it when backward asks for it.

        def pack(x):
            return x.astype(jnp.bfloat16)

        def unpack(packed):
            return packed.astype(jnp.float32)

        def loss(w, x):
            with saved_tensors_hooks(pack, unpack):
                return jnp.sum(jnp.tanh(x @ w))

        jax.grad(loss)(w, x)

    The pair reaches what `save_for_backward` saves in every layer, and the residuals of every JAX operation
    in the block, an already jitted function or a whole scan being one operation. A tensor is packed once. It is
    the block around the differentiated code that counts: inside the function that `jax.grad` gets, or around a
    function that is decorated. A block around a call of `jax.grad` itself (or of a jitted train step) reaches the
    layers in it, but not its plain operations, which JAX does not show.

    In eager mode the hooks see concrete arrays, and what `pack_hook` returns is kept as it is: a NumPy array
    stays on the host, an object dies with the function that `jax.vjp` returned. In traced code they are traced
    like any other code, and run on the host, with NumPy arrays, where `host` is set.

    Derivatives of every order treat pack and unpack as the identity, as torch does; tensors that only a second
    derivative keeps are not packed. Where the block is inside of staged code (a jitted function, the body of a
    scan) that is differentiated from outside, a second derivative is an error, unless the pair is
    `differentiable`. Arrays on `ctx` attributes are not packed, and PRNG keys never are.

    Args:
        pack_hook: from a tensor to anything: arrays in any pytree are kept by JAX, other objects by reference.
        unpack_hook: from what `pack_hook` returned to a tensor of the same shape and dtype. It is called when
            `backward` asks for its saved tensors, perhaps several times for one pack. Weak type and sharding are
            restored for it.
        host: run both on the host, with NumPy arrays, also in compiled programs. What `pack_hook` returned is
            dropped with the function that `jax.vjp` returned; in a compiled program after its use, when the same
            place of the program packs again, and on `close()`. Not under `jax.checkpoint`, which refuses effects.
        differentiable: whether JAX can differentiate the hooks, one after the other with the derivative of the
            identity (a cast, a transfer, but no rounding).

    Raises:
        TypeError: for hooks that are not callable, and for a hook that needs values in traced code without `host`.
        ValueError: where `unpack_hook` returns another shape or dtype.
        RuntimeError: on entry, inside `disable_saved_tensors_hooks`.
    """

    def __init__(self, pack_hook: Hook, unpack_hook: Hook, *, host: bool = False, differentiable: bool = False) -> None:
        for name, hook in (("pack_hook", pack_hook), ("unpack_hook", unpack_hook)):
            if not callable(hook):
                raise TypeError(
                    f"{type(self).__name__}: {name} must be callable, got {hook!r}. Pass a function of one argument."
                )
        self._hooks = (pack_hook, unpack_hook, bool(host), bool(differentiable))
        self._entered = threading.local()
        self._pair = self._present_pair()

    def __call__(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function` with all of it inside a block."""
        if not callable(function):
            raise TypeError(f"{type(self).__name__} decorates a function, got {function!r}. Or use it in `with`.")
        if any(test(function) for test in _RUNS_LATER):
            raise TypeError(
                f"{type(self).__name__} decorates a function that runs when it is called, and {function!r} runs later. "
                "Put `with` around what is differentiated inside of it."
            )

        @functools.wraps(function)
        def hooked(*args: Any, **kwargs: Any) -> Any:
            with self:
                trace = current_trace()
                if isinstance(trace, HooksTrace):
                    return trace.call(function, args, kwargs)
                return function(*args, **kwargs)

        return hooked

    def _present_pair(self) -> Pair:
        pair = Pair(*self._hooks)
        weakref.finalize(self, pair.store.release, used_only=True).atexit = False
        return pair

    def __enter__(self) -> saved_tensors_hooks:
        if isinstance(active.value, Refusal):
            raise RuntimeError(active.value.message)
        if self._pair.is_outdated():  # a variable that a hook closes over was bound anew
            self._pair = self._present_pair()
        mark_nested(self._pair)
        block = _Block()
        block.enter_context(active(self._pair))
        if not nothing_is_traced():
            # The innermost pair alone applies.
            block.enter_context(set_current_trace(HooksTrace(beneath(current_trace()), self._pair)))
        self._blocks().append(block)
        _opened.blocks.append(block)
        return self

    def __exit__(self, *exception: object) -> None:
        self._blocks().pop().is_left = True
        # A block around one that is still open, as generators may have it, ends with that one.
        while _opened.blocks and _opened.blocks[-1].is_left:
            _opened.blocks.pop().close()

    def close(self) -> None:
        """Drop everything that compiled programs hold for this pair; a backward that asks for it fails."""
        self._pair.store.release()

    def _blocks(self) -> list[_Block]:
        if not hasattr(self._entered, "blocks"):
            self._entered.blocks = []
        return self._entered.blocks


@contextlib.contextmanager
def disable_saved_tensors_hooks(message: str) -> Generator[None]:
    """Make it an error to enter a pair of hooks inside a block or a decorated function.

    Raises:
        RuntimeError: with `message`, where a pair is entered inside, or is active outside.
    """
    if active_pair() is not None:
        raise RuntimeError(message)
    with active(Refusal(message)):
        yield
