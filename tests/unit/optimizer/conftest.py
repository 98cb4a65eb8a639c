"""A deployed stack in an emulated AWS of this machine, for the commands that look after one."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engine.emulated_aws import emulated_aws
from tests.unit.optimizer.deployed import IMAGE, DeployedStack


@pytest.fixture(scope="session")
def emulated_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The emulated AWS, whose lifecycle hooks hold."""
    with emulated_aws(tmp_path_factory.mktemp("aws"), {IMAGE: "x86_64"}) as url:
        yield url


@pytest.fixture
def deployed(emulated_url: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> DeployedStack:
    """Group, hooks and bucket of a stack of the test's own, two nodes in service, and its configuration file."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", emulated_url)
    return DeployedStack.create(stack=f"s-{uuid.uuid4().hex[:8]}", directory=tmp_path)
