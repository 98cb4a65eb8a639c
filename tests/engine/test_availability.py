"""Without the tools a user's run skips and says how to get them; CI fails."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.engine import pulumi_cli
from tests.engine.conftest import unavailable
from tests.engine.plugin.provider import require_emulated_aws
from tests.engine.plugin.terraform import ProviderError


def test_a_user_may_lack_something(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CI", raising=False)
    with pytest.raises(pytest.skip.Exception, match="no unicorn"):
        unavailable("no unicorn")


def test_ci_may_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CI", "true")
    with pytest.raises(pytest.fail.Exception, match="no unicorn"):
        unavailable("no unicorn")


def executables(folder: Path, *names: str) -> None:
    folder.mkdir()
    for name in names:
        (folder / name).touch(mode=0o755)


def test_an_installed_cli_comes_before_a_built_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed, built = tmp_path / "installed", tmp_path / "built"
    executables(built, "pulumi", *pulumi_cli.LANGUAGE_HOST)
    monkeypatch.setattr(pulumi_cli, "BUILT", built)
    assert pulumi_cli.find_pulumi(str(installed)) == built
    executables(installed, "pulumi")
    assert pulumi_cli.find_pulumi(str(installed)) == installed


def test_a_cli_half_built_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    executables(tmp_path / "built", "pulumi")
    monkeypatch.setattr(pulumi_cli, "BUILT", tmp_path / "built")
    assert pulumi_cli.find_pulumi("") is None


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
