"""``gpufleet logs``, ``ssh`` and ``port-forward`` on a deployed stack in an emulated AWS."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import boto3
import pytest

from optimizer.aws import clients
from optimizer.aws.actuals import read_ranks
from optimizer.aws.log_group import LogReader
from tests.unit.optimizer.commands.conftest import Gpufleet
from tests.unit.optimizer.deployed import REGION, Clock, DeployedStack

GONE = "i-0000000000000000f"
Follow = Callable[[timedelta, Callable[[], None]], list[str]]


class Output:
    """The stack's log group, written as its nodes write it."""

    def __init__(self, deployed: DeployedStack) -> None:
        self.client: Any = boto3.client("logs", region_name=REGION)
        self.group = deployed.names.log_group
        self.client.create_log_group(logGroupName=self.group)
        self.began = datetime.now(UTC) - timedelta(minutes=10)
        self._streams: set[str] = set()

    def write(self, node: str, text: str, *, after_s: float = 0, stream: str = "train") -> None:
        name = f"{stream}/{node}"
        if name not in self._streams:
            self.client.create_log_stream(logGroupName=self.group, logStreamName=name)
            self._streams.add(name)
        at = self.began + timedelta(seconds=after_s)
        event = {"timestamp": int(at.timestamp() * 1000), "message": text}
        self.client.put_log_events(logGroupName=self.group, logStreamName=name, logEvents=[event])


@pytest.fixture
def output(deployed: DeployedStack) -> Output:
    return Output(deployed)


@pytest.fixture
def nodes(deployed: DeployedStack) -> list[str]:
    return read_ranks(clients.ec2(REGION), deployed.group)


def test_lines_of_all_nodes_have_rank_and_time(
    deployed: DeployedStack, gpufleet: Gpufleet, output: Output, nodes: list[str]
) -> None:
    output.write(GONE, "lost its instance", after_s=0)
    output.write(nodes[1], "[rank 1] step 1 of rank 1", after_s=1)
    output.write(nodes[0], "[rank 10] step 1 of [rank 1] ", after_s=2)
    output.write(nodes[0], "node set-up failed", stream="node-init")
    output.write(nodes[0], "yesterday's", after_s=-86_400)
    code, out, err = gpufleet("logs", *deployed.arguments)
    assert (code, err) == (0, "")
    assert [line.split(" ", 2)[::2] for line in out.splitlines()] == [
        [f"[{GONE}]", "lost its instance"],
        ["[1]", "[rank 1] step 1 of rank 1"],
        ["[0]", "[rank 10] step 1 of [rank 1] "],
    ]
    for option, value in (("--rank", "1"), ("--node", "1")):
        _, out, _ = gpufleet("logs", *deployed.arguments, option, value)
        assert out.splitlines()[0].endswith("step 1 of rank 1") and len(out.splitlines()) == 1
    assert gpufleet("logs", *deployed.arguments, "--rank", "2")[:2] == (0, "")
    _, out, _ = gpufleet("logs", *deployed.arguments, "--node", nodes[0], "--since", "2d")
    assert [line.split(" ", 2)[2] for line in out.splitlines()] == ["yesterday's", "[rank 10] step 1 of [rank 1] "]


@pytest.fixture
def follow(deployed: DeployedStack, gpufleet: Gpufleet, monkeypatch: pytest.MonkeyPatch) -> Follow:
    """`gpufleet logs -f` until a time has passed; ``write`` runs after five seconds. Returns the lines' texts."""

    def run(until: timedelta, write: Callable[[], None]) -> list[str]:
        clock = Clock()
        monkeypatch.setattr("time.sleep", clock.sleep)

        def meanwhile(passed: timedelta) -> None:
            if passed >= until:
                raise KeyboardInterrupt
            if passed == timedelta(seconds=5):
                write()

        clock.meanwhile = meanwhile
        code, out, _ = gpufleet("logs", *deployed.arguments, "-f")
        assert code == 0
        return [line.split(" ", 2)[2] for line in out.splitlines()]

    return run


def test_following_prints_each_line_once_also_late_ones(follow: Follow, output: Output, nodes: list[str]) -> None:
    output.write(nodes[0], "first", after_s=260)

    def write() -> None:
        output.write(nodes[0], "second", after_s=265)
        output.write(nodes[1], "sent late", after_s=10)

    assert follow(timedelta(seconds=15), write) == ["first", "sent late", "second"]


def test_a_long_read_keeps_the_ids_of_the_last_minutes_alone() -> None:
    class Pages:
        def get_paginator(self, _: str) -> Pages:
            return self

        def paginate(self, startTime: int, **_: Any) -> Any:  # noqa: N803 - AWS's name
            times = (at for at in range(0, 86_400_000, 60_000) if at >= startTime)
            yield {
                "events": [{"eventId": str(at), "timestamp": at, "message": "", "logStreamName": ""} for at in times]
            }

    reader = LogReader(client=Pages(), group="", node="", since=datetime.fromtimestamp(0, UTC))
    assert len(list(reader.read())) == 1_440 and len(reader._seen) == 6
    assert list(reader.read()) == []


def test_ranks_are_torchruns(deployed: DeployedStack, nodes: list[str]) -> None:
    """By the address as text, of which 10.0.0.10 comes before 10.0.0.9."""

    class Pages:
        def get_paginator(self, _: str) -> Pages:
            return self

        def paginate(self, InstanceIds: list[str]) -> Any:  # noqa: N803 - AWS's name
            addresses = dict(zip(InstanceIds, ("10.0.0.9", "10.0.0.10"), strict=True))
            found = [
                {"InstanceId": key, "PrivateIpAddress": address, "State": {"Name": "running"}}
                for key, address in addresses.items()
            ]
            return [{"Reservations": [{"Instances": found}]}]

    first, second = (node.instance_id for node in deployed.group.nodes)
    assert read_ranks(Pages(), deployed.group) == [second, first]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (("logs", "--node", "2"), 2, "0 to 1"),
        (("ssh", "first"), 2, "a rank"),
        (("logs", "--since", "soon"), 2, "soon"),
        (("logs", "--since", "9999999d"), 4, "no log group"),
    ],
)
def test_wrong_use_and_nothing_there(
    deployed: DeployedStack, gpufleet: Gpufleet, arguments: tuple[str, ...], code: int, says: str
) -> None:
    ended, _, err = gpufleet(arguments[0], *deployed.arguments, *arguments[1:])
    assert ended == code and says in err


def test_an_absent_aws_cli_is_named_with_its_page(
    gpufleet: Gpufleet, deployed: DeployedStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(deployed.directory))
    code, _, err = gpufleet("ssh", "0", *deployed.arguments)
    assert code == 1 and "no aws" in err and "https://docs.aws.amazon.com/" in err


@pytest.mark.parametrize(
    ("command", "more"),
    [
        (("ssh", "1"), []),
        (
            ("ssh", "1", "--port", "6006", "--local-port", "8006"),
            ["--document-name", "AWS-StartPortForwardingSession", "--parameters"],
        ),
    ],
)
def test_a_session_is_the_aws_clis(
    deployed: DeployedStack, nodes: list[str], command: tuple[str, ...], more: list[str]
) -> None:
    _program(deployed.directory / "aws")
    done = subprocess.run(
        [sys.executable, "-c", "from optimizer.start import main; main()", *command, *deployed.arguments],
        env=os.environ | {"PATH": f"{deployed.directory}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 7, done.stderr
    words = done.stdout.splitlines()
    assert words[:6] == ["ssm", "start-session", "--region", REGION, "--target", nodes[1]]
    assert words[6:9] == more
    if more:
        assert json.loads(words[9]) == {"portNumber": ["6006"], "localPortNumber": ["8006"]}


def _program(path: Path) -> None:
    """Put a program that prints its arguments, one a line, and ends with 7."""
    path.write_text("#!/bin/sh\nprintf '%s\\n' \"$@\"\nexit 7\n")
    path.chmod(0o755)
