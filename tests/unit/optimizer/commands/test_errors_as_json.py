"""With ``--format json`` standard output has the answer alone, and an error is the last line of standard error."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from optimizer.catalog import invariants, snapshot
from tests.unit.optimizer.commands.conftest import Gpufleet

TINY = ("recommend", "--model", "llama-3.2-1b", "--tokens", "1B", "--seq-len", "2048")


def read_error(err: str) -> dict[str, Any]:
    """The error of a call; its keys are published."""
    document = json.loads(err.splitlines()[-1])
    assert list(document) == ["error"]
    assert list(document["error"]) == ["code", "kind", "message", "value", "limit", "next"]
    error: dict[str, Any] = document["error"]
    return error


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("frobnicate",), "No such command"),
        (("recommend", "--modl", "7B"), "No such option '--modl'"),
        (("estimate", "--micro-batch", "x", "--model", "7B"), "x"),
        (("estimate",), "Missing option '--model'"),
        (("recommend", "--refresh=1"), "does not take a value"),
        (("recommend", "missing.yaml"), "missing.yaml cannot be read"),
    ],
)
def test_a_wrong_input_is_one_object_and_no_answer(
    gpufleet: Gpufleet, words: tuple[str, ...], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for flag in (("--format", "json"), ("--format=json",)):
        code, out, err = gpufleet(*words, *flag)
        error = read_error(err)
        assert (code, out, error["code"], error["kind"]) == (2, "", 2, "InvalidInputError") and says in error["message"]
        assert error["next"]


def test_nothing_feasible_has_its_answer_and_its_limit(gpufleet: Gpufleet) -> None:
    code, out, err = gpufleet(*TINY, "--budget", "1", "--format", "json")
    error = read_error(err)
    assert (code, error["code"], error["kind"]) == (3, 3, "NothingFeasibleError")
    assert json.loads(out)["rejected"] and error["limit"] == "budget 1.00 USD"
    assert error["next"].startswith("gpufleet recommend")


def test_missing_data_is_status_4(gpufleet: Gpufleet, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(snapshot.DIRECTORY_VARIABLE, str(tmp_path))
    code, out, err = gpufleet("offers", "--format", "json")
    assert (code, out) == (4, "") and read_error(err)["code"] == 4


def test_a_failure_of_the_machine_and_an_interruption_are_status_1(
    gpufleet: Gpufleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    for raised, says in ((OSError(28, "No space left on device"), "No space"), (KeyboardInterrupt(), "interrupted")):

        def fail(*_: object, raised: BaseException = raised, **__: object) -> None:
            raise raised

        monkeypatch.setattr("optimizer.commands.offers.load", fail)
        code, out, err = gpufleet("offers", "--format", "json")
        assert (code, out) == (1, "") and says in read_error(err)["message"]


def test_a_failed_check_has_its_rows_and_an_error(gpufleet: Gpufleet, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = invariants.InvariantViolation(rule="a price is above 0", place="prices.csv:2", value="-1")
    monkeypatch.setattr(invariants, "check", lambda catalog, today: [broken])
    code, out, err = gpufleet("catalog", "verify", "--format", "json")
    assert code == 1 and json.loads(out)[0]["rule"] == broken.rule and read_error(err)["code"] == 1


def test_text_stays_text(gpufleet: Gpufleet) -> None:
    assert gpufleet("recommend", "--modl", "7B")[2].endswith("next: gpufleet recommend --help\n")
    code, _, err = gpufleet("offers", "--gpu", "H999", "--format", "csv")
    assert code == 2 and err.startswith("error: GPU 'H999'")
    code, _, err = gpufleet("manifest", "missing.json", "--", "train.py", "--format", "json")
    assert code == 2 and err.startswith("error: missing.json"), "the format is the training's"
