"""Custom gradients for JAX, written the way Paddle and PyTorch users write them."""

import importlib
from typing import Any

from ._compare_programs import compare_programs
from ._context import PyLayerContext
from ._function import Function, FunctionCtx
from ._hooks.block import disable_saved_tensors_hooks, saved_tensors_hooks
from ._layer import PyLayer, once_differentiable
from ._report import saved_tensors_report

__version__ = "0.4.0"

__all__ = [
    "Function",
    "FunctionCtx",
    "PyLayer",
    "PyLayerContext",
    "__version__",
    "compare_programs",
    "disable_saved_tensors_hooks",
    "once_differentiable",
    "saved_tensors_hooks",
    "saved_tensors_report",
]


def __getattr__(name: str) -> Any:
    """Import the submodule `testing` when it is first read."""
    if name == "testing":
        return importlib.import_module(".testing", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
