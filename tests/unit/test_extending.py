"""The steps of docs/CONTRIBUTING.md, followed in a copy of the code: a file, a line or a field is all one needs."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "CONTRIBUTING.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the packages and of Pulumi.yaml."""
    folder = tmp_path_factory.mktemp("copy")
    for name in ("infra", "optimizer", "bootstrap", "tools"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "Pulumi.yaml", folder)
    return folder


def example(heading: str) -> str:
    """The Python example below a heading of the page."""
    section = PAGE.split(f"\n## {heading}")[1].split("\n## ")[0]
    block = re.search(r"```python\n(.*?)```", section, re.DOTALL)
    assert block, f"no example below {heading}"
    return block[1]


def run(copy: Path, *arguments: str) -> str:
    """Run Python in the copy, whose modules come before the repository's."""
    environment = os.environ | {"PYTHONPATH": str(copy), "COLUMNS": "200"}
    done = subprocess.run(
        [sys.executable, *arguments], cwd=copy, env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def gpufleet(copy: Path, *arguments: str) -> str:
    return run(copy, "-c", "from optimizer.cli import main; main()", *arguments)


def test_a_command_is_one_file_and_a_line(copy: Path) -> None:
    (copy / "optimizer" / "commands" / "hello.py").write_text(example("A command"), encoding="utf-8")
    group = copy / "optimizer" / "cli.py"
    text, place = group.read_text(encoding="utf-8"), '    "Data": {\n'
    assert place in text
    group.write_text(text.replace(place, place + '        "hello": "Say hello.",\n'), encoding="utf-8")
    assert re.search(r"hello +Say hello\.", gpufleet(copy, "--help"))
    assert gpufleet(copy, "hello") == "hello\n"


def test_a_configuration_key_is_one_field(copy: Path) -> None:
    settings = copy / "infra" / "settings.py"
    text = settings.read_text(encoding="utf-8")
    field = '    greeting: str = Field(default="hello", description="First words of a node.")\n'
    place = re.search(r"^    alarm_email: ", text, re.MULTILINE)
    assert place
    settings.write_text(text[: place.start()] + field + text[place.start() :], encoding="utf-8")
    run(copy, "-m", "tools.pulumi_keys")
    written = (copy / "Pulumi.yaml").read_text(encoding="utf-8")
    assert re.search(r'gpufleet:greeting:\n +type: "string"\n +default: "hello"\n +description: "First words', written)
