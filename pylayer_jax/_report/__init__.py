"""`saved_tensors_report`: the tensors that layers keep for backward, and their bytes.

The rooms, each of which imports only rooms above it:

- `table`: the report that users see, as rows, text, HTML and bars;
- `marks`: the `ResidualTracker`. Each call of a layer hands it the arrays that the layer keeps, and it names every
  array by a number;
- `report`: `saved_tensors_report` traces a function under a tracker, finds these names in the jaxpr of its residuals,
  and makes the rows.
"""
