"""The commands of `python -m pylayer_jax`.

- `demo`: trains a classifier of handwritten digits whose activations, quantizer and gradient scaling are layers, with
  plain and with packed saved tensors; prints its accuracy, gradients and saved tensors, and two second derivatives;
- `specs`: reads the arguments of a layer from the command line, for `check`;
- `check`: finds the layer that the command line names, and returns the report of `check_layer`.

`__main__` chooses between `demo` and `check`. They use only the library above them, and neither uses the other.
"""
