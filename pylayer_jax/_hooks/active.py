"""The blocks of hooks that are open in this thread."""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Iterator
from typing import Any, Final

import jax

from pylayer_jax._jax.traces import current_trace, is_staging, set_current_trace

from .pack import Pair

SUSPENDED: Final = "suspended"  # the value of `active` while hooks run, and for operations that keep nothing
PLANNED: Final = "planned"  # the value of `active` while a function is staged for a plan, which packs its residuals
OFF: Final = "off"  # the value of `active` where blocks are ignored: the report counts residuals without hooks

# The innermost block of this thread, a part of the key of each of JAX's caches: see NOTE [blocks as keys].
active: Final = jax.make_user_context(None)

# Whether plans mark what they keep for the report. This flag is a part of the keys too.
is_reported: Final = jax.make_user_context(False)

_asked_for: Final = set[Any]()  # the keys of the pairs for which code asked while JAX traced it

# The innermost block that this asyncio task entered, or inherited from the task that created it. All tasks of a thread
# see the same value of `active`, so `check_task` compares the two.
_entered: Final[contextvars.ContextVar[Block | None]] = contextvars.ContextVar("entered", default=None)


class Block(set[Any]):
    """One entry into a `with` block of hooks. As a set, it has what it shares with equal blocks.

    NOTE [blocks as keys]
    The current block is a part of the keys of JAX's caches, which may keep it forever. So a block drops its pair when
    the program leaves it, and keeps only a hash of its key. JAX reuses a jaxpr if the current block equals the one in
    the key:

    - Most jaxprs, as that of `jnp.linalg.norm`, do not depend on hooks: their code does not ask for them
      (`active_pair`). So a block outside of staged code begins as *shared*: it equals the shared blocks of this thread,
      and no other. Otherwise JAX would trace and compile such code again for each new pair.
    - When code asks for hooks while JAX traces a jaxpr, the block stops being shared: it equals the blocks of equal
      pairs, which from then on begin so. It is never both, or a jaxpr that calls theirs would be one for all pairs.

    Since blocks may become unequal, all have one hash. A shared block of another thread is another one: else a thread
    that waits for a jaxpr of another would get the hooks of that one. tests: hooks/test_identity.py

    JAX's caches in C++ crash if another thread changes them during a comparison, as it may while Python code runs. So
    two blocks are equal if they share a key: `set.__and__` is C. tests: derivatives/test_several_runs.py
    """

    __eq__ = set.__and__  # type: ignore[assignment]
    __hash__ = (0).__hash__  # type: ignore[assignment]

    def __init__(self, value: Pair | str, trace: Any = None) -> None:
        self.value: Any = value  # a pair; or the message of `disable_saved_tensors_hooks`; None if the block was left
        self.key_of_pair = "pair", hash(value if isinstance(value, str) else value.key)  # their comparison is C too
        self.key_of_thread = threading.get_ident()
        is_shared = not (isinstance(value, str) or is_staging() or self.key_of_pair in _asked_for)
        self.add(self.key_of_thread if is_shared else self.key_of_pair)
        self.may_have_backward = True  # False if a decorated function entered it, and no backward pass was seen
        self.n_used_at_entry = 0 if isinstance(value, str) else value.n_used
        self.plans: dict[Any, Any] = {}  # of operations in eager mode: equal ones are planned once
        self.outer: Block | None = None
        self._trace = trace  # the trace that gets the operations inside the block; None: the trace of JAX gets them
        self._active: Any = OFF if active.value is OFF else self  # the value of `active` in the block
        self._contexts: list[Any] = []

    @property
    def is_at_top(self) -> bool:
        """Whether this open block is not ignored, and was entered in code that JAX does not trace."""
        return self._trace is None and self._active is self

    def enter(self) -> Block:
        self.outer = _entered.get()
        _entered.set(self)
        self._contexts = [active(self._active)]
        if self._trace is not None:
            self._contexts.append(set_current_trace(self._trace))
        for context in self._contexts:
            context.__enter__()
        return self

    def leave(self) -> None:
        """Leave this block, then raise a RuntimeError if it was not the innermost one of this thread."""
        trace, contexts = self._trace, self._contexts
        self.value, self._trace, self._contexts, self.plans = None, None, [], {}
        if _entered.get() is self:
            _entered.set(self.outer)
        is_innermost = active.value is self._active
        is_current = trace is None or current_trace() is trace
        if is_innermost:
            # `contexts[0]` sets `active`, and `contexts[1]`, if it exists, sets the current trace. If another
            # transformation has begun or ended inside the block, JAX itself restores the trace.
            for context in reversed(contexts if is_current else contexts[:1]):
                context.__exit__(None, None, None)
        if not (is_innermost and is_current):
            raise RuntimeError(
                "a block of saved_tensors_hooks was left in another thread, asyncio task, order or transformation than "
                "it was entered, as a generator may do. Leave a block where it was entered, the innermost one first."
            )

    def check_task(self) -> None:
        """Raise a RuntimeError unless the current asyncio task entered the block, or was created inside it."""
        if next(_open_blocks(_entered.get()), None) is not self:
            raise RuntimeError(
                "a block of saved_tensors_hooks that another asyncio task entered is still open in this thread. It "
                "would pack tensors of this task too. Leave the block before each await, or give each task its own "
                "thread (asyncio.to_thread)."
            )


def _open_blocks(block: Block | None) -> Iterator[Block]:
    """Yield the blocks that the program has not left, from `block` outwards."""
    while block is not None:
        if block.value is not None:
            yield block
        block = block.outer


def innermost_block() -> Block | None:
    """Return the innermost open block of this thread, if hooks are not suspended."""
    return next(_open_blocks(active.value), None) if isinstance(active.value, Block) else None


def entered_block(pair: Pair) -> Block | None:
    return next((block for block in _open_blocks(_entered.get()) if block.value is pair), None)


def active_pair() -> Pair | None:
    """Return the pair of the innermost block, which is then no longer shared if JAX traces a jaxpr."""
    block = innermost_block()
    if block is None or isinstance(block.value, str):
        return None
    block.check_task()
    if block.key_of_thread in block and is_staging():
        block.discard(block.key_of_thread)
        block.add(block.key_of_pair)
        _asked_for.add(block.key_of_pair)
    return block.value
