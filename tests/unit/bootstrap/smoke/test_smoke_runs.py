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
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node")
CPU = ("-m", "bootstrap.smoke", "--device", "cpu")


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


def result(report: dict[str, Any], name: str) -> dict[str, Any]:
    (test,) = [test for test in report["tests"] if test["name"] == name]
    return dict(test)


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The report of two healthy ranks, with the default sizes."""
    out = tmp_path_factory.mktemp("smoke") / "report.json"
    done = run(*TORCHRUN, "2", *CPU, "--out", str(out))
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
    report: dict[str, Any] = json.loads(out.read_text())
    return report


def test_two_healthy_ranks_pass_every_test(healthy: dict[str, Any]) -> None:
    """To change a field: raise SCHEMA_VERSION in report.py, and change bootstrap/smoke/README.md and this list."""
    assert (healthy["passed"], healthy["verdict"], healthy["error"]) == (True, "pass", None)
    assert {test["name"]: test["verdict"] for test in healthy["tests"]} == {
        "products_equal_on_all_ranks": "pass",
        "all_reduce_sum": "pass",
        "all_reduce_bus_bandwidth": "pass",
    }
    assert sorted(healthy) == [
        *("bad_hosts", "duration_s", "error", "host", "hung", "passed", "ranks", "schema_version", "software", "tests"),
        *("verdict", "world_size"),
    ]
    assert healthy["schema_version"] == 5


def test_the_figures_agree_with_each_other(healthy: dict[str, Any]) -> None:
    sizes = result(healthy, "all_reduce_bus_bandwidth")["details"]["sizes"]
    assert [row["size_mib"] for row in sizes] == [1, 4]
    for row in sizes:  # two ranks: 2(n-1)/n is 1
        assert row["bus_bandwidth_gb_per_s"] == pytest.approx(row["size_mib"] * 2**20 / row["time_s"] / 1e9)
    assert result(healthy, "all_reduce_bus_bandwidth")["value"] == sizes[-1]["bus_bandwidth_gb_per_s"]


def test_one_rank_has_nobody_to_compare_with() -> None:
    done = run(*TORCHRUN, "1", *CPU)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    bandwidth = result(report, "all_reduce_bus_bandwidth")
    assert (bandwidth["value"], bandwidth["verdict"]) == (None, "pass")
    assert "nobody" in bandwidth["note"]
    assert result(report, "products_equal_on_all_ranks")["value"] == 0


def test_faults_of_a_rank_are_found_and_its_error_ends_the_test(tmp_path: Path) -> None:
    out = tmp_path / "report.json"
    done = run(*TORCHRUN, "2", str(HERE / "sabotaged.py"), "gang", "--device", "cpu", "--out", str(out))
    assert done.returncode == 1, done.stderr
    report = json.loads(out.read_text())
    assert not report["passed"] and report["world_size"] == 2
    assert "rank 1: ValueError: a reason of rank 1's own" in report["error"]
    # Earlier results are not lost.
    product, wrong = result(report, "products_equal_on_all_ranks"), result(report, "all_reduce_sum")
    assert (product["value"], product["verdict"], product["hosts"]) == (1, "fail", []), "two ranks have no majority"
    assert product["note"].startswith("rank 1 of ") and "computes something else" in product["note"]
    # Before and after the timed runs, at each size.
    assert (wrong["value"], wrong["verdict"]) == (4, "fail") and "rank 1 has wrong sums at 1 MiB" in wrong["note"]


def test_a_run_whose_rank_is_killed_leaves_no_rank() -> None:
    command = [sys.executable, *TORCHRUN, "2", *CPU]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        while len(ranks := descendants(process.pid)) < 2:
            time.sleep(0.01)
        os.kill(ranks[-1], signal.SIGKILL)
        _, errors = process.communicate(timeout=120)
    assert process.returncode == 1 and "exitcode  : -9" in errors
    assert not any(map(is_running, ranks))


def test_a_rank_that_hangs_before_it_watches_the_time_is_killed() -> None:
    program = (
        "import sys, time; from bootstrap.smoke import __main__ as cli, ranks; cli.HANGS_S = 0; "
        "ranks.meet = lambda *_, **__: time.sleep(1e6); sys.exit(cli.main(sys.argv[1:]))"
    )
    rank = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    command = [sys.executable, "-c", program, "--device", "cpu", "--time-limit-s", "0.1"]
    assert subprocess.run(command, cwd=ROOT, env={**os.environ, **rank}, timeout=280).returncode == -signal.SIGALRM
