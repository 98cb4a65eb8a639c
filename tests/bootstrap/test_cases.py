"""Runs every folder of cases/ (README.md says how one is written) and checks that each check is needed."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from tests.bootstrap.node import BOOTSTRAP, HERE, Node, in_order

CASES = sorted(path.parent for path in (HERE / "cases").glob("*/case.toml"))
KEYS = {
    "about", "run", "exit", "settings", "node_env", "without", "real", "absent", "mounted", "said", "unsaid", "called",
    "not_called", "files",
}  # fmt: skip


def read(case: Path) -> dict[str, Any]:
    told = tomllib.loads((case / "case.toml").read_text())
    assert told.keys() <= KEYS, f"{case.name}: {told.keys() - KEYS} mean nothing"
    assert {"about", "run", "exit"} <= told.keys(), case.name
    return told


def node_of(case: Path, told: dict[str, Any], folder: Path) -> Node:
    options = {key: told[key] for key in ("node_env", "without", "real", "absent", "mounted") if key in told}
    return Node(folder, case, **options)


def problems(told: dict[str, Any], node: Node) -> list[str]:
    """Differences from the case's expectations."""
    outcomes = [node.run(command, told.get("settings")) for command in told["run"]]
    output = "".join(outcome.output for outcome in outcomes)
    differences = []
    if [outcome.exit_code for outcome in outcomes] != told["exit"]:
        differences.append(f"exit codes {[outcome.exit_code for outcome in outcomes]}, expected {told['exit']}")
    position = 0
    for text in told.get("said", []):
        if (start := output.find(text, position)) < 0:
            differences.append(f"did not say (in this order) {text!r}")
        else:
            position = start + len(text)
    differences += [f"said {text!r}" for text in told.get("unsaid", []) if text in output]
    remaining = iter(node.calls)
    for pattern in told.get("called", []):
        if not any(re.fullmatch(pattern, call) for call in remaining):
            differences.append(f"did not call (in this order) {pattern!r}")
    for pattern in told.get("not_called", []):
        differences += [f"called {call!r}" for call in node.calls if re.match(pattern, call)]
    for name, content in told.get("files", {}).items():
        path = node.root / name
        if not path.is_file() or content not in path.read_text():
            differences.append(f"{name} does not hold {content!r}")
    return [*differences, f"output:\n{output}", "calls:\n" + "\n".join(node.calls)] if differences else []


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_case(case: Path, tmp_path: Path) -> None:
    told = read(case)
    differences = problems(told, node_of(case, told, tmp_path))
    assert not differences, f"{told['about']}\n" + "\n".join(differences)


@pytest.mark.parametrize("check", sorted(path.stem for path in (BOOTSTRAP / "checks").glob("*.sh")))
def test_some_case_fails_without_this_check(check: str, tmp_path: Path) -> None:
    """A check that no case misses is a check that is not tested."""
    for case in CASES:
        told = read(case)
        if case.name.startswith(f"{check}-") and 0 not in told["exit"]:
            node = node_of(case, told, tmp_path / case.name)
            node.replace(f"checks/{check}.sh", "exit 0")
            if problems(told, node):
                return
    pytest.fail(f"{check} can be removed and every case still passes")


def test_every_check_has_an_order() -> None:
    assert sorted(in_order("checks")) == sorted(path.stem for path in (BOOTSTRAP / "checks").glob("*.sh"))
