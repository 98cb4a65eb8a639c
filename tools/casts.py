"""``python -m tools.casts`` records the worked examples anew: examples/casts/NAME.cast, in asciicast v2.

https://docs.asciinema.org/manual/asciicast/v2/; ``asciinema play`` shows one, and so does every reader of text.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from pathlib import Path

from examples.worked import TOYS

FOLDER = Path(__file__).parent.parent / "examples" / "casts"


def masked(text: str) -> list[str]:
    """Lines without what varies from run to run: the plan, which follows prices, numbers and their widths."""
    text = re.sub(r"^plan: .*", "plan", text, flags=re.MULTILINE)
    return [" ".join(re.sub(r"\d[\d,.]*", "#", line).split()) for line in text.splitlines()]


def shown(cast: Path) -> str:
    """Text of a recording."""
    events = [json.loads(line) for line in cast.read_text(encoding="utf-8").splitlines()[1:]]
    return "".join(text for _, _, text in events).replace("\r\n", "\n")


def main() -> None:
    """Record all of them."""
    FOLDER.mkdir(exist_ok=True)
    for name in TOYS:
        command = ["-m", "examples.worked", name]
        lines = [{"version": 2, "width": 100, "height": 24, "title": f"python {' '.join(command)}"}, *record(command)]
        text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
        (FOLDER / f"{name}.cast").write_text(text, encoding="utf-8")


def record(arguments: list[str]) -> list[object]:
    """Output events of a program of Python, which must end well."""
    events: list[object] = []
    started = time.monotonic()
    with subprocess.Popen([sys.executable, *arguments], stdout=subprocess.PIPE, text=True) as program:
        assert program.stdout is not None
        for line in program.stdout:
            events.append([round(time.monotonic() - started, 2), "o", line.replace("\n", "\r\n")])
    if program.returncode:
        raise SystemExit(f"{arguments} ended with {program.returncode}")
    return events


if __name__ == "__main__":
    main()
