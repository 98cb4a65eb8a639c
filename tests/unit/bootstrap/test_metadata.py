"""The instance metadata service answers late or with 503 for a moment: AWS says to ask again.

https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/instancedata-data-retrieval.html
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import bootstrap
from bootstrap.agent.commands import AWS_ENVIRONMENT
from bootstrap.agent.group import GroupClient
from bootstrap.agent.settings import Settings
from examples.local_imds import LocalImds

LIB = Path(bootstrap.__path__[0]) / "lib.sh"
ROLE = "iam/security-credentials/"
KEYS = {
    "Code": "Success",
    "AccessKeyId": "AKIA",
    "SecretAccessKey": "s",
    "Token": "t",
    "Expiration": "2099-01-01T00:00:00Z",
}
ASK = "import botocore.session; print(botocore.session.Session().get_credentials() is not None)"


@pytest.fixture
def imds(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[LocalImds]:
    """The only source of credentials."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(name, str(tmp_path / "none"))
    with LocalImds().running() as service:
        service.values |= {ROLE: "node", f"{ROLE}node": json.dumps(KEYS)}
        monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", service.endpoint)
        yield service


def in_shell(command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", "-c", f'source "$1"; {command}', "shell", str(LIB), sys.executable, ASK],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip


def test_a_step_asks_again_after_a_503(imds: LocalImds) -> None:
    imds.statuses["instance-id"] = 503
    healed = threading.Timer(0.5, imds.statuses.clear)
    healed.start()
    assert in_shell("imds instance-id").stdout == "i-0123456789abcdef0"
    healed.join()


def test_the_agent_asks_again_after_a_503(imds: LocalImds) -> None:
    imds.statuses["instance-id"] = 503
    healed = threading.Timer(0.5, imds.statuses.clear)
    healed.start()
    assert GroupClient(Settings(os.environ)).instance_id() == "i-0123456789abcdef0"
    healed.join()


def test_a_step_does_not_ask_again_for_what_is_not_there(imds: LocalImds) -> None:
    assert in_shell("imds autoscaling/target-lifecycle-state").returncode == 1
    assert len([request for request in imds.requests if request.startswith("GET")]) == 1


def test_calls_of_aws_wait_for_a_slow_answer(imds: LocalImds) -> None:
    """The SDK's own second is too short on a loaded node: https://github.com/aws/aws-parallelcluster/pull/3083"""
    imds.delay_s = 1.4
    assert in_shell('"$2" -c "$3"').stdout == "True\n"
    command = [sys.executable, "-c", ASK]
    assert subprocess.run(command, env={**os.environ, **AWS_ENVIRONMENT}, capture_output=True).stdout == b"True\n"
