"""The smoke test as it is used: real processes, real gloo, and one real fault at a time."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytestmark = pytest.mark.training

HERE = Path(__file__).parent
ROOT = HERE.parents[3]
QUICK = ("--device", "cpu", "--sizes-mib", "1")


def run(program: tuple[str, ...], *arguments: str, launcher: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *launcher, *program, *arguments],
        cwd=ROOT,
        env={name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )


def smoke(*arguments: str) -> subprocess.CompletedProcess[str]:
    return run(("-m", "bootstrap.smoke"), *arguments)


def sabotaged(fault: str, *arguments: str) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
    done = run((str(HERE / "sabotaged.py"), fault), *arguments)
    return done, json.loads(done.stdout)


@pytest.fixture(scope="module")
def wrong_results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of reports of one pair of ranks, one for each fault that changes a result and lets the ranks live."""
    folder = tmp_path_factory.mktemp("wrong")
    faults = "perturbed_gradient,nan_gradient,no_all_reduce,wrong_sum,diverging_parameters"
    launcher = ("-m", "torch.distributed.run", "--nproc-per-node", "2")
    done = run((str(HERE / "sabotaged.py"), faults), *QUICK, "--out", str(folder), launcher=launcher)
    assert done.returncode == 0, done.stderr
    return folder


def report_of(folder: Path, fault: str) -> dict[str, Any]:
    """The report of a fault, which both ranks found to have failed."""
    assert [(folder / f"{fault}.{rank}.code").read_text() for rank in range(2)] == ["1", "1"]
    report: dict[str, Any] = json.loads((folder / f"{fault}.json").read_text())
    assert report["error"] is None
    assert not report["passed"]
    assert report["world_size"] == 2
    return report


def result(report: dict[str, Any], name: str) -> dict[str, Any]:
    (test,) = [test for test in report["tests"] if test["name"] == name]
    return dict(test)


def key_paths(value: Any, path: str = "") -> set[str]:
    """Every key of a JSON value by its path; list elements share one path. Names of variables are not keys."""
    if isinstance(value, dict) and path != ".environment":
        return {f"{path}.{key}" for key in value} | {p for k, v in value.items() for p in key_paths(v, f"{path}.{k}")}
    if isinstance(value, list):
        return {p for inner in value for p in key_paths(inner, f"{path}[]")}
    return set()


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The report of two healthy ranks, with the default sizes."""
    out = tmp_path_factory.mktemp("smoke") / "report.json"
    done = smoke("--device", "cpu", "--out", str(out))
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
    report: dict[str, Any] = json.loads(out.read_text())
    return report


def test_two_healthy_ranks_pass_every_test(healthy: dict[str, Any]) -> None:
    assert (healthy["passed"], healthy["verdict"]) == (True, "pass")
    assert healthy["error"] is None
    assert [test["name"] for test in healthy["tests"]] == [
        "gradients_equal_on_all_ranks_float64",
        "gradients_equal_one_process_float64",
        "gradients_equal_on_all_ranks_float32",
        "gradients_equal_one_process_float32",
        "all_reduce_sum",
        "all_reduce_bus_bandwidth",
        "parameters_equal_after_training",
        "loss_falls",
        "slowest_rank_speed",
        "scaling_efficiency",
    ]
    assert all(test["passed"] for test in healthy["tests"])


def test_the_report_keeps_its_fields(healthy: dict[str, Any]) -> None:
    """To change a field: raise SCHEMA_VERSION in report.py, docs/bootstrap.md and this list together."""
    golden = (HERE / "report_fields.txt").read_text().split()
    assert sorted(key_paths(healthy)) == golden
    assert healthy["schema_version"] == 2


def test_the_figures_agree_with_each_other(healthy: dict[str, Any]) -> None:
    sizes = result(healthy, "all_reduce_bus_bandwidth")["details"]["sizes"]
    assert [row["size_mib"] for row in sizes] == [1, 4, 16]
    for row in sizes:
        algorithm, bus, time_ms = (
            row["algorithm_bandwidth_gb_per_s"],
            row["bus_bandwidth_gb_per_s"],
            row["time_ms"],
        )
        assert algorithm["median"] == pytest.approx(row["size_mib"] * 2**20 / (time_ms["median"] / 1e3) / 1e9)
        assert bus["median"] == pytest.approx(algorithm["median"])  # two ranks: 2(n-1)/n is 1
        assert bus["min"] <= bus["median"] <= bus["max"]
        assert time_ms["min"] <= time_ms["median"] <= time_ms["max"]
    assert result(healthy, "all_reduce_bus_bandwidth")["value"] == sizes[-1]["bus_bandwidth_gb_per_s"]["median"]
    scaling = result(healthy, "scaling_efficiency")
    details = scaling["details"]
    alone = details["one_process_sequences_per_s"]
    assert scaling["value"] == pytest.approx(details["all_ranks_sequences_per_s"] / sum(alone))
    assert details["all_ranks_sequences_per_s"] == pytest.approx(
        2 * details["batch_per_rank"] / (details["all_ranks_step_ms"] / 1e3)
    )


def test_one_rank_has_nobody_to_compare_with() -> None:
    done = smoke(*QUICK, "--nproc", "1")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    bandwidth = result(report, "all_reduce_bus_bandwidth")
    assert bandwidth["value"] is None
    assert bandwidth["passed"] is True
    assert "nobody" in bandwidth["note"]
    assert result(report, "gradients_equal_one_process_float64")["value"] == 0


def test_floors_that_are_not_reached_fail() -> None:
    floors = {"scaling_efficiency": 0.9, "all_reduce_bus_bandwidth": 100000}
    options = ("--min-scaling-efficiency", "0.9", "--min-bus-bandwidth-gb-per-s", "100000")
    done, report = sabotaged("slow_together", *QUICK, *options)
    assert {test["name"] for test in report["tests"] if not test["passed"]} == set(floors)
    for name, floor in floors.items():
        failed = result(report, name)
        assert (failed["limit"], failed["verdict"]) == (floor, "fail")
        assert 0 < failed["value"] < floor
    assert (report["passed"], report["verdict"]) == (False, "fail")
    assert done.returncode == 1
    assert "FAIL all_reduce_bus_bandwidth" in done.stderr


def test_a_perturbed_gradient_is_found_and_named(wrong_results: Path) -> None:
    report = report_of(wrong_results, "perturbed_gradient")
    for precision in ("float64", "float32"):
        unequal = result(report, f"gradients_equal_on_all_ranks_{precision}")
        assert unequal["value"] == 1
        assert not unequal["passed"]
        assert "rank 1 has other bits than the other ranks in blocks.0.qkv.weight" in unequal["note"]
        differs = result(report, f"gradients_equal_one_process_{precision}")
        assert not differs["passed"]
        assert differs["note"] == "rank 1 differs from a single process in blocks.0.qkv.weight"
    assert result(report, "all_reduce_sum")["passed"]


def test_nan_gradients_that_agree_are_wrong_all_the_same(wrong_results: Path) -> None:
    report = report_of(wrong_results, "nan_gradient")
    assert result(report, "gradients_equal_on_all_ranks_float64")["passed"]
    differs = result(report, "gradients_equal_one_process_float64")
    assert not differs["passed"]
    assert differs["value"] == "nan"
    assert "rank 0 differs" in differs["note"]


def test_gradients_that_were_not_reduced_are_found(wrong_results: Path) -> None:
    report = report_of(wrong_results, "no_all_reduce")
    unequal = result(report, "gradients_equal_on_all_ranks_float64")
    assert unequal["value"] > 20
    assert not result(report, "gradients_equal_one_process_float64")["passed"]


def test_a_wrong_sum_is_found_and_its_rank_named(wrong_results: Path) -> None:
    report = report_of(wrong_results, "wrong_sum")
    wrong = result(report, "all_reduce_sum")
    assert wrong["value"] == 2  # before and after the timed runs
    assert "rank 1 has" in wrong["note"]


def test_parameters_that_drift_apart_are_found(wrong_results: Path) -> None:
    report = report_of(wrong_results, "diverging_parameters")
    assert not result(report, "parameters_equal_after_training")["passed"]


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ("is_killed", "rank 1 was killed by SIGKILL"),
        ("raises", "rank 1: ValueError: a reason of rank 1's own"),
    ],
)
def test_a_rank_that_ends_fails_the_run_at_once(fault: str, told: str) -> None:
    began = time.monotonic()
    done, report = sabotaged(fault, *QUICK, "--timeout-s", "250")
    assert time.monotonic() - began < 200, "it waited for the time limit"
    assert done.returncode == 1
    assert not report["passed"]
    assert told in report["error"]
    # Earlier results are not lost.
    assert result(report, "gradients_equal_on_all_ranks_float64")["passed"]


def test_a_rank_that_hangs_is_named_within_the_time_limit() -> None:
    began = time.monotonic()
    done, report = sabotaged("hangs", *QUICK, "--timeout-s", "30")
    # 30 s from when torch is loaded, and 5 s of grace; loading takes long on a busy machine.
    assert time.monotonic() - began < 200
    assert done.returncode == 1
    assert not report["passed"]
    # Its peer gives up on the collective after half of the time; a machine too slow for that runs into the limit.
    assert re.search(
        r"rank 1 (still ran after the (first failure|time limit) and was killed|is not done)", report["error"]
    )


def test_under_torchrun_a_rank_that_dies_leaves_an_unfinished_report(tmp_path: Path) -> None:
    out = tmp_path / "report.json"
    launcher = ("-m", "torch.distributed.run", "--nproc-per-node", "2")
    program = (str(HERE / "sabotaged.py"), "dies")
    done = run(program, *QUICK, "--timeout-s", "60", "--out", str(out), launcher=launcher)
    assert done.returncode == 1
    report = json.loads(out.read_text())
    assert report["passed"] is False
    assert report["error"]


def test_ended_from_outside_it_ends_its_ranks() -> None:
    process = subprocess.Popen(
        [sys.executable, str(HERE / "sabotaged.py"), "hangs", *QUICK, "--timeout-s", "100"],
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    with process.stderr:
        line = next(line for line in process.stderr if "pids" in line)
        pids = [int(pid) for pid in line.split("pids")[1].split()]
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=120) == 1
    assert len(pids) == 2
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
