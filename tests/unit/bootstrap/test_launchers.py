"""Programs with a launcher of their own: which commands they are, which are refused, what a program finds."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from bootstrap import launchers
from bootstrap.agent import torchrun
from bootstrap.contract.launcher import command_faults, loses_sigterm, split_command, start_of
from bootstrap.launchers import expand, program_environment
from bootstrap.processes import count_ranks, descendants

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(
    ("command", "start"),
    [
        ("", "torchrun"), ("train.py --launcher mpirun", "torchrun"), ("-m my.train", "torchrun"),
        ("--no-python env A=1 python train.py", "torchrun"),
        ("python train.py", "program"), ("accelerate launch train.py", "program"), ("./run.sh", "program"),
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
        ("bash -lc 'conda activate env; mpirun -np 16 python train.py'", "mpirun reaches other nodes by SSH"),
        ("/opt/amazon/openmpi/bin/mpirun python accelerate", "mpirun reaches other nodes by SSH"),
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
        ("bash -c 'if true; then A=1 timeout -k 5 2h qsub run.sh; fi'", "qsub starts ranks by a cluster's daemons"),
        ("timeout -s INT 3h bash -c 'numactl -N 0 python -mtorch.distributed.run train.py'", "torchrun has no option"),
        ("bash -c 'poetry -C src run torchrun train.py'", "torchrun has no option"),
        ("python -m poetry run torchrun train.py", "torchrun has no option"),
        ("tini -g -- uv run --frozen python -m torch.distributed.run train.py", "torchrun has no option"),
        ("uv run train.py --nnodes 4 run torchrun", ""),
        ("env A=1 python -m train --model flux --do srun", ""),
        ("python -m flux t2i", ""),
        ("bash -c 'exec flux run python train.py'", "flux run starts ranks by a cluster's daemons"),
        ("bash -c 'cd src && exec python train.py --rank-of ${GPUFLEET_NODE_RANK}'", ""),
        ("--no-python env A=1 python train.py", ""),
        ("--standalone --nproc_per_node=8 train.py", "--nproc-per-node is the nodes' to give"),
        ("--nnodes 1 -m my.train", "--nnodes is the nodes' to give"),
        ("--rdzv_b static --redirects 3 train.py", "--rdzv-b is the nodes' to give"),
        ("--redirects 3 -m my.train --nnodes 1 --launcher torchrun", ""),
        ("--no-python mine --standalone", ""),
        ("'my code/train.py' --nnodes 4 --launcher srun", ""),
        ("python -m my.train --nnodes 4 --launcher deepspeed", ""),
        ("bash -euxo pipefail -c 'torchrun train.py'", "torchrun has no option"),
        ("bash --login -c 'set -e; $(which deepspeed) train.py'", "deepspeed has no option"),
        ("env -S 'A=1 accelerate launch train.py'", "accelerate has no option"),
        ("python /env/torch/distributed/run.py --nproc_per_node 8 train.py", "torchrun has no option"),
        ("numactl -m 0 torchrun train.py", "torchrun has no option"),
        ("conda run -n deepspeed python train.py", ""),
        ("uv run --with accelerate python train.py", ""),
        ("./train --launcher srun", ""),
        ("env -u A nice -n 5 ./train mpirun --backend deepspeed", ""),
        ("conda info torchrun", ""),
        ("bash -c", ""),
        ("python -Xfrozen_modules=off -W ignore -m torch.distributed.run train.py", "torchrun has no option"),
        ("uv run --with accelerate -m accelerate.commands.launch train.py", "accelerate has no option"),
        ("conda run --live-stream -n deepspeed deepspeed train.py", "deepspeed has no option"),
        ("apptainer exec --nv image.sif torchrun train.py", "torchrun has no option"),
        ("sudo -E torchrun train.py", "torchrun has no option"),
        ("bash -c 'doppler run -- accelerate launch train.py'", "accelerate has no option"),
        ("python /opt/conda/bin/torchrun train.py", "torchrun has no option"),
        ("coverage run -m torch.distributed.run train.py", "torchrun has no option"),
        ("./train --backend deepspeed --config run.py", ""),
        ("hatch -e deepspeed run python train.py", ""),
        ("bash -c 'python -c \"import deepspeed\" && exec python train.py'", ""),
        ("bash -c 'which torchrun; command -v deepspeed && exec python train.py'", ""),
        ("bash -c '`which accelerate` launch train.py'", "accelerate has no option"),
        ("bash <(cat run.sh)", "<(cat is a shell's"),
        ("timeout 3h torchrun -m my.train", "torchrun has no option"),
        ("conda run -n deepspeed python -m my.train", ""),
        ("accelerate config", ""),
        ("bash -c 'accelerate config default && accelerate env; pip install deepspeed && python train.py'", ""),
        ("time -o deepspeed python train.py", ""),
        ("time -o deepspeed torchrun train.py", "torchrun has no option"),
        ("ksh -c 'exec torchrun \"$@\"'", "torchrun has no option"),
        ("su ubuntu -c 'cd src; torchrun train.py'", "torchrun has no option"),
        ("docker run --rm -e deepspeed image python train.py", ""),
        ("uv run --with deepspeed train.py", ""),
        ("python train.py -c 'torchrun train.py'", ""),
        ("conda run -n deepspeed --no-capture-output python train.py", ""),
        ("conda run -n deepspeed --no-capture-output torchrun train.py", "torchrun has no option"),
        ("numactl --membind=0 deepspeed --module my.train", "deepspeed has no option"),
        ("uv run --frozen accelerate launch train.py", "accelerate has no option"),
        ("uv run --extra deepspeed --no-sync train.py", ""),
        ("/opt/nvidia/nvidia_entrypoint.sh torchrun train.py", "torchrun has no option"),
        ("uv run deepspeed --num_gpus 2 --module swift.cli.sft", "deepspeed has no option"),
        ("conda run -n deepspeed ./run.sh torchrun", ""),
        ("conda run --prefix=/envs/deepspeed python train.py", ""),
        ("docker run --rm deepspeed/deepspeed python3.12 train.py", ""),
        ("stdbuf -oL mpirun -np 8 python train.py", "mpirun reaches other nodes by SSH"),
        ("env A=1 srun -N 4 ./train", "srun starts ranks by a cluster's daemons"),
        ("timeout 3h mpirun ./train", "mpirun reaches other nodes by SSH"),
        ("sudo --preserve-env torchrun --nproc_per_node 8 -m my.train", "torchrun has no option"),
        ("uv run -w deepspeed train.py", ""),
        ("python -m flux run --config run.py", ""),
        ("./train --launcher srun --data /mnt/data", ""),
        ("bash -c 'pip install deepspeed ./mine && aws s3 sync s3://a/composer /data && python train.py'", ""),
        ("python -m my.train --launcher torchrun --config configs/run.py", ""),
        ("", ""),
    ],
)  # fmt: skip
def test_a_command_that_starts_no_gang_is_named(command: str, says: str) -> None:
    faults = list(command_faults(split_command(command) or [], is_gang=True))
    assert faults == [] if not says else faults[0].startswith(says), faults
    alone = list(command_faults(split_command(command) or [], is_gang=False))
    assert bool(alone) is bool(says and not any(word in says for word in ("option", "SSH")))


@pytest.mark.parametrize(
    ("worlds", "counted"),
    [
        ([(0, 2), (1, 2)], (2, 2)),
        ([(0, 4), (1, 4)], (4, 2)),
        ([(0, 1), (2, 4), (3, 4)], (4, 2)),
        ([(0, 1)], (1, 1)),
        ([], (0, 0)),
    ],
)
def test_ranks_that_are_all_on_this_node_are_seen_whoever_set_them(
    worlds: list[tuple[int, int]], counted: tuple[int, int]
) -> None:
    starts = [f"RANK={rank} WORLD_SIZE={world} sleep 60 &" for rank, world in worlds]
    program = subprocess.Popen(["bash", "-c", f"{' '.join(starts)} echo; wait"], stdout=subprocess.PIPE)
    with program:
        assert program.stdout is not None
        program.stdout.readline()
        while len(descendants(program.pid)) < len(worlds) or any(
            b"WORLD_SIZE=" not in Path(f"/proc/{pid}/environ").read_bytes() for pid in descendants(program.pid)
        ):
            time.sleep(0.01)
        try:
            assert count_ranks([program.pid]) == counted
        finally:
            for pid in (*descendants(program.pid), program.pid):
                os.kill(pid, 9)


@pytest.mark.parametrize(
    ("worlds", "is_found"), [([8] * 6, True), ([8, 8, 32] * 6, False), ([1] * 12, False), ([16] * 9, False)]
)
def test_a_node_of_several_that_trains_by_itself_is_a_fault_of_the_command(
    worlds: list[int], is_found: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torchrun, "LOOK_S", 0.0)
    seen = iter(worlds)
    monkeypatch.setattr(torchrun, "count_ranks", lambda _: (world := next(seen), min(world, 8)))
    run = object.__new__(torchrun.Torchrun)
    run._node = cast(Any, SimpleNamespace(settings=SimpleNamespace(gpus_per_node=8, node_count=4, image="")))
    run._process, run._look_from = cast(Any, SimpleNamespace(pid=0)), 0.0
    run._looks = run._unplanned_world = 0
    faults = [fault for _ in worlds if (fault := run.trains_alone())]
    assert bool(faults) is is_found
    assert capsys.readouterr().err.count("is 16, and the plan has 32") == (16 in worlds)
    if is_found:
        assert "each of the 4 nodes trains by itself" in faults[0]


def test_conda_run_keeps_sigterm_to_itself() -> None:
    for command in (
        "/opt/conda/bin/conda run -n env python train.py",
        "bash -lc 'cd src && exec conda run --no-capture-output -n env python train.py'",
        'nice -n 5 stdbuf -oL sh -c "timeout 3h conda run -p /env ./train"',
    ):
        assert loses_sigterm(split_command(command) or [])
    for command in (
        "",
        "run conda",
        "uv run conda.py run",
        "bash -c 'conda info; python train.py run'",
        "/opt/conda/envs/run/bin/python train.py",
        "conda info",
        "bash run.sh",
    ):
        assert not loses_sigterm(split_command(command) or [])


def test_the_pages_commands_start_a_gang() -> None:
    page = (ROOT / "docs/engines.md").read_text(encoding="utf-8")
    commands = [split_command(text) or [] for text in re.findall(r"gpufleet:trainCommand '(.*)'\n", page)]
    assert [(words[0], start_of(words)) for words in commands] == [
        ("accelerate", "program"),
        ("/opt/conda/envs/env/bin/torchrun", "program"),
    ]
    given = dict.fromkeys(re.findall(r"`(GPUFLEET_\w+|MASTER_\w+)`", page), "1")
    for words in commands:
        assert not list(command_faults(words, is_gang=True)) and not loses_sigterm(words)
        assert "${" not in " ".join(expand(words, given)), "the page's table has every variable"


def test_a_node_becomes_the_program_and_knows_its_place(tmp_path: Path) -> None:
    environment = {
        "PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0",
        "GROUP_RANK": "1", "ROLE_NAME": "default", "TORCHELASTIC_RUN_ID": "fleet", "MASTER_ADDR": "10.0.0.9",
        "MASTER_PORT": "4711", "GPUFLEET_GPUS_PER_NODE": "4",
    }  # fmt: skip
    command = ["bash", "-c", 'env; echo "$@"; exit 3', "sh", "${MASTER_ADDR}:${MASTER_PORT}", "${hidden}"]
    # -S: no packages, as in the system's Python.
    done = subprocess.run(
        [sys.executable, "-S", "-m", "bootstrap.launchers", *command], env=environment, text=True, check=False,
        capture_output=True, cwd=tmp_path,
    )  # fmt: skip
    *lines, said = done.stdout.splitlines()
    assert (done.returncode, said) == (3, "10.0.0.9:4711 ${hidden}")
    given = dict(line.split("=", 1) for line in lines)
    assert {name: given[name] for name in given if name.startswith("GPUFLEET_")} == {
        "GPUFLEET_NODE_RANK": "1", "GPUFLEET_NODE_COUNT": "2", "GPUFLEET_RANKS": "8", "GPUFLEET_GPUS_PER_NODE": "4",
    }  # fmt: skip
    assert not [name for name in given if "WORLD_SIZE" in name or name.startswith(("ROLE_", "GROUP_", "TORCHEL"))]
    assert program_environment(environment | {"WORLD_SIZE": "1"})["MASTER_ADDR"] == "127.0.0.1"


def test_a_script_that_names_no_shell_is_at_fault(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "run.sh"
    script.write_text("torchrun train.py\n")
    script.chmod(0o755)
    with pytest.raises(SystemExit) as ended:
        launchers.main([str(script)], {"RANK": "0", "WORLD_SIZE": "2"})
    assert ended.value.code == 78 and "begin a script with #!/bin/bash" in capsys.readouterr().err


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
