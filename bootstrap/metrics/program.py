"""Output of a program that may hang in NVIDIA's driver."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence

# nvidia-smi answers within 1 s, or never where a GPU fell off the bus.
TIMEOUT_S = 10.0


class Program:
    """Runs ``command``, never for more than ``timeout_s``, and never beside a run of it that hangs."""

    def __init__(self, command: Sequence[str], *, timeout_s: float = TIMEOUT_S) -> None:
        self._command = list(command)
        self._timeout_s = timeout_s
        self._stuck: subprocess.Popen[str] | None = None

    def output(self) -> str:
        """Standard output, also of a program that failed after it wrote some.

        Raises:
            OSError: the program is absent.
            RuntimeError: it failed, or hangs.
        """
        name = self._command[0].rsplit("/", 1)[-1]
        # A killed process may stay in the driver; a second one would only join it.
        if self._stuck is not None and self._stuck.poll() is None:
            raise RuntimeError(f"{name} has not answered for more than {self._timeout_s:g} s")
        self._stuck = None
        process = subprocess.Popen(self._command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        try:
            output, _ = process.communicate(timeout=self._timeout_s)
        except subprocess.TimeoutExpired:
            process.kill()
            self._stuck = process
            raise RuntimeError(f"{name} has not answered for more than {self._timeout_s:g} s") from None
        # A lost GPU sets nvidia-smi's status; the other GPUs' lines still count.
        if process.returncode and not output.strip():
            raise RuntimeError(f"{name} ended with {process.returncode}")
        return output
