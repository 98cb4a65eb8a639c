"""The smoke test as it is used: real processes, real gloo, and one real fault at a time."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from bootstrap.processes import descendants, is_running

pytest.importorskip("torch")
pytestmark = pytest.mark.training

HERE = Path(__file__).parent
ROOT = HERE.parents[3]
QUICK = ("--device", "cpu")


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        env={name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )


@pytest.fixture(scope="module")
def wrong_results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Reports of torchrun's two ranks, one for each fault that changes a result; at last a rank raises an error."""
    folder = tmp_path_factory.mktemp("wrong")
    faults = "perturbed_gradient,nan_gradient,wrong_sum,raises"
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    done = run(*launcher, str(HERE / "sabotaged.py"), faults, str(folder), *QUICK)
    assert done.returncode == 1, done.stderr
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
    done = run("-m", "bootstrap.smoke", "--device", "cpu", "--out", str(out))
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
    report: dict[str, Any] = json.loads(out.read_text())
    return report


def test_two_healthy_ranks_pass_every_test(healthy: dict[str, Any]) -> None:
    assert (healthy["passed"], healthy["verdict"]) == (True, "pass")
    assert healthy["error"] is None
    assert [test["name"] for test in healthy["tests"]] == [
        "gradients_equal_on_all_ranks",
        "gradients_equal_one_process",
        "all_reduce_sum",
        "all_reduce_bus_bandwidth",
    ]
    assert all(test["passed"] for test in healthy["tests"])


def test_the_report_keeps_its_fields(healthy: dict[str, Any]) -> None:
    """To change a field: raise SCHEMA_VERSION in report.py, bootstrap/smoke/README.md and this list together."""
    golden = (HERE / "report_fields.txt").read_text().split()
    assert sorted(key_paths(healthy)) == golden
    assert healthy["schema_version"] == 4


def test_the_figures_agree_with_each_other(healthy: dict[str, Any]) -> None:
    sizes = result(healthy, "all_reduce_bus_bandwidth")["details"]["sizes"]
    assert [row["size_mib"] for row in sizes] == [1, 4]
    for row in sizes:  # two ranks: 2(n-1)/n is 1
        assert row["bus_bandwidth_gb_per_s"] == pytest.approx(row["size_mib"] * 2**20 / row["time_s"] / 1e9)
    assert result(healthy, "all_reduce_bus_bandwidth")["value"] == sizes[-1]["bus_bandwidth_gb_per_s"]


def test_one_rank_has_nobody_to_compare_with() -> None:
    done = run("-m", "bootstrap.smoke", *QUICK, "--nproc", "1")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    bandwidth = result(report, "all_reduce_bus_bandwidth")
    assert (bandwidth["value"], bandwidth["passed"]) == (None, True)
    assert "nobody" in bandwidth["note"]
    assert result(report, "gradients_equal_one_process")["value"] == 0


def test_a_perturbed_gradient_is_found_and_named(wrong_results: Path) -> None:
    report = report_of(wrong_results, "perturbed_gradient")
    unequal = result(report, "gradients_equal_on_all_ranks")
    assert (unequal["value"], unequal["passed"]) == (1, False)
    assert "rank 1 has other bits than the other ranks in layers.layers.0.linear1.weight" in unequal["note"]
    differs = result(report, "gradients_equal_one_process")
    assert not differs["passed"]
    assert differs["note"] == "rank 1 differs from a single process in layers.layers.0.linear1.weight"
    assert result(report, "all_reduce_sum")["passed"]


def test_nan_gradients_that_agree_are_wrong_all_the_same(wrong_results: Path) -> None:
    report = report_of(wrong_results, "nan_gradient")
    assert result(report, "gradients_equal_on_all_ranks")["passed"]
    differs = result(report, "gradients_equal_one_process")
    assert not differs["passed"]
    assert differs["value"] == "nan"
    assert "rank 0 differs" in differs["note"]


def test_a_wrong_sum_is_found_and_its_rank_named(wrong_results: Path) -> None:
    report = report_of(wrong_results, "wrong_sum")
    wrong = result(report, "all_reduce_sum")
    assert wrong["value"] == 4  # before and after the timed runs, at each size
    assert "rank 1 has" in wrong["note"]


def test_a_rank_that_fails_ends_the_run_and_is_named(wrong_results: Path) -> None:
    report = json.loads((wrong_results / "raises.json").read_text())
    assert not report["passed"]
    assert "rank 1: ValueError: a reason of rank 1's own" in report["error"]
    # Earlier results are not lost.
    assert result(report, "gradients_equal_on_all_ranks")["passed"]


def test_a_run_whose_rank_is_killed_leaves_no_rank() -> None:
    command = [sys.executable, "-m", "bootstrap.smoke", *QUICK]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        while len(ranks := descendants(process.pid)) < 2:
            time.sleep(0.01)
        os.kill(ranks[-1], signal.SIGKILL)
        _, errors = process.communicate(timeout=120)
    assert process.returncode == 1 and "ended with -9" in errors
    assert not any(map(is_running, ranks))


def test_a_rank_that_hangs_before_it_watches_the_time_is_killed() -> None:
    program = (
        "import sys, time; from bootstrap.smoke import __main__ as cli, ranks; cli.HANGS_S = 0; "
        "ranks.meet = lambda *_, **__: time.sleep(1e6); sys.exit(cli.main(sys.argv[1:]))"
    )
    rank = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    command = [sys.executable, "-c", program, "--device", "cpu", "--time-limit-s", "0.1"]
    assert subprocess.run(command, cwd=ROOT, env={**os.environ, **rank}, timeout=280).returncode == -signal.SIGALRM
