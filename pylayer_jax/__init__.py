"""Custom gradients for JAX, written the way Paddle and PyTorch users write them."""

from ._hooks.block import disable_saved_tensors_hooks, saved_tensors_hooks
from ._layer import PyLayer
from ._methods.context import PyLayerContext
from ._methods.once_differentiable import once_differentiable
from ._report.report import saved_tensors_report
from ._torch_function import Function, FunctionCtx

__version__ = "0.3.0"

__all__ = [
    "Function",
    "FunctionCtx",
    "PyLayer",
    "PyLayerContext",
    "__version__",
    "disable_saved_tensors_hooks",
    "once_differentiable",
    "saved_tensors_hooks",
    "saved_tensors_report",
]
