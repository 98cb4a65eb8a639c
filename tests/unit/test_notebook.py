"""The notebook of the examples runs, and its stored outputs are those of a run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
NOTEBOOK = ROOT / "examples" / "choose_a_fleet.ipynb"


def outputs(notebook: Path) -> list[dict[str, Any]]:
    """Data of each output by MIME type, without the text of spot plans: their p95 changes with the age of the price."""
    cells: list[dict[str, Any]] = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    data = [output["data"] for cell in cells if cell["cell_type"] == "code" for output in cell["outputs"]]
    return [
        dict.fromkeys(found) | ({} if "spot" in (text := "".join(found["text/plain"])) else {"text": text})
        for found in data
    ]


def test_the_notebook_runs_and_is_stored_with_its_outputs(tmp_path: Path) -> None:
    copy = tmp_path / NOTEBOOK.name
    copy.write_bytes(NOTEBOOK.read_bytes())
    # Jupyter, IPython and matplotlib write nothing into the user's home.
    folders = dict.fromkeys(("JUPYTER_RUNTIME_DIR", "IPYTHONDIR", "MPLCONFIGDIR"), str(tmp_path / "home"))
    done = subprocess.run(
        [sys.executable, "-c", "from nbclient.cli import main; main()", "--inplace", str(copy)],
        env=os.environ | folders | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert outputs(copy) == outputs(NOTEBOOK), "jupyter execute --inplace makes them anew"
    assert any("image/png" in found for found in outputs(NOTEBOOK)), "the frontier is plotted"
