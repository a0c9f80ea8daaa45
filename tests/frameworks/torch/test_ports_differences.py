"""Deliberate differences between this library's Function and torch's: both sides of each."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.kit.case import numpy_grid as grid

from .layers import ported
from .sides import (
    CLIP,
    HALF,
    IMAGES,
    NORM,
    UNCLIPPED,
    UNEVEN,
    K,
    Ours,
    Own,
    Port,
    Q,
    Theirs,
    V,
    X,
    apply,
    assert_equal,
    no_setup,
    one_of,
)

# torch's own: its first use of forward mode compiles rules by what it calls deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
DROPPED = {
    name: Port(name, args, wrt, apply(name), None, True)
    for name, args, wrt in (
        ("SavedIntermediate", (X,), (0,)),
        ("VocabParallelCrossEntropy", (X, np.array([1, 1], np.int32)), (0,)),
        ("SyncBatchNorm", (IMAGES, grid(3), grid(3), None, None, *NORM), (0, 1, 2)),
        ("FlashAttention", (Q, K[:, :, :4], V[:, :, :4], None, True, 2, 2), (0, 1, 2)),
        ("Reversible", (grid(2, 4), Own("BLOCKS"), {"gain": 0.7}, *HALF), (0, 3, 4, 5, 6)),
    )
}


def _plain(name: str) -> Callable[..., Any]:
    """The forward of a layer, differentiated by JAX itself."""

    def call(module, *args):
        layer = getattr(ported, name)
        context = type("Anything", (), {"save_for_backward": lambda self, *tensors: None})()
        return layer.forward(context, *args)

    return call


@pytest.mark.parametrize(
    ("name", "mode"),
    # Operation by operation, a second derivative of the others takes long.
    [pytest.param(name, jax.jit, id=f"jit-{name}") for name in DROPPED]
    + [pytest.param("SavedIntermediate", lambda f: f, id="eager-SavedIntermediate")],
)
def test_torch_drops_a_second_derivative_through_intermediates(torch, original, name, mode):
    one = DROPPED[name]
    right = Ours(dataclasses.replace(one, call=_plain(name)))
    ours, expected = Ours(one).second(mode), right.second(mode)
    for a, b in zip(ours, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4)
    if name == "FlashAttention":  # its backward runs under no_grad, so that nothing is left to differentiate
        with pytest.raises(RuntimeError, match="does not require grad"):
            Theirs(torch, one, original).second()
        return
    theirs = Theirs(torch, one, original).second()
    distances = [np.abs(np.asarray(e) - t.detach().numpy()).max() for e, t in zip(expected, theirs, strict=True)]
    assert max(distances) > 0.1


def test_an_input_changed_in_place(torch, original):
    """torch keeps the changed values for backward, of which the lowest step has no gradient; ours keeps the old."""
    values = np.array([-1.0, 0.03, 0.3, 1.5], np.float32)
    x, c = torch.tensor(values, requires_grad=True), torch.ones(1, requires_grad=True)
    y = original.LearnedClip.apply(x * 1, c, 4, True, True)
    theirs = torch.autograd.grad(y.sum(), (x, c))
    ours = jax.grad(lambda x, c: ported.LearnedClip.apply(x * 1, c, 4, True, True).sum(), (0, 1))(values, jnp.ones(1))
    assert theirs[0].tolist() == [0.0, 0.0, 1.0, 0.0]
    assert ours[0].tolist() == [0.0, 1.0, 1.0, 0.0]
    assert theirs[1].tolist() == ours[1].tolist() == [1.0]


def test_a_leaf_changed_in_place(torch, original):
    x, c = torch.tensor(UNCLIPPED, requires_grad=True), torch.tensor(CLIP)
    with pytest.raises(RuntimeError, match="leaf"):
        original.LearnedClip.apply(x, c, 4, True, True)
    ours = jax.grad(lambda x: ported.LearnedClip.apply(x, jnp.asarray(CLIP), 4, True, True).sum())(UNCLIPPED)
    assert ours.tolist() == [0.0, 1.0, 1.0, 1.0, 0.0]


def test_running_statistics(torch, original):
    mean, var = torch.zeros(3), torch.ones(3)
    original.SyncBatchNorm.apply(torch.tensor(IMAGES), None, None, mean, var, 1e-5, 0.1, original.ONE_RANK, 1)
    np.testing.assert_allclose(mean, 0.1 * IMAGES.mean((0, 2)), atol=1e-6)
    np.testing.assert_allclose(var, 0.9 + 0.1 * IMAGES.var((0, 2), ddof=1), atol=1e-6)
    mean, var = jnp.zeros(3), jnp.ones(3)
    ported.SyncBatchNorm.apply(jnp.asarray(IMAGES), None, None, mean, var, 1e-5, 0.1, ported.ONE_RANK, 1)
    assert mean.tolist() == [0.0] * 3
    assert var.tolist() == [1.0] * 3


def test_an_attribute_of_the_class_read_under_jit(torch, original, monkeypatch):
    """A compiled gradient keeps the attribute of its first call, as everything that Python reads."""
    compiled = jax.jit(jax.grad(lambda x, a: ported.AuxLossScaler.apply(x, a).sum(), 1))
    found, expected = [], []
    for scale in (2, 5):
        for module in (original, ported):
            monkeypatch.setattr(module.AuxLossScaler, "scale", scale)
        loss = torch.tensor(0.7, requires_grad=True)
        original.AuxLossScaler.apply(torch.tensor(X, requires_grad=True), loss).sum().backward()
        expected.append(float(loss.grad))
        found.append(float(compiled(jnp.asarray(X), jnp.float32(0.7))))
    assert expected == [2.0, 5.0]
    assert found == [2.0, 2.0]


def test_both_rules_for_vmap(both):
    """torch finds it out under vmap, ours where the class is defined."""

    def define(of):
        rules = {"vmap": lambda info, in_dims, x: (x * 2, in_dims[0]), "generate_vmap_rule": True}
        return one_of(of, lambda x: x * 2, setup_context=no_setup, **rules)

    theirs, ours = both
    assert define(theirs).apply(theirs.xp.ones(3)).tolist() == [2.0] * 3
    with pytest.raises(RuntimeError, match="generate_vmap_rule"):
        theirs.func.vmap(define(theirs).apply)(theirs.xp.ones(3))
    with pytest.raises(RuntimeError, match="generate_vmap_rule"):
        define(ours)


def test_both_names_of_backward(both):
    """torch finds it out when it differentiates, ours where the class is defined."""
    theirs, ours = both
    y = one_of(theirs, lambda ctx, x: x * 2, vjp=lambda ctx, dy: dy).apply(theirs.xp.ones(3, requires_grad=True)).sum()
    with pytest.raises(RuntimeError, match="vjp"):
        y.backward()
    with pytest.raises(RuntimeError, match="vjp"):
        one_of(ours, lambda ctx, x: x * 2, vjp=lambda ctx, dy: dy)


def test_tensors_in_a_list(both):
    """torch does not see them; here they are tensors of the argument, with a gradient of their own."""
    theirs, ours = (one_of(of, lambda ctx, values: values[0] * 2, lambda ctx, dy: ([dy * 2],)) for of in both)
    assert not theirs.apply([both[0].xp.ones(3, requires_grad=True)]).requires_grad
    assert jax.grad(lambda x: ours.apply([x]).sum())(jnp.ones(3)).tolist() == [2.0] * 3


def test_no_rule_for_vmap(torch, original):
    """torch asks for a rule; here forward and backward are traced, and need none."""
    with pytest.raises(RuntimeError, match="vmap support"):
        torch.func.vmap(original.Cube.apply)(torch.tensor(X))
    assert_equal(jax.vmap(ported.Cube.apply)(jnp.asarray(X)), original.Cube.apply(torch.tensor(X)))


def test_a_context_that_forward_fills_under_transforms(torch, original):
    """torch.func asks for setup_context; here both styles meet every transform."""
    with pytest.raises(RuntimeError, match="setup_context"):
        torch.func.grad(lambda x: original.Exp.apply(x).sum())(torch.tensor(X))
    found = jax.vmap(jax.grad(lambda x: ported.Exp.apply(x).sum()))(jnp.asarray(X))
    assert_equal(found, original.Exp.apply(torch.tensor(X)))


def test_no_rule_for_forward_mode(torch, original):
    with pytest.raises(NotImplementedError, match="jvp"):
        torch.func.jvp(original.WithoutJvp.apply, (torch.ones(2),), (torch.ones(2),))
    with pytest.raises(TypeError, match="WithoutJvp"):
        jax.jvp(ported.WithoutJvp.apply, (jnp.ones(2),), (jnp.ones(2),))


def test_keywords_of_a_class_method(torch, original):
    """torch counts the parameters of a class method wrongly, and finds one missing."""
    with pytest.raises(TypeError, match="num_bits"):
        original.UniformQuantize.apply(torch.tensor(UNEVEN), 3, name="static")
    expected = original.UniformQuantize.apply(torch.tensor(UNEVEN), 3, None, None, "static")
    assert_equal(ported.UniformQuantize.apply(jnp.asarray(UNEVEN), 3, name="static"), expected)


def test_a_second_derivative_that_torch_cuts_off_in_silence(torch, original):
    """torch.autograd.grad does not meet the error of once_differentiable where it may leave inputs out."""
    x = torch.tensor(X, requires_grad=True)
    (first,) = torch.autograd.grad(original.OnceOnly.apply(x).sin().sum(), x, create_graph=True)
    assert torch.autograd.grad(first.sum(), x, allow_unused=True) == (None,)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        jax.grad(lambda x: jax.grad(lambda x: jnp.sin(ported.OnceOnly.apply(x)).sum())(x).sum())(jnp.asarray(X))


def test_a_number_is_refused_though_nothing_is_differentiated(torch, original):
    """torch looks at what is saved only if it is needed; ours always."""
    assert original.SavedNumber.apply(torch.ones(2)).tolist() == [2.0, 2.0]
    with pytest.raises(TypeError, match="save_for_backward"):
        ported.SavedNumber.apply(jnp.ones(2))


def test_the_gradient_of_a_batch_is_that_of_backward(both):
    """torch differentiates what vmap does, and so may lose the custom gradient; here it is backward, batched."""
    slopes = []
    for of in both:
        rules = {"setup_context": no_setup, "vmap": lambda info, in_dims, x: (x * 3, 0)}
        layer = one_of(of, lambda x: x * 2, lambda ctx, dy: dy * 2, **rules)
        mapped = of.func.vmap(layer.apply)
        assert mapped(of.xp.ones(3)).tolist() == [3.0] * 3
        slopes.append(of.func.grad(lambda x, mapped=mapped: mapped(x).sum())(of.xp.ones(3)).tolist())
    assert slopes == [[3.0] * 3, [2.0] * 3]


def save_number_for_jvp(ctx, x):
    ctx.save_for_forward(3)
    return x * 2


def double(ctx, x):
    return x * 2


@pytest.mark.parametrize(
    ("methods", "theirs", "ours", "match"),
    [
        ((save_number_for_jvp,), AssertionError, TypeError, "save_for_forward"),
        # torch lets it pass, as it does what tests of the contract show: marks and saves in vain.
        ((lambda ctx, x: "text",), "text", ValueError, "expected at least one tensor"),
        # torch takes tensors alone; here NumPy arrays are tensors.
        ((double, lambda ctx, dy: np.ones(2, np.float32)), RuntimeError, None, "expected Variable or None"),
    ],
    ids=["save_for_forward", "no tensor", "NumPy"],
)
def test_what_one_side_refuses(both, methods, theirs, ours, match):
    def differentiate(of):
        y = one_of(of, *methods).apply(x := of.xp.ones(2, requires_grad=True))
        return y if isinstance(y, str) else y.sum().backward() or x.grad.tolist()

    if not isinstance(theirs, type):
        assert differentiate(both[0]) == theirs
    else:
        with pytest.raises(theirs, match=match if ours is None else None):
            differentiate(both[0])
    gradient = jax.grad(lambda x: one_of(both[1], *methods).apply(x).sum())
    if ours is None:
        assert gradient(jnp.ones(2)).tolist() == [1.0, 1.0]
    else:
        with pytest.raises(ours, match=match):
            gradient(jnp.ones(2))
