"""How the package is built, and what its import does: it changes nothing of JAX, and starts nothing."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pylayer_jax

PACKAGE = Path(pylayer_jax.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))

# These may move between versions of JAX: only one module imports them.
MAY_MOVE = ("jax.core", "jax.extend", "jax.interpreters", "jax.experimental", "jax.ad_checkpoint")


def module_of(file: Path) -> str:
    return ".".join(file.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__")


def imports_of(file: Path) -> set[str]:
    """Full names of the modules that a file imports, anywhere in it."""
    found: set[str] = set()
    package = ["pylayer_jax", *file.relative_to(PACKAGE).parts[:-1]]
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            start = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*start, *([node.module] if node.module else [])])
            found |= {base} if node.module else {f"{base}.{alias.name}" for alias in node.names}
    return found


def own_imports_of(file: Path) -> set[str]:
    """The modules of the package that a file imports, without `pylayer_jax`."""
    return {name.removeprefix("pylayer_jax").lstrip(".") for name in imports_of(file) if name.startswith("pylayer_jax")}


def test_modules_do_not_import_each_other_in_a_circle():
    imports = {module_of(file): own_imports_of(file) for file in FILES}

    def visit(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, " -> ".join([*path, module])
        if module in done:
            return
        for other in imports.get(module, ()):
            visit(other, (*path, module))
        done.add(module)

    done: set[str] = set()
    for module in imports:
        visit(module, ())


def test_only_one_module_imports_names_of_jax_that_may_move():
    for file in FILES:
        names = imports_of(file)
        assert not [name for name in names if name.startswith("jax._src")], module_of(file)
        if module_of(file) != "_jax.imports":
            assert not [name for name in names if name.startswith(MAY_MOVE)], module_of(file)


# -- what the import does --------------------------------------------------------------------------


# `batching.primitive_batchers` is a view of the table of fancy batchers.
SCRIPT = """
import importlib, pkgutil
import jax
import jax.experimental.buffer_callback
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir, partial_eval

MODULES = (ad, batching, mlir, partial_eval)

def attributes(owner):
    return {name: value for name, value in vars(owner).items() if not name.startswith("__")}

def snapshot():
    found = {f"{m.__name__}.{name}": dict(table) for m in MODULES for name, table in attributes(m).items()
             if isinstance(table, dict)}
    found |= {f"lowerings for {name}": dict(table) for name, table in mlir._platform_specific_lowerings.items()}
    primitives = {key for table in found.values() for key in table if isinstance(key, Primitive)}
    classes = {c for p in primitives for c in type(p).__mro__ if c.__module__.startswith("jax")}
    return found | {repr((x, id(x))): attributes(x) for x in {*primitives, *classes, jax.custom_vjp, jax.custom_jvp}}

before = snapshot()
for name in ("ad.primitive_jvps", "ad.primitive_transposes", "batching.fancy_primitive_batchers", "mlir._lowerings",
             "partial_eval.dce_rules", "partial_eval.partial_eval_jaxpr_custom_rules"):
    assert before[f"jax.interpreters.{name}"], name
assert any("impl" in entries for entries in before.values())

import pylayer_jax
imported = [importlib.import_module(m.name) for m in pkgutil.walk_packages(pylayer_jax.__path__, "pylayer_jax.")]
assert len(imported) > 10
after = snapshot()
for name, entries in before.items():
    for key in entries.keys() | after[name].keys():
        if key in entries or not isinstance(key, Primitive):
            was, now = entries.get(key), after[name].get(key)
            if was is not now and not isinstance(was, dict):
                print(f"{name}[{key}]: {was} is now {now}")
"""


def test_the_import_changes_no_rule_of_jax():
    run = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=300, check=False)
    assert (run.returncode, run.stdout) == (0, ""), run.stdout + run.stderr


# `jax.distributed.initialize` refuses to run once a backend has started.
STARTS_NOTHING = """
import importlib
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
assert jax.process_count() == 1
jax.distributed.shutdown()
"""


def test_the_import_starts_no_backend_and_needs_jax_and_numpy_alone():
    command = [sys.executable, "-W", "error", "-c", STARTS_NOTHING]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert run.returncode == 0, run.stderr
