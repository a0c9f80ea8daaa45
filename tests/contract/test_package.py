"""How the package is built, and what its import does: it changes nothing of JAX, and starts nothing."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

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


# -- what the import does ----------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["changes", "starts"])
def test_the_import_changes_nothing_of_jax_and_starts_no_backend(what):
    command = [sys.executable, "-W", "error", "-m", "tests.contract.alone", what]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, cwd=PACKAGE.parent)
    assert (done.returncode, done.stdout) == (0, ""), done.stdout + done.stderr
