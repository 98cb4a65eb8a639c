"""``gpufleet calibrate --from-stack``: rows of a stack's bucket, used like rows of a CSV."""

from __future__ import annotations

import json
from datetime import timedelta
from pathlib import Path

import pytest

from bootstrap.contract.codec import to_text
from bootstrap.contract.measured import object_name
from optimizer.performance.calibration import read_calibration
from tests.unit.bootstrap.contract.rows import measured_row
from tests.unit.optimizer.commands.conftest import Gpufleet
from tests.unit.optimizer.deployed import DeployedStack


def test_the_newest_row_of_each_layout_calibrates_and_is_named(
    deployed: DeployedStack, gpufleet: Gpufleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = measured_row(tokens_per_second_per_gpu=100.0)
    again = measured_row(at=old.at + timedelta(days=1))
    other = measured_row(at=old.at + timedelta(days=2), micro_batch=1, tokens_per_second_per_gpu=6900.0)
    unknown = measured_row(at=old.at + timedelta(days=3), optimizer="lion")
    for number, row in enumerate((again, old, other, unknown)):
        deployed.put(f"checkpoints/{object_name(row.run_id, f'w{number}')}", to_text(row))
    deployed.put("checkpoints/measured/0123456789ab-torn.json", "{")
    out = tmp_path / "mine.json"
    monkeypatch.chdir(deployed.directory)  # its only stack is the default
    code, text, err = gpufleet("calibrate", "--from-stack", "--out", str(out), "--format", "json")
    assert code == 0, err
    result = json.loads(text)
    assert [row["measured_tokens_per_second_per_gpu"] for row in result["runs"]] == [7447.0, 6900.0]
    assert {row["gpu"] for row in result["runs"]} == {"h100-80gb"}
    (refused,) = result["refused"]
    assert refused["row_id"].startswith("0123456789ab-20261125") and "lion" in refused["reason"]
    assert "measured/0123456789ab-torn.json is not JSON" in err
    assert result["unread_columns"] == []
    calibration = read_calibration(out)
    origin = f"stack {deployed.names.stack}, measured 2026-11-23 to 2026-11-25"
    assert f"({origin})" in calibration.source


def test_a_stack_without_rows_says_who_writes_them(deployed: DeployedStack, gpufleet: Gpufleet) -> None:
    code, _, err = gpufleet("calibrate", "--from-stack", *deployed.arguments)
    assert code == 4
    assert "holds no measured run" in err and "reference trainer" in err
    assert gpufleet("calibrate", "--stack", "dev")[0] == 2
    code, _, err = gpufleet("calibrate", "--from-stack", "--directory", str(deployed.directory / "nowhere"))
    assert code == 2 and "no stack" in err and "next: gpufleet stack set PLAN --stack NAME, or --directory" in err
