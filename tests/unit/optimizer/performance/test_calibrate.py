from __future__ import annotations

import csv
import json
import math
from datetime import date
from pathlib import Path

import numpy as np
import pytest

from optimizer.catalog.gpus import gpu_table
from optimizer.contract.errors import DataMissingError
from optimizer.performance.calibration import CALIBRATION, read_calibration
from optimizer.performance.measured_runs import RUNS, log_errors
from tests.unit.optimizer.performance.fixtures import CALIBRATION as SHIPPED
from tools.calibration import fit, fit_rows, predict, read_runs


def some_rows(count: int, suite: str = "llmfoundry") -> list[dict[str, str]]:
    with RUNS.open(encoding="utf-8", newline="") as file:
        return [row for row in csv.DictReader(file) if row["suite"] == suite][:count]


def write(path: Path, rows: list[dict[str, str]]) -> Path:
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return path


def test_a_fit_recovers_the_coefficients_that_made_its_rows(tmp_path: Path) -> None:
    """Rows whose throughput the model itself gave, with matrix products a tenth slower: the fit finds the tenth."""
    rows = some_rows(66)
    slower = SHIPPED.model_copy(
        update={"matmul_efficiency": {name: value * 0.9 for name, value in SHIPPED.matmul_efficiency.items()}}
    )
    read = read_runs(write(tmp_path / "runs.csv", rows), gpu_table())
    for row, run, tokens in zip(rows, read, predict(read, slower).tokens_per_second, strict=True):
        row["tokens_per_second_per_gpu"] = str(tokens / run.setup.gpus)
    made = read_runs(write(tmp_path / "made.csv", rows), gpu_table())
    before, after = log_errors(made, SHIPPED), log_errors(made, fit_rows(made))
    assert np.sqrt(np.mean(before**2)) > 0.04
    assert np.sqrt(np.mean(after**2)) < 0.015


def test_one_processor_says_nothing_of_another(tmp_path: Path) -> None:
    rows = [row for row in some_rows(66) if row["gpu"] == "h100-80gb"][:4]
    read = read_runs(write(tmp_path / "runs.csv", rows), gpu_table())
    fitted = fit(read)
    assert fitted.residuals["pooled"].relative_error == pytest.approx(math.log(2), rel=1e-3)


def test_a_calibration_without_pooled_values_or_with_errors_of_before_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "calibration.json"
    for reason in ("host_s_per_layer has no value named pooled", "errors are those of an earlier version"):
        data = json.loads(CALIBRATION.read_text())
        if "pooled" in reason:
            del data["host_s_per_layer"]["pooled"]
        else:
            data["residuals"]["new framework"] = {"rows": 0, "relative_error": 0.0421}
        path.write_text(json.dumps(data))
        with pytest.raises(DataMissingError, match=reason):
            read_calibration(path)


def test_every_measured_row_has_a_source() -> None:
    with RUNS.open(encoding="utf-8", newline="") as file:
        assert all("@" in row["source"] or row["source"].startswith("measured 20") for row in csv.DictReader(file))
    assert SHIPPED.as_of <= date.today()
