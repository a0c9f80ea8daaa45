"""`python -m pylayer_jax check MODULE:LAYER SPEC...`: the report of `check_layer` from the shell."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.util
import os
import shlex
import sys
from operator import attrgetter
from pathlib import Path
from typing import Any, Final

import jax
import numpy as np

from pylayer_jax.testing import check_layer
from pylayer_jax.testing._check_layer import PROPERTIES, LayerReport

from .specs import DTYPES, ArraySpec, UnusableError, parse_arguments

_LAYER: Final = "Expected MODULE:NAME, such as mypackage.layers:Tanh or layers.py:Tanh"
_SPECS: Final = f"""\
how an argument of the layer is written (SPEC):
  "f32[8,8]" "f32[]"   an array of numbers between 0.2 and 1.2 in size, of either sign; zeros and ones for "i32[4]" and
                       "bool[4]". The dtypes are {", ".join(DTYPES)}
  "key[]"              a PRNG key
  3 -0.5 True "'text'" a Python literal, for a static: numbers, True, False, None, strings (quoted for Python too)
  jnp.tanh jax.nn.gelu a function or class, by its dotted name
  "{{'w': f32[8,8], 'b': f32[8]}}" "[f32[8], f32[]]" "(f32[8], 3)"
                       dicts, lists and tuples of these, nested as you like
  scale=f32[] axis=-1  an argument by keyword

Write -- before the first SPEC if one begins with a minus and is not a number.

examples:
  python -m pylayer_jax check layers.py:Scale "f32[8,8]" factor=0.5
  python -m pylayer_jax check layers.py:Dense "{{'w': f32[8,4], 'b': f32[4]}}" "f32[3,8]"
  python -m pylayer_jax check layers.py:Round "f32[8]" --reference layers.py:straight_through
"""


def check(arguments: list[str]) -> tuple[bool, str]:
    """Whether the layer that the arguments name is right, and the report. Exits with 2 if an argument is not usable."""
    parser = argparse.ArgumentParser(
        prog="python -m pylayer_jax check",
        description="Check a layer under each transform of JAX, and its gradients against numerical ones.\n"
        "Prints one line per property; the exit status is 0 if the layer has them all, 1 if not.",
        epilog=_SPECS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("layer", metavar="MODULE:LAYER", help="a layer class, or a function that applies one")
    parser.add_argument("specs", metavar="SPEC", nargs="*", help="the arguments of the layer; see below")
    parser.add_argument(
        "--reference",
        metavar="MODULE:FUNCTION",
        help="a function of the same arguments in plain JAX whose gradients are right; declares a gradient that is "
        "meant to differ from that of forward, as that of a straight-through estimator",
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the numbers in the arrays (default: 0)")
    parser.add_argument(
        "--skip",
        metavar="NAME",
        action="append",
        default=[],
        help=f"a property that is not tested; may be repeated. The properties are {', '.join(PROPERTIES)}",
    )
    parser.add_argument(
        "--no-float64",
        dest="float64",
        action="store_false",
        help="compute numerical gradients in the dtypes given; for a layer that rounds to a narrower dtype internally",
    )
    parser.add_argument("--rtol", type=float, help="relative tolerance, instead of one that fits the dtypes")
    parser.add_argument("--atol", type=float, help="absolute tolerance, instead of one that fits the dtypes and sizes")
    options = parser.parse_args(arguments)
    try:
        report = _report(options)
    except UnusableError as error:
        parser.error(str(error))
    return report.passed, "\n".join([report.layer, *map(str, report.rows), *report.hints(_options)])


def _options(**arguments: Any) -> str:
    """Arguments of `check_layer` as options of the command."""
    words: list[str] = []
    for name, value in arguments.items():
        if name == "reference":
            words.append("--reference MODULE:FUNCTION")
        elif name == "float64":
            words.append("--no-float64")
        else:
            words += [f"--{name} {shlex.quote(str(v))}" for v in (value if isinstance(value, list) else [value])]
    return " ".join(words)


def _report(options: argparse.Namespace) -> LayerReport:
    specs = parse_arguments(options.specs)
    arrays = [leaf for leaf in jax.tree_util.tree_leaves(specs) if isinstance(leaf, ArraySpec)]
    with jax.enable_x64(True) if any(array.is_wide for array in arrays) else contextlib.nullcontext():
        layer = _load(options.layer)
        reference = None if options.reference is None else _load(options.reference)
        rng = np.random.default_rng(options.seed)
        args, kwargs = jax.tree_util.tree_map(
            lambda leaf: leaf.make(rng, options.seed) if isinstance(leaf, ArraySpec) else leaf, specs
        )
        try:
            return check_layer(
                layer,
                *args,
                kwargs=kwargs,
                reference=reference,
                skip=options.skip,
                float64=options.float64,
                rtol=options.rtol,
                atol=options.atol,
                raises=False,
            )
        except ValueError as error:  # no argument can be differentiated, or --skip has an unknown name
            raise UnusableError(str(error)) from error


def _load(target: str) -> Any:
    module_or_file, _, name = target.rpartition(":")
    if not module_or_file or not name:
        raise UnusableError(f"{target}: {_LAYER}.")
    module = _module(module_or_file)
    try:
        found = attrgetter(name)(module)
    except AttributeError:
        public = [k for k, v in vars(module).items() if callable(v) and not k.startswith("_")]
        raise UnusableError(
            f"{target}: {module_or_file} has no {name}. It has {', '.join(public[:20]) or 'no callables'}."
        ) from None
    if not callable(getattr(found, "apply", None) if isinstance(found, type) else found):
        raise UnusableError(f"{target}: expected a layer class or a function, got {found!r}.")
    return found


def _module(module_or_file: str) -> Any:
    path = Path(module_or_file)
    is_file = module_or_file.endswith(".py")
    if is_file and not path.is_file():
        raise UnusableError(f"{module_or_file}: no such file. {_LAYER}.")
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
        raise UnusableError(f"{module_or_file}: cannot be imported ({reason}). {_LAYER}.") from error
    finally:
        sys.path.pop(0)
