"""The front page and the pages behind it: their code runs and prints what they show, and their links lead somewhere."""

import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
NOTEBOOKS = ROOT / "notebooks"
PAGES = [README, ROOT / "CHANGELOG.md", ROOT / "tests" / "README.md"]
PAGES += sorted([*NOTEBOOKS.rglob("*.md"), *(ROOT / ".github").glob("*.md")])
WITH_CODE = [README, *(NOTEBOOKS / f"{name}.md" for name in ("guide", "comparison", "architecture", "packing"))]


MORE = re.compile(r"\.\.\. and (\d+) more lines")


def blocks(page, language):
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)


def as_read(text):
    """Without the lines of the source, since a page shows its examples as files of their own; each gap as one space."""
    return re.sub(r" +", " ", re.sub(r"\w+\.py:\d+", "FILE", text))


def run(*arguments, **options):
    outside = {key: value for key, value in os.environ.items() if key not in ("XLA_FLAGS", "PYTEST_ADDOPTS")}
    environment = outside | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "PYTHONIOENCODING": "utf-8"}
    command = [sys.executable, *arguments]
    return subprocess.run(command, capture_output=True, encoding="utf-8", env=environment, check=False, **options)


@pytest.mark.slow
@pytest.mark.parametrize("page", WITH_CODE, ids=lambda page: page.stem)
def test_code_of_a_page_runs_from_top_to_bottom_and_prints_what_is_shown(page, tmp_path):
    script = tmp_path / "script.py"
    script.write_text("\n".join(blocks(page, "python")))
    done = run(script.name, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    shown = blocks(page, "text")
    printed = as_read(done.stdout).splitlines()
    for line in as_read("".join(shown)).splitlines():
        assert line in printed or MORE.fullmatch(line)


def test_the_command_prints_what_check_layer_prints(tmp_path):
    (tmp_path / "mylayers.py").write_text(blocks(README, "python")[0])
    assert 'python -m pylayer_jax check mylayers.py:Tanh "f32[8,8]"' in README.read_text()
    done = run("-m", "pylayer_jax", "check", "mylayers.py:Tanh", "f32[8,8]", cwd=tmp_path)
    *shown, more = blocks(README, "text")[0].splitlines()
    printed = done.stdout.splitlines()
    assert [line for line in printed if line in shown] == shown, done.stderr
    assert len(printed) == len(shown) + int(MORE.fullmatch(more)[1])


def text_of(framework):
    """The layer of the README in torch or Paddle."""
    (text,) = (text for text in blocks(README, "py") if f"import {framework}\n" in text)
    return text


@pytest.mark.frameworks
@pytest.mark.filterwarnings("ignore")  # by the imports of Paddle and torch
def test_the_originals_and_ours_have_the_same_gradient(framework):
    framework("paddle")
    framework("torch")
    ports = dict(zip(("torch", "paddle"), blocks(README, "python")[:2], strict=True))
    for name, port in ports.items():
        original, ours = {}, {}
        exec(text_of(name), original)
        exec(port.replace("jax.grad", "gradient = jax.grad"), ours)
        np.testing.assert_allclose(ours["gradient"], original["x"].grad.numpy(), rtol=1e-6)


@pytest.mark.frameworks
@pytest.mark.filterwarnings("ignore")
def test_torch_and_ours_train_alike(framework):
    framework("torch")
    original, ours = {}, {}
    (loop,) = (text for text in blocks(README, "py") if "optim" in text)
    exec(text_of("torch") + loop, original)
    with jax.numpy_dtype_promotion("standard"):  # optax multiplies its count by numbers
        exec("".join(blocks(README, "python")[1:3]), ours)
    assert float(ours["value"]) < 0.01
    np.testing.assert_allclose(ours["value"], float(original["loss"].detach()), rtol=1e-3)


def anchors(page):
    prose = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    titles = re.findall(r"^#+ (.*)$", prose, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    prose = re.sub(r"^ *```.*?^ *```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    for link in re.findall(r"\]\(([^)\s]+)\)", prose):
        file, _, anchor = link.partition("#")
        target = (page.parent / file).resolve() if file else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


def test_the_readme_has_no_picture_of_the_repository():
    """Outside of the repository, as in a wheel's metadata, a relative picture is a hole."""
    assert not re.search(r"!\[.*?\]\((?!https://)", README.read_text())
