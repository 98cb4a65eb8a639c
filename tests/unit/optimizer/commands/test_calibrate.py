from __future__ import annotations

import csv
import hashlib
import io
import json
import os
from pathlib import Path

import pytest

from optimizer.performance.calibration import CALIBRATION, load, read_calibration
from optimizer.performance.measured_runs import RUNS, RunRow
from tests.unit.optimizer.commands.conftest import Gpufleet

# Runs of a GPU no shipped row has; throughputs near what is predicted, so that no row is refused.
MINE = """\
model,seq_len,gpu,gpus,micro_batch,tokens_per_second_per_gpu,peak_memory_gib
gpt2,1024,l4-24gb,1,8,16000,8.5
gpt2,512,l4-24gb,1,8,15000,
llama-3.2-1b,2048,l4-24gb,8,1,1500,
"""


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    path = tmp_path / "my runs.csv"
    path.write_text(MINE, encoding="utf-8")
    return path


def test_the_report_has_errors_before_after_and_left_out(gpufleet: Gpufleet, runs: Path) -> None:
    code, out, _ = gpufleet("calibrate", str(runs), "--format", "json")
    assert code == 0
    result = json.loads(out)
    assert [row["line"] for row in result["runs"]] == [2, 3, 4]
    (everything,) = result["throughput_error_percent"]
    assert everything["rows"] == 3
    # Fitted rows flatter: a model that was left out is predicted worse than one that was not.
    assert everything["after"] < everything["before"]
    assert everything["after"] < everything["left_out"]
    assert result["left_out_by"] == "model"
    assert result["written"] is None
    for row in result["runs"]:
        assert -1 < row["error_before"] < 10


def test_the_file_written_is_a_calibration_that_says_where_it_comes_from(
    gpufleet: Gpufleet, runs: Path, tmp_path: Path
) -> None:
    out = tmp_path / "mine.json"
    code, _, err = gpufleet("calibrate", str(runs), "--out", str(out))
    assert code == 0
    assert "--calibration" in err
    calibration = read_calibration(out)
    digest = hashlib.sha256(runs.read_bytes()).hexdigest()[:12]
    assert calibration.source == f"your 3 measured runs (my runs.csv, sha256 {digest}), on top of {load().source}"
    assert calibration.residuals["dense decoder on L4 in torch"].rows == 3
    assert calibration.rows == load().rows + 3
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine.json", "my runs.csv"]


def test_estimate_and_recommend_use_it_and_say_so(gpufleet: Gpufleet, runs: Path, tmp_path: Path) -> None:
    out = tmp_path / "mine.json"
    gpufleet("calibrate", str(runs), "--out", str(out))
    job = ("--model", "gpt2", "--seq-len", "1024")

    def estimate(*more: str) -> dict[str, object]:
        code, text, _ = gpufleet("estimate", *job, "--gpu", "l4-24gb", "--gpus", "1", "--format", "json", *more)
        assert code == 0
        result = json.loads(text)
        assert isinstance(result, dict)
        return result

    mine, shipped = estimate("--calibration", str(out)), estimate()
    assert "your 3 measured runs" in str(mine["calibration"])
    assert mine["measured_rows"] == 3
    assert shipped["measured_rows"] == 0
    assert mine["tokens_per_second"] != shipped["tokens_per_second"]

    code, text, _ = gpufleet(
        "recommend", *job, "--tokens", "50M", "--instance-type", "g6.12xlarge", "--region", "us-east-1",
        "--calibration", str(out), "--format", "json",
    )  # fmt: skip
    assert code == 0
    calibration = json.loads(text)["plans"][0]["calibration"]
    assert "your 3 measured runs" in calibration["source"]
    assert calibration["rows"] == 3


def test_rows_that_cannot_be_used_are_named_and_the_others_are_fitted(gpufleet: Gpufleet, runs: Path) -> None:
    with runs.open("a", encoding="utf-8") as file:
        file.write("gpt2,1024,l4-24gb,1,8,,\n")
        file.write("gpt2,1024,mi300x,1,8,16000,\n")
        file.write("gpt2,1024,l4-24gb,8,8,1e308,\n")
        file.write('"a model\nof two lines",1024,l4-24gb,1,8,-3,\n')
        file.write("gpt2,1024,l4-24gb,1,8,16000,-1\n")
        file.write("gpt2,1024,l4-24gb,1,8,1e-8,\n")
    code, out, err = gpufleet("calibrate", str(runs), "--format", "json")
    assert code == 0
    refused = {entry["line"]: entry["reason"] for entry in json.loads(out)["refused"]}
    assert set(refused) == {5, 6, 7, 9, 10, 11}
    assert refused[5] == "tokens_per_second_per_gpu is empty\n  why: there is no fit without it"
    assert "gpu is 'mi300x'" in refused[6]
    assert "of the L4's bf16 peak (limit: 1e-05 to 1); is it of all GPUs together?" in refused[7]
    assert "tokens_per_second_per_gpu is '-3'" in refused[9]
    assert "peak_memory_gib is '-1'" in refused[10]
    assert "is it a row of this model and GPU?" in refused[11]
    assert "\nline 6 refused: gpu is 'mi300x'\n  limit: one of v100-16gb" in err, "parts on lines of their own"
    assert len(json.loads(out)["runs"]) == 3


def test_a_misspelt_column_is_pointed_out(gpufleet: Gpufleet, runs: Path) -> None:
    runs.write_text(MINE.replace("micro_batch", "micro_bach"), encoding="utf-8")
    code, out, err = gpufleet("calibrate", str(runs), "--format", "json")
    assert code == 0
    assert json.loads(out)["unread_columns"] == ["micro_bach"]
    assert "nothing reads the columns micro_bach" in err


def test_the_template_is_a_file_it_reads(gpufleet: Gpufleet, tmp_path: Path) -> None:
    code, out, _ = gpufleet("calibrate", "--template")
    assert code == 0
    (row,) = csv.DictReader(io.StringIO(out))
    assert row["source"] and row.keys() >= RunRow.model_fields.keys()
    path = tmp_path / "runs.csv"
    path.write_text(out, encoding="utf-8")
    code, _, err = gpufleet("calibrate", str(path))
    assert code == 0
    assert "refused" not in err


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "has the header ''"),
        ("gpu,model\n", "holds 0 runs"),
        ("gpu,model\nh100-80gb,gpt2\n", "line 2: tokens_per_second_per_gpu is empty"),
        ("\x00\x01", "next: gpufleet calibrate --template"),
    ],
)
def test_a_file_without_runs_is_wrong_input(gpufleet: Gpufleet, tmp_path: Path, text: str, says: str) -> None:
    path, out = tmp_path / "runs.csv", tmp_path / "mine.json"
    path.write_text(text, encoding="utf-8")
    code, _, err = gpufleet("calibrate", str(path), "--out", str(out))
    assert code == 2
    assert says in err
    assert not out.exists()


def test_the_runs_themselves_are_not_replaced(gpufleet: Gpufleet, runs: Path) -> None:
    code, _, _ = gpufleet("calibrate", str(runs), "--out", str(runs))
    assert code == 2
    assert runs.read_text(encoding="utf-8") == MINE


def test_only_a_file_is_replaced_and_a_link_stays(gpufleet: Gpufleet, runs: Path, tmp_path: Path) -> None:
    pipe, link, target = tmp_path / "pipe", tmp_path / "link.json", tmp_path / "target.json"
    os.mkfifo(pipe)
    code, _, err = gpufleet("calibrate", str(runs), "--out", str(pipe))
    assert code == 2
    assert "no regular file" in err
    assert pipe.is_fifo()
    link.symlink_to(target)
    assert gpufleet("calibrate", str(runs), "--out", str(link))[0] == 0
    assert link.is_symlink()
    assert read_calibration(target).residuals["dense decoder on L4 in torch"].rows == 3


@pytest.mark.parametrize("arguments", [(), ("--template", "runs.csv"), ("--template", "--out", "x.json")])
def test_arguments_that_do_not_go_together(gpufleet: Gpufleet, arguments: tuple[str, ...]) -> None:
    assert gpufleet("calibrate", *arguments)[0] == 2


@pytest.mark.parametrize("command", ["recommend", "estimate"])
@pytest.mark.parametrize("text", ["{}", "", '{"residuals": ' + 5000 * "9" + "}", None], ids=["fields", "", "9", "gone"])
def test_a_calibration_that_is_none_is_wrong_input(
    gpufleet: Gpufleet, tmp_path: Path, command: str, text: str | None
) -> None:
    path = tmp_path / "mine.json"
    if text is not None:
        path.write_text(text, encoding="utf-8")
    more = ("--tokens", "1M", "--seq-len", "512") if command == "recommend" else ("--gpu", "h100-80gb")
    code, _, err = gpufleet(command, "--model", "gpt2", *more, "--calibration", str(path))
    assert code == 2
    assert str(path) in err
    assert "gpufleet calibrate RUNS.csv" in err
    assert "validation error" not in err


def test_the_shipped_calibration_names_the_shipped_runs() -> None:
    assert f"sha256 {hashlib.sha256(RUNS.read_bytes()).hexdigest()[:12]}" in read_calibration(CALIBRATION).source
