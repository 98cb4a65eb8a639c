"""torchrun of a node, in this process with real workers: places taken by standby processes, faults that are final."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from bootstrap.training import standby, torchrun
from bootstrap.training.rank_group import OWN_STORE_VARIABLE


@pytest.fixture(autouse=True)
def log() -> Iterator[None]:
    """``main`` shows the runtime's progress; later tests of this process see warnings alone again."""
    runtime = logging.getLogger("bootstrap")
    level, handlers = runtime.level, runtime.handlers[:]
    yield
    runtime.setLevel(level)
    runtime.handlers[:] = handlers


# Dies without a word at its first start, and finds its settings at fault at its second, as a script of the user's own.
WORKER = """
import json, os, signal, sys, time
from pathlib import Path
from bootstrap.training.errors import ConfigurationError
from bootstrap.training.ledger import process_started_at

here, restarts, parent = Path(sys.argv[1]), int(os.environ["TORCHELASTIC_RESTART_COUNT"]), os.getppid()
row = {"argv": sys.argv, "orig_argv": sys.orig_argv, "name": __name__, "path": sys.path[0], "parent": os.getppid(),
       "session": os.getsid(0) == os.getpid(), "imported": "told" in sys.modules, "rank": os.environ["RANK"],
       "pid": os.getpid(), "shares": os.environ["TORCHELASTIC_USE_AGENT_STORE"], "started_at": process_started_at()}
with (here / "starts.jsonl").open("a") as file:
    file.write(json.dumps(row) + "\\n")
while not restarts and not (here / "go").exists() and os.getppid() == parent:
    time.sleep(0.01)
if not restarts:
    os.kill(os.getpid(), signal.SIGKILL)
raise ConfigurationError("the plan's sharding is zero3, and the model is not sharded")
"""


def test_a_failed_worker_is_replaced_by_a_standby_process_and_a_fault_is_final(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "told.py").write_text("")
    (tmp_path / "work.py").write_text(WORKER)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{Path(torchrun.__file__).parents[2]}")
    monkeypatch.setenv("GPUFLEET_STANDBY", "1")
    monkeypatch.setenv("GPUFLEET_STANDBY_DELAY_S", "0.05")
    monkeypatch.setenv(OWN_STORE_VARIABLE, "")  # main() sets it
    monkeypatch.delenv(OWN_STORE_VARIABLE)
    monkeypatch.setattr(standby, "MODULES", ("told", "no_such_module"))
    # main() replaces these two; monkeypatch sets them back.
    monkeypatch.setattr(torchrun.api, "LocalElasticAgent", torchrun.api.LocalElasticAgent)
    monkeypatch.setattr(torchrun.handlers, "SubprocessHandler", torchrun.handlers.SubprocessHandler)
    command = [str(tmp_path / "work.py"), str(tmp_path), "b c"]
    arguments = ["--standalone", "--nproc-per-node", "1", "--max-restarts", "3", *command]
    monkeypatch.setattr(sys, "argv", ["torchrun", *arguments])
    killed: list[float] = []

    def kill_when_ready() -> None:
        deadline = time.monotonic() + 60
        while standby.STANDS not in caplog.text and time.monotonic() < deadline:
            time.sleep(0.01)
        killed.append(time.time())
        (tmp_path / "go").touch()

    threading.Thread(target=kill_when_ready, daemon=True).start()
    with pytest.raises(SystemExit) as ended:
        torchrun.main()
    assert ended.value.code == 78
    first, second = (json.loads(line) for line in (tmp_path / "starts.jsonl").read_text().splitlines())
    assert not first["imported"] and second["imported"]
    assert killed[0] <= second["started_at"] <= time.time()
    for row in (first, second):
        assert row["argv"] == command and row["orig_argv"] == [sys.executable, "-u", *command]
        assert row["name"] == "__main__" and row["path"] == str(tmp_path) and row["rank"] == "0"
        assert row["parent"] == os.getpid() and row["session"] and row["shares"] == "False"


DEAF = """
import os, signal, sys, time
from pathlib import Path

if os.environ["RANK"] == "0" and not int(os.environ["TORCHELASTIC_RESTART_COUNT"]):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    Path(sys.argv[1]).touch()
    time.sleep(600)
while not Path(sys.argv[1]).exists():
    time.sleep(0.01)
sys.exit(0 if int(os.environ["TORCHELASTIC_RESTART_COUNT"]) else 3)
"""


def test_workers_that_react_to_no_signal_are_not_waited_for(tmp_path: Path) -> None:
    """A worker whose peer is dead hangs in NCCL; torchrun itself closes a failed round, with the limit that is seen."""
    (tmp_path / "work.py").write_text(DEAF)
    program = (
        "from torch.distributed.elastic.multiprocessing.api import SubprocessContext as Context\n"
        "from bootstrap.training import torchrun\n"
        "close = Context._close\n"
        "def seen(self, death_sig, timeout=30):\n"
        "    print('limit', timeout, flush=True)\n"
        "    close(self, death_sig, timeout)\n"
        "Context._close = seen\n"
        "torchrun.STOP_S = 0.5\n"
        "torchrun.main()\n"
    )
    arguments = ["--standalone", "--nproc-per-node", "2", "--max-restarts", "1", str(tmp_path / "work.py")]
    ended = subprocess.run(
        [sys.executable, "-c", program, *arguments, str(tmp_path / "deaf")],
        env={**os.environ, "PYTHONPATH": str(Path(torchrun.__file__).parents[2])},
        stdout=subprocess.PIPE, text=True, check=True,
    )  # fmt: skip
    assert ended.stdout.splitlines()[0] == "limit 0.5"


KEPT = """
import os, signal, sys, time
from pathlib import Path
import torch
from bootstrap.training import SpotTolerantRun
from bootstrap.training.checkpoint import StoredCheckpoints

here, is_torn, read, sizes = Path(sys.argv[1]), sys.argv[2] == "True", StoredCheckpoints.read_chunks, [0]
def seen(self, checkpoint, chunks, into):
    sizes.append(into.nbytes)
    read(self, checkpoint, chunks, into)
StoredCheckpoints.read_chunks = seen
model = torch.nn.Linear(300, 300)
optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
options = {"dataset_size": 8, "global_batch": 1, "store": str(here / "store"), "checkpoint_every": 2}
with SpotTolerantRun(model, optimizer, **options) as run:
    is_resumed = run.step > 0
    for step in run.steps(1 if is_resumed else 1000):
        (here / ("after" if is_resumed else "before")).write_text(f"{max(sizes)} {model.weight.sum().item()}")
        model(torch.ones(1, 300)).sum().backward()
        optimizer.step()
        if run._saver.saved_step and not run._saver.is_pending:
            run._share.buffer[0] += is_torn
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.01)
    (here / "after").write_text(f"{max(sizes)} {model.weight.sum().item()}")
"""


@pytest.mark.parametrize("is_torn", [False, True])
def test_the_next_process_finds_the_last_checkpoint_in_memory(is_torn: bool, tmp_path: Path) -> None:
    """All of its file, where that is as the manifest says; else nothing."""
    (tmp_path / "work.py").write_text(KEPT)
    arguments = ["--nproc-per-node", "1", "--max-restarts", "1", str(tmp_path / "work.py"), str(tmp_path), str(is_torn)]
    environment = {**os.environ, "PYTHONPATH": str(Path(torchrun.__file__).parents[2])}
    subprocess.run([sys.executable, "-m", "bootstrap.training.torchrun", *arguments], env=environment, check=True)
    (_, before), (read, after) = ((tmp_path / name).read_text().split() for name in ("before", "after"))
    assert after == before and (int(read) >= 300 * 300 * 4) == is_torn


NOTICED = """
import os, signal, subprocess, sys, time
from pathlib import Path

here, asked = Path(sys.argv[1]), []
child = subprocess.Popen(["sleep", "600"])
(here / f"child-{os.environ['RANK']}").write_text(str(child.pid))
signal.signal(signal.SIGTERM, lambda *_: asked.append(1))
if os.environ["RANK"] == "0":
    while not (here / "child-1").exists():
        time.sleep(0.01)
    os._exit(int(sys.argv[2]))
while not asked:
    time.sleep(0.01)
time.sleep(1.5)
(here / "cleaned").write_text(str(child.poll()))
"""


@pytest.mark.parametrize("ended_with", [75, 3])
def test_workers_that_leave_after_a_notice_clean_up_and_what_they_started_ends(ended_with: int, tmp_path: Path) -> None:
    """Their own processes, as data loaders', go on until they have ended, and hold no port and no GPU later."""
    if ended_with != 75:
        (tmp_path / "drain").write_text(f"{time.time() + 60:.0f} SIGTERM\n")
    (tmp_path / "work.py").write_text(NOTICED)
    program = "from bootstrap.training import torchrun; torchrun.STOP_S = 0.1; torchrun.main()"
    arguments = ["--nproc-per-node", "2", str(tmp_path / "work.py"), str(tmp_path), str(ended_with)]
    root, drain = Path(torchrun.__file__).parents[2], tmp_path / "drain"
    environment = {**os.environ, "PYTHONPATH": str(root), "GPUFLEET_DRAIN_FILE": str(drain)}
    ended = subprocess.run([sys.executable, "-c", program, *arguments], env=environment, check=False)
    assert ended.returncode == 1 and (tmp_path / "cleaned").read_text() == "None"
    for rank in range(2):
        status = Path("/proc", (tmp_path / f"child-{rank}").read_text(), "stat")
        with contextlib.suppress(FileNotFoundError):
            while status.read_text().rpartition(")")[2].split()[0] != "Z":
                time.sleep(0.01)


SPEAKER = """
import os, sys, time
from pathlib import Path

here, rank, restarts = Path(sys.argv[1]), os.environ["RANK"], int(os.environ["TORCHELASTIC_RESTART_COUNT"])
print(f"start {restarts} of {rank}", flush=True)
print("to standard error", file=sys.stderr)
parent = os.getppid()  # a killed test's torchrun ends nothing
while not restarts and not (here / "go").exists() and os.getppid() == parent:
    time.sleep(0.01)
if not restarts:
    sys.exit(3)
os.write(1, b"\\r 10%\\r 20%")
while not (here / f"seen-{rank}").exists() and os.getppid() == parent:
    time.sleep(0.01)
os.write(1, b"\\r\\n" + b"x" * 100_000 + b"\\nthe last line has no end")
"""


def test_every_line_has_its_rank_and_comes_at_once(tmp_path: Path) -> None:
    """Two workers and, after a failure, the standby processes in their places; a bar's last state has no end at all."""
    (tmp_path / "work.py").write_text(SPEAKER)
    root = Path(torchrun.__file__).parents[2]
    environment = {
        **os.environ, "PYTHONPATH": str(root), "GPUFLEET_STANDBY": "1",
        "GPUFLEET_STANDBY_DELAY_S": "0.05", "TORCHELASTIC_ERROR_FILE": "",
    }  # fmt: skip
    arguments = [
        "--standalone",
        "--nproc-per-node",
        "2",
        "--max-restarts",
        "1",
        str(tmp_path / "work.py"),
        str(tmp_path),
    ]
    # Imports of a standby process are most of a minute of a processor.
    program = (
        "from bootstrap.training import rank_lines, standby, torchrun; standby.MODULES = ('json',); "
        "rank_lines.QUIET_S = 0.2; torchrun.main()"
    )
    command = [sys.executable, "-c", program, *arguments]
    lines: list[str] = []
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        for line in process.stderr:
            lines.append(line.removesuffix("\n"))
            if sum(standby.STANDS in line for line in lines) == 2:
                (tmp_path / "go").touch()
            for rank in "01":
                if line == f"[rank {rank}]  20%\n":
                    (tmp_path / f"seen-{rank}").touch()
    assert process.returncode == 0, lines
    assert sum(standby.TAKES in line for line in lines) == 2, lines
    for rank in "01":
        marked = [line.removeprefix(f"[rank {rank}] ") for line in lines if line.startswith(f"[rank {rank}] ")]
        assert marked[:4] == [
            f"start 0 of {rank}", "to standard error", f"start 1 of {rank}", "to standard error",
        ]  # fmt: skip
        assert marked[4:7] == ["", " 10%", " 20%"]
        assert [len(part) for part in marked[7:10]] == [49_152, 49_152, 1_696] and "".join(
            marked[7:10]
        ) == "x" * 100_000
        assert marked[10:] == ["the last line has no end"]


def test_a_fault_below_a_launcher_that_hides_the_status_is_final(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = (
        "import sys; from bootstrap.training.errors import ConfigurationError; raise ConfigurationError(sys.argv[1])"
    )
    script = f'printf "a\\rb\\n"; echo start; {sys.executable} -c "{program}" fault || exit 1'
    arguments = ["--standalone", "--nproc-per-node", "1", "--max-restarts", "3", "-m", "bootstrap.launchers"]
    root = Path(torchrun.__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": str(root), "GPUFLEET_DRAIN_FILE": str(tmp_path / "drain")}
    command = [sys.executable, "-m", "bootstrap.training.torchrun", *arguments, "sh", "-c", script]
    done = subprocess.run(command, env=environment, stderr=subprocess.PIPE, text=True, check=False)
    lines = done.stderr.splitlines()  # their ranks are the program's own launcher's to name
    assert done.returncode == 78 and lines.count("start") == 1 and {"a", "b"} <= set(lines), lines
    monkeypatch.setenv("GPUFLEET_DRAIN_FILE", str(tmp_path / "drain"))
    monkeypatch.setattr(sys, "argv", ["torchrun", "-m", "bootstrap.launchers"])
    failures = [ProcessFailure(local_rank=0, pid=1, exitcode=1, error_file="")]
    assert torchrun.is_at_fault(failures)
    os.utime(tmp_path / "drain.at-fault", (time.time() - torchrun.FAULT_S,) * 2)
    assert not torchrun.is_at_fault(failures), "its launcher went on"


def test_only_the_trainer_has_standby_processes_unasked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GPUFLEET_STANDBY", raising=False)
    trainer, own = ["--nnodes", "1", "-m", "bootstrap.trainer"], ["--nnodes", "1", "train.py", "bootstrap.trainer"]
    assert standby.Standby.from_environment(trainer) and not standby.Standby.from_environment(own)
    monkeypatch.setenv("GPUFLEET_STANDBY", "1")
    assert standby.Standby.from_environment(own)
    monkeypatch.setenv("GPUFLEET_STANDBY", "0")
    assert not standby.Standby.from_environment(trainer)


def test_without_free_memory_nothing_stands_by(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(standby, "FREE_BYTES", 2**60)
    waiting = standby.Standby(("json",), delay_s=0.01)
    waiting.started(2)
    deadline = time.monotonic() + 10
    while "no process stands by" not in caplog.text and time.monotonic() < deadline:
        time.sleep(0.01)
    assert "GiB are free" in caplog.text
    assert waiting.take((sys.executable, "-u", "train.py"), {}) is None
    waiting.close()


def test_a_standby_process_that_was_killed_takes_no_place() -> None:
    waiting = standby.Standby(("json",), delay_s=0.01)
    waiting.started(1)
    deadline = time.monotonic() + 60
    while not waiting._waiting and time.monotonic() < deadline:
        time.sleep(0.01)
    waiting._waiting[0].process.kill()
    waiting._waiting[0].process.wait()
    assert waiting.take((sys.executable, "-u", "train.py"), {"RANK": "0"}) is None
    waiting.close()


@pytest.mark.parametrize(
    ("variables", "arguments", "is_alone"),
    [
        ({}, ["train.py", "--rdzv-backend", "c10d"], True),
        ({}, ["--nnodes", "1", "train.py"], True),
        ({}, ["--nnodes", "2", "train.py"], False),
        ({}, ["--nnodes=1:2", "--rdzv_backend=c10d", "--rdzv_endpoint=host:1", "train.py"], False),
        ({}, ["--rdzv-backend", "c10d", "train.py"], False),
        ({"PET_NNODES": "2", "PET_NODE_RANK": "1", "PET_MASTER_ADDR": "host"}, ["train.py"], False),
    ],
)
def test_only_a_single_node_meets_by_itself(
    variables: dict[str, str], arguments: list[str], is_alone: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv(OWN_STORE_VARIABLE, "1")
    monkeypatch.setattr(sys, "argv", ["torchrun", *arguments])
    monkeypatch.setattr(torchrun.api, "LocalElasticAgent", torchrun.api.LocalElasticAgent)
    monkeypatch.setattr(torchrun.handlers, "SubprocessHandler", torchrun.handlers.SubprocessHandler)
    monkeypatch.setattr(torchrun.run, "main", lambda: None)
    torchrun.main()
    assert sys.argv[1:] == ["--standalone"] * is_alone + arguments
