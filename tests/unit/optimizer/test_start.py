"""The console script between its start and its end: Ctrl-C, a closed pipe, a terminal without UTF-8."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from optimizer.cli import EXTRAS

CODE = "from optimizer.start import main; main()"


def run(*arguments: str, code: str = CODE, **options: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False, timeout=60, **options)


def test_ctrl_c_during_the_imports_has_no_traceback() -> None:
    interrupt = (
        "import sys\nclass Stop:\n  def find_spec(self, name, *_):\n    if name == 'click': raise KeyboardInterrupt\n"
    )
    done = run(code=f"{interrupt}sys.meta_path.insert(0, Stop())\n{CODE}")
    assert (done.returncode, done.stderr) == (1, "error: interrupted\n")


@pytest.mark.parametrize("command", [["offers", "--format", "csv"], ["offers"], ["catalog", "show"]])
def test_a_reader_that_has_enough_is_no_failure(command: list[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as closed:
        done = run(*command, stdout=closed)
    assert done.returncode == 0
    assert not any(words in done.stderr for words in ("Traceback", "BrokenPipe", "Exception ignored"))


def test_a_closed_output_is_an_error() -> None:
    command = f"{sys.executable} -c '{CODE}' offers --format csv >&-"
    done = subprocess.run(["bash", "-c", command], stderr=subprocess.PIPE, text=True, check=False, timeout=60)
    assert done.returncode == 1 and "error: standard output is closed" in done.stderr
    assert "Traceback" not in done.stderr and "Exception ignored" not in done.stderr


def test_ascii_output_replaces_what_it_lacks() -> None:
    printing = "import sys\nfrom optimizer import cli\ncli.cli = lambda **_: print('mod\\u00e8le')\ncli.main()"
    done = run(code=printing, stdout=subprocess.PIPE, env={**os.environ, "PYTHONIOENCODING": "ascii"})
    assert (done.returncode, done.stdout, done.stderr) == (0, "mod?le\n", "")


@pytest.mark.parametrize(
    ("command", "extra"),
    [
        (["offers", "--gpu", "H100", "--format", "csv"], ""),
        (["recommend", "--model", "llama-3.2-1b", "--tokens", "1B", "--seq-len", "2048", "--max-nodes", "1"], ""),
        (["doctor"], ""),
        (["catalog", "--help"], ""),
        (["preview", "plans.json"], "deploy"),
        (["report", "plans.json", "--out", "page.html"], "report"),
        (["calibrate", "runs.csv", "--out", "mine.json"], "calibrate"),
        (["mcp"], "mcp"),
    ],
)
def test_choosing_needs_no_extra_and_a_command_names_its_own(command: list[str], extra: str) -> None:
    """The wheel's environment has what choosing needs: 180 MB, where the Pulumi provider alone has 145."""
    absent = f"import sys\nsys.modules |= dict.fromkeys({list(EXTRAS)})\n{CODE}"
    done = run(*command, code=absent, stdout=subprocess.PIPE)
    assert (done.returncode, done.stdout != "") == ((1, False) if extra else (0, True)), done.stderr
    assert f"pip install 'gpufleet[{extra}]'" in done.stderr if extra else "not installed" not in done.stderr


def test_extras_are_the_projects() -> None:
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]
    assert set(EXTRAS.values()) <= set(project["optional-dependencies"])
