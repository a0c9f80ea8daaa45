"""Classes of JAX: under other names every number stays right, and the import fails if one cannot be found."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import jax

ROOT = Path(__file__).parents[2]


def run(source, *args, **environment):
    """The last line that a program prints, in a process that has not imported the package before."""
    command = [sys.executable, "-c", source, *args]
    ended = subprocess.run(
        command, cwd=ROOT, env={**os.environ, **environment}, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout.splitlines()[-1])


# The gradients of Square and of the second output of `pair` are not those of their forward.
RENAMED = """
import json

import jax
import jax._src.interpreters.remat
import jax.numpy as jnp
from jax.core import Trace, Tracer
from jax.experimental.jet import jet


def below(cls):
    return [c for each in cls.__subclasses__() for c in (each, *below(each))]


(equation,) = jax.make_jaxpr(jax.jit(lambda: jax.lax.axis_index("i")), axis_env=[("i", 1)])().eqns
others = map(type, (*equation.effects, *equation.params["out_shardings"]))
for renamed in (*below(Tracer), *below(Trace), *others):
    renamed.__name__ = renamed.__qualname__ = "Other"

from pylayer_jax import PyLayer, saved_tensors_hooks


class Square(PyLayer):
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    def backward(ctx, dy):
        return dy * 4 * ctx.saved_tensors[0]


def layer(forward, backward):
    return type("Layer", (PyLayer,), {"forward": staticmethod(forward), "backward": staticmethod(backward)})


pair = layer(lambda ctx, x, w: (x, w), lambda ctx, dx, dw: (dx, jnp.float32(1)))
double = layer(lambda ctx, x: 2 * x, lambda ctx, dy: 2 * dy)
doubled = saved_tensors_hooks(lambda x: 2 * x, lambda x: x)
on_host = saved_tensors_hooks(lambda x: 2 * x, lambda x: x, host=True)
square, X = Square.apply, jnp.float32(3)


def packed(x):
    with doubled:
        return jnp.multiply(square(x), x)


def pairs(w):
    return jax.vmap(lambda x: pair.apply(x, w)[0])(jnp.ones(4)).sum()


def error(function, *args):
    try:
        return str(function(*args))
    except Exception as error:
        return type(error).__name__


numbers = [
    jax.grad(square)(X),
    jax.vmap(jax.grad(square))(X[None])[0],
    jax.jit(jax.grad(square))(X),
    jax.grad(jax.checkpoint(square))(X),
    jax.grad(jax.grad(square))(X),
    jax.jvp(jax.grad(square), (X,), (X,))[1],
    jax.grad(pairs)(X),
    jax.grad(packed)(X),
    jax.vmap(jax.grad(packed))(X[None])[0],
    jax.jit(jax.grad(packed))(X),
    jax.linear_transpose(double.apply, X)(X)[0],
]
errors = [error(jet, square, (X,), ((X,),)), error(jax.grad(jax.checkpoint(on_host(square))), X)]
print(json.dumps([*map(float, numbers), *errors]))
"""


def test_no_class_is_recognised_by_its_name():
    errors = ["NoForwardModeError", "NotImplementedError"]
    assert run(RENAMED) == [12, 12, 12, 12, 4, 12, 4, 162, 162, 162, 6, *errors]


# Each change stands for a JAX in which something has another name, or is not told apart any more.
CHANGED = """
import json
import sys

import jax
from jax.core import Tracer
from jax.extend.core import take_current_trace


def hide(cls, name):
    "No module of the package finds this attribute."
    slot = vars(cls)[name]

    def get(self):
        if sys._getframe(1).f_globals["__name__"].startswith("pylayer_jax"):
            raise AttributeError(name)
        return slot.__get__(self)

    setattr(cls, name, property(get, slot.__set__))
    return lambda: setattr(cls, name, slot)


def swap(name, value):
    old = getattr(jax, name)
    setattr(jax, name, value) if value else delattr(jax, name)
    return lambda: setattr(jax, name, old)


seen = {}


def look(name):
    def found(x):
        with take_current_trace() as trace:
            seen[name] = type(x), type(trace)
        return x
    return found


def all_of(x):
    look("jit")(x)
    jax.vmap(look("vmap"))(x[None])
    return jax.vjp(look("vjp"), x)[0]


jax.eval_shape(all_of, 1.0)
(effect,) = jax.make_jaxpr(lambda: jax.lax.axis_index("i"), axis_env=[("i", 1)])().effects
changes = {
    "val": lambda: hide(seen["vmap"][0], "val"),
    "primal": lambda: hide(seen["vjp"][0], "primal"),
    "_trace": lambda: hide(Tracer, "_trace"),
    "parent_trace": lambda: hide(seen["jit"][1], "parent_trace"),
    "frame": lambda: hide(seen["jit"][1], "frame"),
    "linear_transpose": lambda: swap("linear_transpose", None),
    "no call": lambda: swap("linear_transpose", lambda f, x: x),
    "apart": lambda: swap("linear_transpose", lambda f, x: jax.jvp(f, (x,), (x,))),
    "checkpoint": lambda: swap("checkpoint", jax.jit),
}
errors = {}
for name, change in changes.items():
    undo = change()
    try:
        import pylayer_jax
    except ImportError as error:
        errors[name] = str(error)
    undo()
    for module in [m for m in sys.modules if m.startswith("pylayer_jax")]:
        del sys.modules[module]
print(json.dumps(errors))
"""


def test_what_cannot_be_found_stops_the_import():
    errors = run(CHANGED)
    for error in errors.values():
        assert f" in jax {jax.__version__} (" in error
        assert "tested with jax 0.10.2 and 0.12.0" in error
    assert "no attribute val" in errors["val"]
    what = {name: error.removeprefix("pylayer_jax cannot find ").split(" in jax ")[0] for name, error in errors.items()}
    assert what == {
        "val": "the tracers and traces of jax.vmap",
        "primal": "the tracers and traces of jax.vjp and jax.linearize",
        "_trace": "the tracers and traces of jax.jit",
        "parent_trace": "the tracers and traces of jax.jit",
        "frame": "what a trace says that stages a function for jax.jit",
        "linear_transpose": "the tracers and traces of jax.linear_transpose",
        "no call": "the tracers and traces of jax.linear_transpose",
        "apart": "classes that tell transformations apart",
        "checkpoint": "how jax.checkpoint runs a function",
    }


# `jax.distributed.initialize` refuses to run once a backend has started.
STARTS_NOTHING = """
import importlib
import json
import socket
import sys

for name in ("optax", "sklearn", "tqdm", "torch", "paddle", "equinox", "flax"):
    sys.modules[name] = None  # cannot be imported

import jax
import pylayer_jax

for module in ("packers", "testing"):
    importlib.import_module(f"pylayer_jax.{module}")
with socket.socket() as listener:
    listener.bind(("127.0.0.1", 0))
    port = listener.getsockname()[1]
jax.distributed.initialize(f"127.0.0.1:{port}", num_processes=1, process_id=0)
print(json.dumps(jax.process_count()))
jax.distributed.shutdown()
"""


def test_the_import_starts_no_backend_and_needs_jax_and_numpy_alone():
    assert run(STARTS_NOTHING, PYTHONWARNINGS="error") == 1


IMPORTED_UNDER_JIT = """
import json

import jax

jax.jit(lambda x: (__import__("pylayer_jax"), x)[1])(1.0)

from pylayer_jax._jax.tracers import nothing_is_traced

print(json.dumps([nothing_is_traced(), float(jax.jit(lambda x: x * nothing_is_traced())(1.0))]))
"""


def test_the_import_under_a_trace_does_not_take_it_for_no_trace():
    assert run(IMPORTED_UNDER_JIT) == [True, 0]


# A backward that leaves out a gradient is right only where none is needed.
IMPORTED_WITHIN = """
import json

import jax

with jax.checking_leaks(), jax.disable_jit():
    jax.grad(lambda x: (__import__("pylayer_jax"), x)[1])(1.0)

from pylayer_jax import PyLayer


members = {"forward": staticmethod(lambda ctx, x, y: x * y), "backward": staticmethod(lambda ctx, dz: (5 * dz,))}
first = type("First", (PyLayer,), members)


def gradient():
    return float(jax.grad(lambda x: jax.checkpoint(first.apply)(x, 3.0))(2.0))


print(json.dumps(gradient()))
"""


def test_an_import_within_a_trace():
    assert run(IMPORTED_WITHIN) == 5
