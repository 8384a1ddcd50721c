"""Every notebook runs from the top, in a copy, and is committed without outputs."""

from __future__ import annotations

import shutil
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOKS = sorted((Path(__file__).resolve().parent.parent / "notebooks").glob("*.ipynb"))


def test_there_is_a_notebook() -> None:
    assert NOTEBOOKS, "notebooks/ holds no .ipynb file"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_committed_without_outputs(path: Path) -> None:
    for i, cell in enumerate(nbformat.read(path, as_version=4).cells):
        if cell.cell_type == "code":
            assert not cell.outputs, f"cell {i} holds outputs; clear them before committing"
            assert cell.execution_count is None, f"cell {i} holds an execution count"


@pytest.mark.timeout(600)
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_runs_from_the_top(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # This environment's kernel and no settings of whoever runs the test.
    monkeypatch.setenv("JUPYTER_PREFER_ENV_PATH", "1")
    for name in ("JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR", "IPYTHONDIR"):
        monkeypatch.setenv(name, str(tmp_path / name.lower()))
    # The inline backend, which a reader has; conftest's Agg would draw nothing.
    monkeypatch.delenv("MPLBACKEND", raising=False)
    work = tmp_path / "notebooks"
    work.mkdir()
    (tmp_path / "papers").symlink_to(NOTEBOOKS[0].parent.parent / "papers")
    notebook = nbformat.read(shutil.copy(path, work), as_version=4)
    NotebookClient(
        notebook, timeout=540, kernel_name="python3", resources={"metadata": {"path": str(work)}}
    ).execute()
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert code, "a notebook without code shows nothing"
    noise = [
        output.text
        for cell in code
        for output in cell.outputs
        if output.output_type == "stream" and output.name == "stderr"
    ]
    assert not noise, "warnings and bars belong to no quiet run:\n" + "\n".join(noise)
