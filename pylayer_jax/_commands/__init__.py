"""The commands of `python -m pylayer_jax`: `demo` trains a network of layers, `check` checks a layer of the user's."""
