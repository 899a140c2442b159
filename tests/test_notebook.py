"""The notebook of the documentation shows what its cells show when they run today."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

CELL = re.compile(r"[^\s>]*ipykernel_\d+/\d+\.py")
"""The file of a cell, whose name is another one in each process."""
NOTEBOOK = Path(__file__).resolve().parent.parent / "docs" / "notebook.ipynb"
nbformat = pytest.importorskip("nbformat", reason="the extra 'docs' is not installed")
nbclient = pytest.importorskip("nbclient", reason="the extra 'docs' is not installed")
pytestmark = pytest.mark.skipif(not NOTEBOOK.exists(), reason="the documentation is not beside the tests")


def shown(notebook: Any) -> list[list[tuple[str, ...]]]:
    """What each cell shows, without the bytes of pictures: they depend on the version of Matplotlib, and on fonts."""
    return [
        [
            (output["output_type"], output.get("text", ""), *_texts(output.get("data", {})))
            for output in cell.get("outputs", ())
        ]
        for cell in notebook.cells
    ]


def _texts(data: dict[str, str]) -> list[str]:
    """As they are in the compiled form, which is said where it runs."""
    return [
        CELL.sub("cell.py", text).replace("plain form", "compiled form") if kind.startswith("text/") else kind
        for kind, text in sorted(data.items())
    ]


@pytest.mark.filterwarnings("default")  # of Jupyter
def test_notebook(tmp_path: Path) -> None:
    """Every cell runs, and shows what the file has below it."""
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    expected = shown(notebook)
    assert sum(map(len, expected)) >= 7
    nbclient.NotebookClient(notebook, timeout=120, resources={"metadata": {"path": str(tmp_path)}}).execute()
    assert shown(notebook) == expected
