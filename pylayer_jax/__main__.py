"""`python -m pylayer_jax` runs the demo on real data; `python -m pylayer_jax check` checks a user's own layer."""

from __future__ import annotations

import argparse
import os
import signal
import sys

from . import __version__
from ._commands import check, demo

# Exit statuses that a shell reports when a signal ended a command.
INTERRUPTED = 128 + 2  # SIGINT
PIPE_CLOSED = 128 + 13  # SIGPIPE


def main(arguments: list[str] | None = None) -> int:
    """Run the command line. Return the exit status: 0 if the demo reached its goals or the layer passed, else 1."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments[:1] == ["check"]:
        passed, report = check.check(arguments[1:])
        try:
            report.encode(sys.stdout.encoding or "utf-8")
        except UnicodeEncodeError:  # many terminals on Windows cannot print ticks
            for mark, word in {"✓ ": "ok     ", "✗ ": "FAILED ", "– ": "-      "}.items():
                report = report.replace(mark, word)
            report = report.encode("ascii", "replace").decode()
        print(report)
        return 0 if passed else 1
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
        return 0 if demo.run(options.epochs, options.seed, progress=not options.quiet) else 1
    except ImportError as error:
        print(f"{error.name} is missing. The demo needs: pip install optax scikit-learn tqdm", file=sys.stderr)
        return 1


def _main_without_traceback() -> int:
    # If Ctrl-C raised a KeyboardInterrupt while JAX compiles, C++ would swallow it. So the signal handler exits.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _exit_after_interrupt)
    try:
        try:
            return main()
        finally:
            sys.stdout.flush()  # if Python flushed at exit, a BrokenPipeError could not be caught
    except BrokenPipeError:  # the process that reads the output, such as `head`, has exited
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return PIPE_CLOSED


def _exit_after_interrupt(*_: object) -> None:
    if sys.stderr.isatty():
        os.write(sys.stderr.fileno(), b"\n")  # start a new line after the progress bar
    os._exit(INTERRUPTED)


if __name__ == "__main__":
    sys.exit(_main_without_traceback())
