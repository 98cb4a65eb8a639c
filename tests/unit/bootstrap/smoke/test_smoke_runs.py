"""The smoke test as it is used: real processes and real gloo."""

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

ROOT = Path(__file__).parents[4]
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


def test_two_healthy_ranks_pass_every_test(tmp_path: Path) -> None:
    """To change a field: raise SCHEMA_VERSION in report.py, and change bootstrap/smoke/README.md and this list."""
    done = run(*TORCHRUN, "2", *CPU, "--out", str(tmp_path / "report.json"))
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    healthy: dict[str, Any] = json.loads((tmp_path / "report.json").read_text())
    assert (healthy["passed"], healthy["verdict"], healthy["error"]) == (True, "pass", None)
    assert {test["name"]: test["verdict"] for test in healthy["tests"]} == {
        "gradients_equal_on_all_ranks": "pass",
        "gradients_equal_one_process": "pass",
        "all_reduce_sum": "pass",
        "all_reduce_bus_bandwidth": "pass",
    }
    assert sorted(healthy) == [
        *("bad_hosts", "duration_s", "error", "host", "hung", "passed", "ranks", "schema_version", "software", "tests"),
        *("verdict", "world_size"),
    ]
    assert healthy["schema_version"] == 5
    bandwidth = result(healthy, "all_reduce_bus_bandwidth")
    sizes = bandwidth["details"]["sizes"]
    assert [row["size_mib"] for row in sizes] == [1, 4]
    for row in sizes:  # two ranks: 2(n-1)/n is 1
        assert row["bus_bandwidth_gb_per_s"] == pytest.approx(row["size_mib"] * 2**20 / row["time_s"] / 1e9)
    assert bandwidth["value"] == sizes[-1]["bus_bandwidth_gb_per_s"]


def test_one_rank_has_nobody_to_compare_with() -> None:
    done = run(*TORCHRUN, "1", *CPU)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    bandwidth = result(report, "all_reduce_bus_bandwidth")
    assert (bandwidth["value"], bandwidth["verdict"]) == (None, "pass")
    assert "nobody" in bandwidth["note"]
    assert result(report, "gradients_equal_one_process")["value"] == 0


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
