"""Every command that prints a table keeps to the terminal's width: 120, 80 and 60 columns."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from click.testing import CliRunner

from optimizer import commands
from optimizer.cli import cli
from optimizer.commands.layout import choose_columns
from optimizer.commands.output import say
from tests.plans import sample_plan

COMMAND_FOLDER = Path(commands.__file__).parent
REQUEST = (
    *("--model", "llama-3.1-8b", "--tokens", "2B", "--seq-len", "8192", "--budget", "3000", "--deadline", "48h"),
    *("--instance-type", "p5*", "--instance-type", "p6*", "--instance-type", "g6f*", "--max-nodes", "4"),
)
ESTIMATE = ("--model", "llama-2-7b", "--instance-type", "p4d.24xlarge", "--nodes", "2", "--seq-len", "2048")
COMMANDS = {
    "recommend": REQUEST,
    "recommend --all": (*REQUEST, "--all", "--explain"),
    "recommend, nothing feasible": (*REQUEST, "--budget", "5"),
    "what-if": (*REQUEST, "--against", "nodes=1,4"),
    "offers": ("--gpu", "H100"),
    "offers of other clouds": ("--gpu", "H100", "--cloud", "all"),
    "estimate": ESTIMATE,
    "catalog": ("show",),
    "preview": (),
    "preview --all": ("--all",),
}


@pytest.mark.parametrize("columns", [120, 80, 60])
@pytest.mark.parametrize("name", COMMANDS)
def test_the_answer_fits(name: str, columns: int, tmp_path: Path) -> None:
    command = name.replace(",", " ").split()[0]
    arguments = [command, *COMMANDS[name]]
    if command == "preview":
        (tmp_path / "plan.json").write_text(sample_plan().to_json())
        arguments.insert(1, str(tmp_path / "plan.json"))
    done = CliRunner(env={"COLUMNS": str(columns)}).invoke(cli, arguments)
    lines = done.stdout.splitlines()
    assert lines, done.output
    assert max(map(len, lines)) <= columns, max(lines, key=len)
    assert name != "recommend" or columns < 80 or len(lines) <= 14, "the answer is about ten lines"
    assert "\x1b" not in done.stdout  # no colour where there is no terminal


# Their lines are another program's, or a training's; output.py and layout.py wrap.
MACHINE = {"layout.py", "logs.py", "output.py", "policy.py", "progress.py"}


def test_every_sentence_of_a_command_is_wrapped_on_a_terminal() -> None:
    """click.echo prints as wide as the text is: it is for documents and empty lines, ``say`` for sentences."""
    echoed = []
    for path in sorted(COMMAND_FOLDER.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "click.echo" and node.args:
                text = node.args[0]
                if isinstance(text, ast.JoinedStr | ast.BinOp) or (isinstance(text, ast.Constant) and text.value):
                    echoed.append(f"{path.relative_to(COMMAND_FOLDER)}:{node.lineno}")
    assert [place for place in echoed if Path(place.rpartition(":")[0]).name not in MACHINE] == []


def test_sentences_keep_their_indent_on_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "error: 9 nodes\n  next: " + "words " * 12
    say(text)
    assert capsys.readouterr().out == f"{text}\n", "a line elsewhere is whole"
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    say(text)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "error: 9 nodes" and lines[1].startswith("  next: words") and lines[2].startswith("    words")
    assert max(map(len, lines)) <= 60


def test_a_narrow_table_drops_then_wraps_then_gives_up() -> None:
    headings = {"name": "name", "spare": "spare", "why": "why"}
    cells = [{"name": "p5.48xlarge", "spare": "on-demand", "why": "a sentence that is longer than any single name"}]
    assert choose_columns(headings, cells, ("spare",), 100) == ({"name": 11, "spare": 9, "why": 46}, [])
    assert choose_columns(headings, cells, ("spare",), 42) == ({"name": 11, "spare": 9, "why": 18}, [])
    # A column of sentences was one word wide ("why it loses" of recommend --explain at 80 columns).
    assert choose_columns(headings, cells, ("spare",), 40) == ({"name": 11, "why": 27}, ["spare"])
    assert choose_columns(headings, cells, ("spare",), 25) == ({"name": 11, "why": 12}, ["spare"])
    assert choose_columns(headings, cells, ("spare",), 15) == ({}, ["spare"])
