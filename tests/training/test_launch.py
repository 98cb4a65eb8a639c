"""bootstrap/agent against fake programs: a case is a folder with its environment, its fakes and what must come out.

    launch_cases/NAME/env        NAME=value lines for the agent
    launch_cases/NAME/python     what stands in for python (torchrun); absent: exits 0
    launch_cases/NAME/aws        what stands in for the AWS CLI; absent: fails
    launch_cases/NAME/TOOL       another fake: dmesg, nvidia-smi
    launch_cases/NAME/during.sh  optional: run while the agent runs, with its process id as $1
    launch_cases/NAME/leave      optional, lines of "TEXT" or "TEXT|PATH|VALUE": when the log holds TEXT, the metadata
                                 service gives the notice (by default the group ends this node)
    launch_cases/NAME/leave-after  the same, after during.sh
    launch_cases/NAME/expected   exit status, then lines that must be in the calls (+) or the log (>), or must not (!)

Fakes append their name and arguments to $CALLS. $CASE is the case's scratch folder. The node's watcher,
bootstrap.launchers and "python -c" are the real ones.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from examples.local_imds import LocalImds

CASES = Path(__file__).parent / "launch_cases"
AGENT = [sys.executable, str(Path(__file__).parents[2] / "bootstrap" / "agent")]
PRELUDE = '#!/usr/bin/env bash\n{first}echo "{name} $*" >>"$CALLS"\n'
REAL_PYTHON = (
    f'[[ $1 != -c && $2 != bootstrap.training.watcher && $2 != bootstrap.launchers ]] || exec {sys.executable} "$@"\n'
)
DEFAULTS = {"python": "exit 0\n", "aws": "echo 'aws was not expected' >&2\nexit 255\n", "dmesg": "exit 0\n"}
# The controller lets every group train.
CHOSEN = """[[ $* != *control/state.json* ]] || { echo '{"phase": "running"}'; exit 0; }\n"""
TOOLS = (*DEFAULTS, "ip", "nvidia-smi")
LIMITS = {"relaunch_delay_s": 0.1, "join_poll_s": 0.1, "tell_delay_s": 1, "worker_pause_s": 1, "gpu_check_s": 1}
LIMITS["gang_test_s"] = 0
LIFECYCLE = "autoscaling/target-lifecycle-state"


def install_fakes(case: Path, folder: Path) -> None:
    folder.mkdir()
    for name in TOOLS:
        if (given := case / name).exists():
            answer = given.read_text()
        elif name in DEFAULTS:
            answer = DEFAULTS[name]
        else:
            continue
        fake = folder / ("python3" if name == "python" else name)
        fake.write_text(
            PRELUDE.format(name=name, first=CHOSEN if name == "aws" else "")
            + (REAL_PYTHON if name == "python" else "")
            + answer
        )
        fake.chmod(0o755)


def give_notice(told: str, log: Path, imds: LocalImds) -> None:
    """Wait for the text in the log, then give the notice of a case's ``leave``."""
    text, path, value = told.split("|") if "|" in told else (told, LIFECYCLE, "Terminated")
    deadline = time.monotonic() + 120
    while text not in log.read_text():
        assert time.monotonic() < deadline, f"never said {text!r}:\n{log.read_text()}"
        time.sleep(0.05)
    imds.values[path] = value


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """Folder that other users may read; pytest's own belongs to one user."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


@pytest.mark.parametrize("name", sorted(path.name for path in CASES.iterdir() if path.is_dir()))
def test_case(name: str, open_folder: Path) -> None:
    case, tmp_path = CASES / name, open_folder
    install_fakes(case, tmp_path / "bin")
    # gpufleet-train.service writes what the agent says into this file.
    calls, log = tmp_path / "calls", tmp_path / "var/log/gpufleet/train.log"
    log.parent.mkdir(parents=True)
    calls.touch()
    calls.chmod(0o666)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "drain").write_text("left by an earlier start")
    given = dict(line.split("=", 1) for line in (case / "env").read_text().splitlines() if line)
    if "GPUFLEET_TRAIN_USER" in given and os.geteuid() != 0:
        pytest.skip("only root may start programs as another user")
    with LocalImds().running() as imds, log.open("wb") as output:
        environment = {
            "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "CALLS": str(calls), "CASE": str(tmp_path),
            "ROOT": str(tmp_path), "GPUFLEET_RUN_DIR": str(tmp_path / "run"), "GPUFLEET_TRAIN_DIR": str(tmp_path),
            "AWS_EC2_METADATA_SERVICE_ENDPOINT": imds.endpoint, "HOME": str(tmp_path),
            "GPUFLEET_IMDS_POLL_S": "0.2",
        } | given | {"GPUFLEET_AGENT": json.dumps(LIMITS | json.loads(given.get("GPUFLEET_AGENT", "{}")))}  # fmt: skip
        process = subprocess.Popen(AGENT, env=environment, stdout=output, stderr=output, start_new_session=True)
        try:
            if (case / "leave").exists():
                for notice in (case / "leave").read_text().splitlines():
                    give_notice(notice, log, imds)
            if (case / "during.sh").exists():
                command = ["bash", "-eu", str(case / "during.sh"), str(process.pid)]
                subprocess.run(command, env=environment, check=True, timeout=120)
            if (case / "leave-after").exists():
                give_notice((case / "leave-after").read_text().strip(), log, imds)
            status = process.wait(timeout=120)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, 9)
                process.wait()
    called, said = calls.read_text(), log.read_text()
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    memlock = "unlimited" if limit == resource.RLIM_INFINITY else str(limit // 1024)
    expected_status, *expected = (case / "expected").read_text().splitlines()
    assert status == int(expected_status), said
    for line in expected:
        kind, text = line[0], line[2:].replace("$CASE", str(tmp_path)).replace("$MEMLOCK", memlock)
        where = {"+": called, ">": said, "!": called + said}[kind]
        assert (text in where) is (kind != "!"), f"{line}\n--- calls\n{called}--- log\n{said}"
