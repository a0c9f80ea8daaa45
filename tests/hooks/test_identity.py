"""Which pairs of hooks are equal, whose hooks run, and what JAX's caches keep of a pair."""

from __future__ import annotations

import copy
import dataclasses
import functools
import gc
import itertools
import pickle
import threading
import weakref

import jax
import jax.monitoring
import jax.numpy as jnp
import numpy as np
import pytest

from pylayer_jax import saved_tensors_hooks, saved_tensors_report
from pylayer_jax.packers import by_name, cast_saved, chain, quantize_saved, save_on_cpu, save_on_disk

from .spy import X, counted_step, tanh_sum

# Some blocks stand around `jax.grad`, where hooks see no plain operation; some functions have no tensor of each name.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*0 tensors packed:UserWarning"),
    pytest.mark.filterwarnings("ignore:by_name. no tensor:UserWarning"),
]


def is_matrix(x):
    return x.ndim > 1


# -- pairs that look alike: `make(scale)` is a pair whose unpack hook multiplies by `scale` --------------


class OfClosures(saved_tensors_hooks):
    """As torchtune and TRL write an offloader."""

    def __init__(self, scale):
        def pack(x):
            return (x,)

        def unpack(packed):
            return packed[0] * scale

        super().__init__(pack, unpack)


class OfState(saved_tensors_hooks):
    def __init__(self):
        super().__init__(self.pack, self.unpack)

    def pack(self, x):
        return (x,)

    def unpack(self, packed):
        return packed[0] * self.scale


class Mixin:
    def __init__(self, scale):
        super().__init__(lambda x: (x,), lambda packed: packed[0] * scale)


class OfMixin(Mixin, saved_tensors_hooks):
    pass


@dataclasses.dataclass
class OfDataclass(saved_tensors_hooks):
    """A dataclass defines `==`, and so takes `hash` away."""

    scale: float = dataclasses.field(compare=False)

    def __post_init__(self):
        super().__init__(lambda x: (x,), lambda packed: packed[0] * self.scale)


class Hidden(saved_tensors_hooks):
    def __new__(cls, scale):
        return super().__new__(cls)

    def __init__(self, scale):
        super().__init__(lambda x: (x,), lambda packed: packed[0] * scale)


@dataclasses.dataclass(frozen=True)
class Multiplies:
    """Equal to all others of its class."""

    scale: float = dataclasses.field(compare=False)

    def __call__(self, packed):
        return packed[0] * self.scale

    def method(self, packed):
        return packed[0] * self.scale


class WithoutWeakReferences:
    __slots__ = ("scale",)

    def __init__(self, scale):
        self.scale = scale

    def __eq__(self, other):
        return True

    def __hash__(self):
        return 0

    def __call__(self, packed):
        return packed[0] * self.scale

    def method(self, packed):
        return packed[0] * self.scale


def as_tuple(x):
    return (x,)


def multiply(packed):
    return packed[0] * 2


def times(scale, packed):
    return packed[0] * scale


def of_state(scale):
    pair = OfState()
    pair.scale = scale
    return pair


def of_class(scale):
    class Local(saved_tensors_hooks):
        pass

    return Local(as_tuple, lambda packed: packed[0] * scale)


ALIKE = {
    "closures": OfClosures,
    "state": of_state,
    "mixin": OfMixin,
    "dataclass": OfDataclass,
    "hidden": Hidden,
    "class": of_class,
    "lambda": lambda scale: saved_tensors_hooks(as_tuple, lambda packed: packed[0] * scale),
    "partial": lambda scale: saved_tensors_hooks(as_tuple, functools.partial(times, scale)),
    "callable": lambda scale: saved_tensors_hooks(as_tuple, Multiplies(scale)),
    "method": lambda scale: saved_tensors_hooks(as_tuple, Multiplies(scale).method),
    "slots": lambda scale: saved_tensors_hooks(as_tuple, WithoutWeakReferences(scale)),
    "method of slots": lambda scale: saved_tensors_hooks(as_tuple, WithoutWeakReferences(scale).method),
    "chain": lambda scale: chain(OfClosures(scale), cast_saved(jnp.float32)),
    "by name": lambda scale: by_name({"tanh": None, ...: OfClosures(scale)}),
    "host": lambda scale: saved_tensors_hooks(as_tuple, functools.partial(times, np.float32(scale)), host=True),
}


def slope(scale):
    return 1 - (scale * np.tanh(X)) ** 2


@pytest.mark.parametrize("make", ALIKE.values(), ids=ALIKE)
def test_each_pair_runs_its_own_hooks(make):
    step, traced = counted_step()
    outer = jax.jit(jax.grad(lambda x: jax.jit(tanh_sum)(x)))
    for scale in (1.0, 2.0, 3.0):  # a pair may get the memory of the one before
        with make(scale):
            step(X)
            np.testing.assert_allclose(step(X), slope(scale), rtol=1e-5)
            np.testing.assert_allclose(outer(X), slope(scale), rtol=1e-5)
            np.testing.assert_allclose(jax.grad(tanh_sum)(X), slope(scale), rtol=1e-5)
        gc.collect()
    assert len(traced) == 3


@pytest.mark.parametrize("make", ALIKE.values(), ids=ALIKE)
def test_a_jitted_layer_in_a_block_of_eager_mode_is_packed_by_its_own_pair(make):
    apply = jax.jit(tanh_sum)
    plain = jax.jit(jnp.sum)
    for scale in (1.0, 2.0, 3.0):
        pair = make(scale)

        def loss(x, pair=pair):
            with pair:
                return plain(x) + apply(x) + plain(x)

        np.testing.assert_allclose(jax.grad(loss)(X), 2 + slope(scale), rtol=1e-5)


def test_each_thread_runs_its_own_hooks():
    step = jax.jit(jax.grad(lambda x: jax.jit(tanh_sum)(x) + jax.lax.map(tanh_sum, x[None])[0]))
    together, found = threading.Barrier(8), {}

    def run(scale):
        together.wait()
        with OfClosures(scale):
            found[scale] = step(X)

    threads = [threading.Thread(target=run, args=(float(scale),)) for scale in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8
    for scale, slopes in found.items():
        np.testing.assert_allclose(slopes, 2 * slope(scale), rtol=1e-4)


def test_a_pair_may_enter_a_set_before_its_hooks_are_set():
    entered = weakref.WeakSet()

    class Entered(OfState):
        def __init__(self):
            entered.add(self)
            super().__init__()

    pairs = [Entered(), Entered()]
    assert set(entered) == set(pairs)


# -- equal pairs -----------------------------------------------------------------------------------------


def floats_only(x):
    return is_matrix(x)


class Named(saved_tensors_hooks):
    pass


class Ready(quantize_saved):
    pass


class WithState(quantize_saved):
    def __init__(self):
        super().__init__(8)


EQUAL = [
    (lambda folder: quantize_saved(), lambda folder: quantize_saved(8)),
    (lambda folder: quantize_saved(8, only=is_matrix), lambda folder: quantize_saved(bits=8, only=is_matrix)),
    (lambda folder: cast_saved(), lambda folder: cast_saved("bfloat16", arguments=False)),
    (lambda folder: save_on_cpu(), lambda folder: save_on_cpu(False)),
    (save_on_disk, lambda folder: save_on_disk(str(folder))),
    (lambda folder: chain(cast_saved(), save_on_cpu()), lambda folder: chain(cast_saved(jnp.bfloat16), save_on_cpu())),
    (lambda folder: by_name({"a": None, ...: cast_saved()}), lambda folder: by_name({...: cast_saved(), "a": None})),
    (
        lambda folder: saved_tensors_hooks(as_tuple, multiply),
        lambda folder: saved_tensors_hooks(unpack_hook=multiply, pack_hook=as_tuple, host=False),
    ),
    (lambda folder: Named(as_tuple, multiply), lambda folder: Named(as_tuple, multiply)),
    (lambda folder: Ready(), lambda folder: Ready(8)),
]
UNEQUAL = [
    (lambda: quantize_saved(8), lambda: quantize_saved(4)),
    (lambda: quantize_saved(8), lambda: quantize_saved(8, arguments=True)),
    (lambda: quantize_saved(8), lambda: Ready(8)),
    (lambda: quantize_saved(8, only=is_matrix), lambda: quantize_saved(8, only=floats_only)),
    (lambda: WithState(), lambda: WithState()),
    (lambda: chain(cast_saved(), save_on_cpu()), lambda: chain(quantize_saved(), save_on_cpu())),
    (lambda: chain(cast_saved()), lambda: chain(cast_saved(), only=is_matrix)),
    (lambda: by_name({"a": cast_saved()}), lambda: by_name({"b": cast_saved()})),
    (lambda: by_name({"a": cast_saved()}), lambda: by_name({"a": None})),
    (lambda: saved_tensors_hooks(as_tuple, multiply), lambda: saved_tensors_hooks(as_tuple, multiply, host=True)),
    (lambda: saved_tensors_hooks(as_tuple, multiply), lambda: Named(as_tuple, multiply)),
    (lambda: OfClosures(1.0), lambda: OfClosures(1.0)),
    (lambda: OfState(), lambda: OfState()),
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


@pytest.mark.parametrize("make", [quantize_saved, lambda: chain(cast_saved(), save_on_cpu(), only=is_matrix)])
def test_an_equal_pair_is_a_hit_when_the_first_one_is_gone(make):
    step, traced = counted_step(jax.jit(lambda x: tanh_sum(jnp.tile(x, (8, 64)))))
    for _ in range(3):
        with make():
            step(X)
        gc.collect()
    assert len(traced) == 1


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))])
def test_a_copy_of_a_ready_pair_is_equal_to_it_and_a_copy_of_a_pair_with_a_state_is_not(copied):
    pair = chain(quantize_saved(4, only=is_matrix), save_on_cpu())
    assert copied(pair) == pair
    own = OfClosures(2.0)
    assert copied(own) != own


def test_an_equal_pair_that_is_still_open_keeps_its_values(tmp_path):
    forward = jax.jit(lambda x: jax.vjp(tanh_sum, x))
    first, second = save_on_disk(tmp_path), save_on_disk(tmp_path)
    with first:
        forward(X)
    with second:
        _, pull = forward(X)
    first.close()
    np.testing.assert_allclose(pull(jnp.float32(1.0))[0], slope(1), rtol=1e-5)


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
    only = lambda x: x.size > size[0]  # noqa: E731
    return make(only), [only]


PAIRS = {
    "hooks": hooks_of_a_step,
    "host": lambda: hooks_of_a_step(host=True),
    "only": lambda: predicate_of_a_step(lambda only: cast_saved(only=only)),
    "chain": lambda: predicate_of_a_step(lambda only: chain(quantize_saved(), save_on_cpu(), only=only)),
    "by name": lambda: predicate_of_a_step(lambda only: by_name({...: cast_saved(only=only)})),
}


def inside(pair, f, run=jax.grad):
    run(pair(f))(*ARGS)


def around(pair, f):
    with pair:
        jax.grad(f)(*ARGS)


def a_dropped_jitted_function(pair, f):
    jax.jit(jax.grad(pair(lambda *args: f(*args))))(*ARGS)


def under_vmap(pair, f):
    jax.vmap(jax.grad(pair(f)), (None, 0))(ARGS[0], jnp.stack([W, W]))


def under_checkpoint(pair, f):
    jax.grad(pair(jax.checkpoint(lambda *args: f(*args))))(*ARGS)


def report(pair, f):
    saved_tensors_report(pair(f), *ARGS)


STEPS = {"inside": inside, "around": around, "vmap": under_vmap}
ALL_STEPS = STEPS | {"jit": a_dropped_jitted_function, "checkpoint": under_checkpoint, "report": report}
FUNCTIONS = {"plain": plain, "layers": layers, "jitted": jitted}


def met(steps):
    """Each pair in eager mode, and hooks everywhere; the rest is marked as slow."""
    found = []
    for step, pair, function in itertools.product(steps, PAIRS, FUNCTIONS):
        # jax.checkpoint refuses the effects of hooks on the host
        if (pair == "hooks" or function == "plain") and (step, pair) != ("checkpoint", "host"):
            is_core = step == "inside" or (pair == "hooks" and function != "plain")
            found.append(pytest.param(step, pair, function, marks=[] if is_core else pytest.mark.slow))
    return found


@pytest.mark.parametrize(("step", "pair", "function"), met(ALL_STEPS))
def test_nothing_of_a_pair_stays_alive(step, pair, function):
    alive = []
    for _ in range(2):
        made, parts = PAIRS[pair]()
        alive += map(weakref.ref, [made, *parts])
        ALL_STEPS[step](made, FUNCTIONS[function])
        del made, parts
    gc.collect()
    assert not [part() for part in alive if part() is not None]


@pytest.mark.parametrize(("step", "pair", "function"), met(STEPS))
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
