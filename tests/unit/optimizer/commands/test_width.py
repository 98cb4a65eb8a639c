"""Every command that prints a table keeps to the terminal's width: 120, 80 and 60 columns."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from optimizer.cli import cli
from optimizer.commands.layout import choose_columns
from tests.plans import SPOT_P4D

REQUEST = (
    *("--model", "llama-3.1-8b", "--tokens", "2B", "--seq-len", "8192", "--budget", "3000", "--deadline", "48h"),
    *("--instance-type", "p5*", "--instance-type", "p6*", "--instance-type", "g6f*", "--max-nodes", "4"),
)
ESTIMATE = ("--model", "llama-2-7b", "--instance-type", "p4d.24xlarge", "--nodes", "2", "--seq-len", "2048")
COMMANDS = {
    "recommend": REQUEST,
    "recommend --all": (*REQUEST, "--all", "--explain", "--compare-clouds"),
    "recommend, nothing feasible": (*REQUEST, "--budget", "5"),
    "what-if": (*REQUEST, "--against", "nodes", "--node-counts", "1,4"),
    "offers": ("--gpu", "H100"),
    "offers of other clouds": ("--gpu", "H100", "--cloud", "all"),
    "estimate": ESTIMATE,
    "catalog": ("show",),
    "preview": (),
    "preview --all": ("--all",),
}


@pytest.mark.usefixtures("unaudited")
@pytest.mark.parametrize("columns", [120, 80, 60])
@pytest.mark.parametrize("name", COMMANDS)
def test_the_answer_fits(name: str, columns: int, tmp_path: Path) -> None:
    command = name.replace(",", " ").split()[0]
    arguments = [command, *COMMANDS[name]]
    if command == "preview":
        (tmp_path / "plan.json").write_text(json.dumps(SPOT_P4D))
        arguments.insert(1, str(tmp_path / "plan.json"))
    done = CliRunner(env={"COLUMNS": str(columns)}).invoke(cli, arguments)
    lines = done.stdout.splitlines()
    assert lines, done.output
    assert max(map(len, lines)) <= columns, max(lines, key=len)
    assert "\x1b" not in done.stdout  # no colour where there is no terminal


def test_a_narrow_table_drops_then_wraps_then_gives_up() -> None:
    headings = {"name": "name", "spare": "spare", "why": "why"}
    cells = [{"name": "p5.48xlarge", "spare": "on-demand", "why": "a sentence that is longer than any single name"}]
    assert choose_columns(headings, cells, ("spare",), 100) == ({"name": 11, "spare": 9, "why": 46}, [])
    assert choose_columns(headings, cells, ("spare",), 40) == ({"name": 11, "spare": 9, "why": 16}, [])
    assert choose_columns(headings, cells, ("spare",), 25) == ({"name": 11, "why": 12}, ["spare"])
    assert choose_columns(headings, cells, ("spare",), 15) == ({}, ["spare"])
