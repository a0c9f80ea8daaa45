"""The warning about a `backward` that does not return."""

from __future__ import annotations

import threading
import warnings
import weakref
from typing import Any

from ._messages import innermost

_warned: weakref.WeakSet[type] = weakref.WeakSet()
_lock = threading.Lock()


def warn_of_missing_return(layer: Any, name: str) -> None:
    """Warn, once per class and at the line of its `backward`, that it returned None though a gradient is needed."""
    with _lock:
        if layer in _warned:
            return
        _warned.add(layer)
    text = (
        f"{name}.backward returned None, although a gradient is needed; it counts as zero. Did you forget return? "
        "Return (None,) if zero is meant."
    )
    code = getattr(innermost(layer.backward), "__code__", None)
    try:
        if code is None:  # implemented in C
            warnings.warn(text, UserWarning, stacklevel=2)
        else:
            warnings.warn_explicit(text, UserWarning, code.co_filename, code.co_firstlineno)
    except UserWarning:  # warnings are errors: the next run raises it too
        with _lock:
            _warned.discard(layer)
        raise
