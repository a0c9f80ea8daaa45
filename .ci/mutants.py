"""Which changes of the code do the tests not notice? Makes random single-point mutants and runs the tests on each.

    python .ci/mutants.py --count 60 --seed 0

A mutant is killed if a test fails. A survivor is a test that is missing (some run with `--all` alone), or a change
that changes no behaviour; a reader has to tell. Each mutant runs only the tests that cover its line, which pytest-cov
tells: pip install pytest-cov. Not a part of CI: after one run of all tests, a mutant takes about 20 seconds.
"""

from __future__ import annotations

import argparse
import ast
import collections
import copy
import itertools
import os
import pathlib
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import coverage

ROOT = pathlib.Path(__file__).parents[1]
PACKAGE = ROOT / "pylayer_jax"
LEFT_OUT = ("testing", "_demo.py", "__main__.py")
TESTS = ("contract", "derivatives", "hooks", "layers", "devices", "generated")  # the fast ones first
MARKERS = "core or generated"  # what `core` stands for is in tests/conftest.py

_COMPARED = {ast.Eq: ast.NotEq, ast.Is: ast.IsNot, ast.Lt: ast.LtE, ast.Gt: ast.GtE, ast.In: ast.NotIn}
_COMPARED |= {there: here for here, there in _COMPARED.items()}
_CALCULATED = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.BitOr: ast.BitAnd, ast.Mod: ast.Add}


def mutations(node: ast.AST) -> Iterator[tuple[str, Callable[[Any], ast.AST]]]:
    """The changes that one node allows: what each is called, and a function from the node to another one."""
    match node:
        case ast.Compare(ops=[operator]) if type(operator) in _COMPARED:
            yield "comparison", lambda n: ast.Compare(n.left, [_COMPARED[type(n.ops[0])]()], n.comparators)
        case ast.BoolOp(op=operator):
            other = ast.Or() if isinstance(operator, ast.And) else ast.And()
            yield "and/or", lambda n: ast.BoolOp(other, n.values)
        case ast.UnaryOp(op=ast.Not()):
            yield "not", lambda n: n.operand
        case ast.BinOp(op=operator) if type(operator) in _CALCULATED:
            yield "operator", lambda n: ast.BinOp(n.left, _CALCULATED[type(n.op)](), n.right)
        case ast.Constant(value=bool()):
            yield "bool", lambda n: ast.Constant(not n.value)
        case ast.Constant(value=int()):
            yield "number", lambda n: ast.Constant(n.value + 1)
        case ast.Return(value=value) if value is not None and not isinstance(value, ast.Constant):
            yield "return None", lambda _: ast.Return(ast.Constant(None))
        case ast.If() | ast.IfExp():
            yield "condition", lambda n: type(n)(ast.UnaryOp(ast.Not(), n.test), n.body, n.orelse)
        case ast.Expr(value=ast.Call()):
            yield "call", lambda _: ast.Pass()


def untested(node: ast.AST) -> ast.AST | None:
    """Return the part of a node that has no mutants (an annotation, a message, a `__repr__`), or None."""
    match node:
        case ast.Raise() | ast.JoinedStr() | ast.FunctionDef(name="__repr__" | "__str__"):
            return node
        case ast.Assign(targets=[ast.Name(id="__tracebackhide__")]) | ast.Call(func=ast.Name(id="cast" | "TypeVar")):
            return node
        case ast.AnnAssign(annotation=part) | ast.arg(annotation=part) | ast.FunctionDef(returns=part):
            return part
    return None


def points(tree: ast.Module) -> list[tuple[int, str, Callable[[Any], ast.AST]]]:
    """The number of each node that can be changed, and how."""
    left_out = {id(inner) for node in ast.walk(tree) if (part := untested(node)) for inner in ast.walk(part)}
    return [
        (number, name, change)
        for number, node in enumerate(ast.walk(tree))
        if id(node) not in left_out
        for name, change in mutations(node)
    ]


def mutant(source: str, number: int, change: Callable[[Any], ast.AST]) -> tuple[str, int, str]:
    """The changed source, the line of the change, and the line's statement before and after."""
    tree = ast.parse(source)
    target = list(ast.walk(tree))[number]
    before = ast.unparse(target)
    changed = ast.copy_location(change(copy.deepcopy(target)), target)

    class Replace(ast.NodeTransformer):
        def visit(self, node: ast.AST) -> ast.AST:
            return changed if node is target else super().visit(node)

    tree = ast.fix_missing_locations(Replace().visit(tree))

    def first(text: str) -> str:
        return text.splitlines()[0][:90]

    return ast.unparse(tree), getattr(target, "lineno", 0), f"{first(before)}  ->  {first(ast.unparse(changed))}"


class Covering:
    """The tests that run each line of the package, and their seconds, from one run of all tests with pytest-cov."""

    def __init__(self, folder: pathlib.Path) -> None:
        options = ["-n", "2", "-vv", "--durations=0", "--cov=pylayer_jax", "--cov-context=test", "--cov-report="]
        done = run_pytest(folder, [*options, *[f"tests/{name}" for name in TESTS]], None)
        if done.returncode:
            sys.exit(f"The tests fail without a mutant, or pytest-cov is not installed:\n{done.stdout[-2000:]}")
        self.seconds = collections.Counter[str]()
        for seconds, test in re.findall(r"^([\d.]+)s (?:call|setup|teardown) +(tests/.*?) *$", done.stdout, re.M):
            self.seconds[test] += float(seconds)
        self.data = coverage.CoverageData(str(folder / ".coverage"))
        self.data.read()

    def tests(self, path: pathlib.Path, tree: ast.Module, node: Any) -> list[str]:
        """Return the tests that run the lines of a node, or else of its statement, the fastest first.

        If a line also runs before the tests, as a test module makes an object for them, all other tests follow.
        """
        by_line = self.data.contexts_by_lineno(str(path))

        def of(node: Any) -> set[str]:
            lines = range(node.lineno, node.end_lineno + 1)
            return {context.partition("|")[0] for line in lines for context in by_line.get(line, ())}

        around = [s for s in ast.walk(tree) if isinstance(s, ast.stmt) and any(inner is node for inner in ast.walk(s))]
        found = of(node) or of(around[-1])
        others = self.seconds.keys() - found if "" in found else ()
        return [test for part in (found - {""}, others) for test in sorted(part, key=self.seconds.__getitem__)]


def run_pytest(folder: pathlib.Path, arguments: list[str], timeout: float | None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", MARKERS, *arguments]
    environment = {**os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(
        command, cwd=folder, env=environment, timeout=timeout, capture_output=True, text=True, check=False
    )


def run_tests(folder: pathlib.Path, tests: list[str], seconds: dict[str, float], timeout: float) -> str:
    """Run the tests of 25 seconds first, which kill most mutants, then the others; all tests if none is known."""
    until = list(itertools.accumulate(seconds[test] for test in tests))
    first = sum(1 for total in until if total < 25) or 1
    for part in (tests[:first], tests[first:]) if tests else ([f"tests/{name}" for name in TESTS],):
        if part:
            names = folder.parent / "tests.txt"
            names.write_text("\n".join(part))
            try:
                if run_pytest(folder, ["-x", f"@{names}"], timeout).returncode:
                    return "killed"
            except subprocess.TimeoutExpired:
                return "killed (time)"
    return "SURVIVED"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=150)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no mutant after this time")
    parser.add_argument("--timeout", type=float, default=1800, help="seconds for the tests of one mutant")
    options = parser.parse_args()
    paths = [path for path in PACKAGE.rglob("*.py") if path.relative_to(PACKAGE).parts[0] not in LEFT_OUT]
    sources = {path: path.read_text() for path in sorted(paths)}
    found = [(path, *point) for path, source in sources.items() for point in points(ast.parse(source))]
    chosen = random.Random(options.seed).sample(found, min(options.count, len(found)))
    print(f"{len(found)} possible mutants, {len(chosen)} chosen", flush=True)
    results = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = pathlib.Path(temporary) / "repository"
        shutil.copytree(ROOT, folder, ignore=shutil.ignore_patterns(".git", ".venv", "__pycache__"))
        covering = Covering(folder)
        start = time.monotonic()
        for path, number, name, change in chosen:
            if time.monotonic() - start > options.minutes * 60:
                break
            place = folder / path.relative_to(ROOT)
            changed, line, what = mutant(sources[path], number, change)
            place.write_text(changed)
            begin = time.monotonic()
            tree = ast.parse(sources[path])
            tests = covering.tests(place, tree, list(ast.walk(tree))[number])
            results.append(run_tests(folder, tests, covering.seconds, options.timeout))
            place.write_text(sources[path])
            seconds = time.monotonic() - begin
            print(f"{results[-1]:14} {seconds:5.0f} s  {path.relative_to(ROOT)}:{line} {name}: {what}", flush=True)
    survived = results.count("SURVIVED")
    print(f"{len(results)} mutants, {survived} survived")


if __name__ == "__main__":
    main()
