"""Processes below one, as /proc has them. Standard library only: the system's Python runs it, too."""

from __future__ import annotations

from pathlib import Path


def is_running(pid: int) -> bool:
    """Return whether a process is there; a zombie has ended."""
    # The state follows the name, which may have any character.
    return _read(Path(f"/proc/{pid}/stat")).rpartition(")")[2].split()[:1] not in ([], ["Z"])


def children(pid: int | None) -> list[int]:
    """Processes that a process has started, of all its threads."""
    files = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for file in files for child in _read(file).split()]


def descendants(pid: int) -> list[int]:
    """Running processes below a process."""
    return [process for child in children(pid) if is_running(child) for process in (child, *descendants(child))]


def _read(file: Path) -> str:
    """Text of a file of /proc; empty where its process has just ended."""
    try:
        return file.read_text()
    except OSError:
        return ""
