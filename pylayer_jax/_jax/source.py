"""Functions that read JAX's source information: the functions and the named scopes in which an operation was bound."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from typing import Any, Final

from .imports import summarize

_FRAME: Final = re.compile(r"(?P<file>.*?):(?P<line>\d+)(:\d+)? \((?P<function>.*)\)")
_SCOPE: Final = re.compile(r"[^/()]+(?=[/)]|$)")  # the scopes of "jvp(Attention)/scores", without transformations


def _frames(source: Any) -> list[re.Match[str]]:
    """Return the frames of user code, outermost first. JAX leaves out its own frames and those of this package."""
    lines = summarize(source, num_frames=1000).splitlines()
    return [match for match in map(_FRAME.fullmatch, lines) if match]


def _rest(outer: Sequence[Any], inner: Sequence[Any]) -> Sequence[Any]:
    """Return the entries of `inner` that follow the longest common start of both."""
    pairs = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(outer, inner, strict=False))
    return inner[len(list(pairs)) :]


def frames_between(outer: Any, inner: Any) -> list[str]:
    """Return the names of the functions that code at `outer` has called to come to `inner`, outermost first.

    A method has two names: the class that defines the method, and the method, unless its name is like `__call__`.
    """
    frames = _frames(inner)
    functions = [(frame["file"], frame["function"]) for frame in frames]
    rest = _rest([(frame["file"], frame["function"]) for frame in _frames(outer)], functions)
    names = [name for _, function in rest for name in _names(function)]
    return [name for name, previous in zip(names, [None, *names], strict=False) if name != previous]


def _names(function: str) -> Iterator[str]:
    for name in function.rpartition("<locals>.")[2].split("."):
        if not name.startswith("<") and not (name.startswith("__") and name.endswith("__")):
            yield name


def scopes_between(outer: Any, inner: Any) -> list[str]:
    """Return the names of the `jax.named_scope`s that were entered between `outer` and `inner`, outermost first."""
    around, within = (_SCOPE.findall(str(source.name_stack)) for source in (outer, inner))
    return list(_rest(around, within))


def line_of(sources: Sequence[Any]) -> str:
    """Return the innermost line, such as `model.py:12`, of source information from the outermost to the innermost.

    Lines outside of installed packages are preferred.
    """
    frames = [frame for source in reversed(sources) for frame in reversed(_frames(source))]
    own = [f for f in frames if "site-packages" not in f["file"] and "dist-packages" not in f["file"]]
    for frame in (own or frames)[:1]:
        return f"{frame['file'].replace(chr(92), '/').rpartition('/')[2]}:{frame['line']}"
    return ""
