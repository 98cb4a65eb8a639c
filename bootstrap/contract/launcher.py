"""Start of a training command: by torchrun, or as a program with a launcher of its own."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from pathlib import PurePath
from typing import Literal

Start = Literal["torchrun", "program", "mpi"]

# Launchers of Open MPI, MPICH, Intel MPI. Called on one node, they start all ranks.
MPI = frozenset({"mpirun", "mpiexec", "mpiexec.hydra", "orterun", "prterun"})
# Launchers that train on their own node alone unless they are told of the others.
ONE_NODE = frozenset({"torchrun", "accelerate", "deepspeed"})


def split_command(text: str) -> list[str] | None:
    """Split at blanks outside quotes, as xargs does; None where a quote is open. Nothing is expanded."""
    words = shlex.shlex(text, posix=True, punctuation_chars=False)
    words.whitespace_split, words.commenters, words.escapedquotes = True, "", ""
    try:
        return list(words)
    except ValueError:
        return None


def start_of(words: Sequence[str]) -> Start:
    """Way in which the nodes start a command.

    torchrun: a script or options; torchrun runs it once a GPU. program: anything else; it runs once on each node. mpi:
    mpirun is in it; it runs on the first node, and mpirun starts the ranks of all.
    """
    if not words or words[0].startswith("-") or words[0].endswith((".py", ".pyc", ".pyz")):
        return "torchrun"
    return "mpi" if MPI & _names(words) else "program"


def gang_faults(words: Sequence[str]) -> Iterator[str]:
    """Reasons why several nodes would not train together with a program."""
    start = start_of(words)
    if start != "torchrun" and "horovodrun" in _names(words):
        yield "horovodrun reaches other nodes by SSH, which they do not answer: start Horovod's ranks with mpirun"
    if start != "program" or any("MASTER_ADDR" in word for word in words):
        return
    for name in sorted(ONE_NODE & _names(words)):
        yield (
            f"{name} has no option with ${{MASTER_ADDR}}, so each node would train by itself: give it its options for "
            "several nodes, or the script alone, which the nodes start under torchrun"
        )


def loses_sigterm(words: Sequence[str]) -> bool:
    """Return whether a command begins with `conda run`, which SIGTERM ends while its own command goes on, untold.

    https://github.com/conda/conda/blob/26.7.1/conda/gateways/subprocess.py
    """
    return bool(words) and PurePath(words[0]).name == "conda" and "run" in words


def _names(words: Sequence[str]) -> set[str]:
    return {PurePath(word).name for word in words}
