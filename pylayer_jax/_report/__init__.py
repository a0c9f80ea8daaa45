"""`saved_tensors_report`: `origins` finds where the values of a jaxpr come from, `report` lists the residuals."""

from .report import SavedTensor, SavedTensorsReport, saved_tensors_report

__all__ = ["SavedTensor", "SavedTensorsReport", "saved_tensors_report"]
