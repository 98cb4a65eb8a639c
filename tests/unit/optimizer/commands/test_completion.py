"""What a shell completes, asked of click as its scripts ask."""

from __future__ import annotations

import pytest
from click.shell_completion import ShellComplete

from optimizer.cli import cli
from tests.unit.optimizer.commands.conftest import Gpufleet


def completed(*words: str, incomplete: str = "") -> list[str]:
    found = ShellComplete(cli, {}, "gpufleet", "_GPUFLEET_COMPLETE").get_completions(list(words), incomplete)
    return [item.value for item in found]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_each_shell_gets_its_script(gpufleet: Gpufleet, monkeypatch: pytest.MonkeyPatch, shell: str) -> None:
    monkeypatch.setenv("_GPUFLEET_COMPLETE", f"{shell}_source")
    code, out, _ = gpufleet()
    assert code == 0 and f"_GPUFLEET_COMPLETE={shell}_complete" in out


@pytest.mark.parametrize(("word", "meant"), [("recomend", "recommend"), ("what_if", "what-if"), ("stak", "stack")])
def test_a_misspelt_command_names_the_near_one(gpufleet: Gpufleet, word: str, meant: str) -> None:
    code, out, err = gpufleet(word)
    assert (code, out) == (2, "") and f"No such command '{word}'." in err
    assert "Did you mean" in err and f"'{meant}'" in err
    assert "Did you mean" not in gpufleet("frobnicate")[2]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("port-forward", "0", "6006"), "port-forward is gone: gpufleet ssh RANK --port PORT"),
        (("completion", "bash"), "completion is gone: source <(_GPUFLEET_COMPLETE=bash_source gpufleet)"),
    ],
)
def test_a_command_of_earlier_versions_names_the_new_way(gpufleet: Gpufleet, words: tuple[str, ...], says: str) -> None:
    code, out, err = gpufleet(*words)
    assert (code, out) == (2, "") and says in err


def test_help_is_one_screen_and_help_all_has_the_rest(gpufleet: Gpufleet) -> None:
    short, whole = gpufleet("recommend", "--help")[1], gpufleet("recommend", "--help-all")[1]
    assert len(short.splitlines()) <= 40 and "--budget" in short and "--lora-alpha" not in short
    assert "--lora-alpha" in whole and len(gpufleet("--help")[1].splitlines()) <= 40
    assert "--lora-alpha" in completed("recommend", incomplete="--lora")
