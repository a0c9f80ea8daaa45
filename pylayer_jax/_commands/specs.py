"""The arguments of a layer, as `python -m pylayer_jax check` reads them from the shell.

    SPEC   = VALUE | NAME=VALUE                 the second is passed by keyword
    VALUE  = DTYPE[SIZES] | key[] | STATIC | FUNCTION | (VALUE, ...) | [VALUE, ...] | {STATIC: VALUE, ...}
    DTYPE  = f32, bf16, i32, ...
    STATIC = a Python literal: 3, -0.5, True, None, 'text'
    FUNCTION = the dotted name of a function or class: jnp.tanh, jax.nn.gelu, mymodule.f

The text is parsed into a syntax tree of Python, of which only these forms are read. Names are imported, and nothing is
called.
"""

from __future__ import annotations

import ast
import dataclasses
import io
import pkgutil
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
_WIDE: Final = ("f64", "c128", "i64", "u64")
_EXPECTED: Final = (
    'Expected an array such as "f32[8,8]" or "f32[]", a Python literal such as 3, 0.5, True, None or \'"text"\', a '
    "function such as jnp.tanh, or a tuple, list or dict of these."
)
_ALIASES: Final = {"jnp": "jax.numpy", "np": "numpy"}


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
        keyword, equals, text = (part.strip() for part in spec.partition("="))
        if not (equals and keyword.isidentifier()):
            args.append(_value(spec, spec.strip()))
        elif keyword in kwargs:
            raise UnusableError(f"{spec}: the keyword {keyword} is given twice.")
        else:
            kwargs[keyword] = _value(spec, text)
    return tuple(args), kwargs


def _value(spec: str, text: str) -> Any:
    try:
        return _read(ast.parse(_with_scalars(text), mode="eval").body)
    except UnusableError as error:
        raise UnusableError(f"{spec}: {error}") from None
    # The last two are from literal_eval for a name, and from a list as the key of a dict.
    except (SyntaxError, tokenize.TokenError, ValueError, TypeError):
        hint = f" For a string, quote it twice: '\"{text}\"'." if text.isidentifier() else ""
        raise UnusableError(f"{spec}: {_EXPECTED}{hint}") from None


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
        case ast.Attribute():
            return _function(ast.unparse(node))
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


def _function(name: str) -> Any:
    first, _, rest = name.partition(".")
    try:
        found = pkgutil.resolve_name(f"{_ALIASES.get(first, first)}.{rest}")
    except Exception as error:  # a module may fail in any way while it is imported
        raise UnusableError(f"{name} cannot be found: {error}.") from error
    if not callable(found):
        raise UnusableError(f"Expected the name of a function, got {name}, which is {found!r}.")
    return found


def _array(name: str, index: ast.expr) -> ArraySpec:
    if name not in (*DTYPES, "key"):
        raise UnusableError(f"Unknown dtype {name!r}; expected one of {', '.join(DTYPES)}, or key.")
    sizes = index.elts if isinstance(index, ast.Tuple) else [index]
    shape = tuple(size.value for size in sizes if isinstance(size, ast.Constant) and type(size.value) is int)
    if len(shape) < len(sizes):
        raise UnusableError(f"Expected whole numbers as sizes, as in {name}[8,8].")
    if name == "key" and shape:
        raise UnusableError("Expected one PRNG key: key[].")
    return ArraySpec(name, shape)
