"""`python -m pylayer_jax check MODULE:LAYER SPEC...`: the report of `check_layer` from the shell."""

from __future__ import annotations

import argparse
import ast
import contextlib
import importlib
import importlib.util
import os
import re
import sys
from operator import attrgetter
from pathlib import Path
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np

from pylayer_jax.testing import check_layer
from pylayer_jax.testing._check_layer import LayerReport

_DTYPES: Final = {
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
_LONG: Final = {np.dtype(dtype).name: name for name, dtype in _DTYPES.items()}  # the names that reports print
_ARRAY: Final = re.compile(r"(\w+)\[\s*(\d+(?:\s*,\s*\d+)*|)\s*\]")
_LAYER: Final = "Expected MODULE:NAME, such as mypackage.layers:Tanh or layers.py:Tanh"


class _UnusableError(Exception):
    """The command cannot understand or find an argument; the message says what it expected."""


def check(arguments: list[str]) -> LayerReport:
    """The report of the layer that the arguments name. Exits with status 2 if an argument is not usable."""
    parser = argparse.ArgumentParser(
        prog="python -m pylayer_jax check",
        description="Check a layer under each transform of JAX, and its gradients against numerical ones. Prints one "
        "line per property; the exit status is 0 if the layer has them all, 1 if not.",
        epilog='For example: python -m pylayer_jax check layers.py:Scale "f32[8,8]" 0.5',
    )
    parser.add_argument("layer", metavar="MODULE:LAYER", help="a layer class, or a function that applies one")
    parser.add_argument(
        "specs",
        metavar="SPEC",
        nargs="*",
        help='an array, as "f32[8,8]" or "f32[]" with numbers between -1.2 and 1.2 that are not near 0, "i32[4]" with '
        f"zeros and ones ({', '.join(_DTYPES)}); key[] for a PRNG key; or a Python literal for a static: 3, 0.5, True, "
        "None, '\"text\"'. Write -- before the first one if one begins with a minus",
    )
    parser.add_argument(
        "--reference",
        metavar="MODULE:FUNCTION",
        help="a function of the same arguments in plain JAX whose gradients are right; needed if backward is not the "
        "gradient of forward",
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the numbers in the arrays (default: 0)")
    parser.add_argument(
        "--skip", metavar="NAME", action="append", default=[], help="a property that is not tested; may be repeated"
    )
    parser.add_argument(
        "--no-float64",
        dest="float64",
        action="store_false",
        help="compute numerical gradients in the dtypes given; for a layer that rounds to a narrower dtype internally",
    )
    options = parser.parse_args(arguments)
    try:
        specs = [_shortened(spec) for spec in options.specs]
        wide = any(spec.startswith(("f64[", "c128[", "i64[", "u64[")) for spec in specs)
        with jax.enable_x64(True) if wide else contextlib.nullcontext():
            layer = _load(options.layer)
            reference = None if options.reference is None else _load(options.reference)
            rng = np.random.default_rng(options.seed)
            args = [_argument(spec, rng, options.seed) for spec in specs]
            try:
                report = check_layer(
                    layer, *args, reference=reference, skip=options.skip, float64=options.float64, raises=False
                )
            except ValueError as error:  # no argument can be differentiated, or --skip has an unknown name
                raise _UnusableError(str(error)) from error
    except _UnusableError as error:
        parser.error(str(error))
    return report


def _shortened(spec: str) -> str:
    name, bracket, sizes = spec.partition("[")
    return f"{_LONG.get(name, name)}[{sizes}" if bracket else spec


def _argument(spec: str, rng: np.random.Generator, seed: int) -> Any:
    if spec == "key[]":
        return jax.random.key(seed)
    match = _ARRAY.fullmatch(spec)
    if match is None:
        if "=" in spec and spec.partition("=")[0].isidentifier():
            raise _UnusableError(
                f"{spec}: arguments are positional here. For keywords, name a function that applies the layer with "
                "them."
            )
        try:
            return ast.literal_eval(spec)
        except (ValueError, SyntaxError):
            hint = f" For a string, quote it twice: '\"{spec}\"'." if spec.isidentifier() else ""
            raise _UnusableError(
                f'{spec}: expected an array such as "f32[8,8]" or "f32[]", or a Python literal such as 3, 0.5, True, '
                f"None or '\"text\"'.{hint}"
            ) from None
    name, sizes = match.groups()
    if name not in _DTYPES:
        raise _UnusableError(f"{spec}: unknown dtype {name!r}; expected one of {', '.join(_DTYPES)}.")
    return _random([int(size) for size in sizes.split(",") if size], _DTYPES[name], rng)


def _random(shape: list[int], dtype: Any, rng: np.random.Generator) -> jax.Array:
    def away_from_zero() -> Any:
        return rng.uniform(0.2, 1.2, shape) * rng.choice([-1.0, 1.0], shape)

    if jnp.issubdtype(dtype, jnp.complexfloating):
        return jnp.asarray(away_from_zero() + 1j * away_from_zero(), dtype)
    if jnp.issubdtype(dtype, jnp.floating):
        return jnp.asarray(away_from_zero(), dtype)
    return jnp.asarray(rng.integers(0, 2, shape), dtype)


def _load(target: str) -> Any:
    module_or_file, _, name = target.rpartition(":")
    if not module_or_file or not name:
        raise _UnusableError(f"{target}: {_LAYER}.")
    module = _module(module_or_file)
    try:
        found = attrgetter(name)(module)
    except AttributeError:
        public = [k for k, v in vars(module).items() if callable(v) and not k.startswith("_")]
        raise _UnusableError(
            f"{target}: {module_or_file} has no {name}. It has {', '.join(public[:20]) or 'no callables'}."
        ) from None
    if not callable(getattr(found, "apply", None) if isinstance(found, type) else found):
        raise _UnusableError(f"{target}: expected a layer class or a function, got {found!r}.")
    return found


def _module(module_or_file: str) -> Any:
    path = Path(module_or_file)
    is_file = module_or_file.endswith(".py")
    if is_file and not path.is_file():
        raise _UnusableError(f"{module_or_file}: no such file. {_LAYER}.")
    # Python puts the same folder on the path for a script, or for -m.
    sys.path.insert(0, str(path.resolve().parent) if is_file else os.getcwd())
    try:
        if not is_file:
            return importlib.import_module(module_or_file)
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules.setdefault(path.stem, module)  # dataclasses and pickle look for the module there
        spec.loader.exec_module(module)
        return module
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        raise _UnusableError(f"{module_or_file}: cannot be imported ({reason}). {_LAYER}.") from error
    finally:
        sys.path.pop(0)
