"""A Function's own tangents, here and in real torch."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from tests.kit.modes import EAGER_AND_JIT as MODES

from .layers import ported
from .sides import (
    Ours,
    Port,
    Theirs,
    X,
    Y,
    apply,
    assert_equal,
    direction,
    weights,
)

# torch's own: its first use of forward mode compiles rules by what it calls deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
DX, DY = direction(X.shape), weights(Y.shape)


@pytest.mark.parametrize("which", ["both", "first", "second"])
@MODES
def test_jvp(torch, original, which, mode):
    def functions(module, sin, x, y):
        free = {
            "both": lambda a, b: module.SinProduct.apply(a, b, 0.7)[0],
            "first": lambda a: module.SinProduct.apply(sin(a), y, 0.7)[0],
            "second": lambda b: module.SinProduct.apply(x, sin(b), 0.7)[0],
        }[which]
        return free, {"both": (x, y), "first": (x,), "second": (y,)}[which]

    tangents = {"both": (DX, DY), "first": (DX,), "second": (DY,)}[which]
    f, primals = functions(original, torch.sin, torch.tensor(X), torch.tensor(Y))
    expected = torch.func.jvp(f, primals, tuple(map(torch.tensor, tangents)))
    f, primals = functions(ported, jnp.sin, jnp.asarray(X), jnp.asarray(Y))
    tangents = tuple(map(jnp.asarray, tangents))
    assert_equal(jax.jvp(f, primals, tangents), expected)
    assert_equal(jax.jvp(jax.jit(f), primals, tangents), expected)
    assert_equal(mode(lambda p, t: jax.jvp(f, p, t))(primals, tangents), expected)


def test_jvp_with_a_context_that_forward_fills(torch, original):
    forward_ad = torch.autograd.forward_ad
    with forward_ad.dual_level():
        x, y = (forward_ad.make_dual(torch.tensor(v), torch.tensor(t)) for v, t in ((X, DX), (Y, DY)))
        expected = tuple(forward_ad.unpack_dual(original.SinProductInCtx.apply(x, y, 0.7)))
    found = jax.jvp(lambda x, y: ported.SinProductInCtx.apply(x, y, 0.7), (X, Y), (DX, DY))
    assert_equal(found, expected)
    jitted = jax.jit(lambda x, y: ported.SinProductInCtx.apply(x, y, 0.7))
    assert_equal(jax.jvp(jitted, (X, Y), (DX, DY)), expected)


def test_statics_among_the_outputs_under_jvp(torch, original):
    forward_ad = torch.autograd.forward_ad
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(torch.tensor(X), torch.tensor(DX))
        outputs = original.SinProduct.apply(dual, torch.tensor(Y), 0.7)
        expected = tuple(forward_ad.unpack_dual(outputs[0]))
    kept = []

    def first(x):
        y, *rest = ported.SinProduct.apply(x, jnp.asarray(Y), 0.7)
        kept[:] = rest
        return y

    assert_equal(jax.jvp(first, (jnp.asarray(X),), (jnp.asarray(DX),)), expected)
    assert tuple(kept) == outputs[1:] == (None, "units")


@pytest.mark.parametrize("materialize", [True, False])
@pytest.mark.parametrize("which", [0, 1])
def test_missing_tangents(torch, original, monkeypatch, materialize, which):
    for module in (original, ported):
        monkeypatch.setattr(module.SeenTangents, "materialize", materialize)
        monkeypatch.setattr(module.SeenTangents, "seen", [])

    def function(module, args):
        def of_one(v):
            return module.SeenTangents.apply(*(v if i == which else a for i, a in enumerate(args)), 0.7)

        return of_one

    x, t = (X, Y)[which], (DX, DY)[which]
    expected = torch.func.jvp(
        function(original, [torch.tensor(X), torch.tensor(Y)]), (torch.tensor(x),), (torch.tensor(t),)
    )
    found = jax.jvp(function(ported, [jnp.asarray(X), jnp.asarray(Y)]), (jnp.asarray(x),), (jnp.asarray(t),))
    assert_equal(found, expected)
    missing = "zeros" if materialize else None
    assert original.SeenTangents.seen == [("some", missing, None) if which == 0 else (missing, "some", None)]
    assert ported.SeenTangents.seen[-1] == original.SeenTangents.seen[0]


def test_what_is_saved_for_backward_and_for_jvp(torch, original):
    forward_ad = torch.autograd.forward_ad
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(torch.tensor(X), torch.tensor(DX))
        expected = tuple(forward_ad.unpack_dual(original.SavedForEach.apply(dual)))
    assert_equal(jax.jvp(ported.SavedForEach.apply, (jnp.asarray(X),), (jnp.asarray(DX),)), expected)
    one = Port("SavedForEach", (X,), (0,), apply("SavedForEach"), None, False)
    assert_equal(Ours(one).first(jax.jit), Theirs(torch, one, original).first())


def test_a_tangent_too_many(torch, original):
    with pytest.raises(RuntimeError, match="expected 1 but got 2"):
        torch.func.jvp(original.SurplusTangent.apply, (torch.tensor(X),), (torch.tensor(DX),))
    with pytest.raises(ValueError, match=r"SurplusTangent.jvp returned 2 tangents; expected 1"):
        jax.jvp(ported.SurplusTangent.apply, (jnp.asarray(X),), (jnp.asarray(DX),))
