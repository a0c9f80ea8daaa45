"""How the package is built: which subpackage may import which, the length of modules, names of JAX that may move."""

from __future__ import annotations

import ast
from pathlib import Path

import pylayer_jax

PACKAGE = Path(pylayer_jax.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))

# Each subpackage imports only the subpackages that stand above it.
SUBPACKAGES = (
    "_jax",
    "_trees",
    "_methods",
    "_hooks",
    "_autodiff",
    "_layer",
    "_torch_function",
    "_report",
    "__init__",
    "packers",
    "parallel",
    "testing",
    "_commands",
    "__main__",
)
# These may move between versions of JAX: only one module imports them.
MAY_MOVE = ("jax.core", "jax.extend", "jax.interpreters", "jax.experimental", "jax.ad_checkpoint")
LONGEST_MODULE = 300  # lines; `packers` is public and stays whole


def subpackage_of(module: str) -> str:
    """The subpackage of a module, which is named without `pylayer_jax`."""
    return module.split(".", maxsplit=1)[0] or "__init__"


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


def test_a_subpackage_imports_only_those_above_it():
    for file in FILES:
        own = subpackage_of(module_of(file))
        for module in own_imports_of(file):
            # `from . import __version__` names the package itself.
            other = subpackage_of(module) if subpackage_of(module) in SUBPACKAGES else "__init__"
            assert SUBPACKAGES.index(other) <= SUBPACKAGES.index(own), f"{module_of(file)} imports {module}"


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


def test_no_module_is_longer_than_a_reader_takes_in_at_once():
    lines = {module_of(file): len(file.read_text().splitlines()) for file in FILES if file.name != "packers.py"}
    assert {module: count for module, count in lines.items() if count > LONGEST_MODULE} == {}


def test_only_one_module_imports_names_of_jax_that_may_move():
    for file in FILES:
        names = imports_of(file)
        assert not [name for name in names if name.startswith("jax._src")], module_of(file)
        if module_of(file) != "_jax.imports":
            assert not [name for name in names if name.startswith(MAY_MOVE)], module_of(file)
