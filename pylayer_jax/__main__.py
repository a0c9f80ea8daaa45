"""`python -m pylayer_jax` runs the main job on real data; `python -m pylayer_jax check` checks a user's own layer."""

from __future__ import annotations

import argparse
import sys
import textwrap
import time

from . import __version__
from ._commands import check, demo

ACCURACY = 0.95
GRADIENT_ERROR = 1e-4


def main(arguments: list[str] | None = None) -> int:
    """Run the command line. Returns 0 if the network learned and its gradients are right, or if the layer is right."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments[:1] == ["check"]:
        report = check.check(arguments[1:])
        print(_printable(str(report), sys.stdout.encoding or "utf-8"))
        return 0 if report.passed else 1
    parser = argparse.ArgumentParser(
        prog="python -m pylayer_jax",
        description="Train a classifier of handwritten digits whose activations, quantizer and gradient scaling are "
        "PyLayers, and compare its gradients with plain JAX.",
        epilog="To check a layer of your own: python -m pylayer_jax check --help",
    )
    parser.add_argument("--epochs", type=int, default=30, help="passes over the training images (default: 30)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the weights and of the split (default: 0)")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")
    parser.add_argument("--version", action="version", version=__version__)
    options = parser.parse_args(arguments)
    if options.epochs < 1:
        parser.error(f"--epochs: expected at least 1, got {options.epochs}")

    start = time.perf_counter()
    try:
        result = demo.train(options.epochs, options.seed, progress=not options.quiet)
    except ImportError as error:
        print(f'{error.name} is missing. The main job needs an extra: pip install "pylayer_jax[demo]"', file=sys.stderr)
        return 1
    learned, right = result.accuracy >= ACCURACY, result.gradient_error <= GRADIENT_ERROR
    print(
        f"Test accuracy: {result.accuracy:.1%} with {demo.BITS}-bit weights (at least {ACCURACY:.0%}: {_yes(learned)})"
    )
    print(
        f"Gradients against the same model in plain JAX: largest relative difference {result.gradient_error:.1e} "
        f"(at most {GRADIENT_ERROR:.0e}: {_yes(right)})"
    )
    print(f"Saved for backward, for {demo.BATCH} images:")
    print(textwrap.indent(str(result.saved), "  "))
    print(f"{time.perf_counter() - start:.1f} s")
    return 0 if learned and right else 1


def _printable(report: str, encoding: str) -> str:
    try:
        report.encode(encoding)
    except UnicodeEncodeError:  # an encoding without ticks, as that of many a terminal on Windows
        report = report.replace("✓", f"{'ok':6}").replace("✗", "FAILED")
    return report.encode(encoding, "replace").decode(encoding)


def _yes(fact: bool) -> str:
    return "yes" if fact else "NO"


if __name__ == "__main__":
    sys.exit(main())
