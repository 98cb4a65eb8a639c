"""The gang test between hosts with their own addresses: real processes, real gloo, real links."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bootstrap.smoke import __main__ as cli
from bootstrap.smoke.pairs import MAX_ROUNDS, find_slow, rounds
from tests.unit.bootstrap.smoke.hosts import INTERFACE, USUAL_MBIT_PER_S, Host, hosts, missing

pytestmark = pytest.mark.training

PROGRAM = Path(__file__).with_name("gang_host.py")
COUNT = 3
# Other tests can slow a pair of hosts on two processors below the limit; they do not twice more.
HEALTHY = ("healthy", "healthy_again", "healthy_at_last")
SCENARIOS = (*HEALTHY, "slow_host", "three_faults", "vanishes")
WAIT_S = 200.0
SLOW_MBIT_PER_S = 20.0
Reports = dict[str, list[dict[str, Any]]]


class Gang:
    """Ranks on hosts, and what each reports of a scenario."""

    def __init__(self, folder: Path, made: tuple[Host, ...], scenarios: tuple[str, ...]) -> None:
        self.folder, self.hosts = folder, made
        with (folder / "log").open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, str(PROGRAM), str(folder), ",".join(host.namespace for host in made), *scenarios],
                env=os.environ
                | {"WORLD_SIZE": str(len(made)), "MASTER_ADDR": made[0].address, "GLOO_SOCKET_IFNAME": INTERFACE},
                stderr=log,
                start_new_session=True,
            )

    def run(self, scenario: str, *faults: str) -> None:
        (self.folder / "faults").write_text("\n".join(faults))
        (self.folder / "faults").rename(self.folder / f"{scenario}.go")

    def reports(self, scenario: str, ranks: range) -> list[dict[str, Any]]:
        """Reports of these ranks' hosts; a rank that ends without one fails the test with its log."""
        until = time.monotonic() + WAIT_S
        files = [self.folder / f"{scenario}.{rank}.json" for rank in ranks]
        while not all(file.exists() for file in files):
            assert time.monotonic() < until, (self.folder / "log").read_text()
            time.sleep(0.05)
        return [json.loads(file.read_text()) for file in files]


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reports]:
    """Reports of every scenario: one start of the ranks serves all, as it is most of the time."""
    if lack := missing():
        pytest.skip(f"this machine cannot make hosts: {lack}")
    folder = tmp_path_factory.mktemp("gang")
    found: Reports = {}
    everyone = range(COUNT)
    steady = [f"{rank} steady" for rank in everyone]
    with hosts(COUNT) as made:
        # It ends its ranks, as the last scenario does.
        hanging = Gang(tmp_path_factory.mktemp("hanging"), made, ("hangs",))
        hanging.run("hangs", *(f"{rank} hangs" for rank in everyone))
        found["hangs"] = hanging.reports("hangs", everyone)
        hanging.process.wait(WAIT_S)
        gang = Gang(folder, made, SCENARIOS)
        try:
            for scenario in HEALTHY:
                if found.get("healthy", [{"passed": False}])[0]["passed"]:
                    (folder / f"{scenario}.skip").touch()
                    continue
                gang.run(scenario, *steady)
                found["healthy"] = gang.reports(scenario, everyone)

            made[2].limit(SLOW_MBIT_PER_S)
            gang.run("slow_host", *steady)
            found["slow_host"] = gang.reports("slow_host", everyone)
            made[2].limit(USUAL_MBIT_PER_S)

            made[1].limit_towards(made[2], SLOW_MBIT_PER_S)
            gang.run("three_faults", *steady, "0 miscomputes", "1 slow")
            found["three_faults"] = gang.reports("three_faults", everyone)
            made[1].limit_towards(made[2], USUAL_MBIT_PER_S)

            gang.run("vanishes", "2 vanishes", "0 hurries", "1 hurries")
            while not (folder / "cut").exists():
                time.sleep(0.02)
            made[2].cut()
            found["vanishes"] = gang.reports("vanishes", range(2))
            yield found
        finally:
            os.killpg(gang.process.pid, signal.SIGKILL)
            gang.process.wait()


def by_name(report: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {test["name"]: test for test in report["tests"]}


def test_a_healthy_gang_may_train_and_misses_only_the_plan_s_bandwidth(reports: Reports) -> None:
    for rank, report in enumerate(reports["healthy"]):
        assert (report["verdict"], report["passed"], report["error"], report["bad_hosts"]) == ("warn", True, None, [])
        assert report["host"] == f"host-{rank}"
        assert report["world_size"] == COUNT
        tests = by_name(report)
        warned = {name for name, test in tests.items() if test["verdict"] == "warn"}
        # A busy machine has slow pairs too; none of them fails.
        rates = {f"{name}_bus_bandwidth" for name in ("all_reduce", "all_gather", "reduce_scatter")}
        assert rates <= warned <= rates | {"slowest_pair"}
        assert "the plan expects 2" in tests["all_gather_bus_bandwidth"]["note"]
        exchanges = ("all_gather", "reduce_scatter", "broadcast", "all_to_all", "send_receive")
        assert all(tests[f"{name}_values"]["value"] == 0 for name in exchanges)
        assert tests["slowest_pair"]["value"] > 0.5


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
            "products_equal_on_all_ranks",
            "slowest_pair",
            "slowest_rank_products",
        }
        assert tests["products_equal_on_all_ranks"]["hosts"] == ["host-0"]
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
        assert by_name(report)["products_equal_on_all_ranks"]["verdict"] == "pass"


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


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ([], "RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT unset: start it with torchrun on every node"),
        (["--plan", '{"expected": {"link_gb_per_s": 3}}'], "GPUFLEET_PLAN.expected.link_gb_per_s is '3', and must be"),
        (["--time-limit-s", "0"], "not a finite number above 0"),
    ],
)
def test_wrong_usage_of_the_gang_test_ends_with_2(
    arguments: list[str], told: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
        if arguments:
            monkeypatch.setenv(name, "1")
    with pytest.raises(SystemExit) as ended:
        cli.main(["gang", *arguments])
    assert ended.value.code == 2
    assert told in capsys.readouterr().err
