"""The documentation is true: links lead somewhere, shown commands parse, and every folder explains itself."""

from __future__ import annotations

import ast
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import cast

import click
import pytest

from optimizer.cli import COMMANDS, cli
from tools import spot_plots

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    ROOT / name
    for name in subprocess.run(
        ["git", "ls-files", "*.md"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.splitlines()
)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
        if not target.startswith(("http://", "https://", "mailto:")):
            assert (page.parent / target).exists(), f"{page.name} links to {target}, which is not there"


def shown_commands() -> list[tuple[str, str]]:
    commands = []
    for page in PAGES:
        for block in re.findall(r"```(?:sh|bash|shell|console)\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL):
            for line in block.replace("\\\n", " ").splitlines():
                if line.strip().removeprefix("$ ").startswith("gpufleet "):
                    commands.append((str(page.relative_to(ROOT)), line.strip().removeprefix("$ ")))
    return commands


@pytest.mark.parametrize(("page", "line"), shown_commands())
def test_shown_commands_parse(page: str, line: str) -> None:
    words = shlex.split(line, comments=True)[1:]
    for stop in ("|", ">", "&&", ";"):
        words = words[: words.index(stop)] if stop in words else words
    command, words = _resolve(words)
    command.make_context(command.name, words, resilient_parsing=False)


def _resolve(words: list[str]) -> tuple[click.Command, list[str]]:
    """Return the command that words begin with, and its arguments."""
    context, command = click.Context(cli, info_name="gpufleet"), cast(click.Command, cli)
    while isinstance(command, click.Group) and words and not words[0].startswith("-"):
        _, child, words = command.resolve_command(context, words)
        assert child is not None
        command = child
    return command, words


ADVICE = re.compile(r"gpufleet ([a-z-]+ [^`;:,()|&>\n]*--[a-z][a-z-]*)")


def advised_commands() -> set[tuple[str, str]]:
    """Commands that texts of the code name, as next steps do, with X for what they fill in."""
    advised = set()
    for name in _tracked():
        if not name.startswith(("optimizer/", "infra/", "bootstrap/")) or not name.endswith(".py"):
            continue
        for node in ast.walk(ast.parse((ROOT / name).read_text(encoding="utf-8"))):
            parts = node.values if isinstance(node, ast.JoinedStr) else [node]
            text = "".join(str(part.value) if isinstance(part, ast.Constant) else "X" for part in parts)
            advised |= {(name, words) for words in ADVICE.findall(text)}
    return advised


def test_advice_names_flags_that_exist() -> None:
    advised = advised_commands()
    assert len(advised) > 100
    for place, line in sorted(advised):
        command, words = _resolve(line.split())
        known = {flag for parameter in command.params for flag in (*parameter.opts, *parameter.secondary_opts)}
        unknown = {word for word in words if word.startswith("--")} - known - {"--help", "--help-all"}
        assert not unknown, f"{place}: gpufleet {line}"


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help_and_an_example(name: str) -> None:
    command = cli.get_command(click.Context(cli), name)
    assert command is not None
    context = click.Context(command, info_name=name, parent=click.Context(cli, info_name="gpufleet"))
    leaves = [command]
    if isinstance(command, click.Group):
        leaves = [child for n in command.list_commands(context) if (child := command.get_command(context, n))]
    for leaf in leaves:
        text = leaf.get_help(click.Context(leaf, info_name=leaf.name, parent=context))
        assert len(text.splitlines()) <= 40, "one screen"
        assert "Example" in text, f"{name} {leaf.name} has no example"
        assert leaf.help and len(leaf.help) > 20


def test_the_list_of_commands_names_each_module_and_imports_none() -> None:
    assert len(COMMANDS) <= 26
    code = (
        "import sys; sys.argv = ['gpufleet', '--help']\nfrom optimizer.cli import main\n"
        "try: main()\nexcept SystemExit: pass\n"
        "print([name for name in sys.modules if name.startswith(('numpy', 'pydantic', 'optimizer.commands'))])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert re.search("recommend +Find", done.stdout) and done.stdout.splitlines()[-1] == "[]"


def test_every_folder_of_code_has_a_readme() -> None:
    folders = {Path(name).parts[0] for name in _tracked() if name.endswith((".py", ".sh")) and "/" in name}
    folders |= {
        f"{parts[0]}/{parts[1]}"
        for name in _tracked()
        if (parts := Path(name).parts)[0] in ("optimizer", "bootstrap")
        and len(parts) > 2
        and name.endswith((".py", ".sh"))
    }
    missing = [folder for folder in sorted(folders) if not (ROOT / folder / "README.md").exists()]
    assert not missing, f"no README.md in {', '.join(missing)}"


def test_nothing_names_an_index_host() -> None:
    for name in ("constraints.txt", "pyproject.toml"):
        assert not re.search(r"--(extra-)?index-url|--find-links|@ (https?|file):", (ROOT / name).read_text())


def _tracked() -> list[str]:
    done = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


def test_the_plots_of_spot_policies_are_of_the_kept_results(tmp_path: Path) -> None:
    spot_plots.write(tmp_path / "spot.svg")
    assert (tmp_path / "spot.svg").read_bytes() == spot_plots.PICTURE.read_bytes()
