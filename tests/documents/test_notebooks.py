"""Every notebook runs from top to bottom, and what is shown with it is fit to be read."""

import json
import os
import re
from pathlib import Path

import pytest

nbclient = pytest.importorskip("nbclient", reason='notebooks need an extra: pip install -e ".[notebooks]"')
for package in ("flax", "ipykernel", "matplotlib", "rich"):
    pytest.importorskip(package, reason='notebooks need an extra: pip install -e ".[notebooks]"')
import nbformat  # noqa: E402

from notebooks.tools.clean_notebooks import cleaned  # noqa: E402

from .compare_outputs import differences  # noqa: E402

pytestmark = pytest.mark.notebooks

NOTEBOOKS = sorted((Path(__file__).parents[2] / "notebooks").glob("*.ipynb"))
assert NOTEBOOKS
# The steps of four trainings, of which the last runs as the first does.
FEWER = {"07_gpt_in_flax_nnx": ("(60, BATCH, 1)", "(6, BATCH, 1)")}
# The cells with numbers that depend on the number of steps, on the version of XLA, or are rounding errors themselves.
VARY = {"02_saved_tensors": {9, 12}, "06_state_out_of_backward": {12}, "07_gpt_in_flax_nnx": {15, 17, 22}}
UNFIT = re.compile(r"warning|traceback|(?<![\w:/.])/(home|root|tmp|usr|Users)/|[A-Z]:\\", re.IGNORECASE)


EACH = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def shown(notebook):
    """(cell number, text) of every output; an image is not text."""
    for number, cell in enumerate(notebook.cells):
        for output in cell.get("outputs", []):
            yield number, output.get("text") or output.get("data", {}).get("text/plain", "") or str(output)


@EACH
# The kernel's client, not the notebook, may leave a socket or a deprecated event loop behind.
@pytest.mark.filterwarnings("default")
def test_a_run_prints_what_is_stored(path):
    text, (many, few) = path.read_text(), FEWER.get(path.stem, ("", ""))
    assert many in text
    notebook = nbformat.reads(text.replace(many, few) if many else text, as_version=4)
    client = nbclient.NotebookClient(notebook, timeout=300, startup_timeout=120, kernel_name="python3")
    # The kernel has as many devices as that of a reader, and not those of the tests.
    flags = re.sub(r"--xla_force_host_platform_device_count=\d+", "", os.environ["XLA_FLAGS"])
    client.execute(cwd=str(path.parent), env=os.environ | {"XLA_FLAGS": flags})
    printed = [(number, text) for number, text in shown(notebook) if UNFIT.search(text)]
    assert not printed
    stored = nbformat.reads(text, as_version=4)
    assert not list(differences(stored, notebook, VARY.get(path.stem, ())))


@EACH
def test_stored_outputs_are_of_one_clean_run(path):
    notebook = nbformat.read(path, as_version=4)
    counts = [cell.execution_count for cell in notebook.cells if cell.cell_type == "code"]
    assert counts == list(range(1, len(counts) + 1))
    assert notebook.metadata.kernelspec.name == "python3"
    assert not [(number, text) for number, text in shown(notebook) if UNFIT.search(text) or "not installed" in text]
    assert path.stat().st_size < 500_000
    assert cleaned(json.loads(path.read_text())) == json.loads(path.read_text())
    assert not re.search(r"install [\"'\\]*pylayer_jax", path.read_text())  # the package is on no index
