"""`saved_tensors_report`: the residuals that `jax.vjp` of a function holds, and their bytes.

- `origins`: follows the equations of a jaxpr, also into inner jaxprs, and finds where each value comes from.
- `report`: traces `jax.vjp` of a function to a jaxpr, and makes a row for each residual.
"""

from .report import SavedTensor, SavedTensorsReport, saved_tensors_report

__all__ = ["SavedTensor", "SavedTensorsReport", "saved_tensors_report"]
