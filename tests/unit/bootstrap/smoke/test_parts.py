"""The parts that need no second process: judging, naming, arithmetic, arguments."""

from __future__ import annotations

import importlib.util
import json
import math
from pathlib import Path

import pytest
import torch

from bootstrap.smoke import __main__ as cli
from bootstrap.smoke import report
from bootstrap.smoke.gradients import relative_error
from bootstrap.smoke.report import CheckResult


@pytest.mark.parametrize(
    ("value", "limit", "must_be", "passed"),
    [
        (1.0, 1.0, "at_most", True),
        (1.1, 1.0, "at_most", False),
        (1.0, 1.0, "at_least", True),
        (0.9, 1.0, "at_least", False),
        (math.nan, 1.0, "at_most", False),
        (math.nan, 1.0, "at_least", False),
        (math.nan, None, "at_least", False),
        (math.inf, None, "at_least", False),
        (5.0, None, "at_least", True),
        (None, 1.0, "at_least", True),
        (None, None, "at_most", True),
    ],
)
def test_a_value_is_judged_by_its_limit(value: float | None, limit: float | None, must_be: str, passed: bool) -> None:
    assert CheckResult(name="x", value=value, unit="u", limit=limit, must_be=must_be).passed is passed  # type: ignore[arg-type]


def test_a_value_between_its_limits_warns() -> None:
    def verdict(value: float | None, limit: float | None = 5.0) -> str:
        return CheckResult(name="x", value=value, unit="u", limit=limit, warn=9.0, must_be="at_least").verdict

    assert [verdict(value) for value in (10.0, 9.0, 8.0, 5.0, 4.0, math.nan, None)] == [
        *("pass", "pass", "warn", "warn", "fail", "fail", "pass")
    ]
    assert verdict(0.0, limit=None) == "warn"


def test_a_report_passes_only_with_results_and_without_error() -> None:
    good = CheckResult(name="x", value=1, unit="u", must_be="at_least")
    bad = CheckResult(name="y", value=1, unit="u", limit=2, must_be="at_least")

    def passed(results: list[CheckResult], error: str | None) -> bool:
        built = report.build(
            started_at="t", duration_s=1, arguments={}, facts={"device": "cpu"}, results=results, error=error
        )
        return bool(built["passed"])

    assert passed([good], None)
    assert not passed([good, bad], None)
    assert not passed([], None)
    assert not passed([good], "a rank died")


def test_what_json_cannot_hold_becomes_text(tmp_path: Path) -> None:
    report.write({"a": math.nan, "b": [1.5, {"c": -math.inf}]}, tmp_path / "r.json")
    assert json.loads((tmp_path / "r.json").read_text()) == {"a": "nan", "b": [1.5, {"c": "-inf"}]}
    assert [path.name for path in tmp_path.iterdir()] == ["r.json"]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--nproc", "0"], "0 is below 1"),
        (["--device", "tpu"], "invalid choice"),
        (["--time-limit-s", "nan"], "not a finite number above 0"),
        (["--out", "/nowhere/r.json"], "cannot be written"),
        (["--out", "/"], "cannot be written"),
        (["stray"], "invalid choice"),
    ],
)
def test_wrong_usage_ends_with_2(arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    assert ended.value.code == 2
    assert told in capsys.readouterr().err


def test_a_rank_has_no_nproc_and_knows_its_master(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    for nproc, told in (["--nproc=3"], "torchrun has started this one already"), ([], "MASTER_ADDR, MASTER_PORT unset"):
        with pytest.raises(SystemExit) as ended:
            cli.main(["--device", "cpu", *nproc])
        assert ended.value.code == 2
        assert told in capsys.readouterr().err


def test_without_torch_it_says_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert cli.main([]) == 1
    assert "pip install 'gpufleet[torch]'" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["--device", "cuda"], ["--device", "cuda", "--nproc", "2"]])
def test_a_gpu_that_is_not_there_fails(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    assert cli.main(arguments) == 1
    assert "torch sees no GPU" in capsys.readouterr().err


def test_relative_error() -> None:
    reference = torch.tensor([4.0, -8.0])
    assert relative_error(reference.clone(), reference) == 0
    assert relative_error(torch.tensor([4.0, -7.0]), reference) == pytest.approx(1 / 8)
    assert relative_error(torch.tensor([1.0]), torch.tensor([0.0])) == math.inf
    assert relative_error(torch.tensor([0.0]), torch.tensor([0.0])) == 0
    assert math.isnan(relative_error(torch.tensor([math.nan]), torch.tensor([1.0])))
