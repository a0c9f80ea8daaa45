"""`saved_tensors_report`: the tensors that layers keep for backward, and their bytes.

The rooms, each of which imports only rooms above it:

- `table`: the report that users see, as rows, text, HTML and bars;
- `marks`: the `ResidualTracker`, which calls of layers find in the user context of `_autodiff`. It gives each array that
  they keep a name with a number;
- `report`: `saved_tensors_report` traces a function under a tracker, finds these names in the jaxpr of its residuals,
  and makes the rows.
"""
