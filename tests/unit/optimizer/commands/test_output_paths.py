"""Paths that commands write to are checked before the work."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from optimizer.cli import cli
from optimizer.contract.errors import InvalidInputError

FLAGS = ("--out", "--save")


def outputs(command: click.Command, *words: str) -> Iterator[tuple[str, ...]]:
    """Every command with an output path, as words up to the flag."""
    for option in command.params:
        if isinstance(option, click.Option) and not option.is_flag:
            yield from ((*words, flag) for flag in option.opts if flag in FLAGS)
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            child = command.get_command(context, name)
            assert child is not None
            yield from outputs(child, *words, name)


COMMANDS = sorted(outputs(cli))
FOLDERS = {("stack", "policy", "--out"), ("logs", "trace", "--out")}


def fails(*words: str) -> InvalidInputError:
    with pytest.raises(InvalidInputError, match="cannot be written") as caught:
        cli(list(words), standalone_mode=False)
    return caught.value


def test_the_list_has_the_long_ones() -> None:
    assert {("recommend", "--save"), ("estimate", "--out"), *FOLDERS} <= set(COMMANDS)


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_a_path_that_cannot_be_written_is_refused_before_the_work(
    words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    missing, file = tmp_path / "missing", tmp_path / "file"
    file.touch()
    if words not in FOLDERS:  # these commands make their folder
        error = fails(*words, str(missing / "name.svg"))
        assert f"{words[-1]} {missing / 'name.svg'}" in error.got
        assert error.why == f"the folder {missing} does not exist" and error.next_step == f"mkdir -p {missing}"
    assert fails(*words, str(file / "name.svg")).why == f"{file} is no folder"
    monkeypatch.setattr(os, "access", lambda path, mode: mode != os.W_OK)
    error = fails(*words, str(tmp_path / "name.svg"))
    assert error.why == f"you have no permission to write to {tmp_path}"
    assert not missing.exists() and list(tmp_path.iterdir()) == [file]
