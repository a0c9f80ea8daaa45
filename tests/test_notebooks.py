"""Every notebook runs from top to bottom."""

from pathlib import Path

import pytest

nbformat = pytest.importorskip("nbformat", reason="the extra named notebooks is not installed")
nbclient = pytest.importorskip("nbclient", reason="the extra named notebooks is not installed")
pytest.importorskip("ipykernel", reason="the extra named notebooks is not installed")

FOLDER = Path(__file__).parents[1] / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))


def test_there_are_notebooks():
    assert NOTEBOOKS


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
# The kernel's own libraries warn of what this project does not do.
@pytest.mark.filterwarnings("default")
def test_notebook_runs_and_shows_what_it_says(path):
    stored = nbformat.read(path, as_version=4)
    notebook = nbformat.from_dict(stored)
    nbclient.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": FOLDER}}).execute()
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            assert output.get("name") != "stderr", output.text


def test_stored_outputs_are_those_of_a_run():
    for path in NOTEBOOKS:
        cells = [c for c in nbformat.read(path, as_version=4).cells if c.cell_type == "code"]
        assert [c.execution_count for c in cells] == list(range(1, len(cells) + 1)), path.name
