"""The blocks of hooks that are open, and the facts that a layer or an operation takes from them."""

from __future__ import annotations

import contextlib
import contextvars
import sys
import threading
from collections.abc import Generator, Sequence
from typing import Any, Final

import jax

from pylayer_jax._jax.identity_primitives import mark_hooks_block
from pylayer_jax._jax.imports import current, set_current_trace, summarize
from pylayer_jax._jax.tracers import (
    applied_to,
    current_trace,
    is_in_eager_loop,
    is_rematerialized,
    is_staging,
    trace_below,
)

from .pair import Pair


class Disabled:
    """Marker: hooks are disabled, and to enter a pair is an error."""

    __slots__ = ("message",)

    def __init__(self, message: str) -> None:
        self.message = message

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Disabled) and self.message == other.message

    def __hash__(self) -> int:
        return hash(self.message)


# Marker: an outer block already packs what is saved.
SUSPENDED: Final = "suspended"

# The innermost block. Part of the key of every cache of JAX, so that a function is traced again if it was compiled
# without hooks, or with other hooks. Local to the thread.
active: Final = jax.make_user_context(None)

# The blocks that this asyncio task has entered, or inherited from the task that made it.
_entered: Final[contextvars.ContextVar[tuple[Block, ...]]] = contextvars.ContextVar("entered", default=())


class Block:
    """One entry of a `with` block. For JAX's caches, blocks of equal pairs are equal.

    NOTE [open blocks]
    JAX's contexts belong to a thread, and each is restored by the code that changed it, the last one first. A block may
    end otherwise: a generator that holds it outlives the trace in which it was entered, or is closed before a block
    that was entered later, within a layer, or in another thread. Therefore a block that is left restores the contexts
    only where it is the innermost one. Otherwise it is marked as left, and whoever comes upon it goes on to the one
    around it. And while an asyncio task waits within a block, the other tasks of the thread run within it too. They
    notice, since a context variable belongs to a task.
    """

    __slots__ = ("__weakref__", "_context", "_outer", "_task", "left_in", "thread", "value")

    def __init__(self, value: Pair | Disabled) -> None:
        self.value = value
        self.thread = threading.get_ident()
        self.left_in = ""  # the thread in which it was left
        self._task: Any = None
        self._outer: Any = None
        self._context: Any = None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Block) and self.value == other.value

    def __hash__(self) -> int:
        return hash(self.value)

    def enter(self) -> None:
        self._task = _current_task()
        self._outer = active.value
        self._context = active(self)
        self._context.__enter__()
        _entered.set((*(block for block in _entered.get() if not block.left_in), self))

    def leave(self) -> None:
        self.left_in, self._task = threading.current_thread().name, None
        _entered.set(tuple(block for block in _entered.get() if block is not self))
        if active.value is self:
            self.restore()
        found = trace = current_trace()
        while getattr(trace, "is_hooks_block", False) and trace.block.left_in:
            trace = trace.outer_trace
        if trace is not found:
            set_current_trace(trace).__enter__()  # for good

    def restore(self) -> None:
        """Activate what was active before this block, which is left, and before those around it that are left."""
        block = self
        while isinstance(outer := block._outer, Block) and outer.left_in:
            block._outer = block._context = None
            block = outer
        context, block._outer, block._context = block._context, None, None
        context.__exit__(None, None, None)

    def is_of_another_task(self) -> bool:
        """Whether another asyncio task entered the block, and this one was not made inside it."""
        return (
            self._task is not None
            and not any(block is self for block in _entered.get())
            and self._task is not _current_task()
        )

    def other_task_error(self) -> RuntimeError:
        entered, met = self._task.get_name(), _current_task()
        here = "code outside of any task" if met is None else f"the asyncio task {met.get_name()!r}"
        return RuntimeError(
            f"a block of saved_tensors_hooks that the asyncio task {entered!r} entered is still open, and {here} runs "
            "in the same thread. A block belongs to the thread, so that it would pack what other tasks save. Leave the "
            "block before each await, or give the tasks threads of their own (asyncio.to_thread)."
        )


def _current_task() -> Any:
    asyncio = sys.modules.get("asyncio")  # where nobody has imported it there is no task
    try:
        return None if asyncio is None else asyncio.current_task()
    except RuntimeError:  # no event loop runs
        return None


def innermost_block() -> Block | None:
    """The innermost open block of this thread."""
    while isinstance(block := active.value, Block) and block.left_in:
        block.restore()
        # A jitted function that is traced here is remembered as one within the block.
        if is_staging(include_outer=True):
            is_here = block.left_in == threading.current_thread().name
            where = "within a layer or a hook" if is_here else f"in the thread {block.left_in!r}"
            raise RuntimeError(
                f"a block of saved_tensors_hooks that this thread entered was left {where}. JAX still counts the code "
                "that is being staged here as part of the block. Leave a block where it was entered. From here on it "
                "is over."
            )
    return block if isinstance(block, Block) else None


def active_pair() -> Pair | None:
    """The pair whose block is the innermost one.

    Raises:
        RuntimeError: if another asyncio task entered the block.
    """
    block = innermost_block()
    if block is None or not isinstance(block.value, Pair):
        return None
    if block.is_of_another_task():
        raise block.other_task_error()
    return block.value


@contextlib.contextmanager
def hooks_suspended() -> Generator[None]:
    """Pack nothing in here: the caller packs, or runs a hook."""
    with active(SUSPENDED):
        yield


@contextlib.contextmanager
def outside_hooks_trace() -> Generator[None]:
    """Run on the trace below the innermost hooks block."""
    with set_current_trace(trace_below(current_trace())):
        yield


def mark_nested() -> None:
    """Mark the staged code if it enters a block within another block that surrounds the code."""
    if innermost_block() is not None and not getattr(current_trace(), "is_hooks_block", False):
        mark_hooks_block()


class Hooks:
    """The pair that was active when a layer, or an operation, was applied."""

    __slots__ = ("deferred", "line_in_eager_loop", "pair", "rematerialized")

    def __init__(self, pair: Pair, tensors: Sequence[Any]) -> None:
        self.pair = pair
        self.deferred = applied_to(tensors).is_deferred  # see NOTE [packed tensors]
        self.rematerialized = pair.host and is_rematerialized()
        # Where it was applied, in a loop that runs in eager mode; see NOTE [host packs].
        self.line_in_eager_loop = summarize(current()) if pair.host and is_in_eager_loop() else None

    @staticmethod
    def captured(tensors: Sequence[Any]) -> Hooks | None:
        pair = active_pair()
        return None if pair is None else Hooks(pair, tensors)
