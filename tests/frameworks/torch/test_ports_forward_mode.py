"""A Function's own tangents, here and in real torch."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from tests.kit.modes import EAGER_AND_JIT as MODES

from .layers import ported
from .sides import Ours, Port, Theirs, X, Y, apply, assert_equal, compare, direction, seen, set_on_both, weights

# torch's own: its first use of forward mode compiles rules by what it calls deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
DX, DY = direction(X.shape), weights(Y.shape)


def dual(torch, function, *pairs):
    """The value and the tangent of what torch calls dual numbers, which allow a context that forward fills."""
    forward_ad = torch.autograd.forward_ad
    with forward_ad.dual_level():
        args = [
            torch.tensor(x) if t is None else forward_ad.make_dual(torch.tensor(x), torch.tensor(t)) for x, t in pairs
        ]
        outputs = function(*args)
        first, *rest = outputs if isinstance(outputs, tuple) else (outputs,)
        return tuple(forward_ad.unpack_dual(first)), rest


@pytest.mark.parametrize("which", ["both", "first", "second"])
@MODES
def test_jvp(both, which, mode):
    def function(of):
        x, y = of.tensor(X), of.tensor(Y)
        return {
            "both": lambda a, b: of.layers.SinProduct.apply(a, b, 0.7)[0],
            "first": lambda a: of.layers.SinProduct.apply(of.xp.sin(a), y, 0.7)[0],
            "second": lambda b: of.layers.SinProduct.apply(x, of.xp.sin(b), 0.7)[0],
        }[which]

    primals, tangents = {"both": ((X, Y), (DX, DY)), "first": ((X,), (DX,)), "second": ((Y,), (DY,))}[which]

    def run(of):
        jvp = of.mode(lambda p, t: of.func.jvp(function(of), p, t))
        return jvp(tuple(map(of.tensor, primals)), tuple(map(of.tensor, tangents)))

    def run_jitted(of):
        return of.func.jvp(of.mode(function(of)), tuple(map(of.tensor, primals)), tuple(map(of.tensor, tangents)))

    compare(both, run, mode)
    compare(both, run_jitted, mode)


@pytest.mark.parametrize("mode", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_jvp_with_a_context_that_forward_fills(torch, original, mode):
    expected, _ = dual(torch, lambda x, y: original.SinProductInCtx.apply(x, y, 0.7), (X, DX), (Y, DY))
    found = jax.jvp(mode(lambda x, y: ported.SinProductInCtx.apply(x, y, 0.7)), (X, Y), (DX, DY))
    assert_equal(found, expected)


def test_statics_among_the_outputs_under_jvp(torch, original):
    expected, statics = dual(torch, lambda x, y: original.SinProduct.apply(x, y, 0.7), (X, DX), (Y, None))
    kept = []

    def first(x):
        y, *kept[:] = ported.SinProduct.apply(x, jnp.asarray(Y), 0.7)
        return y

    assert_equal(jax.jvp(first, (jnp.asarray(X),), (jnp.asarray(DX),)), expected)
    assert kept == statics == [None, "units"]


@pytest.mark.parametrize("materialize", [True, False])
@pytest.mark.parametrize("which", [0, 1])
def test_missing_tangents(both, monkeypatch, materialize, which):
    set_on_both(monkeypatch, both, "SeenTangents", materialize=materialize, seen=[])
    x, t = (X, Y)[which], (DX, DY)[which]

    def run(of):
        args = [of.tensor(X), of.tensor(Y)]
        of_one = lambda v: of.layers.SeenTangents.apply(*(v if i == which else a for i, a in enumerate(args)), 0.7)  # noqa: E731
        return of.func.jvp(of_one, (of.tensor(x),), (of.tensor(t),))

    compare(both, run)
    missing = "zeros" if materialize else None
    theirs, ours = seen(both, "SeenTangents")
    assert theirs == [("some", missing, None) if which == 0 else (missing, "some", None)]
    assert ours == theirs[0]


def test_what_is_saved_for_backward_and_for_jvp(torch, original):
    expected, _ = dual(torch, original.SavedForEach.apply, (X, DX))
    assert_equal(jax.jvp(ported.SavedForEach.apply, (jnp.asarray(X),), (jnp.asarray(DX),)), expected)
    one = Port("SavedForEach", (X,), (0,), apply("SavedForEach"), None, False)
    assert_equal(Ours(one).first(jax.jit), Theirs(torch, one, original).first())


def test_a_tangent_too_many(torch, original):
    with pytest.raises(RuntimeError, match="expected 1 but got 2"):
        torch.func.jvp(original.SurplusTangent.apply, (torch.tensor(X),), (torch.tensor(DX),))
    with pytest.raises(ValueError, match=r"SurplusTangent.jvp returned 2 tangents; expected 1"):
        jax.jvp(ported.SurplusTangent.apply, (jnp.asarray(X),), (jnp.asarray(DX),))
