"""``python -m bootstrap.launchers PROGRAM [ARGUMENT ...]``, which torchrun starts as its only worker on each node.

torchrun gives what programs with a launcher of their own lack: the gang starts together, and again together when one
node's program fails or a node is replaced. This process tells the nodes of each other, and becomes the program.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping

from bootstrap.contract.launcher import start_of
from bootstrap.contract.report import EXIT_AT_FAULT
from bootstrap.launchers.environment import expand, program_environment, write_files
from bootstrap.launchers.meeting import meet
from bootstrap.launchers.mpi import follow, lead


def main(words: list[str], environ: Mapping[str, str]) -> int:
    """Become the program; returns only where it cannot be started, or under mpirun."""
    rank, count = int(environ["RANK"]), int(environ["WORLD_SIZE"])
    is_mpi = start_of(words) == "mpi"
    meeting = meet(environ, rank, count)
    environment = program_environment(environ, None if is_mpi else rank, meeting.addresses)
    if is_mpi and rank > 0:
        return follow(meeting.lines[0], environment)
    environment |= write_files(environment, [address for address, _ in meeting.addresses])
    words = expand(words, environment)
    path = environment.get("PATH", os.defpath)
    program = shutil.which(words[0], path=path)
    if program is None:
        sys.stderr.write(
            f"{words[0]} is not a program on this node: install it with gpufleet:requirements or in the image, or give "
            f"its path; PATH is {path}\n"
        )
        return EXIT_AT_FAULT  # another start would not find it either
    if not is_mpi:
        # Signals reach the program itself.
        os.execve(program, words, environment)  # noqa: S606
    return lead([program, *words[1:]], environment, meeting)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], os.environ))
