"""The blocks of hooks that are open in this thread."""

from __future__ import annotations

import contextlib
import contextvars
import sys
import threading
from typing import Any, Final, Self

import jax

from pylayer_jax._jax.imports import set_current_trace
from pylayer_jax._jax.tracers import current_trace

from .pair import Pair

SUSPENDED: Final = "suspended"  # the active value while an enclosing operation packs the residuals

# The innermost block of this thread. It is part of the key of every cache of JAX, so that a function is traced again if
# it was compiled without hooks, or with other hooks.
active: Final = jax.make_user_context(None)

# The blocks that this asyncio task has entered, or inherited from the task that made it.
_entered: Final[contextvars.ContextVar[tuple[Block, ...]]] = contextvars.ContextVar("entered", default=())


class Disabled:
    """The value of a block in which it is an error to enter a pair."""

    def __init__(self, message: str) -> None:
        self.message = message
        self.key = "disabled"


class Block(tuple[Any]):
    """One entry into a `with` block. For JAX's caches, blocks of equal pairs are equal.

    A block is a tuple of the key, which JAX hashes and compares quickly at each call of a jitted function.
    """

    def __new__(cls, value: Pair | Disabled, trace: Any = None) -> Self:
        del trace
        return super().__new__(cls, (value.key,))

    def __init__(self, value: Pair | Disabled, trace: Any = None) -> None:
        super().__init__()
        self.value = value
        self.is_left = False
        self._trace = trace  # the trace that gets the operations of the block
        self._task: Any = _current_task()
        self._thread = threading.get_ident()
        self._contexts: list[Any] = []

    def enter(self) -> Block:
        """Make this the innermost block."""
        self._contexts = [active(self)]
        if self._trace is not None:
            self._contexts.append(set_current_trace(self._trace))
        for context in self._contexts:
            context.__enter__()
        _entered.set((*_entered.get(), self))
        return self

    def leave(self) -> None:
        """Restore the block around this one.

        Raises:
            RuntimeError: if this is not the innermost block of this thread. The block is left all the same.
        """
        self.is_left, self._task = True, None
        _entered.set(tuple(block for block in _entered.get() if block is not self))
        innermost, trace, self._trace = active.value, self._trace, None
        if innermost is self and (trace is None or current_trace() is trace):
            while self._contexts:
                self._contexts.pop().__exit__(None, None, None)
            return
        if innermost is not self and isinstance(innermost, Block) and innermost.is_of_another_task():
            raise innermost.other_task_error()
        raise RuntimeError(
            "a block of saved_tensors_hooks was left in another thread, order or transformation than it was entered, "
            "as a generator may do. Leave a block where it was entered, the innermost one first."
        )

    def restore(self) -> None:
        """Make the enclosing block active again, after this one was left. JAX itself restores the trace."""
        self._contexts.pop(0).__exit__(None, None, None)
        self._contexts = []

    def is_mine(self) -> bool:
        """Return whether this thread and this asyncio task entered the block."""
        return self._thread == threading.get_ident() and not self.is_of_another_task()

    def is_of_another_task(self) -> bool:
        """Return whether another asyncio task entered the block, and the current task was not made inside it."""
        is_mine = id(self) in map(id, _entered.get()) or self._task is _current_task()
        return self._task is not None and not is_mine

    def other_task_error(self) -> RuntimeError:
        met, task = _current_task(), self._task
        entered = "another" if task is None else repr(task.get_name())
        here = "code outside of any task" if met is None else f"the asyncio task {met.get_name()!r}"
        return RuntimeError(
            f"a block of saved_tensors_hooks that the asyncio task {entered} entered is still open, "
            f"and {here} runs in the same thread. A block belongs to the thread, so that it would pack tensors of "
            "other tasks. Leave the block before each await, or give each task its own thread (asyncio.to_thread)."
        )


def _current_task() -> Any:
    asyncio = sys.modules.get("asyncio")  # without the import there is no task
    try:
        return None if asyncio is None else asyncio.current_task()
    except RuntimeError:  # no event loop runs
        return None


def innermost_block() -> Block | None:
    """Return the innermost open block of this thread, if hooks are not suspended."""
    while isinstance(block := active.value, Block) and block.is_left:
        block.restore()
    return block if isinstance(block, Block) else None


def active_pair() -> Pair | None:
    """Return the pair of the innermost block; None if there is none, or it is disabled or suspended.

    Raises:
        RuntimeError: if another asyncio task entered the block.
    """
    block = innermost_block()
    if block is None or not isinstance(block.value, Pair):
        return None
    if block.is_of_another_task():
        raise block.other_task_error()
    return block.value


def hooks_suspended() -> contextlib.AbstractContextManager[None]:
    """Return a context in which hooks pack nothing: the caller packs, or runs a hook."""
    return active(SUSPENDED)
