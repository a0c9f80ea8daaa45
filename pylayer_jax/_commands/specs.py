"""The arguments of a layer, as `python -m pylayer_jax check` reads them from the shell.

    SPEC   = VALUE | NAME=VALUE                 the second is passed by keyword
    VALUE  = DTYPE[SIZES] | key[] | STATIC | (VALUE, ...) | [VALUE, ...] | {STATIC: VALUE, ...}
    DTYPE  = f32, float32, bf16, ...            in either case
    STATIC = a Python literal: 3, -0.5, True, None, 'text'

The text is parsed into a syntax tree of Python, of which only these forms are read. Nothing is evaluated.
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import io
import re
import token
import tokenize
from collections.abc import Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np

DTYPES: Final = {
    "f16": jnp.float16,
    "bf16": jnp.bfloat16,
    "f32": jnp.float32,
    "f64": jnp.float64,
    "c64": jnp.complex64,
    "c128": jnp.complex128,
    "i8": jnp.int8,
    "i16": jnp.int16,
    "i32": jnp.int32,
    "i64": jnp.int64,
    "u8": jnp.uint8,
    "u16": jnp.uint16,
    "u32": jnp.uint32,
    "u64": jnp.uint64,
    "bool": jnp.bool_,
}
_LONG: Final = {np.dtype(dtype).name: name for name, dtype in DTYPES.items()}  # the names that reports print
_WIDE: Final = ("f64", "c128", "i64", "u64")


class UnusableError(Exception):
    """The command cannot understand or find an argument; the message says what it expected."""


@dataclasses.dataclass(frozen=True)
class ArraySpec:
    """An array that is to be made, or a PRNG key."""

    dtype: str  # as in DTYPES, or "key"
    shape: tuple[int, ...]

    @property
    def is_wide(self) -> bool:
        """Whether JAX needs `jax.enable_x64` for it."""
        return self.dtype in _WIDE

    def make(self, rng: np.random.Generator, seed: int) -> jax.Array:
        """Random numbers of size 0.2 to 1.2 and either sign; zeros and ones for integers and booleans."""
        if self.dtype == "key":
            return jax.random.key(seed)
        dtype = DTYPES[self.dtype]

        def away_from_zero() -> Any:
            return rng.uniform(0.2, 1.2, self.shape) * rng.choice([-1.0, 1.0], self.shape)

        if jnp.issubdtype(dtype, jnp.complexfloating):
            return jnp.asarray(away_from_zero() + 1j * away_from_zero(), dtype)
        if jnp.issubdtype(dtype, jnp.floating):
            return jnp.asarray(away_from_zero(), dtype)
        return jnp.asarray(rng.integers(0, 2, self.shape), dtype)


def parse_arguments(specs: Sequence[str]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The positional and the keyword arguments, in which each array is an `ArraySpec`.

    Raises:
        UnusableError: if a spec is not one, or two give the same keyword.
    """
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    for spec in specs:
        keyword, text = _keyword(spec)
        value = _parsed(spec, text)
        if keyword is None:
            args.append(value)
        elif keyword in kwargs:
            raise UnusableError(f"{spec}: the keyword {keyword} is given twice.")
        else:
            kwargs[keyword] = value
    return tuple(args), kwargs


def _keyword(spec: str) -> tuple[str | None, str]:
    name, equals, text = spec.partition("=")
    return (name.strip(), text) if equals and name.strip().isidentifier() else (None, spec)


def _parsed(spec: str, text: str) -> Any:
    try:
        return _value(text)
    except _NoSpecError as error:
        reason = str(error)
    suggestions = _suggestions(text)
    if suggestions:
        meant = " or ".join(f'"{spec.removesuffix(text)}{suggestion}"' for suggestion in suggestions[:3])
        raise UnusableError(f"{spec}: did you mean {meant}? {reason}")
    hint = f" For a string, quote it twice: '\"{text}\"'." if text.isidentifier() else ""
    raise UnusableError(f"{spec}: {reason}{hint}")


# -- reading --------------------------------------------------------------------------------------


class _NoSpecError(Exception):
    """The text is not a spec; the message says what was expected."""


_EXPECTED: Final = (
    'Expected an array such as "f32[8,8]" or "f32[]", a Python literal such as 3, 0.5, True, None or \'"text"\', or a '
    "tuple, list or dict of these."
)


def _value(text: str) -> Any:
    text = text.strip()
    try:
        node = ast.parse(_with_scalars(text), mode="eval").body
        if not isinstance(node, ast.Tuple) or text.startswith("("):
            return _read(node)
    # The last four are from literal_eval for a name, from a list as the key of a dict, and from very long texts.
    except (SyntaxError, tokenize.TokenError, ValueError, TypeError, RecursionError, MemoryError):
        raise _NoSpecError(_EXPECTED) from None
    raise _NoSpecError("An array needs a dtype, and a tuple needs parentheses.")


def _with_scalars(text: str) -> str:
    """`f32[]` is not Python: write `f32[()]`, which has the same meaning here. Strings stay as they are."""
    lines = text.splitlines()
    tokens = list(tokenize.generate_tokens(io.StringIO(text).readline))
    for name, opened, closed in reversed(list(zip(tokens, tokens[1:], tokens[2:], strict=False))):
        if name.type == token.NAME and opened.string == "[" and closed.string == "]":
            row, column = opened.end
            lines[row - 1] = f"{lines[row - 1][:column]}(){lines[row - 1][column:]}"
    return "\n".join(lines)


def _read(node: ast.expr) -> Any:
    match node:
        case ast.Subscript(ast.Name(name), index):
            return _array(name, index)
        case ast.Tuple(elements):
            return tuple(map(_read, elements))
        case ast.List(elements):
            return [_read(element) for element in elements]
        case ast.Dict(keys, values) if None not in keys:
            pairs = zip(keys, values, strict=True)
            read = {ast.literal_eval(key): _read(value) for key, value in pairs if key is not None}
            sorted(read)  # a TypeError, if the keys have several types: JAX cannot sort them either
            return read
        case _:
            return ast.literal_eval(node)


def _array(name: str, index: ast.expr) -> ArraySpec:
    dtype = _dtype(name)
    if dtype is None:
        raise _NoSpecError(f"Unknown dtype {name!r}; expected one of {', '.join(DTYPES)}, or key.")
    sizes = index.elts if isinstance(index, ast.Tuple) else [index]
    shape = tuple(size.value for size in sizes if isinstance(size, ast.Constant) and type(size.value) is int)
    if len(shape) < len(sizes):
        raise _NoSpecError(f"Expected whole numbers as sizes, as in {name}[8,8].")
    if dtype == "key" and shape:
        raise _NoSpecError("Expected one PRNG key: key[].")
    return ArraySpec(dtype, shape)


def _dtype(name: str) -> str | None:
    name = name.lower()
    name = _LONG.get(name, name)
    return name if name in DTYPES or name == "key" else None


# -- suggestions ----------------------------------------------------------------------------------

_SIZES: Final = r"\d+(?:\s*[,x*; ]\s*\d+)*"
# An array that is written in another way: f32[8x8], f32(8,8), f32<8,8>, f32{8}, f32:8,8, f32 8 8, jnp.float32[8].
_NEARLY: Final = re.compile(
    rf"(?:\b\w+\.)?\b([A-Za-z]+\d+|[A-Za-z]+)\s*(?:[\[({{<:]|(?=\s\d))\s*({_SIZES}|)\s*[,;]?\s*(?:[\])}}>]|$)"
)
_SYNONYMS: Final = {"float": "f32", "double": "f64", "half": "f16", "int": "i32", "complex": "c64", "prngkey": "key"}


def _suggestions(text: str) -> list[str]:
    """Specs near to a text that is not one."""
    text = text.strip()
    if re.fullmatch(_SIZES, text):  # no dtype
        found = [f"f32[{_sizes(text)}]", f"({text})"]
    elif text.lower() in (*DTYPES, *_LONG, "key"):  # no sizes
        found = [f"{_dtype(text)}[]"]
    else:
        found = list(dict.fromkeys(_respelled(text, choice) for choice in range(len(DTYPES))))
    return [suggestion for suggestion in found if suggestion != text and _is_spec(suggestion)]


def _respelled(text: str, choice: int) -> str:
    """The text with each array as this command reads it; `choice` picks one of several dtypes that are equally near."""

    def array(match: re.Match[str]) -> str:
        near = _near_dtypes(match[1])
        return f"{near[min(choice, len(near) - 1)]}[{_sizes(match[2])}]" if near else match[0]

    return _NEARLY.sub(array, text)


def _near_dtypes(name: str) -> list[str]:
    """The dtypes that a name may stand for, all equally near."""
    exact = _dtype(_SYNONYMS.get(name.lower(), name))
    if exact is not None:
        return [exact]
    known = {**{short: short for short in DTYPES}, **_LONG}
    near = difflib.get_close_matches(name.lower(), known, n=len(known))
    ratios = [difflib.SequenceMatcher(None, found, name.lower()).ratio() for found in near]
    best = [known[found] for found, ratio in zip(near, ratios, strict=True) if ratio == ratios[0]]
    return [short for short in DTYPES if short in best]


def _sizes(text: str) -> str:
    return ",".join(re.findall(r"\d+", text))


def _is_spec(text: str) -> bool:
    try:
        _value(text)
    except _NoSpecError:
        return False
    return True
