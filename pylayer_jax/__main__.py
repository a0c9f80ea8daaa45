"""`python -m pylayer_jax` runs the demo on real data; `python -m pylayer_jax check` checks a user's own layer."""

from __future__ import annotations

import argparse
import os
import signal
import sys

from . import __version__
from ._commands import check, demo

PACKAGES = "optax scikit-learn tqdm"  # the extra `demo`, also where the package was not installed from a checkout

# What a shell reports of a command that a signal ended.
INTERRUPTED = 128 + 2  # SIGINT
PIPE_CLOSED = 128 + 13  # SIGPIPE


def main(arguments: list[str] | None = None) -> int:
    """Run the command line.

    Returns:
        0 if the gradients are right and the network learned, or had too few epochs for that; or if the layer is right.
        Otherwise 1.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments[:1] == ["check"]:
        passed, report = check.check(arguments[1:])
        print(_printable(report, sys.stdout.encoding or "utf-8"))
        return 0 if passed else 1
    parser = argparse.ArgumentParser(
        prog="python -m pylayer_jax",
        description="Train a classifier of handwritten digits whose activations, quantizer and gradient scaling are "
        "PyLayers, compare its gradients with plain JAX, and train it once more with packed saved tensors.",
        epilog="To check a layer of your own: python -m pylayer_jax check --help",
    )
    parser.add_argument("--epochs", type=int, default=30, help="passes over the training images (default: 30)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the weights and of the split (default: 0)")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")
    parser.add_argument("--version", action="version", version=__version__)
    if arguments and not arguments[0].startswith("-"):
        parser.error(
            f"unknown command {arguments[0]!r}. To check a layer: python -m pylayer_jax check MODULE:LAYER SPEC..., as "
            "in check layers:Tanh 'f32[8,8]'. To run the demo: python -m pylayer_jax"
        )
    options = parser.parse_args(arguments)
    if options.epochs < 1:
        parser.error(f"--epochs: expected at least 1, got {options.epochs}")

    try:
        passed = demo.run(options.epochs, options.seed, progress=not options.quiet)
    except ImportError as error:
        print(f"{error.name} is missing. The demo needs: pip install {PACKAGES}", file=sys.stderr)
        return 1
    return 0 if passed else 1


def _printable(report: str, encoding: str) -> str:
    try:
        report.encode(encoding)
    except UnicodeEncodeError:  # an encoding without ticks, as that of many a terminal on Windows
        report = report.replace("✓", f"{'ok':6}").replace("✗", "FAILED")
    return report.encode(encoding, "replace").decode(encoding)


def _main_without_traceback() -> int:
    # An exception would be lost where Ctrl-C falls into a function that C++ calls, as while JAX compiles.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _stop)
    try:
        try:
            return main()
        finally:
            sys.stdout.flush()  # at exit Python would print an error here that nothing can catch
    except BrokenPipeError:  # the reader has left, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return PIPE_CLOSED


def _stop(*_: object) -> None:
    if sys.stderr.isatty():
        os.write(sys.stderr.fileno(), b"\n")  # below the line that shows the progress
    os._exit(INTERRUPTED)


if __name__ == "__main__":
    sys.exit(_main_without_traceback())
