"""Which pairs of hooks are equal, whose hooks run, what JAX's caches keep of a pair, its copies and its `repr`."""

import contextlib
import copy
import dataclasses
import gc
import pickle
import weakref

import jax
import jax.monitoring
import jax.numpy as jnp
import numpy as np
import pytest

from pylayer_jax import saved_tensors_hooks, saved_tensors_report
from pylayer_jax.packers import by_name, cast_saved, chain, quantize_saved, recompute_saved, save_on_cpu, save_on_disk
from tests.kit.threads import in_threads

from .spy import X, in_block, is_matrix, tanh_sum

# Some blocks stand around `jax.grad`, where hooks see no plain operation; some functions have no tensor of each name.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*0 tensors packed:UserWarning"),
    pytest.mark.filterwarnings("ignore:by_name. no tensor:UserWarning"),
]


# -- pairs that look alike: `make(scale)` is a pair whose unpack hook multiplies by `scale` --------------


class OfClosures(saved_tensors_hooks):
    """As torchtune and TRL write an offloader."""

    def __init__(self, scale):
        def pack(x):
            return (x,)

        def unpack(packed):
            return packed[0] * scale

        super().__init__(pack, unpack)


@dataclasses.dataclass(frozen=True, slots=True)
class Multiplies:
    """Equal to all others of its class, and without weak references."""

    scale: float = dataclasses.field(compare=False)

    def __call__(self, packed):
        return packed[0] * self.scale


class Unhashable(Multiplies):
    __hash__ = None


def as_tuple(x):
    return (x,)


def of_tuple(packed):
    return packed[0]


ALIKE = {
    "closures": OfClosures,
    "lambda": lambda scale: saved_tensors_hooks(as_tuple, lambda packed: packed[0] * scale),
    "callable": lambda scale: saved_tensors_hooks(as_tuple, Multiplies(scale)),
    "method": lambda scale: saved_tensors_hooks(as_tuple, Multiplies(scale).__call__),
    "without a hash": lambda scale: saved_tensors_hooks(as_tuple, Unhashable(scale)),
    "chain": lambda scale: chain(OfClosures(scale), cast_saved(jnp.float32)),
    "host": lambda scale: saved_tensors_hooks(as_tuple, lambda packed: packed[0] * np.float32(scale), host=True),
}


def slope(scale):
    return 1 - (scale * np.tanh(X)) ** 2


def counted_step(f):
    """Return the compiled gradient of `f`, and a list that grows each time it is traced."""
    traced = []

    def counted(x):
        traced.append(None)
        return f(x)

    return jax.jit(jax.grad(counted)), traced


@pytest.mark.parametrize("make", ALIKE.values(), ids=ALIKE)
def test_each_pair_runs_its_own_hooks(make):
    step, traced = counted_step(tanh_sum)
    outer = jax.jit(jax.grad(lambda x: jax.jit(tanh_sum)(x)))
    apply, plain = jax.jit(tanh_sum), jax.jit(jnp.sum)
    inner = jax.jit(lambda x: tanh_sum(x))
    around_inner = jax.jit(lambda x: inner(x))
    for scale in (1.0, 2.0, 3.0):  # a pair may get the memory of the one before
        pair = make(scale)
        for f in (inner, around_inner):
            with pair:  # the second block finds what JAX traced in the first
                np.testing.assert_allclose(jax.grad(f)(X), slope(scale), rtol=1e-5)
        with make(scale):
            step(X)
            for run in (step, outer, jax.grad(tanh_sum)):
                np.testing.assert_allclose(run(X), slope(scale), rtol=1e-5)
        block = in_block(make(scale), lambda x: plain(x) + apply(x) + plain(x))
        np.testing.assert_allclose(jax.grad(block)(X), 2 + slope(scale), rtol=1e-5)
        gc.collect()
    assert len(traced) == 3


def test_each_thread_runs_its_own_hooks():
    step = jax.jit(jax.grad(lambda x: jax.jit(tanh_sum)(x) + jax.lax.map(tanh_sum, x[None])[0]))
    # No hooks in two threads, and three pairs that two threads share each.
    pairs = [contextlib.nullcontext(), *map(OfClosures, (2.0, 3.0, 4.0))]

    def work(i):
        with pairs[i % 4]:
            np.testing.assert_allclose(step(X), 2 * slope(1.0 + i % 4), rtol=1e-4)

    assert in_threads(8, work) == []


def test_a_pair_may_enter_a_set_before_its_hooks_are_set():
    entered = weakref.WeakSet()

    class Entered(OfClosures):
        def __init__(self):
            entered.add(self)
            super().__init__(1.0)

    pairs = [Entered(), Entered()]
    assert set(entered) == set(pairs)


class Named(saved_tensors_hooks):
    pass


class Ready(quantize_saved):
    pass


class WithState(quantize_saved):
    def __init__(self):
        super().__init__(8)


EQUAL = [
    (lambda folder: quantize_saved(), lambda folder: quantize_saved(8)),
    (lambda folder: cast_saved(), lambda folder: cast_saved("bfloat16", arguments=False)),
    (lambda folder: save_on_cpu(), lambda folder: save_on_cpu(False)),
    (save_on_disk, lambda folder: save_on_disk(str(folder))),
    (lambda folder: chain(cast_saved(), save_on_cpu()), lambda folder: chain(cast_saved(jnp.bfloat16), save_on_cpu())),
    (lambda folder: by_name({"a": None, ...: cast_saved()}), lambda folder: by_name({...: cast_saved(), "a": None})),
    (
        lambda folder: saved_tensors_hooks(as_tuple, of_tuple),
        lambda folder: saved_tensors_hooks(unpack_hook=of_tuple, pack_hook=as_tuple, host=False),
    ),
    (lambda folder: Named(as_tuple, of_tuple), lambda folder: Named(as_tuple, of_tuple)),
    (lambda folder: Ready(), lambda folder: Ready(8)),
]
UNEQUAL = [
    (lambda: quantize_saved(8), lambda: quantize_saved(4)),
    (lambda: quantize_saved(8), lambda: quantize_saved(8, arguments=True)),
    (lambda: quantize_saved(8), lambda: Ready(8)),
    (lambda: quantize_saved(8, only=is_matrix), lambda: quantize_saved(8, only=lambda x: is_matrix(x))),
    (lambda: WithState(), lambda: WithState()),
    (lambda: chain(cast_saved(), save_on_cpu()), lambda: chain(quantize_saved(), save_on_cpu())),
    (lambda: chain(cast_saved()), lambda: chain(cast_saved(), only=is_matrix)),
    (lambda: by_name({"a": cast_saved()}), lambda: by_name({"b": cast_saved()})),
    (lambda: by_name({"a": cast_saved()}), lambda: by_name({"a": None})),
    (lambda: saved_tensors_hooks(as_tuple, of_tuple), lambda: saved_tensors_hooks(as_tuple, of_tuple, host=True)),
    (lambda: saved_tensors_hooks(as_tuple, of_tuple), lambda: Named(as_tuple, of_tuple)),
    (lambda: OfClosures(1.0), lambda: OfClosures(1.0)),
    (lambda: cast_saved(), lambda: "cast_saved()"),
]


@pytest.mark.parametrize(("one", "other"), EQUAL)
def test_equal_pairs_are_one_static_argument_and_one_entry_of_the_cache(one, other, tmp_path):
    first, second = one(tmp_path), other(tmp_path)
    assert first == second
    assert hash(first) == hash(second)
    traced = []
    compiled = jax.jit(lambda x, pair: traced.append(pair) or x, static_argnums=1)
    for pair in (first, second):
        compiled(X, pair)
    assert len(traced) == 1


@pytest.mark.parametrize(("one", "other"), UNEQUAL)
def test_other_pairs_are_not_equal(one, other):
    first, second = one(), other()
    assert first != second
    assert first == first
    assert len({first, first, second}) == 2


def test_jit_traces_again_for_another_pair_and_not_for_an_equal_one(tmp_path):
    step, traced = counted_step(jax.jit(lambda x: tanh_sum(jnp.tile(x, (8, 64)))))
    makers = [contextlib.nullcontext, quantize_saved, save_on_cpu, lambda: save_on_disk(tmp_path)]
    makers += [lambda: cast_saved(only=is_matrix), lambda: chain(cast_saved(), save_on_cpu(), only=is_matrix)]
    makers += [lambda: saved_tensors_hooks(as_tuple, of_tuple)]
    for count, make in enumerate([*makers, contextlib.nullcontext], 1):
        for _ in range(3):
            with make():
                step(X)
            gc.collect()  # the pair is gone before an equal one comes
        assert len(traced) == min(count, len(makers))


# -- what stays alive, and what is compiled again --------------------------------------------------------


def plain(x, w):
    return jnp.sum(jax.nn.relu(jax.nn.softmax(jnp.tanh(x @ w))) * jnp.where(x > 0, x, 0.0))


def layers(x, w):
    return tanh_sum(x @ w) + jnp.sum(jnp.sin(x))


jitted = jax.jit(plain)
W = jnp.full((8, 8), 0.1)
ARGS = jnp.linspace(-1.0, 1.0, 32).reshape(4, 8), W


def hooks_of_a_step(**flags):
    storage = []

    def pack(x):
        storage.append(x)
        return (x,)

    def unpack(packed):
        return storage and packed[0]

    return saved_tensors_hooks(pack, unpack, **flags), [pack, unpack]


def predicate_of_a_step(make):
    size = [1]
    only = lambda x: x.size > size[0]
    return make(only), [only]


PAIRS = {
    "hooks": hooks_of_a_step,
    "host": lambda: hooks_of_a_step(host=True),
    "limit": lambda: predicate_of_a_step(lambda only: recompute_saved(limit="4 KiB", only=only)),
    "only": lambda: predicate_of_a_step(lambda only: cast_saved(only=only)),
    "chain": lambda: predicate_of_a_step(lambda only: chain(quantize_saved(), save_on_cpu(), only=only)),
    "by name": lambda: predicate_of_a_step(lambda only: by_name({...: cast_saved(only=only)})),
}


def around(pair, f):
    with pair:
        jax.grad(f)(*ARGS)


STEPS = {
    "inside": lambda pair, f: jax.grad(pair(f))(*ARGS),
    "around": around,
    "vmap": lambda pair, f: jax.vmap(jax.grad(pair(f)), (None, 0))(ARGS[0], jnp.stack([W, W])),
}
ALL_STEPS = STEPS | {
    "jit of a function that is dropped": lambda pair, f: jax.jit(jax.grad(pair(lambda *args: f(*args))))(*ARGS),
    "checkpoint": lambda pair, f: jax.grad(pair(jax.checkpoint(lambda *args: f(*args))))(*ARGS),
    "report": lambda pair, f: saved_tensors_report(pair(f), *ARGS),
}
FUNCTIONS = {"plain": plain, "layers": layers, "jitted": jitted}


def met(steps):
    """Each step with the pair of plain hooks, and each pair in eager mode."""
    found = [(step, "hooks", function) for step in steps for function in FUNCTIONS]
    return pytest.mark.parametrize(("step", "pair", "function"), found + [("inside", pair, "plain") for pair in PAIRS])


@met(ALL_STEPS)
def test_nothing_of_a_pair_or_of_what_it_decorates_stays_alive(step, pair, function):
    alive = []
    for _ in range(2):
        made, parts = PAIRS[pair]()
        decorated = lambda *args: FUNCTIONS[function](*args)
        alive += map(weakref.ref, [made, decorated, *parts])
        ALL_STEPS[step](made, decorated)
        del made, decorated, parts
    gc.collect()
    assert not [part() for part in alive if part() is not None]


@met(STEPS)
def test_a_new_pair_in_eager_mode_compiles_nothing_again(step, pair, function):
    compiled = []

    def listen(event, _, **__):
        if "backend_compile" in event:
            compiled.append(event)

    made, _ = PAIRS[pair]()
    STEPS[step](made, FUNCTIONS[function])
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        for _ in range(2):
            made, _ = PAIRS[pair]()
            STEPS[step](made, FUNCTIONS[function])
        assert not compiled
        jax.jit(lambda x: x + 1)(X)
        assert compiled
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


# -- a pair in one line, and its copies --------------------------------------------------------------


class Scaled(saved_tensors_hooks):
    def __init__(self, scale, *, table=None):
        super().__init__(lambda x: x * scale, lambda x: x / scale)


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda hooks: pickle.loads(pickle.dumps(hooks))])
@pytest.mark.parametrize(
    ("make", "text"),
    [
        (
            lambda _: saved_tensors_hooks(as_tuple, of_tuple, host=True),
            "saved_tensors_hooks(as_tuple, of_tuple, host=True)",
        ),
        (lambda _: cast_saved(), "cast_saved()"),
        (lambda _: cast_saved(np.dtype("float16"), only=is_matrix), "cast_saved(float16, only=is_matrix)"),
        (lambda _: quantize_saved(bits=4), "quantize_saved(bits=4)"),
        (lambda _: save_on_cpu(True), "save_on_cpu(True)"),
        (save_on_disk, "save_on_disk('FOLDER')"),
        (
            lambda folder: chain(cast_saved(), save_on_disk(folder), only=None),
            "chain(cast_saved(), save_on_disk('FOLDER'), only=None)",
        ),
        (lambda _: Scaled(0.5, table=np.eye(2)), "Scaled(0.5, table=array([[1., 0.], [0., 1.]]))"),
    ],
)
def test_a_pair_shows_its_arguments_and_a_copy_is_another_equal_pair(make, text, copied, tmp_path):
    hooks = make(str(tmp_path))
    assert repr(hooks).replace(str(tmp_path), "FOLDER").startswith(text)
    shown = repr(hooks)
    with hooks:  # an open block is not copied
        other = copied(hooks)
    assert other is not hooks
    assert type(other) is type(hooks)
    assert repr(other) == shown
    assert (other == hooks) == (type(hooks) is not Scaled)  # which may have a state
    hooks.close()
    with other:
        _, pullback = jax.vjp(jnp.sin, jnp.ones(64))
    np.testing.assert_allclose(pullback(jnp.ones(64))[0], np.full(64, np.cos(1.0)), rtol=0.01)


def test_a_pair_tells_how_many_tensors_it_has_packed_and_backward_computes_again():
    f = lambda x: jnp.sin(x).sum()
    hooks, exact = save_on_cpu(recompute=False), recompute_saved()
    jax.grad(hooks(f))(jnp.ones(3))
    assert "1 tensor" in repr(hooks)
    jax.jit(jax.grad(hooks(f)))(jnp.ones(3))
    assert all(text in repr(hooks) for text in ("2 tensors", "1 of them traced"))
    jax.grad(exact(f))(jnp.ones(3))
    assert "1 computed again" in repr(exact)
