"""The classes of tracers and traces, which have no public names: learned from what a traced function sees.

At import, `jax.vmap` (and so on) runs a function that notes the class of its argument and of the running trace, and
checks the attributes that `tracers` reads. All of it runs in `jax.eval_shape`, which compiles nothing and starts no
backend. If JAX is not as expected, the import fails.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from .imports import eval_context, jet, take_current_trace


class Seen(NamedTuple):
    tracer: type[Any]  # of the arguments of a traced function
    trace: type[Any]  # the running one


class Checkpoint(NamedTuple):
    traced_for: str  # what a trace says that stages a function for `jax.checkpoint`
    tracers: tuple[type[Any], ...]  # that a forward rule gets, if JAX reports all of them as perturbed


def current_trace() -> Any:
    with take_current_trace() as trace:
        return trace


def _learn(what: str, look: Callable[[Any], Any]) -> Any:
    """What `look` returns for a staged array."""
    found: list[Any] = []
    try:
        # The package may be imported within a function that is traced.
        with eval_context(), jax.disable_jit(False):
            jax.eval_shape(lambda x: found.append(look(x)), jax.ShapeDtypeStruct((1,), np.float32))
        return found[0]
    except Exception as error:
        raise ImportError(
            f"pylayer_jax cannot find {what} in jax {jax.__version__} ({type(error).__name__}: {error}). It was tested "
            "with jax 0.10.2 and 0.12.0. Install one of these, or a newer pylayer_jax."
        ) from error


def _check(is_expected: bool, found: object) -> None:
    if not is_expected:
        raise TypeError(f"found {found}")


def _seen(what: str, transform: Callable[[Any, Any], object], below: str | None = None) -> Seen:
    """What a transformed function sees. `below` is the attribute of a tracer that holds the value below it."""

    def look(x: Any) -> Seen:
        outer, found = current_trace(), set[Seen]()

        def transformed(y: Any) -> Any:
            trace = current_trace()
            _check(y._trace is trace and trace.parent_trace is outer, f"{type(trace)}, not within {outer}")
            _check(below is None or getattr(y, below) is x, f"another {below} of {type(y)}")
            found.add(Seen(type(y), type(trace)))
            return y

        transform(transformed, x)
        _check(len(found) == 1, found or "no call of the function")
        return found.pop()

    return _learn(f"the tracers and traces of {what}", look)


with eval_context():
    EVAL_TRACE: type[Any] = type(current_trace())
STAGED = _seen("jax.jit", lambda f, x: jax.jit(f)(x))
MAPPED = _seen("jax.vmap", lambda f, x: jax.vmap(f)(x), below="val")
FORWARD = _seen("jax.jvp", lambda f, x: jax.jvp(f, (x,), (x,)), below="primal")
REVERSE = _seen("jax.vjp and jax.linearize", lambda f, x: (jax.vjp(f, x), jax.linearize(f, x)), below="primal")
TRANSPOSED = _seen("jax.linear_transpose", lambda f, x: jax.linear_transpose(f, x))  # noqa: PLW0108 - may be missing
JET = _seen("jax.experimental.jet", lambda f, x: jet(f, (x,), ((x,),), factorial_scaled=False))


def _check_apart(_: Any) -> None:
    kinds = (STAGED, MAPPED, FORWARD, REVERSE, TRANSPOSED, JET)
    for classes in ([k.tracer for k in kinds], [EVAL_TRACE, *(k.trace for k in kinds)]):
        _check(all(sum(issubclass(c, other) for other in classes) == 1 for c in classes), classes)


def _check_map(x: Any) -> None:
    found: list[Any] = []
    jax.vmap(lambda y: found.append((current_trace().axis_data.name, y.batch_dim)), axis_name="i")(x)
    _check(found == [("i", 0)], found)


def _unspecified_sharding(x: Any) -> type[Any]:
    (equation,) = jax.make_jaxpr(jax.jit(lambda y: y))(x).eqns
    (sharding,) = equation.params["out_shardings"]
    _check(not isinstance(sharding, jax.sharding.Sharding), sharding)
    return type(sharding)


def _traced_for_jit(x: Any) -> str:
    names: list[str] = []
    jax.jit(lambda _: names.append(current_trace().frame.debug_info.traced_for))(x)
    return names[0]


_learn("classes that tell transformations apart", _check_apart)
_learn("the name and the place of a mapped axis", _check_map)
JIT = _learn("what a trace says that stages a function for jax.jit", _traced_for_jit)
UNSPECIFIED_SHARDING = _learn("the shardings of an equation", _unspecified_sharding)


def checkpoint() -> Checkpoint:
    # The flags may change after the import.
    return _checkpoint(getattr(jax.config, "jax_remat3", None), getattr(jax.config, "jax_custom_vjp3", None))


@functools.cache
def _checkpoint(*_: Any) -> Checkpoint:
    def look(x: Any) -> Checkpoint:
        names: list[str] = []
        given: list[tuple[type[Any], bool]] = []  # not the values, which would leak

        def staged(y: Any) -> Any:
            names.append(current_trace().frame.debug_info.traced_for)
            return y

        def forward_rule(y: Any, constant: Any) -> tuple[Any, None]:
            given.append((type(constant.value), constant.perturbed))
            return y.value, None

        rule: Any = jax.custom_vjp(lambda y, _: y)
        rule.defvjp(forward_rule, lambda _, c: (c, c), symbolic_zeros=True)
        jax.checkpoint(staged)(jax.jit(staged)(x))
        _check(len(set(names)) == len(names) == 2, names)
        with contextlib.suppress(NotImplementedError):  # JAX may have no derivative here: 0.10 with JAX_CUSTOM_VJP3
            jax.vjp(lambda y: jax.checkpoint(rule)(y, x), x)
            _check(len(given) > 0, "no call of a forward rule")
        return Checkpoint(names[1], tuple(tracer for tracer, perturbed in given if perturbed))

    return _learn("how jax.checkpoint runs a function", look)


checkpoint()
