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
FOLDERS = {("stack", "policy", "--out")}


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_a_path_that_cannot_be_written_is_refused_before_the_work(
    words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(path: Path | str) -> None:
        with pytest.raises(InvalidInputError, match=f"{words[-1]} {path or '.'} cannot be written"):
            cli([*words, str(path)], standalone_mode=False)

    missing, file, loop = tmp_path / "missing", tmp_path / "file", tmp_path / "loop"
    file.touch()
    loop.symlink_to(loop)
    fails(loop)
    loop.unlink()
    fails("/dev/null" if words in FOLDERS else "")
    if words not in FOLDERS:  # these commands make their folder
        fails(missing / "name.svg")
    fails(file / "name.svg")
    monkeypatch.setattr(os, "access", lambda path, mode: mode != os.W_OK)
    fails(tmp_path / "name.svg")
    assert list(tmp_path.iterdir()) == [file]
