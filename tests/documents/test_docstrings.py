"""Examples in public docstrings run, and each public function and class has one."""

import doctest

import jax
import jax.numpy as jnp
import pytest

import pylayer_jax
from pylayer_jax import packers, testing
from tests.kit.layers import Tanh, layer

# A context is made for a call of `forward`; the class of its layer has the example.
WITHOUT_EXAMPLE = {"PyLayerContext", "FunctionCtx", "__version__"}
PUBLIC = {
    f"{module.__name__}.{name}": getattr(module, name)
    for module in (pylayer_jax, packers, testing)
    for name in module.__all__
    if name not in WITHOUT_EXAMPLE
}


@pytest.mark.parametrize("name", [*PUBLIC, "pylayer_jax.packers"])
def test_the_example_of_a_docstring_runs(name, tmp_path):
    names = {"jax": jax, "jnp": jnp, "Tanh": Tanh, "folder": tmp_path}
    names |= {"Round": layer(lambda ctx, x: jnp.round(x))}
    names |= {"x": jnp.array([[0.3, -0.7]]), "w": jnp.array([[1.0], [0.5]])}
    names |= {path.rpartition(".")[2]: value for path, value in PUBLIC.items()}
    public = PUBLIC.get(name, packers)
    (example,) = doctest.DocTestFinder(recurse=False).find(public, name, globs=names)
    assert example.examples
    result = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(example)
    assert result.failed == 0
