"""The gang test between ranks that are a host each: real processes and real gloo, with faults put in."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bootstrap.smoke.pairs import MAX_ROUNDS, find_slow, rounds

pytestmark = pytest.mark.training

PROGRAM = Path(__file__).with_name("gang_host.py")
Reports = dict[str, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> Reports:
    """Reports of every scenario: one start of torch serves all, as it is most of the time."""
    folder = tmp_path_factory.mktemp("gang")
    done = subprocess.run([sys.executable, PROGRAM, folder], capture_output=True, text=True, timeout=290, check=False)
    assert done.returncode == 0, done.stderr
    found: Reports = {}
    for file in sorted(folder.glob("*.json")):
        found.setdefault(file.name.split(".")[0], []).append(json.loads(file.read_text()))
    assert {name: len(files) for name, files in found.items()} == {
        "fails": 3, "hangs": 3, "healthy": 3, "slow_host": 3, "three_faults": 3, "vanishes": 2,
    }, done.stderr  # fmt: skip
    return found


def by_name(report: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {test["name"]: test for test in report["tests"]}


def test_a_healthy_gang_may_train_and_misses_only_the_plan_s_bandwidth(reports: Reports) -> None:
    for rank, report in enumerate(reports["healthy"]):
        assert (report["verdict"], report["passed"], report["error"], report["bad_hosts"]) == ("warn", True, None, [])
        assert report["host"] == f"host-{rank}"
        assert report["world_size"] == 3
        tests = by_name(report)
        warned = {name for name, test in tests.items() if test["verdict"] == "warn"}
        assert warned == {f"{name}_bus_bandwidth" for name in ("all_reduce", "all_gather", "reduce_scatter")}
        assert "the plan expects 2e+06" in tests["all_gather_bus_bandwidth"]["note"]
        exchanges = ("all_gather", "reduce_scatter", "broadcast", "all_to_all", "send_receive")
        assert all(tests[f"{name}_values"]["value"] == 0 for name in exchanges)
        assert tests["slowest_pair"]["value"] == 1


def test_a_host_that_is_slow_with_all_others_is_named(reports: Reports) -> None:
    for report in reports["slow_host"]:
        tests = by_name(report)
        pair = tests["slowest_pair"]
        assert (pair["hosts"], pair["note"]) == (["host-2"], "host-2 is slow with every host")
        assert {name for name, test in tests.items() if test["verdict"] == "fail"} == {"slowest_pair"}
        assert report["bad_hosts"] == ["host-2"]


def test_each_of_three_faults_at_once_is_found_by_its_own_test(reports: Reports) -> None:
    """A rank that computes wrongly, one that is slow, and a slow link between two hosts."""
    for report in reports["three_faults"]:
        tests = by_name(report)
        assert {name for name, test in tests.items() if test["verdict"] == "fail"} == {
            "gradients_equal_one_process",
            "slowest_pair",
            "slowest_rank_products",
        }
        assert tests["gradients_equal_one_process"]["hosts"] == ["host-0"]
        assert tests["gradients_equal_on_all_ranks"]["value"] == 0
        assert tests["slowest_rank_products"]["hosts"] == ["host-1"]
        assert tests["slowest_pair"]["note"] == "host-1 with host-2 alone is slow"
        # Its second host goes. With all hosts to blame, none is.
        assert tests["slowest_pair"]["hosts"] == ["host-2"]
        assert report["bad_hosts"] == []


def test_a_host_that_vanishes_is_named_in_time_by_the_others(reports: Reports) -> None:
    for report in reports["vanishes"]:
        assert (report["passed"], report["bad_hosts"]) == (False, ["host-2"])
        assert "host-2 does not answer" in report["error"]
        # Earlier results are not lost.
        assert by_name(report)["gradients_equal_on_all_ranks"]["verdict"] == "pass"


def test_a_wrong_sum_and_an_error_of_a_rank_are_named(reports: Reports) -> None:
    for report in reports["fails"]:
        assert (report["passed"], report["bad_hosts"]) == (False, ["host-1"])
        assert "rank 1: ValueError: a reason of rank 1's own" in report["error"]
        wrong = by_name(report)["all_reduce_sum"]
        # Before and after the timed runs.
        assert (wrong["value"], wrong["verdict"]) == (2, "fail") and "rank 1 has wrong sums at 1 MiB" in wrong["note"]


def test_a_collective_that_hangs_is_named_and_no_host_is(reports: Reports) -> None:
    for report in reports["hangs"]:
        assert (report["passed"], report["bad_hosts"], report["hung"]) == (False, [], "broadcast")
        assert report["error"] == "broadcast hangs, though every rank answers"


def test_every_pair_meets_once_and_nobody_twice_a_round() -> None:
    for hosts_there in range(2, 17):
        played = rounds(hosts_there)
        for meeting in played:
            assert len({host for pair in meeting for host in pair}) == 2 * len(meeting)
        met = [pair for meeting in played for pair in meeting]
        assert len(set(met)) == len(met)
        if len(played) < MAX_ROUNDS:
            assert len(met) == hosts_there * (hosts_there - 1) // 2
    assert len(rounds(100)) == MAX_ROUNDS


def test_the_slow_host_or_the_slow_link_is_told_apart() -> None:
    def found(hosts_there: int, *slow: tuple[int, int]) -> tuple[list[int], list[tuple[int, int]]]:
        met = [pair for meeting in rounds(hosts_there) for pair in meeting]
        return find_slow({pair: 1.0 if pair in slow else 10.0 for pair in met}, 0.5)

    assert found(4) == ([], [])
    assert found(4, (0, 2), (1, 2), (2, 3)) == ([2], [])
    assert found(4, (1, 3)) == ([], [(1, 3)])
    assert found(8, *((i, 7) for i in range(7)), (0, 1)) == ([7], [(0, 1)])
    assert found(2, (0, 1)) == ([], [])  # two hosts: no other pair tells who
