"""Stand-in for nsys 2022.4.2: the interactive commands that gpufleet uses, as measured (docs/operations.md).

A process is traced where the variables of ``launch``'s command hold, whoever started it. Where the session's daemon is
gone, such a process ends with 1. On SIGTERM ``launch`` ends at once with 0. A report lists the traced processes.
"""

import fcntl
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

INJECTED = """
import fcntl, os, pathlib, sys
folder = pathlib.Path(os.environ["STAND_IN_NSYS"])
with (folder / "daemon").open() as file:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        (folder / "traced" / str(os.getpid())).touch()
    else:
        sys.stderr.write("Failed to connect to Agent: Connection refused\\n")
        os._exit(1)
"""


def launch(folder: Path, command: list[str]) -> int:
    """Start the daemon and the command, and wait for either's end."""
    (folder / "traced").mkdir(parents=True)
    (folder / "sitecustomize.py").write_text(INJECTED)
    program = [sys.executable, __file__, "--start-agent", f"--session-name={folder.name}", str(folder / "daemon")]
    daemon = subprocess.Popen(program, start_new_session=True)
    while not (folder / "daemon").exists():
        time.sleep(0.01)
    path = f"{folder}:{os.environ.get('PYTHONPATH', '')}"
    environment = {**os.environ, "PYTHONPATH": path, "STAND_IN_NSYS": str(folder)}
    child = subprocess.Popen(command, env=environment, start_new_session=True, stdout=subprocess.DEVNULL)

    def on_sigterm(*_: object) -> None:
        child.terminate()
        os._exit(0)

    signal.signal(signal.SIGTERM, on_sigterm)
    while child.poll() is None and daemon.poll() is None:
        time.sleep(0.02)
    if daemon.poll() is not None:
        return 0
    daemon.kill()
    daemon.wait()
    return 128 - child.returncode if child.returncode < 0 else child.returncode


def main(words: list[str]) -> int:
    """Carry out a command."""
    if words[0] == "--start-agent":
        with Path(words[2]).with_suffix(".new").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            Path(file.name).rename(words[2])
            signal.pause()
    options = dict(word.lstrip("-").split("=", 1) for word in words if word.startswith("--") and "=" in word)
    folder = Path(tempfile.gettempdir()) / (options.get("session-new") or options["session"])
    if words[0] == "launch":
        return launch(folder, words[1 + len([word for word in words if word.startswith("--")]) :])
    collecting = folder / "collecting"
    if words[0] == "start" and not collecting.exists():
        collecting.write_text(options["output"])
        return 0
    if words[0] == "stop" and collecting.exists():
        pids = [int(path.name) for path in (folder / "traced").iterdir()]
        Path(f"{collecting.read_text()}.nsys-rep").write_text(json.dumps(pids))
        collecting.unlink()
        return 0
    if words[0] == "start":
        sys.stdout.write("Configuring is not allowed in this state.\n")
    else:
        sys.stdout.write("The request is not applicable in this state: StopRequest.\n")
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
