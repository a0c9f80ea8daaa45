"""The command line: `python -m pylayer_jax` runs the demo on real data, and `check` checks a user's own layer.

    python -m pylayer_jax check layers.py:Scale "f32[8,8]" 0.5 jax.numpy.tanh
    ->  check_layer(Scale, <array of 8 x 8 random numbers>, 0.5, jax.numpy.tanh)

`check` never evaluates a spec as Python code: a spec is an array type, a Python literal, or a dotted name.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import pkgutil
import re
import sys
from pathlib import Path
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np

from . import __version__, _demo
from ._report import function_of
from .testing._checkers import LayerReport, check_layer


def main(arguments: list[str]) -> int:
    """Run the command line. Return 0 if the demo reached its goals or the layer passed, else 1."""
    if arguments[:1] == ["check"]:
        report = check(arguments[1:])
        encoding = sys.stdout.encoding or "utf-8"
        print(str(report).encode(encoding, "namereplace").decode(encoding))  # a pipe on Windows cannot encode a tick
        return 0 if report.passed else 1
    parser = argparse.ArgumentParser(
        prog="python -m pylayer_jax",
        usage="%(prog)s [--epochs EPOCHS] [--seed SEED] [--quiet]\n       %(prog)s check MODULE:LAYER SPEC...",
        description="Train a classifier of handwritten digits whose activations and quantizer are PyLayers. Compare "
        "its gradients with plain JAX, and train it again with packed saved tensors.",
        epilog="To check a layer of your own: python -m pylayer_jax check --help",
    )
    parser.add_argument("--epochs", type=int, default=30, help="passes over the training images (default: 30)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the weights and of the split (default: 0)")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")
    parser.add_argument("--version", action="version", version=__version__)
    options = parser.parse_args(arguments)
    if options.epochs < 1:
        parser.error(f"--epochs: expected at least 1, got {options.epochs}")
    try:
        return 0 if _demo.run(options.epochs, options.seed, progress=not options.quiet) else 1
    except ImportError as error:
        print(f"{error.name} is missing. The demo needs: pip install optax scikit-learn tqdm", file=sys.stderr)
        return 1


# -- check -----------------------------------------------------------------------------------------------

_BITS: Final = {"float": (16, 32, 64), "complex": (64, 128), "int": (8, 16, 32, 64), "uint": (8, 16, 32, 64)}
_NUMBERS: Final = {f"{kind[0]}{n}": f"{kind}{n}" for kind, sizes in _BITS.items() for n in sizes}
_DTYPES: Final = {**_NUMBERS, "bf16": "bfloat16", "bool": "bool"}
_SPECS: Final = f"""\
An argument of the layer (SPEC) is one of
  "f32[8,8]" "f32[]"   an array of random numbers, with absolute values from 0.2 to 1.2 and random signs; or of random
                       zeros and ones, for "i32[4]" and "bool[4]". The dtypes are {", ".join(_DTYPES)}
  "key[]"              a PRNG key
  0.5 -3 None "'sum'"  a Python literal, which the layer gets unchanged. Quote a string twice, as in "'sum'"
  jax.numpy.tanh       a function, or any other object of a module, by its dotted name

For other arguments (keywords, dicts of arrays, special values) write a function that makes them from arrays and
applies the layer, and check that. Write -- before the specs if one begins with a minus and is not a number.

example: python -m pylayer_jax check layers.py:Scale "f32[8,8]" 0.5
"""


def check(arguments: list[str]) -> LayerReport:
    """Return the report about the layer. Exit with status 2 if an argument is invalid."""
    parser = argparse.ArgumentParser(
        prog="python -m pylayer_jax check",
        description="Check a layer under each transform of JAX, and its gradients against numerical ones.\n"
        "Prints one line per property; the exit status is 0 if the layer has them all, 1 if not.",
        epilog=_SPECS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("layer", metavar="MODULE:LAYER", help="a layer class, or a function that applies one")
    parser.add_argument("specs", metavar="SPEC", nargs="*", help="an argument of the layer; see below")
    parser.add_argument(
        "--reference",
        metavar="MODULE:FUNCTION",
        help="plain JAX with the gradients that are meant, if they differ from those of forward (straight-through)",
    )
    parser.add_argument("--skip", metavar="NAME", action="append", default=[], help="leave out a property; repeatable")
    parser.add_argument("--seed", type=int, default=0, help="seed of the numbers in the arrays (default: 0)")
    parser.add_argument("--rtol", type=float, help="relative tolerance, instead of one that fits the dtypes")
    parser.add_argument("--atol", type=float, help="absolute tolerance, instead of one that fits the dtypes and sizes")
    parser.add_argument(
        "--no-float64",
        dest="float64",
        action="store_false",
        help="compute numerical gradients in the dtypes given; for NumPy code that rounds to a narrower dtype",
    )
    options = parser.parse_args(arguments)
    is_wide = any(re.match(r"[fiu]64\b|c128\b", spec) for spec in options.specs)
    rng = np.random.default_rng(options.seed)
    try:
        with jax.enable_x64(True) if is_wide else contextlib.nullcontext():
            return check_layer(
                _load(options.layer),
                *[_argument(spec, rng, options.seed) for spec in options.specs],
                reference=None if options.reference is None else _load(options.reference),
                skip=options.skip,
                rtol=options.rtol,
                atol=options.atol,
                float64=options.float64,
                raises=False,
            )
    except ValueError as error:  # an argument of the command or of `check_layer` is invalid
        parser.error(str(error))


def _argument(spec: str, rng: np.random.Generator, seed: int) -> Any:
    if match := re.fullmatch(r"(\w+)\[([\d\s,]*)\]", spec.strip()):
        name, shape = match[1], tuple(map(int, re.findall(r"\d+", match[2])))
        if name == "key" and not shape:
            return jax.random.key(seed)
        if name not in _DTYPES:
            raise ValueError(f'{spec}: expected one of {", ".join(_DTYPES)} before the shape, or "key[]".')
        dtype = jnp.dtype(_DTYPES[name])
        if not jnp.issubdtype(dtype, jnp.inexact):
            return jnp.asarray(rng.integers(0, 2, shape), dtype)
        real, imaginary = rng.uniform(0.2, 1.2, (2, *shape)) * rng.choice([-1.0, 1.0], (2, *shape))
        return jnp.asarray(real + 1j * imaginary if name.startswith("c") else real, dtype)
    with contextlib.suppress(SyntaxError, ValueError, TypeError):
        return ast.literal_eval(spec)
    if re.fullmatch(r"\w+(\.\w+)+", spec):
        return _resolve(spec, spec)
    hint = f" For a string, quote it twice: \"'{spec}'\"." if spec.isidentifier() else ""
    raise ValueError(
        f'{spec}: expected an array such as "f32[8,8]" or "f32[]", a Python literal such as 0.5 or None, or a '
        f"dotted name such as jax.numpy.tanh.{hint}"
    )


def _load(target: str) -> Any:
    """Import the layer or function that `mypackage.layers:Tanh` or `layers.py:Tanh` names."""
    module, _, name = target.rpartition(":")
    if not module or not name:
        raise ValueError(f"{target}: expected MODULE:NAME, such as mypackage.layers:Tanh or layers.py:Tanh.")
    path = Path(module)
    if path.suffix == ".py":
        sys.path.insert(0, str(path.resolve().parent))  # Python does the same for a script
        module = path.stem
    layer = _resolve(f"{module}:{name}", target)
    if not callable(function_of(layer)):
        raise ValueError(f"{target}: expected a layer class or a function, got {layer!r}.")
    return layer


def _resolve(name: str, shown: str) -> Any:
    try:
        return pkgutil.resolve_name(name)
    except Exception as error:  # importing a module may raise anything
        raise ValueError(f"{shown}: not found ({type(error).__name__}: {error}).") from error


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
