"""`saved_tensors_report`: everything that `jax.vjp` of a function keeps for backward, and its bytes.

The modules, each of which imports only modules above it:

- `table`: the report that users see, as rows, text, HTML and bars;
- `provenance`: follows the equations of a jaxpr, also into inner jaxprs, and finds where each of its values comes from;
- `report`: `saved_tensors_report` traces `jax.vjp` of a function to a jaxpr, and makes a row for each residual.
"""
