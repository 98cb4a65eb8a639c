"""A run reaches nothing beyond this machine, takes nothing of the user's settings, and leaves no process."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.engine import pulumi_cli
from tests.engine.plugin.provider import require_emulated_aws
from tests.engine.plugin.terraform import ProviderError


def test_nothing_of_the_users_settings_reaches_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_PROFILE", "AWS_SESSION_TOKEN", "PULUMI_ACCESS_TOKEN", "TF_CLI_CONFIG_FILE"):
        monkeypatch.setenv(name, "the user's")
    env = pulumi_cli.environment(
        pulumi=tmp_path, plugins=tmp_path, scratch=tmp_path, endpoint="http://127.0.0.1:1", region="us-east-1"
    )
    assert "the user's" not in env.values()
    assert env["AWS_ENDPOINT_URL"] == "http://127.0.0.1:1"
    assert env["PULUMI_BACKEND_URL"].startswith("file://")
    assert env["HOME"] != os.environ.get("HOME")


@pytest.mark.parametrize("endpoint", ["", "https://ec2.us-east-1.amazonaws.com", "http://127.0.0.1.example.com:80"])
def test_the_plugin_talks_to_this_machine_only(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    with pytest.raises(ProviderError, match="emulated AWS"):
        require_emulated_aws()


@pytest.mark.skipif(not Path("/proc").exists(), reason="sessions are read from Linux's /proc")
def test_a_killed_run_leaves_no_process() -> None:
    # Job control (set -m) gives the sleep a process group of its own, as the engine gives its plugins.
    shell = subprocess.Popen(
        ["bash", "-c", "set -m; sleep 1000 & echo $!; wait"], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    with shell:
        assert shell.stdout is not None
        child = int(shell.stdout.readline())
        assert os.getpgid(child) != os.getpgid(shell.pid)
        pulumi_cli.kill_session(shell.pid)
        # The pipe ends when the last process that holds it has.
        assert shell.stdout.read() == ""
