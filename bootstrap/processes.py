"""Processes below one, as /proc has them. Standard library only: the system's Python runs it, too."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

# Variables with the rank and the number of ranks: torchrun's and its like, Open MPI's, MPICH's and Intel MPI's.
WORLDS = (("RANK", "WORLD_SIZE"), ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"), ("PMI_RANK", "PMI_SIZE"))


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


def count_ranks(workers: Iterable[int]) -> tuple[int, int]:
    """Ranks of the largest job that programs and their children belong to: in all, and on this node."""
    ranks: dict[int, set[int]] = {}
    for pid in (process for worker in workers for process in (worker, *descendants(worker))):
        variables = dict(part.partition("=")[::2] for part in _read(Path(f"/proc/{pid}/environ")).split("\0"))
        for rank, world in WORLDS:
            if variables.get(rank, "").isdecimal() and variables.get(world, "").isdecimal():
                ranks.setdefault(int(variables[world]), set()).add(int(variables[rank]))
    largest = max(ranks, default=0)
    return largest, len(ranks.get(largest, ()))


def _read(file: Path) -> str:
    """Text of a file of /proc; empty where its process has just ended."""
    try:
        return file.read_text(errors="replace")
    except OSError:
        return ""
