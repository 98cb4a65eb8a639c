from __future__ import annotations

import sys
from pathlib import Path

import pytest
import yaml

from tests.unit.optimizer.commands.conftest import Gpufleet


def test_the_project_runs_in_the_environment_of_gpufleet(
    gpufleet: Gpufleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its path from the folder where it is inside, as a moved folder still finds it then."""
    for folder, prefix, written in (
        ("beside", tmp_path / "venv", str(tmp_path / "venv")),
        ("around", tmp_path / "around" / ".venv", ".venv"),
    ):
        monkeypatch.setattr(sys, "prefix", str(prefix))
        code, out, _ = gpufleet("init", str(tmp_path / folder))
        assert code == 0 and f"next: cd {tmp_path / folder} && gpufleet recommend request.yaml" in out
        project = yaml.safe_load((tmp_path / folder / "Pulumi.yaml").read_text())
        assert project["runtime"]["options"]["virtualenv"] == written
    monkeypatch.setattr(sys, "prefix", sys.base_prefix)
    (tmp_path / "system").mkdir()
    monkeypatch.chdir(tmp_path / "system")
    code, out, _ = gpufleet("init")
    assert code == 0 and "next: gpufleet recommend" in out
    assert "options" not in yaml.safe_load((tmp_path / "system" / "Pulumi.yaml").read_text())["runtime"]


def test_nothing_is_overwritten_and_nothing_written_beside_it(gpufleet: Gpufleet, tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("mine")
    code, _, err = gpufleet("init", str(tmp_path))
    assert code == 2 and f"{tmp_path} has README.md" in err and "next: gpufleet init" in err
    assert [path.name for path in tmp_path.iterdir()] == ["README.md"]
    assert (tmp_path / "README.md").read_text() == "mine"


def test_a_folder_that_cannot_be_made_is_an_error(gpufleet: Gpufleet, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    code, _, err = gpufleet("init", str(tmp_path / "file" / "below"))
    assert code == 1 and "cannot be written" in err
