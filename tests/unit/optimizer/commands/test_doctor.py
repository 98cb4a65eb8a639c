"""``gpufleet doctor``: every part has a state, and every old or missing one the command that mends it."""

from __future__ import annotations

import json
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from botocore.client import BaseClient

from optimizer.catalog import snapshot
from tests.unit.optimizer.commands.conftest import Gpufleet

VARIABLES = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")


def examine(gpufleet: Gpufleet, *flags: str) -> dict[str, dict[str, Any]]:
    code, out, err = gpufleet("doctor", *flags, "--format", "json")
    assert (code, err) == (0, "")
    rows = {row["part"]: row for row in json.loads(out)}
    for row in rows.values():
        assert row["state"] in ("ok", "old", "missing") and (row["state"] == "ok" or row["next"]), row
    return rows


def test_each_part_is_named_and_nothing_is_sent(
    gpufleet: Gpufleet, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("a request")

    monkeypatch.setattr(BaseClient, "_make_api_call", refuse)
    program = tmp_path / "pulumi"
    program.write_text("#!/bin/sh\necho v3.272.0 $PULUMI_SKIP_UPDATE_CHECK\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    rows = examine(gpufleet)
    assert f"click {metadata.version('click')}" in rows["packages"]["found"]
    assert rows["packages of [torch]"]["state"] == "ok" and rows["Pulumi CLI"]["found"] == "v3.272.0 true"
    assert rows["spot prices"]["next"] == rows["on-demand prices"]["next"] == "gpufleet catalog refresh"
    assert rows["spot prices"]["state"] == "old" and rows["spot prices"]["age_days"] > 1, "the shipped ones"
    assert {"interruption bands", "Capacity Block rates", "calibration"} <= set(rows)
    assert rows["AWS credentials"]["found"].startswith("by env: ")
    assert "gpufleet catalog refresh" in gpufleet("doctor")[1]


def test_missing_parts_name_their_command(gpufleet: Gpufleet, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    real = metadata.version

    def version(name: str) -> str:
        if name == "torch":
            raise metadata.PackageNotFoundError(name)
        return real(name)

    monkeypatch.setattr(metadata, "version", version)
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setenv(snapshot.DIRECTORY_VARIABLE, str(tmp_path))
    for name in VARIABLES:
        monkeypatch.delenv(name)
    rows = examine(gpufleet)
    assert rows["packages of [torch]"]["next"] == "pip install 'gpufleet[torch]'"
    assert "torch missing" in rows["packages of [torch]"]["found"]
    parts = ("Pulumi CLI", "catalog", "AWS credentials", "packages of [torch]")
    assert [rows[part]["state"] for part in parts] == ["missing"] * 4
    assert "gpufleet catalog refresh" in rows["catalog"]["next"]
    monkeypatch.setenv("AWS_PROFILE", "unknown")
    monkeypatch.delenv("AWS_DEFAULT_REGION")
    row = examine(gpufleet)["AWS credentials"]
    assert row["state"] == "missing" and "unknown" in row["found"]


def test_a_profiles_role_is_named_and_no_program_runs_for_it(
    gpufleet: Gpufleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran, role = tmp_path / "ran", "arn:aws:iam::123456789012:role/trainer"
    (tmp_path / "config").write_text(
        f"[profile own]\nrole_arn = {role}\nsource_profile = base\n[profile base]\ncredential_process = touch {ran}\n"
    )
    for name in VARIABLES:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_PROFILE", "own")
    row = examine(gpufleet)["AWS credentials"]
    assert row["state"] == "ok" and role in row["found"] and not ran.exists()
