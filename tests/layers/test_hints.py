"""Each hint about a name of torch has JAX code that gives what torch gives. The text of the hint runs beside torch."""

import operator

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pylayer_jax._messages import _IN_JAX
from tests.kit.layers import layer, text_of

NUMBERS = np.random.default_rng(0)
# The variables in the texts. A name has another value where its function needs one.
USUAL = {
    "x": NUMBERS.uniform(0.1, 1.0, (3, 4)),
    "y": NUMBERS.uniform(0.1, 1.0, (3, 4)),
    "w": NUMBERS.uniform(-1, 1, (4, 2)),
    "src": NUMBERS.uniform(-1, 1, (2, 2)),
    "mask": NUMBERS.uniform(-1, 1, (3, 4)) > 0,
    "index": np.array([[0, 2], [1, 1]]),
    "rows": np.array([2, 0, 2]),
    "values": [1.0, 2.0],
    "sizes": [1, 3, 2],
    "a": 6,
    "b": 2,
    "n": 2,
    "k": 2,
    "p": 3,
    "axis": 1,
    "low": 0.3,
    "high": 0.6,
    "value": 7.0,
}
LONG = NUMBERS.uniform(-1, 1, (6, 4))
BATCH = NUMBERS.uniform(-1, 1, (2, 3, 4))
OTHER = {
    "split": {"x": LONG},
    "permute": {"x": BATCH},
    "transpose": {"x": BATCH},
    "flatten": {"x": BATCH},
    "bmm": {"x": BATCH, "y": np.swapaxes(BATCH, 1, 2)},
    "gather": {"index": np.array([[0, 2], [1, 1], [3, 0]])},
    "type_as": {"y": np.arange(3)},
    "eq": {"y": np.round(USUAL["x"], 1)},
    **{name: {"x": LONG} for name in ("abs", "sign", "floor", "ceil", "trunc", "int", "long", "relu", "norm")},
}
# Hints in words, with no call of torch beside them.
WORDS = """clone contiguous is_contiguous stride storage cpu cuda is_cuda get_device place numpy requires_grad
stop_gradient grad backward no_grad register_hook saved_variables"""


def pairs_of(name):
    """Return the pairs (code of JAX, code of torch) in the hint about a name."""
    for part in _IN_JAX[name].split("; "):
        ours, is_pair, theirs = part.partition(" for ")
        if is_pair:
            yield ours, theirs.partition(", if ")[0]


def test_each_hint_is_run_or_in_words():
    assert {name for name in _IN_JAX if not list(pairs_of(name))} == set(WORDS.split())


@pytest.mark.frameworks
@pytest.mark.parametrize(
    ("name", "ours", "theirs"),
    [pytest.param(name, *pair, id=f"{name}-{pair[1]}") for name in _IN_JAX for pair in pairs_of(name)],
)
def test_the_text_of_a_hint_gives_what_torch_gives(name, ours, theirs, framework):
    torch = framework("torch")
    numbers = USUAL | OTHER.get(name, {})

    def variables(tensor):
        return {key: tensor(x) if isinstance(x, np.ndarray) else x for key, x in numbers.items()}

    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        got = eval(ours, {"jax": jax, "jnp": jnp, "np": np, "dtype": jnp.float32, **variables(jnp.asarray)})
        expected = eval(theirs, {"torch": torch, "dtype": torch.float32, **variables(torch.tensor)})
        got, expected = (list(x) if isinstance(x, (tuple, list)) else [x] for x in (got, expected))
        assert len(got) == len(expected)
        for a, b in zip(got, expected, strict=True):
            b = b.to(torch.float32) if getattr(b, "dtype", None) is torch.bfloat16 else b
            np.testing.assert_allclose(
                np.asarray(a), np.asarray(b), rtol=1e-3 if "16" in name or name == "half" else 1e-6
            )


NAMES = "split ge lt eq logsumexp unbind roll flip tril"
# A method that uses its array as in torch, by a name of the hints, or with what the error says about no name of them.
USES = {
    "view": lambda x: x.view(-1),
    "view of a shape": lambda x: x.view(2, 2),
    "flatten": lambda x: x.flatten(1),
    "flatten of several axes": lambda x: x.flatten(0, 1),
    "transpose": lambda x: x[None].transpose(1, 2),
    **{name: lambda x, name=name: getattr(x, name) for name in NAMES.split()},
    "register_hook": lambda x: x.register_hook(print),
    "cat": lambda x: jnp.cat([x, x]),
    "tensor": lambda x: jnp.tensor([1.0]),
    "no_grad": lambda x: jax.no_grad(),
}
ADVICE = {
    "x.shape[0]": lambda x: x.size(0),
    "jax.lax.stop_gradient(": lambda x: x.data,
    "ctx.needs_input_grad": lambda x: x.requires_grad,
    "in place": lambda x: x.add_(1),
    "x.at[": lambda x: operator.setitem(x, 0, 1.0),
    "axis": lambda x: x.sum(dim=1),
    "keepdims": lambda x: x.mean(axis=1, keepdim=True),
    "ddof": lambda x: x.var(unbiased=False),
}
SAID = [(_IN_JAX[name.split()[0]], use) for name, use in USES.items()] + [*ADVICE.items()]


@pytest.mark.parametrize("mode", [lambda f: f, jax.jit], ids=["eager", "jit"])
@pytest.mark.parametrize(("advice", "use"), SAID, ids=[*USES, *ADVICE])
def test_the_error_has_the_hint(advice, use, mode):
    with pytest.raises((AttributeError, TypeError, ValueError, NotImplementedError)) as raised:
        mode(layer(lambda ctx, x: use(x)).apply)(jnp.ones((2, 2)))
    assert advice in text_of(raised.value)
    assert "Made.forward" in text_of(raised.value)


def test_the_context_has_no_saved_variables():
    old = layer(backward=lambda ctx, dy: dy * ctx.saved_variables[0])
    with pytest.raises(AttributeError) as raised:
        jax.grad(lambda x: old.apply(x).sum())(jnp.ones(3))
    assert "ctx.saved_tensors" in text_of(raised.value)
