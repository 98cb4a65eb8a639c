"""``gpufleet report``: where the page goes, and what is refused."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest

from tests.plans import sample_plan
from tests.unit.optimizer.commands.conftest import Gpufleet


def test_a_plan_of_standard_input_becomes_a_page(
    gpufleet: Gpufleet, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    out = tmp_path / "report.html"
    out.write_text("an older page", encoding="utf-8")
    monkeypatch.setattr(sys, "stdin", io.StringIO(sample_plan().to_json()))
    assert gpufleet("report", "-", "--out", str(out)) == (0, "", f"wrote {out}\n")
    page = out.read_text(encoding="utf-8")
    assert page.startswith("<!DOCTYPE html>") and "gpufleet preview plans.json" in page


def test_a_file_that_is_no_plan_leaves_the_old_page(gpufleet: Gpufleet, tmp_path: Path) -> None:
    out = tmp_path / "report.html"
    out.write_text("an older page", encoding="utf-8")
    (tmp_path / "plan.json").write_text("{}", encoding="utf-8")
    code, _, error = gpufleet("report", str(tmp_path / "plan.json"), "--out", str(out))
    assert code == 2 and "is not a valid FleetPlan" in error
    assert out.read_text(encoding="utf-8") == "an older page"


def test_without_the_extra_it_names_it(gpufleet: Gpufleet, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in [name for name in sys.modules if name.startswith("optimizer.report")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "vl_convert", None)
    code, _, error = gpufleet("report", "plan.json", "--out", str(tmp_path / "report.html"))
    assert code == 1 and "needs vl_convert" in error and "pip install 'gpufleet[report]'" in error
