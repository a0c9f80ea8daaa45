"""Imports in the package, what an import of it changes, and what pyright says of right and wrong calls of users."""

import ast
import graphlib
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import pylayer_jax

PACKAGE = Path(pylayer_jax.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))
CALLS = Path(__file__).with_name("typed_calls.py")


def imports_of(file: Path) -> set[str]:
    """Return the full names of all modules that a file imports."""
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


def test_modules_import_neither_each_other_in_a_circle_nor_what_is_private_to_jax():
    # Which module imports names of JAX that may move is checked by the linter.
    imports = {".".join(file.relative_to(PACKAGE.parent).with_suffix("").parts): imports_of(file) for file in FILES}
    assert not [name for names in imports.values() for name in names if name.startswith("jax._src")]
    graphlib.TopologicalSorter({module.removesuffix(".__init__"): imports[module] for module in imports}).prepare()


@pytest.mark.parametrize("what", ["changes", "starts"])
def test_the_import_changes_nothing_of_jax_and_starts_no_backend(what):
    command = [sys.executable, "-W", "error", "-m", "tests.contract.alone", what]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, cwd=PACKAGE.parent)
    assert (done.returncode, done.stdout) == (0, ""), done.stdout + done.stderr


@pytest.mark.pyright
def test_pyright_refuses_the_wrong_calls_and_no_others(framework, tmp_path):
    framework("pyright")
    text = CALLS.read_text()
    (tmp_path / CALLS.name).write_text(text)
    # The settings of a user who has set none, not those of this package.
    (tmp_path / "pyrightconfig.json").write_text(json.dumps({"extraPaths": [str(CALLS.parents[2])]}))
    command = [sys.executable, "-m", "pyright", "--outputjson", "--pythonpath", sys.executable]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    found = json.loads(result.stdout)["generalDiagnostics"]
    refused = {(x["range"]["start"]["line"] + 1, x.get("rule", x["message"])) for x in found}
    expected = {
        (number, match[1])
        for number, line in enumerate(text.splitlines(), start=1)
        if (match := re.search(r"  # error: (\w+)$", line))
    }
    assert len(expected) > 20
    assert refused == expected, found
