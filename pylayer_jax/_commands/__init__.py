"""Commands of `python -m pylayer_jax`: `demo` trains a network of layers, and `check` checks a layer of the user."""
