"""``gpufleet report``: where the page goes, and what is refused."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest

from tests.plans import sample_plan
from tests.unit.optimizer.commands.conftest import Gpufleet
from tests.unit.optimizer.commands.test_status import write_ledger
from tests.unit.optimizer.deployed import DeployedStack


def test_a_plan_of_standard_input_becomes_a_page(
    gpufleet: Gpufleet, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    out = tmp_path / "report.html"
    out.write_text("an older page", encoding="utf-8")
    monkeypatch.setattr(sys, "stdin", io.StringIO(sample_plan().to_json()))
    code, printed, err = gpufleet("report", "-", "--out", str(out))
    assert (code, printed) == (0, "") and err.startswith(f"wrote {out}\ntruer: gpufleet preflight PLAN asks")
    page = out.read_text(encoding="utf-8")
    assert page.startswith("<!DOCTYPE html>")


def test_a_file_that_is_no_plan_leaves_the_old_page(gpufleet: Gpufleet, tmp_path: Path) -> None:
    out = tmp_path / "report.html"
    out.write_text("an older page", encoding="utf-8")
    (tmp_path / "plan.json").write_text("{}", encoding="utf-8")
    code, _, error = gpufleet("report", str(tmp_path / "plan.json"), "--out", str(out))
    assert code == 2 and "is not a valid FleetPlan" in error
    assert out.read_text(encoding="utf-8") == "an older page"


def test_a_name_that_is_neither_a_file_nor_a_stack_says_both(gpufleet: Gpufleet, tmp_path: Path) -> None:
    code, out, error = gpufleet("report", "demo", "--directory", str(tmp_path), "--out", str(tmp_path / "run.html"))
    assert (code, out) == (2, "")
    assert f"demo is no file, and {tmp_path / 'Pulumi.demo.yaml'} is missing" in error
    assert "gpufleet recommend REQUEST.yaml --save plans.json" in error and "--directory" in error


def test_a_deployed_stack_becomes_a_page_of_its_run(
    gpufleet: Gpufleet, deployed: DeployedStack, tmp_path: Path
) -> None:
    deployed.write_state()
    write_ledger(deployed)
    out = tmp_path / "run.html"
    _, stack, *directory = deployed.arguments
    assert gpufleet("report", stack, *directory, "--out", str(out)) == (0, "", f"wrote {out}\n")
    page = out.read_text(encoding="utf-8")
    for words in (
        "What happened",
        "running",
        "training that was kept",
        "cost so far",
    ):
        assert words in page, words
    assert "cannot be read" not in page
    # A ledger of another kind of file is named, and the rest is shown; the stack's plan is of an earlier version.
    deployed.file.write_text(deployed.file.read_text().replace("digest: ", "digest: 0"))
    deployed.put("checkpoints/ledger/w-000001.jsonl", "no event")
    assert gpufleet("report", stack, *directory, "--out", str(out))[0] == 0
    assert "the ledger cannot be used: the ledger holds no start event" in out.read_text(encoding="utf-8")
