"""The parts that need no second process: judging, naming, arguments."""

from __future__ import annotations

import math

import pytest
import torch

from bootstrap.smoke import __main__ as cli
from bootstrap.smoke.products import _equal
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


def test_most_ranks_say_which_rank_computes_wrongly() -> None:
    hosts = ["a", "a", "b", "b"]
    assert (_equal([5, 5, 5, 5], hosts).verdict, _equal([5, 5, 5, 5], hosts).note) == ("pass", "")
    odd = _equal([5, 5, 7, 5], hosts)
    assert (odd.value, odd.verdict, odd.hosts, odd.note[:12]) == (1, "fail", ("b",), "rank 2 of b ")
    assert _equal([5, 5, 7, 7], hosts).hosts == ()


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--nproc", "0"], "--nproc is 0, not a finite number above 0"),
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


@pytest.mark.parametrize("arguments", [["--device", "cuda"], ["--device", "cuda", "--nproc", "2"]])
def test_a_gpu_that_is_not_there_fails(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    assert cli.main(arguments) == 1
    assert "torch sees 0 GPUs" in capsys.readouterr().err
