"""The commands of `python -m pylayer_jax`, one room each.

- `demo`: the main job. It trains a classifier of handwritten digits whose activations, quantizer and gradient scaling
  are layers, and reports its accuracy, its gradients and the saved tensors;
- `check`: reads a layer and specifications of its arguments from the command line, and returns the report of
  `check_layer`.

`__main__` parses the choice between them and prints the results. The commands use only the library above them, and
neither uses the other.
"""
