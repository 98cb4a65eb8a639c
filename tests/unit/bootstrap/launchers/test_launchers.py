"""Programs with a launcher of their own, on nodes that are processes with addresses of the loopback network."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from bootstrap.agent import torchrun
from bootstrap.contract.launcher import command_faults, loses_sigterm, split_command, start_of
from bootstrap.launchers.environment import expand, write_files
from bootstrap.processes import descendants, lone_world

ROOT = Path(__file__).parents[4]


@pytest.mark.parametrize(
    ("command", "start"),
    [
        ("", "torchrun"), ("train.py --launcher mpirun", "torchrun"), ("-m my.train", "torchrun"),
        ("--no-python env A=1 python train.py", "torchrun"),
        ("python train.py", "program"), ("accelerate launch train.py", "program"), ("./run.sh", "program"),
        ("mpirun -np 16 python train.py", "mpi"), ("/opt/amazon/openmpi/bin/mpirun train", "mpi"),
        ("conda run -n hvd mpiexec python train.py", "mpi"),
    ],
)  # fmt: skip
def test_the_first_word_says_how_a_command_is_started(command: str, start: str) -> None:
    assert start_of(split_command(command) or []) == start


@pytest.mark.parametrize(
    ("command", "says"),
    [
        ("conda run -n env torchrun train.py", "torchrun has no option"),
        ("python -m torch.distributed.launch --nproc_per_node 8 train.py", "torchrun has no option"),
        ("env A=1 python3 -m accelerate.commands.launch train.py", "accelerate has no option"),
        ("./launch --nproc-per-node=8 train.py", "nproc-per-node has no option"),
        ("horovodrun -np 16 python train.py", "horovodrun reaches other nodes by SSH"),
        ("-m torch.distributed.launch --nproc_per_node 8 train.py", "torchrun would start in each rank"),
        ("--no-python deepspeed train.py", "deepspeed would start in each rank"),
        ("VAR=1 python train.py", "VAR=1 is a shell's"),
        ("cd src && python train.py", "cd is a shell's"),
        ("train.py --epochs 3 && echo done", "&& is a shell's"),
        ("srun -N 4 python train.py", "srun starts ranks by a cluster's daemons"),
        ("python -umtorch.distributed.run train.py", "torchrun has no option"),
        ("accelerate-launch train.py", "accelerate-launch has no option"),
        ("bash -c 'cd src && A=1 torchrun --standalone train.py'", "torchrun has no option"),
        ("sh -c 'exec python -m accelerate.commands.launch train.py'", "accelerate has no option"),
        ("bash -lc 'conda activate env; mpirun -np 16 python train.py'", "mpirun in a shell's script"),
        ("python train.py; echo done", "train.py; is a shell's"),
        ("python train.py >log", ">log is a shell's"),
        ("bash -c 'pip install accelerate && python train.py --launcher torchrun --separator=\">\"'", ""),
        ("bash -c 'exec torchrun --rdzv-endpoint $MASTER_ADDR:29500 train.py'", ""),
        ("train.py --pad <pad> '<eos>' --above '>0.5'", ""),
        ("deepspeed --no_ssh --master_addr ${MASTER_ADDR} train.py", ""),
        ("python train.py --num_nodes 4 --nnodes 4", ""),
        ("bash run.sh --nnodes 4 torchrun", ""),
        ("bash -c 'export A=1; exec python train.py;'", ""),
        ("train.py --separator '|' --model flux --text 'a && b'", ""),
        ("train.py | tee log", "| is a shell's"),
        ("ulimit -n 4096; python train.py", "ulimit is a shell's"),
        ("mpirun python accelerate", ""),
        ("bash -c 'cd src && exec python train.py --rank-of ${GPUFLEET_NODE_RANK}'", ""),
        ("--no-python env A=1 python train.py", ""),
        ("", ""),
    ],
)  # fmt: skip
def test_a_command_that_starts_no_gang_is_named(command: str, says: str) -> None:
    faults = list(command_faults(split_command(command) or [], is_gang=True))
    assert faults == [] if not says else faults[0].startswith(says), faults
    alone = list(command_faults(split_command(command) or [], is_gang=False))
    assert bool(alone) is bool(says and not any(word in says for word in ("option", "SSH", "script")))


@pytest.mark.parametrize(
    ("worlds", "lone"),
    [([(0, 2), (1, 2)], 2), ([(0, 4), (1, 4)], 0), ([(0, 1), (2, 4), (3, 4)], 0), ([(0, 1)], 1), ([], 0)],
)
def test_ranks_that_are_all_on_this_node_are_seen_whoever_set_them(worlds: list[tuple[int, int]], lone: int) -> None:
    starts = [f"RANK={rank} WORLD_SIZE={world} sleep 60 &" for rank, world in worlds]
    program = subprocess.Popen(["bash", "-c", f"{' '.join(starts)} echo; wait"], stdout=subprocess.PIPE)
    with program:
        assert program.stdout is not None
        program.stdout.readline()
        while len(descendants(program.pid)) < len(worlds) or any(
            Path(f"/proc/{pid}/comm").read_text() != "sleep\n" for pid in descendants(program.pid)
        ):
            time.sleep(0.01)
        try:
            assert lone_world([program.pid]) == lone
        finally:
            for pid in (*descendants(program.pid), program.pid):
                os.kill(pid, 9)


@pytest.mark.parametrize(("worlds", "is_found"), [([8] * 6, True), ([8, 8, 0] * 6, False), ([1] * 12, False)])
def test_a_node_of_several_that_trains_by_itself_is_a_fault_of_the_command(
    worlds: list[int], is_found: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torchrun, "LOOK_S", 0.0)
    seen = iter(worlds)
    monkeypatch.setattr(torchrun, "lone_world", lambda _: next(seen))
    run = object.__new__(torchrun.Torchrun)
    run._node = cast(Any, SimpleNamespace(settings=SimpleNamespace(gpus_per_node=8, node_count=4, image="")))
    run._process, run._look_from, run._looks = cast(Any, SimpleNamespace(pid=0)), 0.0, 0
    faults = [fault for _ in worlds if (fault := run.trains_alone())]
    assert bool(faults) is is_found
    if is_found:
        assert "each of the 4 nodes trains by itself" in faults[0]


def test_conda_run_keeps_sigterm_to_itself() -> None:
    assert loses_sigterm(["/opt/conda/bin/conda", "run", "-n", "env", "python", "train.py"])
    for command in ("", "run conda", "/opt/conda/envs/run/bin/python train.py", "conda info", "bash run.sh"):
        assert not loses_sigterm(split_command(command) or [])


def test_the_pages_commands_start_a_gang() -> None:
    page = (ROOT / "docs/engines.md").read_text(encoding="utf-8")
    commands = [split_command(text) or [] for text in re.findall(r"gpufleet:trainCommand '(.*)'\n", page)]
    assert [(words[0], start_of(words)) for words in commands] == [
        ("accelerate", "program"), ("deepspeed", "program"), ("mpirun", "mpi"), ("python", "program"),
        ("/opt/conda/envs/env/bin/torchrun", "program"),
    ]  # fmt: skip
    given = dict.fromkeys(re.findall(r"`(GPUFLEET_\w+|MASTER_\w+)`", page), "1")
    for words in commands:
        assert not list(command_faults(words, is_gang=True)) and not loses_sigterm(words)
        assert "${" not in " ".join(expand(words, given)), "the page's table has every variable"


class Gang:
    """Two nodes of a gang, each as torchrun would start its only worker."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "bin").mkdir()
        with closing(socket.socket()) as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]

    def put(self, name: str, script: str) -> None:
        program = self.folder / "bin" / name
        program.write_text(f"#!/bin/bash\n{script}")
        program.chmod(0o755)

    def start(self, rank: int, command: Sequence[str], count: int = 2) -> subprocess.Popen[str]:
        run = self.folder / f"run-{rank}"
        run.mkdir()
        environment = {
            "PATH": f"{self.folder / 'bin'}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT), "OUT": str(self.folder),
            "RANK": str(rank), "WORLD_SIZE": str(count), "LOCAL_RANK": "0", "GROUP_RANK": str(rank),
            "ROLE_NAME": "default", "TORCHELASTIC_RUN_ID": "fleet", "TORCHELASTIC_USE_AGENT_STORE": "True",
            "MASTER_ADDR": "127.0.0.2", "MASTER_PORT": str(self.port), "NODE": str(rank),
            "GPUFLEET_DRAIN_FILE": str(run / "drain"), "GPUFLEET_GPUS_PER_NODE": "4",
        }  # fmt: skip
        # -S: no packages, as in the system's Python.
        return subprocess.Popen(
            [sys.executable, "-S", "-m", "bootstrap.launchers", *command], env=environment, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip

    def run(self, *command: str) -> list[tuple[int, str]]:
        """Start both nodes; returns their exit statuses and output."""
        processes = [self.start(rank, command) for rank in range(2)]
        outputs = [process.communicate(timeout=30)[0] for process in processes]
        return [(process.returncode, output) for process, output in zip(processes, outputs, strict=True)]


@pytest.fixture
def gang(tmp_path: Path) -> Gang:
    return Gang(tmp_path)


def test_every_node_becomes_the_program_and_knows_the_others(gang: Gang) -> None:
    first = gang.start(
        0, ["bash", "-c", 'env >"$OUT/env-$NODE"; echo "$@"; exit 3', "sh", "${MASTER_ADDR}", "${hidden}"]
    )
    # A stranger's connection is no node.
    for _ in range(100):
        try:
            with socket.create_connection(("127.0.0.1", gang.port)) as stranger:
                stranger.sendall(b"GET / HTTP/1.0\r\n\r\n")
            break
        except OSError:
            time.sleep(0.05)
    second = gang.start(1, ["bash", "-c", 'env >"$OUT/env-$NODE"; cat "$GPUFLEET_HOSTFILE"'])
    assert first.communicate(timeout=30)[0] == "127.0.0.2 ${hidden}\n" and first.returncode == 3
    assert second.communicate(timeout=30)[0] == "127.0.0.2 slots=4\n127.0.0.1 slots=4\n"
    given = [
        dict(line.split("=", 1) for line in (gang.folder / f"env-{rank}").read_text().splitlines()) for rank in (0, 1)
    ]
    for rank, environment in enumerate(given):
        assert environment["GPUFLEET_NODE_RANK"] == str(rank)
        assert (environment["GPUFLEET_NODE_COUNT"], environment["GPUFLEET_RANKS"]) == ("2", "8")
        assert not {"RANK", "WORLD_SIZE", "LOCAL_RANK", "GROUP_RANK", "ROLE_NAME"} & set(environment)
        assert not [name for name in environment if name.startswith("TORCHELASTIC")]
    task = {"type": "worker", "index": 1}
    config = json.loads(given[1]["TF_CONFIG"])
    workers = config["cluster"]["worker"]
    assert config["task"] == task and [worker.split(":")[0] for worker in workers] == ["127.0.0.2", "127.0.0.1"]
    for environment in given:
        assert f"{environment['MASTER_ADDR']}:{environment['MASTER_PORT']}" == workers[0] != workers[1]
        assert environment["MASTER_PORT"] != str(gang.port), "that port is the meeting's"


# mpirun of each kind calls its remote shell for the hosts of its host file, and exits with its ranks' status.
MPIRUN = """
[[ $NODE == 0 ]] || { echo "mpirun on node $NODE"; exit 99; }
while read -r host _; do
  "$OMPI_MCA_plm_rsh_agent" -x "$host" "RANKS=$2;" "echo ranks of \\$NODE: \\$RANKS >>'$OUT/ranks';" "exit 7"
  echo "$host ended with $?"
done <"$PRTE_MCA_prte_default_hostfile"
"$HYDRA_LAUNCHER_EXEC" 10.1.2.3 true
echo "a stranger: $?"
exit 78
"""


def test_mpirun_on_the_first_node_starts_ranks_on_the_others_without_ssh(gang: Gang) -> None:
    gang.put("mpirun", MPIRUN)
    (first, said), (second, _) = gang.run("mpirun", "-np", "${GPUFLEET_RANKS}")
    assert said == "127.0.0.2 ended with 7\n127.0.0.1 ended with 7\na stranger: 255\n"
    assert sorted((gang.folder / "ranks").read_text().splitlines()) == ["ranks of 0: 8", "ranks of 1: 8"]
    # Final on both nodes.
    assert (first, second) == (78, 78)


def test_ranks_do_not_outlive_a_first_node_that_is_gone(gang: Gang) -> None:
    # A daemon of mpirun leaves its session; its remote shell ends.
    gang.put("mpirun", '"$OMPI_MCA_plm_rsh_agent" 127.0.0.1 "setsid sleep 300 & echo \\$! >$OUT/pid"\nkill -9 $PPID\n')
    (first, _), (second, said) = gang.run("mpirun")
    assert (first, second) == (-9, 1) and "the first node, which runs mpirun, is gone" in said
    left = Path(f"/proc/{(gang.folder / 'pid').read_text().strip()}/cmdline")
    assert not left.exists() or not left.read_text(), "gone, or a zombie"


# Open MPI 5.0.11 says "PRTE has lost communication with a remote daemon", and ends with 0. Or it waits for ever.
@pytest.mark.parametrize(
    ("on_the_other", "then", "statuses"),
    [
        ("kill -9 \\$PPID", "exit 0", (1, -9)),
        ("kill -9 \\$PPID", "sleep 300", (1, -9)),
        ("exit 3", "exit 0", (1, 1)),
        ("exit 0", "exit 0", (0, 0)),
    ],
)
def test_an_mpirun_that_lost_a_node_has_failed(
    gang: Gang, on_the_other: str, then: str, statuses: tuple[int, int]
) -> None:
    gang.put("mpirun", f'"$OMPI_MCA_plm_rsh_agent" 127.0.0.1 "{on_the_other}"\n{then}\n')
    (first, said), (second, _) = gang.run("mpirun")
    assert (first, second) == statuses
    assert ("mpirun lost 127.0.0.1\n" in said) is (first == 1)


def test_a_single_node_has_no_gang(gang: Gang) -> None:
    gang.put(
        "mpirun", 'cat "$HYDRA_HOST_FILE"; echo "$MASTER_ADDR ${TF_CONFIG:-none} ${GPUFLEET_NODE_RANK:-none}"; exit 5'
    )
    process = gang.start(0, ["mpirun"], count=1)
    assert process.communicate(timeout=30)[0] == "127.0.0.1:4\n127.0.0.1 none none\n"
    assert process.returncode == 5


def test_mpirun_finds_its_remote_shell_and_a_users_own_variable_stays(tmp_path: Path) -> None:
    environment = {"GPUFLEET_DRAIN_FILE": str(tmp_path / "drain"), "GLOO_SOCKET_IFNAME": "ens6"}
    made = write_files(environment | {"OMPI_MCA_btl_tcp_if_exclude": "lo"}, ["10.0.0.1"])
    assert "OMPI_MCA_btl_tcp_if_exclude" not in made
    shell = Path(made["OMPI_MCA_plm_rsh_agent"])
    assert shell.parent == ROOT / "bootstrap/launchers", "/run/gpufleet is mounted noexec"
    assert shell.read_text().startswith("#!") and os.access(shell, os.X_OK), "the bundle makes it a program"
    assert made["HYDRA_IFACE"] == made["I_MPI_HYDRA_IFACE"] == "ens6"


def test_a_process_that_ends_while_it_is_listed_hides_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other would be left behind, with its memory on the GPU."""
    read = Path.read_text
    with subprocess.Popen(["sleep", "60"]) as ended, subprocess.Popen(["sleep", "60"]) as lives:

        def read_text(path: Path, **options: Any) -> str:
            if path == Path(f"/proc/{ended.pid}/stat"):
                raise ProcessLookupError(path)
            return read(path, **options)

        monkeypatch.setattr(Path, "read_text", read_text)
        found = descendants(os.getpid())
        ended.kill()
        lives.kill()
    assert lives.pid in found and ended.pid not in found
