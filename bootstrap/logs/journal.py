"""Lines of a systemd unit, read from the node's journal, which keeps them while CloudWatch is out of reach."""

from __future__ import annotations

import itertools
import json
import subprocess
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """One line of output."""

    text: str
    at_ms: int  # since 1970, UTC
    cursor: str  # the line's place in the journal
    process: str = ""  # id of the process that wrote it


def read_journal(unit: str, *, after: str, limit: int) -> list[Line]:
    """Read a unit's lines after a cursor, or from the first one for an empty cursor; ``limit`` at most.

    Raises:
        OSError: there is no journalctl, or it failed.
    """
    # Without --all a message of more than 4096 bytes is null: https://man7.org/linux/man-pages/man1/journalctl.1.html
    command = ["journalctl", f"--unit={unit}", "--output=json", "--all", "--output-fields=MESSAGE,_PID"]
    command += ["--no-pager", "--quiet"]
    if after:
        command.append(f"--after-cursor={after}")
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, errors="replace") as process:
        assert process.stdout is not None
        lines = [parse(json.loads(entry)) for entry in itertools.islice(process.stdout, limit)]
        if len(lines) == limit:
            process.terminate()  # not all of a long journal
        elif process.wait():
            raise OSError(f"journalctl ended with {process.returncode}")
    return lines


def parse(entry: dict[str, Any]) -> Line:
    """Parse one entry; a message that is no UTF-8 is a list of bytes.

    Workers share torchrun's stream, and journald begins a new line where another process writes ("pid-change"):
    https://www.freedesktop.org/software/systemd/man/latest/systemd.journal-fields.html
    https://systemd.io/JOURNAL_EXPORT_FORMATS/#journal-json-format
    """
    message = entry.get("MESSAGE") or ""
    text = message if isinstance(message, str) else bytes(message).decode(errors="replace")
    at_ms = int(entry["__REALTIME_TIMESTAMP"]) // 1000
    return Line(text=text, at_ms=at_ms, cursor=entry["__CURSOR"], process=entry.get("_PID", ""))
