"""What the backward of a Function sees, and what it may not return, here and in real torch."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.kit.modes import EAGER_AND_JIT as MODES

from .sides import ACTS, LABELS, Ours, Port, Theirs, X, Y, apply, assert_equal, one_of, seen, set_on_both

# torch's own: its first use of forward mode compiles rules by what it calls deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
NEEDS = {
    "two": ((X, 0.7, Y), [(0,), (2,), (0, 2)]),
    "three": ((X, 0.7, Y, X), [(0,), (3,), (0, 2, 3)]),
    "all": ((X, 0.7, Y, X, "named"), [(2,), (2, 3)]),
}


@pytest.mark.parametrize("name", ["SeenNeeds", "SeenNeedsSetup"])
@pytest.mark.parametrize("passed", NEEDS)
@MODES
def test_needs_input_grad(torch, original, both, monkeypatch, name, passed, mode):
    args, subsets = NEEDS[passed]
    for subset in subsets:
        one = Port(name, args, subset, apply(name), None, False)
        set_on_both(monkeypatch, both, name, seen=[])
        assert_equal(Ours(one).first(mode), Theirs(torch, one, original).first())
        theirs, ours = seen(both, name)
        assert ours == theirs[0]
        # Defaults that were not passed count where the context is set up apart, and only there.
        assert len(ours) == (5 if name == "SeenNeedsSetup" else len(args))


@pytest.mark.parametrize("materialize", [True, False])
@pytest.mark.parametrize("pick", [(0,), (1,), (0, 1)])
@MODES
def test_missing_cotangents(torch, original, both, monkeypatch, materialize, pick, mode):
    one = Port("SeenCotangents", (X,), (0,), apply("SeenCotangents"), pick, False)
    set_on_both(monkeypatch, both, "SeenCotangents", materialize=materialize, seen=[])
    assert_equal(Ours(one).first(mode), Theirs(torch, one, original).first())
    theirs, ours = seen(both, "SeenCotangents")
    assert ours == theirs[0]


@MODES
def test_statics_among_the_outputs(torch, original, both, monkeypatch, mode):
    one = Port("WithStatics", (X,), (0,), apply("WithStatics"), (0,), False)
    set_on_both(monkeypatch, both, "WithStatics", seen=[])
    assert_equal(Ours(one).first(mode), Theirs(torch, one, original).first())
    theirs, ours = seen(both, "WithStatics")
    assert ours == theirs[0] == (False, True, True, True, False)


def test_an_attribute_of_the_class_changed_between_calls(torch, original, both, monkeypatch):
    one = Port("AuxLossScaler", (X, np.array(0.7, np.float32)), (0, 1), apply("AuxLossScaler"), None, False)
    for scale in (None, 2, 5):
        set_on_both(monkeypatch, both, "AuxLossScaler", scale=scale)
        found = Ours(one).first(lambda f: f)
        assert_equal(found, Theirs(torch, one, original).first())
        assert float(found[1]) == (scale or 1)


# Two steps of one example, as its forward is long.
SHORT = ACTS[:2, :1], LABELS[:1, :1], np.array([2], np.int32), np.array([1], np.int32)
ERRORS = [
    # name, arguments, what torch raises, what we raise, what our message names
    ("TooFew", (X, Y), RuntimeError, ValueError, "TooFew"),
    ("SurplusGradient", (X,), RuntimeError, ValueError, "SurplusGradient"),
    ("ListOfGradients", (X, Y), RuntimeError, ValueError, "ListOfGradients"),
    ("WrongShape", (X,), RuntimeError, ValueError, "WrongShape"),
    ("GradientForStatic", (X, 2.0), RuntimeError, ValueError, "GradientForStatic"),
    ("SavedNumber", (X,), TypeError, TypeError, "save_for_backward"),
    ("DirtyAndLost", (X,), RuntimeError, ValueError, "mark_dirty"),
]


@pytest.mark.parametrize(("name", "args", "their_error", "our_error", "named"), ERRORS, ids=[e[0] for e in ERRORS])
@MODES
def test_errors(torch, original, name, args, their_error, our_error, named, mode):
    # A product of the input, as torch refuses to change a leaf in place before it looks at anything else.
    one = Port(name, args, (0,), lambda m, x, *rest: getattr(m, name).apply(x * 1, *rest), None, False)
    with pytest.raises(their_error):
        Theirs(torch, one, original).first()
    with pytest.raises(our_error, match=named):
        Ours(one).first(mode)


@pytest.mark.parametrize(("name", "args"), [("OnceOnly", (X,)), ("CTC", SHORT)], ids=["OnceOnly", "CTC"])
@MODES
def test_second_derivative_of_once_differentiable(torch, original, name, args, mode):
    one = Port(name, args, (0,), apply(name), None, True)
    # Of backward(), as torch.autograd.grad visits only what leads to its inputs, and the error is beside that way.
    slope = sum(g.sum() for g in Theirs(torch, one, original).first(create_graph=True))
    with pytest.raises(RuntimeError, match="once_differentiable"):
        slope.backward()
    with pytest.raises(RuntimeError, match="once_differentiable"):
        Ours(one).second(mode)


def test_no_backward_at_all(both):
    theirs, ours = (one_of(of, lambda ctx, x: x * 2, backward=None) for of in both)
    y = theirs.apply(both[0].xp.ones(2, requires_grad=True)).sum()
    with pytest.raises(NotImplementedError):
        y.backward()
    assert ours.apply(jnp.ones(2)).tolist() == [2.0, 2.0]
    with pytest.raises(NotImplementedError, match="OneOf"):
        jax.grad(lambda x: ours.apply(x).sum())(jnp.ones(2))
