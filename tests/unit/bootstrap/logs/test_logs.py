"""The log stream of a node: the real service against moto's CloudWatch Logs, with a stand-in for journalctl."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import boto3
import pytest
from moto.server import ThreadedMotoServer

from bootstrap.logs.journal import Line, parse
from bootstrap.logs.ranks import Ranks
from bootstrap.logs.upload import BATCH_BYTES, BATCH_EVENTS, BATCH_SPAN_MS, EVENT_OVERHEAD_BYTES, batches
from examples.local_imds import LocalImds

GROUP, REGION = "/gpufleet/dev", "us-east-1"
NOW_MS = int(datetime.now(UTC).timestamp() * 1000)
# Answers with the entries after the cursor, and without long messages unless it is asked for --all, as journalctl does.
JOURNALCTL = """#!/bin/sh
after=0 long='s/"MESSAGE": "[^"]{{4097,}}"/"MESSAGE": null/'
for word in "$@"; do case $word in --after-cursor=*) after=${{word#*=}} ;; --all) long= ;; esac; done
[ -e {journal} ] || exit 1
tail -n +$((after + 1)) {journal} | sed -E "$long"
"""
LONG = "step 2 " + "x" * 5_000


def lines(*texts: str, at_ms: int = NOW_MS) -> list[Line]:
    return [Line(text=text, at_ms=at_ms, cursor=str(number)) for number, text in enumerate(texts, start=1)]


def test_a_batch_keeps_the_limits_of_a_call() -> None:
    by_count = list(batches(lines(*[""] * (BATCH_EVENTS + 1))))
    assert [len(batch) for batch in by_count] == [BATCH_EVENTS, 1]
    # é has two bytes.
    by_size = list(batches(lines(*["é" * 20_000] * 60)))
    sizes = [sum(len(line.text.encode()) + EVENT_OVERHEAD_BYTES for line in batch) for batch in by_size]
    assert len(sizes) == 3 and max(sizes) <= BATCH_BYTES
    days = [Line(text="", at_ms=NOW_MS + day * BATCH_SPAN_MS // 3, cursor="") for day in (0, 1, -1, 3)]
    spans = [[line.at_ms for line in batch] for batch in batches(days)]
    assert all(max(times) - min(times) < BATCH_SPAN_MS for times in spans)
    assert all(times == sorted(times) for times in spans), "a clock that was set back"
    assert sum(map(len, spans)) == 4


def test_a_message_that_is_no_utf8_is_kept() -> None:
    """https://systemd.io/JOURNAL_EXPORT_FORMATS/#journal-json-format"""
    entry = {"__CURSOR": "s=1;i=2", "__REALTIME_TIMESTAMP": "1700000000123456", "MESSAGE": [104, 105, 255]}
    assert parse(entry) == Line(text="hi\ufffd", at_ms=1_700_000_000_123, cursor="s=1;i=2")
    assert parse(entry | {"MESSAGE": None}).text == ""


class Journal:
    """A journal that grows."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "journal"
        self._count = 0
        program = folder / "journalctl"
        program.write_text(JOURNALCTL.format(journal=self._file))
        program.chmod(0o755)

    def write(self, *texts: str, process: int = 1) -> None:
        with self._file.open("a") as file:
            for text in texts:
                self._count += 1
                at_us = str((NOW_MS + self._count) * 1000)
                entry = {
                    "__CURSOR": str(self._count),
                    "__REALTIME_TIMESTAMP": at_us,
                    "MESSAGE": text,
                    "_PID": str(process),
                }
                file.write(json.dumps(entry) + "\n")


@pytest.fixture
def endpoint() -> Iterator[str]:
    server = ThreadedMotoServer(port=0, verbose=False)
    server.start()
    _, port = server.get_host_and_port()
    yield f"http://127.0.0.1:{port}"
    server.stop()


def service(folder: Path, endpoint: str, imds: LocalImds) -> subprocess.Popen[str]:
    program = "from bootstrap.logs import __main__ as logs; logs.POLL_S = 0.1; raise SystemExit(logs.main())"
    settings = {"GPUFLEET_LOG_GROUP": GROUP, "GPUFLEET_REGION": REGION, "STATE_DIRECTORY": str(folder)}
    settings |= {"AWS_ENDPOINT_URL": endpoint, "AWS_EC2_METADATA_SERVICE_ENDPOINT": imds.endpoint}
    settings |= {"PATH": f"{folder}:{os.environ['PATH']}"}
    return subprocess.Popen(
        [sys.executable, "-c", program], env={**os.environ, **settings}, stderr=subprocess.PIPE, text=True
    )


def sent(client: Any, count: int) -> list[str]:
    """The stream's messages, once there are so many."""
    deadline = time.monotonic() + 60
    while True:
        found = client.filter_log_events(logGroupName=GROUP, logStreamNamePrefix="train/")["events"]
        if len(found) >= count:
            return [event["message"] for event in found]
        assert time.monotonic() < deadline, found
        time.sleep(0.05)


def test_output_is_sent_as_it_is_written_and_to_the_last_line(tmp_path: Path, endpoint: str) -> None:
    """Through an outage and a restart: each line once, in order."""
    client = boto3.client("logs", region_name=REGION, endpoint_url=endpoint)
    journal = Journal(tmp_path)
    journal.write("step 1", "")
    with LocalImds().running() as imds:
        with service(tmp_path, endpoint, imds) as running:
            assert running.stderr is not None
            assert "the journal keeps it" in running.stderr.readline(), "there is no log group yet"
            client.create_log_group(logGroupName=GROUP)
            assert sent(client, 2) == ["step 1", " "], "an event has at least one character"
            journal.write(LONG)
            assert sent(client, 3)[-1] == LONG
            # systemd stops it after the training, whose last lines it has not looked for yet.
            os.kill(running.pid, signal.SIGSTOP)
            journal.write("the last words")
            os.kill(running.pid, signal.SIGTERM)
            os.kill(running.pid, signal.SIGCONT)
            _, said = running.communicate(timeout=30)
            assert (running.returncode, said) == (0, "the training's output is sent again\n")
        with service(tmp_path, endpoint, imds) as again:
            # The rank of a process that is there is in its environment; of one that is gone, in torchrun's line.
            with subprocess.Popen(["sleep", "60"], env={"PATH": os.environ["PATH"], "RANK": "3"}) as worker:
                journal.write("after the restart", process=worker.pid)
                assert sent(client, 5)[2:] == [LONG, "the last words", "[rank 3] after the restart"]
                worker.kill()
            started = "2026-11-21 16:00:00,123 torchrun rank 11 is process 4194304"
            journal.write(started)
            journal.write("Traceback", process=4_194_304)
            assert sent(client, 7)[5:] == [started, "[rank 11] Traceback"]
            again.terminate()
            again.communicate(timeout=30)
        (stream,) = client.describe_log_streams(logGroupName=GROUP)["logStreams"]
    assert stream["logStreamName"] == f"train/{imds.values['instance-id']}"


def test_a_process_id_that_is_used_again_has_its_new_rank(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path)
    assert ranks.prefixed("agent: starting torchrun", "7") == "agent: starting torchrun"
    ranks.prefixed("2026 torchrun rank 0 is process 7", "1")
    assert ranks.prefixed("step 1", "7") == "[rank 0] step 1"
    ranks.prefixed("2026 torchrun rank 5 is process 7", "1")
    assert ranks.prefixed("step 1", "7") == "[rank 5] step 1"


def test_without_a_log_group_it_ends_at_once(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "bootstrap.logs"],
        env={**os.environ, "GPUFLEET_LOG_GROUP": ""},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0 and "no log stream" in done.stderr
