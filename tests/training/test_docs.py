"""The example of docs/training.md runs as it stands, stops on SIGTERM and goes on."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.warm import Warm

pytestmark = pytest.mark.training
ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs" / "training.md"


def test_example_runs_and_goes_on(warm: Warm, tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", DOCS.read_text(), re.DOTALL)
    assert len(blocks) == 1
    script = tmp_path / "train.py"
    stop = "        import os, signal; step == 50 and 'STOP' in os.environ and os.kill(os.getpid(), signal.SIGTERM)\n"
    script.write_text(blocks[0] + stop + "print('last loss', loss.item())\n")
    environment = {
        **os.environ, "PYTHONPATH": str(ROOT), "GPUFLEET_CHECKPOINT_URI": str(tmp_path / "store"),
        "AWS_EC2_METADATA_DISABLED": "true",
    }  # fmt: skip

    stopped = subprocess.run(
        [sys.executable, str(script)], env=environment | {"STOP": "1"}, capture_output=True, text=True, check=False
    )
    assert (stopped.returncode, stopped.stdout) == (75, ""), stopped.stderr
    assert [path.name[:13] for path in (tmp_path / "store").glob("step-*")] == ["step-00000051"]
    assert "last loss" in warm.run(tmp_path, [str(script)], **environment)
    summary = subprocess.run(
        [sys.executable, "-m", "bootstrap.training.ledger", str(tmp_path / "store")],
        env=environment, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert "200 steps kept, 0 recomputed, 2 starts, finished" in summary.stdout


def test_settings_table_names_every_variable_and_no_other() -> None:
    sources = [*(ROOT / "bootstrap/training").rglob("*.py"), ROOT / "bootstrap/contract/node_plan.py"]
    used = set(
        re.findall(r'"((?:GPUFLEET|AWS_EC2_METADATA)_[A-Z_]+)"', "\n".join(path.read_text() for path in sources))
    )
    cells = re.findall(r"^\| (`[A-Z0-9_]+`[^|]*) \|", DOCS.read_text(), re.MULTILINE)
    listed = {name for cell in cells for name in re.findall(r"`(\w+)`", cell)}
    internal = {
        "GPUFLEET_DRAIN_FILE", "GPUFLEET_REGION", "GPUFLEET_INSTANCE_ID",
        "GPUFLEET_STARTED_AT", "AWS_EC2_METADATA_SERVICE_ENDPOINT",
    }  # fmt: skip
    assert used - internal == listed
