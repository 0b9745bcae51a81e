"""The notebooks of docs/ run from their first cell to their last."""

import nbformat
import pytest
from nbclient import NotebookClient

from tests.support import runs

NOTEBOOKS = sorted((runs.ROOT / 'docs' / 'notebooks').glob('*.ipynb'))
assert NOTEBOOKS


@pytest.mark.cases(fast=0, slow=1)
@pytest.mark.slow
@pytest.mark.parametrize('path', NOTEBOOKS, ids=lambda p: p.stem)
def test_a_notebook(path, tmp_path, monkeypatch):
  monkeypatch.setenv('PYTHONPATH', str(runs.ROOT))
  notebook = nbformat.read(path, as_version=4)
  client = NotebookClient(notebook, timeout=300, resources={'metadata': {'path': str(tmp_path)}})
  client.execute()  # raises the error of a cell
  assert all(
    cell.outputs
    for cell in notebook.cells
    if cell.cell_type == 'code' and 'import' not in cell.source
  )


@pytest.mark.parametrize('path', NOTEBOOKS, ids=lambda p: p.stem)
def test_a_notebook_is_kept_without_outputs(path):
  notebook = nbformat.read(path, as_version=4)
  assert not any(cell.get('outputs') for cell in notebook.cells)
