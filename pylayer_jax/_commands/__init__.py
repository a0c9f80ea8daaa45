"""The commands of `python -m pylayer_jax`.

- `demo`: trains a classifier of handwritten digits whose activations, quantizer and gradient scaling are layers, with
  plain and with packed saved tensors, and reports its accuracy, its gradients and the saved tensors;
- `second_order`: two second derivatives, by layers and by plain `jax.custom_vjp`;
- `specs`: reads the arguments of a layer from the command line, for `check`;
- `check`: finds the layer that the command line names, and returns the report of `check_layer`.

`__main__` parses the choice between them and prints the results. The commands use only the library above them, and
neither uses the other.
"""
