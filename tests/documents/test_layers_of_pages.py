"""Each layer in the guide, the recipes and the README has the same values under jit, grad, vmap and scan, and mixed."""

import ast
import functools
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pylayer_jax import PyLayer

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "notebooks" / "guide.md", *sorted((ROOT / "notebooks" / "recipes").glob("*.md"))]
X = jnp.asarray(np.random.default_rng(0).uniform(0.2, 1.5, (4, 2)), jnp.float32)
W = jnp.array([[0.5, -1.0], [0.25, 2.0]])


def code_of(page):
    return "\n".join(re.findall(r"^```python\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL))


@functools.cache
def names_of(page):
    """Return what a page defines. Of the long pages, only imports and classes run."""
    kinds = [ast.Import, ast.ImportFrom, ast.ClassDef]
    if page.parent.name == "recipes":
        kinds += [ast.Assign, ast.FunctionDef]
    tree = ast.parse(code_of(page))
    tree.body = [node for node in tree.body if isinstance(node, tuple(kinds))]
    names = {"__name__": __name__, "print": lambda *_: None}
    exec(compile(tree, str(page), "exec"), names)
    return names


def layers_of(page):
    classes = re.findall(r"^class (\w+)\((?:PyLayer|Function)\)", code_of(page), re.MULTILINE)
    return list(dict.fromkeys(classes))


LAYERS = {f"{page.stem}-{name}": (page, name) for page in PAGES for name in layers_of(page)}


def with_ref(value, f):
    ref = jax.new_ref(value)
    return lambda x: f(ref, x)


# How a layer with more than one argument is a function of one matrix. Each entry takes the names of the page.
CALLS = {
    "guide-Scale": lambda of: lambda x: of["Scale"].apply(x, 2.0),
    "batch_of_cotangents-Solve": lambda of: lambda x: of["Solve"].apply(2 * jnp.eye(2) + x.T @ x, x[0]),
    "data_dependent_shapes-Positive": lambda of: lambda x: of["Positive"].apply(x, x[:, 0] - 0.8, 3),
    "detach-SpectralNorm": lambda of: lambda x: of["SpectralNorm"].apply(x, jnp.ones(4)),
    "gradient_in_forward-CTC": lambda of: (
        lambda x: of["CTC"].apply(jnp.tile(x, (3, 3, 1)), jnp.zeros((3, 12)), jnp.ones((3, 4), int), jnp.zeros((3, 4)))
    ),
    "gradient_in_forward-LinearCrossEntropy": lambda of: (
        lambda x: of["LinearCrossEntropy"].apply(x, W, jnp.array([1, 0, 1, 1]), 2)
    ),
    "groups_of_ranks-ColumnParallel": lambda of: lambda x: of["loss"](x, W),
    "host_second_derivatives-Solve": lambda of: lambda x: of["Solve"].apply(2 * jnp.eye(2) + x.T @ x, x[0]),
    "indexed_updates-Lookup": lambda of: lambda x: of["Lookup"].apply(x, jnp.array([1, 3, 1, 0])),
    "jvp_in_a_loss-Slope": lambda of: lambda x: of["Slope"].apply(x, x),
    "later_weight_gradients-Linear": lambda of: (
        lambda x: of["Linear"].apply(x, W, (jnp.zeros_like(x), jnp.zeros((4, 2))))
    ),
    "learned_quantizer-LearnedStep": lambda of: lambda x: of["LearnedStep"].apply(x, jnp.float32(0.3)),
    "list_outputs-Split": lambda of: lambda x: of["Split"].apply(x, 2),
    "logs-LogNorm": lambda of: with_ref(jnp.zeros(3), lambda ref, x: of["LogNorm"].apply(ref, 1, x)),
    "main_grad-Linear": lambda of: lambda x: of["Linear"].apply(x, W, jnp.zeros((2, 2))),
    "module_parameters-Clipped": lambda of: lambda x: of["Clipped"].apply(of["linear"], x),
    "module_static_parts-Clipped": lambda of: lambda x: of["Clipped"].apply(of["mlp"], x),
    "module_static_parts-ClippedNet": lambda of: (
        lambda x: of["ClippedNet"].apply(of["graph"], of["parameters"], of["rest"], x)
    ),
    "no_gradient_for_an_argument-Dense": lambda of: lambda x: of["Dense"].apply(x, W),
    "no_gradient_for_an_argument-Power": lambda of: lambda x: of["Power"].apply(x, jnp.full_like(x, 3)),
    "random_numbers-Dropout": lambda of: lambda x: of["Dropout"].apply(jax.random.key(0), x, 0.5),
    "reversible_chain-ReversibleChain": lambda of: lambda x: of["ReversibleChain"].apply([(W, W.T)], x, 2 * x),
    "state-Probe": lambda of: with_ref(jnp.float32(0), of["Probe"].apply),
}
NOT_RUN = {"groups_of_ranks-Identity": "the page shows that it is wrong"}
# The backward of each example of a vmap would write to one Ref. JAX cannot lower a closed-over Ref that no code reads.
OF_REFS = ("logs-LogNorm", "state-Probe")
NEEDS = {"module_static_parts": "flax"}


def total(f, x):
    """Return a number that depends on each floating-point output of a function."""
    outputs = [y for y in jax.tree.leaves(f(x)) if jnp.issubdtype(y.dtype, jnp.floating)]
    return sum(jnp.sum(jnp.sin(y.astype(jnp.float32)) * (1 + jnp.arange(y.size).reshape(y.shape) % 3)) for y in outputs)


# From a function of one example, its gradient and a batch of examples to (got, what a loop over the examples gives).
MODES = {
    "jit of grad": lambda f, grad, xs: (jax.jit(grad)(xs[0]), grad(xs[0])),
    "vmap": lambda f, grad, xs: (jax.jit(jax.vmap(f))(xs), each(f, xs)),
    "grad of vmap": lambda f, grad, xs: (
        jax.grad(lambda xs: jax.vmap(lambda x: total(f, x))(xs).sum())(xs),
        each(grad, xs),
    ),
    "scan of grad": lambda f, grad, xs: (jax.lax.scan(lambda carry, x: (carry, grad(x)), 0, xs)[1], each(grad, xs)),
}


def each(f, xs):
    return jax.tree.map(lambda *ys: jnp.stack(ys), *[f(x) for x in xs])


def test_each_layer_is_run():
    assert set(CALLS) | set(NOT_RUN) <= set(LAYERS)
    assert len(LAYERS) > 30


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", [name for name in LAYERS if name not in NOT_RUN])
def test_a_layer_of_a_page(name, mode):
    page, layer = LAYERS[name]
    if name in OF_REFS and "vmap" in mode:
        pytest.skip("as in all of JAX")
    if page.stem in NEEDS:
        pytest.importorskip(NEEDS[page.stem])
    with jax.numpy_dtype_promotion("standard"):
        names = names_of(page)
        assert issubclass(names[layer], PyLayer)
        f = CALLS.get(name, lambda of: of[layer].apply)(names)
        xs = jnp.stack([X, 0.7 * X, X[::-1]])
        got, expected = MODES[mode](f, jax.grad(lambda x: total(f, x)), xs)
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(a, b, rtol=2e-3, atol=1e-4)
