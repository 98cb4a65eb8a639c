"""Writes the table of tests/benchmarks/results/figures.md; ``--check`` fails where its last row has drifted.

A row is read from the results that a commit recorded, and its lines are counted there; the last is of the working tree.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from statistics import median

RESULTS = "tests/benchmarks/results"
PAGE = Path(__file__).parent.parent / RESULTS / "figures.md"
SUITES = ("dgxc-llama", "h200", "llmfoundry", "megatron", "vtrain", "mean of the suites")
# The newest measurement that a commit has counts.
CHECKPOINTS = ("checkpoint_4xh200", "checkpoint_2xh100", "checkpoint_2xh200")
LINES = 2  # columns that change with every commit, and are not checked


def _git(*words: str) -> str:
    return subprocess.run(["git", *words], capture_output=True, text=True, check=False, cwd=PAGE.parent).stdout


def _read(commit: str, name: str) -> str:
    return _git("show", f"{commit}:{RESULTS}/{name}") if commit else (PAGE.parent / name).read_text(encoding="utf-8")


def _count_lines(commit: str, *folders: str) -> int:
    counts = _git("grep", "-c", "", *([commit] if commit else []), "--", *(f":/{folder}/*.py" for folder in folders))
    return sum(int(line.rpartition(":")[2]) for line in counts.splitlines())


def read_row(commit: str = "") -> list[str]:
    """Figures of a commit, or of the working tree; a dash where it has recorded none."""
    accuracy, search = _read(commit, "accuracy_202611.md"), _read(commit, "search_speed_202611.md")
    errors = dict(re.findall(r"^\| new suite: ([\w -]+?) \| <= 5 \| ([\d.]+) \|", accuracy, re.MULTILINE))
    cold = re.search(r"^\| llama-3.1-8b, budget and deadline \| ([\d.]+)", search, re.MULTILINE)
    stall = "–"
    for name in CHECKPOINTS:
        runs = [json.loads(line) for line in _read(commit, f"{name}_202611.jsonl").splitlines()]
        longer = next((run["extra_s"] for run in reversed(runs) if run.get("mode") == "ddp" and "extra_s" in run), ())
        if longer:
            stall = f"{median(longer):.2f} ({name.removeprefix('checkpoint_')})"
            break
    restarts = [json.loads(line) for line in _read(commit, "restart_202611.jsonl").splitlines()]
    kills = [row["all"] for row in restarts if "all" in row]  # rows of the whole way, of 2 H200
    return [
        *(errors.get(suite, "–") for suite in SUITES),
        cold[1] if cold else "–",
        stall,
        f"{median(kills):.1f}" if kills else "–",
        f"{_count_lines(commit, 'optimizer', 'infra', 'bootstrap'):,}",
        f"{_count_lines(commit, 'tests'):,}",
    ]


def main() -> None:
    """Write or check the table's rows; their first two cells, which a person writes, are state and commit."""
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    first = next(at for at, line in enumerate(lines) if line.startswith("|---")) + 1
    last = next(at for at in range(first, len(lines)) if not lines[at].startswith("|"))
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[first:last]]
    row = read_row()
    if "--check" in sys.argv[1:]:
        if rows[-1][2:-LINES] != row[:-LINES]:
            sys.exit(f"{PAGE.name} has drifted from the recorded results: run `make docs` and commit it")
        return
    rows[-1] = [*rows[-1][:2], *row]
    lines[first:last] = [f"| {' | '.join(row)} |" for row in rows]
    PAGE.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
