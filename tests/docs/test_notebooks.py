"""Every notebook runs from its first cell to its last."""

import os
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from tests.docs.pages import ROOT

NOTEBOOKS = sorted((ROOT / "examples" / "notebooks").glob("*.ipynb"))
RUN_S = 600


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_has_no_outputs_and_runs(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    notebook = nbformat.read(path, as_version=4)  # type: ignore[no-untyped-call]  # no types
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert all(not cell.outputs and cell.execution_count is None for cell in code)
    monkeypatch.setenv("PATH", f"{ROOT / '.venv' / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("PLEXRL_DATA_DIR", str(tmp_path / "data"))
    resources = {"metadata": {"path": str(tmp_path)}}
    NotebookClient(notebook, timeout=RUN_S, resources=resources).execute()
    assert all(cell.outputs for cell in code if cell.source.startswith(("!", "print(")))
