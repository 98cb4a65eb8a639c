"""The parts that need no second process: judging, naming, arguments."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from bootstrap.smoke import __main__ as cli
from bootstrap.smoke import gang, report
from bootstrap.smoke.gradients import LIMIT, _equal_on_all_ranks, largest, miscomputing, relative_error
from bootstrap.smoke.report import CheckResult


@pytest.mark.parametrize(
    ("value", "limit", "must_be", "verdict"),
    [
        (1.0, 1.0, "at_most", "pass"),
        (1.1, 1.0, "at_most", "fail"),
        (1.0, 1.0, "at_least", "pass"),
        (0.9, 1.0, "at_least", "fail"),
        (math.nan, 1.0, "at_most", "fail"),
        (math.nan, None, "at_least", "fail"),
        (math.inf, None, "at_least", "fail"),
        (5.0, None, "at_least", "pass"),
        (None, 1.0, "at_least", "pass"),
    ],
)
def test_a_value_is_judged_by_its_limit(value: float | None, limit: float | None, must_be: str, verdict: str) -> None:
    assert CheckResult(name="x", value=value, unit="u", limit=limit, must_be=must_be).verdict == verdict  # type: ignore[arg-type]


def test_a_value_between_its_limits_warns() -> None:
    def verdict(value: float | None, limit: float | None = 5.0) -> str:
        return CheckResult(name="x", value=value, unit="u", limit=limit, warn=9.0).verdict

    assert [verdict(value) for value in (10.0, 9.0, 8.0, 5.0, 4.0, math.nan, None)] == [
        *("pass", "pass", "warn", "warn", "fail", "fail", "pass")
    ]
    assert verdict(0.0, limit=None) == "warn"


def test_most_ranks_say_whose_gradients_differ() -> None:
    hosts = ["a", "a", "b", "b"]
    assert _equal_on_all_ranks(["5", "5", "5", "5"], hosts).verdict == "pass"
    odd = _equal_on_all_ranks(["5", "5", "7", "5"], hosts)
    assert (odd.value, odd.verdict, odd.hosts, odd.note[:12]) == (1, "fail", ("b",), "rank 2 of b ")
    assert gang.bad_hosts(["a", "c", "d"], [odd], ["a", "b", "c", "d"]) == ["b"], "b loses the others"
    assert _equal_on_all_ranks(["5", "5", "7", "7"], hosts).hosts == ()


def test_a_rank_that_computes_wrongly_alone_is_found() -> None:
    assert miscomputing([3.0, 3.0, 3.0 * (1 + LIMIT / 2)]) == []
    assert miscomputing([3.0, 3.1, 3.0]) == [1] and miscomputing([3.0, 3.0, math.nan]) == [2]
    assert relative_error(torch.tensor([1.0, 2.5]), torch.tensor([1.0, 2.0])) == 0.25
    assert math.isnan(relative_error(torch.tensor([math.nan]), torch.tensor([2.0])))
    assert largest([0.1, 0.2]) == 0.2 and math.isnan(largest([0.1, math.nan, 0.2]))


def test_what_json_cannot_hold_becomes_text(tmp_path: Path) -> None:
    report.write({"a": math.nan, "b": [1.5, -math.inf]}, tmp_path / "r.json")
    found = json.loads((tmp_path / "r.json").read_text(), parse_constant=pytest.fail)
    assert found == {"a": "NaN", "b": [1.5, "-Infinity"]}


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--device", "tpu"], "invalid choice"),
        (["--time-limit-s", "nan"], "not a finite number above 0"),
        (["--out", "/nowhere/r.json"], "cannot be written"),
        (["--out", "/"], "cannot be written"),
        (["stray"], "invalid choice"),
        (["--time-limit-s", "0"], "not a finite number above 0"),
        (["MASTER_ADDR="], "MASTER_ADDR unset: start it with torchrun"),
        (["RANK=x"], "RANK is 'x', no whole number"),
        (["LOCAL_WORLD_SIZE=-8"], "LOCAL_WORLD_SIZE is '-8', no whole number"),
        (["RANK=1"], "RANK is 1 of WORLD_SIZE 1: ranks count from 0"),
        (["gang"], "GPUFLEET_PLAN.expected.link_gb_per_s is '3', and must be"),
    ],
)
def test_wrong_usage_ends_with_2(
    arguments: list[str], told: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    if "=" in arguments[0]:
        name, value = arguments[0].split("=")
        monkeypatch.setenv(name, value)
        if not value:
            monkeypatch.delenv(name)
        arguments = []
    monkeypatch.setenv("GPUFLEET_PLAN", '{"expected": {"link_gb_per_s": 3}}')
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    assert ended.value.code == 2
    assert told in capsys.readouterr().err


def test_gpus_that_are_not_there_fail(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "99", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("signal.alarm", lambda _: None)
    assert cli.main(["--device", "cuda"]) == 1
    assert "99 ranks need as many GPUs" in capsys.readouterr().err
