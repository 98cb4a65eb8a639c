"""``python -m bootstrap.launchers PROGRAM [ARGUMENT ...]``: a training command with a launcher of its own.

torchrun starts this module as its only worker on each node, so that the programs of all nodes start together, and again
together when a program fails or a node is replaced. The process then becomes the program. Standard library only;
``contract/launcher.py`` has the rule which commands are programs.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from typing import NoReturn

from bootstrap.contract.launcher import EXPANDED
from bootstrap.contract.report import EXIT_AT_FAULT

# torchrun sets these for its only worker; the program's launcher would take them for a rank's.
TORCHRUNS = re.compile(r"(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)|ROLE_NAME|TORCHELASTIC_\w+")


def program_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Make the program's environment: the node's place in the gang in place of torchrun's own variables."""
    nodes, slots = int(environ["WORLD_SIZE"]), int(environ.get("GPUFLEET_GPUS_PER_NODE") or 1)
    made = {name: value for name, value in environ.items() if not TORCHRUNS.fullmatch(name)}
    made |= {"GPUFLEET_NODE_RANK": environ["RANK"], "GPUFLEET_NODE_COUNT": str(nodes)}
    made["GPUFLEET_RANKS"] = str(nodes * slots)
    if nodes == 1:  # torchrun gives the host's name, which a VPC without DNS does not resolve
        made["MASTER_ADDR"] = "127.0.0.1"
    return made


def expand(words: Sequence[str], environ: Mapping[str, str]) -> list[str]:
    """Replace ``${GPUFLEET_...}``, ``${MASTER_ADDR}`` and ``${MASTER_PORT}``; any other text stays as it is."""
    return [EXPANDED.sub(lambda found: environ.get(found[1], found[0]), word) for word in words]


def main(words: list[str], environ: Mapping[str, str]) -> NoReturn:
    """Become the program; ends with the status that no other start would change where it is not on this node."""
    environment = program_environment(environ)
    words = expand(words, environment)
    path = environment.get("PATH", os.defpath)
    try:  # signals reach the program itself
        os.execve(shutil.which(words[0], path=path) or words[0], words, environment)  # noqa: S606
    except OSError as error:
        sys.stderr.write(
            f"{words[0]} is not a program on this node: install it with gpufleet:requirements or in the image, or give "
            f"its path; begin a script with #!/bin/bash; PATH is {path} ({error.strerror})\n"
        )
        sys.exit(EXIT_AT_FAULT)


if __name__ == "__main__":
    main(sys.argv[1:], os.environ)
