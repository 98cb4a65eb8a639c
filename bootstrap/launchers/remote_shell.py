#!/usr/bin/env python3
"""mpirun's remote shell: ``remote_shell.py HOST COMMAND ...``, with ssh's arguments and exit status."""

from __future__ import annotations

import itertools
import json
import os
import socket
import sys
from collections.abc import Mapping
from pathlib import Path


def shell_socket(environ: Mapping[str, str]) -> Path:
    """Path of the socket, beside the notice files."""
    return Path(environ["GPUFLEET_DRAIN_FILE"]).with_name("remote-shell.socket")


def main(arguments: list[str]) -> int:
    """Have the command run on the host by mpi.lead, which listens at a socket."""
    words = list(itertools.dropwhile(lambda word: word.startswith("-"), arguments))  # -x and the like mean nothing here
    host, *command = words
    with socket.socket(socket.AF_UNIX) as asking:
        asking.connect(str(shell_socket(os.environ)))
        asking.sendall(json.dumps({"host": host, "command": " ".join(command)}).encode() + b"\n")
        answer = asking.makefile().readline()
    return int(answer or 255)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
