"""No test reaches any address but this machine, or a real account's credentials."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pytest_socket import socket_allow_hosts

from tests.warm import Warm

_CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "testing",
    "AWS_SECRET_ACCESS_KEY": "testing",
    "AWS_SESSION_TOKEN": "testing",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
    "AWS_CONFIG_FILE": "/dev/null",
    "AWS_SHARED_CREDENTIALS_FILE": "/dev/null",
    # A closed port: a call a test forgot to point at its own endpoint fails here instead of leaving the machine.
    "AWS_ENDPOINT_URL": "http://127.0.0.1:9",
}

# Half a minute and more each, besides tests/training; the slowest first.
SLOW_FILES = ("test_lifecycle.py", "test_smoke_runs.py", "test_lost_state.py", "test_gang.py", "test_layouts.py")

# Before torch is imported. On a busy machine its threads spin while they wait for each other: a small training takes
# twice the processor time with two of them.
os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let xdist's workers begin with slow files: tests/training the first, SLOW_FILES the last; they end together.

    ``--dist worksteal`` gives each worker an equal, contiguous share, and an idle one takes from the end of another's:
    https://pytest-xdist.readthedocs.io/en/stable/distribution.html
    """
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    if workers == 1:
        return
    first = [item for item in items if Path(__file__).with_name("training") in item.path.parents]
    last = [item for name in SLOW_FILES for item in items if item.path.name == name]
    quick = [item for item in items if item not in {*first, *last}]
    at = max(0, len(items) // workers * (workers - 1) - len(first))
    items[:] = [*first, *quick[:at], *last, *quick[at:]]


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object) -> None:
    """Say how a worker of xdist ended that did not do so by itself: a negative status is its signal."""
    if error:
        process = getattr(getattr(node.gateway, "_io", None), "popen", None)
        status = None if process is None else process.wait(timeout=60)
        sys.stderr.write(f"\n{node.gateway.id} (process {getattr(process, 'pid', '?')}) ended with {status}: {error}\n")


@pytest.fixture(scope="module", autouse=True)
def _collected() -> None:
    """Clear up after the module before, and let no later collection look at what is left.

    It grows to 1.4 million objects (moto's, torch's, catalogs), a second to look at; one profile looks 5 to 9 times.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _this_machine_only(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    for name, value in _CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("AWS_PROFILE", raising=False)
    monkeypatch.delenv("GPUFLEET_CATALOG", raising=False)
    monkeypatch.delenv("COLUMNS", raising=False)  # pytest-xdist's, 80
    # A user's own refreshed catalog must not change what a test sees.
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "cache"))
    socket_allow_hosts(["127.0.0.1", "::1", "localhost"], allow_unix_socket=True)
    yield


@pytest.fixture
def repository() -> Path:
    """The root of the checkout."""
    return Path(__file__).parent.parent


@pytest.fixture(scope="session")
def warm() -> Iterator[Warm]:
    """Process that has torch imported once for all tests."""
    process = Warm()
    yield process
    process.close()
