"""mpirun's remote shell: ``remote_shell.py SOCKET HOST COMMAND ...``, with ssh's arguments and exit status."""

from __future__ import annotations

import json
import socket
import sys


def main(arguments: list[str]) -> int:
    """Have the command run on the host by mpi.lead, which listens at the socket."""
    path, *words = arguments
    while words and words[0].startswith("-"):
        words.pop(0)  # -x and the like, of no meaning here
    host, *command = words
    with socket.socket(socket.AF_UNIX) as asking:
        asking.connect(path)
        asking.sendall(json.dumps({"host": host, "command": " ".join(command)}).encode() + b"\n")
        answer = asking.makefile().readline()
    return int(answer or 255)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
