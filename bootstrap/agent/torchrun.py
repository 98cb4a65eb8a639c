"""One torchrun: its command line, its workers, its end."""

from __future__ import annotations

import hashlib
import math
import os
import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from bootstrap.agent import container
from bootstrap.agent.commands import AWS_ENVIRONMENT, log, output_of, python_path, start_as
from bootstrap.agent.efa import efa_settings
from bootstrap.agent.node import SupervisedNode
from bootstrap.agent.rendezvous import Rendezvous
from bootstrap.agent.settings import Settings
from bootstrap.contract.checkpoint import FOLDER
from bootstrap.contract.launcher import split_command, start_of
from bootstrap.contract.node_plan import read_node_plan
from bootstrap.contract.words import counted
from bootstrap.processes import children, count_ranks, descendants, is_running

# A node that says nothing for ``interval`` times ``max_attempt`` seconds is out of the rendezvous. Its replacement
# needs longer than 10 s to come, so nobody waits for this; with 3 s, a torchrun that stood still for 6 s on a busy
# machine cost two nodes 70 s (torch 2.11: the next rendezvous waits 60 s for it and both start again).
RENDEZVOUS_CONF = "last_call_timeout=2,keep_alive_interval=1,keep_alive_max_attempt=10"
# Limit of the gang test's rendezvous, s (torchrun's default is 600). A node that waits at another port than its peers
# gives up after this time; all meet at the training's rendezvous.
TEST_JOIN_S = 120.0
# Ranks with a SpotTolerantRun end by themselves within a second of their torchrun, and say so; others hold their GPUs.
ORPHANS_END_S = 2.0
# Seconds between two looks at the ranks of several nodes, and looks that must agree.
LOOK_S, LOOKS = 5.0, 6
# A system service's PATH lacks the programs of the EFA installer, which brings Open MPI, and CUDA:
# https://docs.aws.amazon.com/dlami/latest/devguide/tutorial-efa-using.html
PROGRAMS = ("opt/amazon/efa/bin", "opt/amazon/openmpi/bin", "usr/local/cuda/bin")
# Variables beside the plan's that the training command follows.
FOLLOWED = (
    "GPUFLEET_NODE_COUNT", "GPUFLEET_GPUS_PER_NODE", "GPUFLEET_TRAIN_DATA", "GPUFLEET_BASE_WEIGHTS", "GPUFLEET_IMAGE",
)  # fmt: skip


def version(settings: Settings) -> str:
    """Digest of code, command, job and layout.

    Nodes of two versions never meet at the rendezvous, where they would silently compute different things in one job.
    """
    words = [settings.train_archive, settings.train_command]
    words += [f"{name}={settings.environ[name]}" for name in FOLLOWED if settings.environ.get(name)]
    plan = read_node_plan(settings.environ)
    words += [plan.layout] if plan else []
    text = " ".join(words) + "\n"
    return hashlib.sha256(text.encode("utf-8", errors="surrogateescape")).hexdigest()[:12]


def arguments(settings: Settings, rendezvous: Rendezvous | None, ranks: int, *, test: bool = False) -> list[str]:
    """Arguments of torchrun before the command of its ``ranks`` a node; the gang test's has a rendezvous of its own."""
    conf, suffix, max_restarts = RENDEZVOUS_CONF, "", settings.limits.max_restarts
    if test:
        conf, suffix, max_restarts = f"{conf},join_timeout={TEST_JOIN_S:g}", "-test", 0
    where = ["--standalone", "--nnodes", "1"]
    if rendezvous is not None:
        conf += f",is_host={int(rendezvous.is_host)}"
        # The address, not the name: all ranks connect to the first rank, and a VPC may have no DNS for its name.
        where = [
            "--nnodes", str(settings.node_count), "--rdzv-backend", "c10d",
            "--rdzv-id", f"{'+'.join(sorted(settings.place_groups))}-{version(settings)}{suffix}",
            "--rdzv-endpoint", f"{rendezvous.host_ip}:{settings.limits.rendezvous_port + test}",
            "--local-addr", rendezvous.own_ip,
        ]  # fmt: skip
    counts = ["--nproc-per-node", str(ranks), "--max-restarts", str(max_restarts)]
    return [*counts, "--rdzv-conf", conf, *where]


class Torchrun:
    """Running torchrun with the training command, or the gang test's."""

    def __init__(self, node: SupervisedNode, rendezvous: Rendezvous | None, test: Sequence[str] = ()) -> None:
        self._node = node
        self._look_from = math.inf if test or not node.settings.is_gang else time.monotonic()
        self._looks = self._unplanned_world = 0
        command, ranks = test or split_command(node.settings.train_command) or [], node.settings.gpus_per_node
        if not test and start_of(command) != "torchrun":
            log("the command is a program of its own: torchrun starts it once on every node")
            command, ranks = ["-m", "bootstrap.launchers", *command], 1
        options = arguments(node.settings, rendezvous, ranks, test=bool(test))
        node.notices.listener.unlink(missing_ok=True)  # a killed process could not
        node.notices.at_fault.unlink(missing_ok=True)  # of an earlier program
        # The command itself is not logged: it may hold a token.
        log(f"starting torchrun {' '.join(options)}")
        words = ["-m", "bootstrap.training.torchrun", *options, *command]
        environment = training_environment(node, rendezvous)
        if node.settings.image:
            container.remove()
            words, environment = container.command(node.settings, environment, words, container.NAME)
        else:
            words = [node.settings.python, *words]
        # docker starts torchrun as that user.
        self._process = start_as(
            None if node.settings.image else node.settings.user, words, environment, node.settings.train_dir
        )
        self._last_workers: list[int] = []

    def runs(self) -> bool:
        """True until torchrun has ended."""
        if self._process.poll() is not None:
            return False
        if not self._node.settings.image:  # the processes of a container end with it
            self._last_workers = self.workers()
        return True

    def trains_alone(self) -> str:
        """Fault of a command whose ranks, seen several times, are all on this node of several; empty for none.

        Whatever the command says, its ranks' variables tell how many there are.
        """
        if time.monotonic() < self._look_from:
            return ""
        (world, on_node), settings = count_ranks(self.workers()), self._node.settings
        planned = settings.node_count * settings.gpus_per_node
        if world > on_node and world not in (planned, self._unplanned_world):
            self._unplanned_world = world
            log(f"WORLD_SIZE of the command's ranks is {world}, and the plan has {planned}: GPUs may be paid idle")
        # A look a minute is enough once ranks of other nodes have joined: a script may start another job.
        self._look_from = time.monotonic() + (LOOK_S if world == on_node else 12 * LOOK_S)
        # A node that trains by itself uses all its GPUs; a smaller world may prepare data.
        is_alone = world == on_node and world >= settings.gpus_per_node
        self._looks = self._looks + 1 if is_alone else 0
        if self._looks < LOOKS:
            return ""
        return (
            f"WORLD_SIZE of the command's ranks is {world}, and all of them run on this node: each of the "
            f"{settings.node_count} nodes trains by itself (docs/engines.md)"
        )

    def status(self) -> int:
        """Wait for the exit status; 128 and the signal's number after a signal, as in a shell."""
        status = self._process.wait()
        if status >= 0:
            return status
        self._end_orphans()
        return 128 - status

    def _end_orphans(self) -> None:
        """End what a killed torchrun left: the next one's ranks would find no memory on the GPUs."""
        deadline = time.monotonic() + ORPHANS_END_S
        while left := [
            process for pid in self._last_workers if is_running(pid) for process in (pid, *descendants(pid))
        ]:
            if time.monotonic() >= deadline:
                log(f"torchrun was killed; ending {counted(len(left), 'process', 'processes')} that it left")
                for pid in left:
                    send(pid, signal.SIGKILL)
                return
            time.sleep(0.1)

    def workers(self) -> list[int]:
        """torchrun's children, which have sessions of their own and so no common process group."""
        if not self._node.settings.image:
            return children(self._process.pid)
        return [pid for torchrun in children(container.init_process()) for pid in children(torchrun)]

    def end(self) -> None:
        """Send SIGTERM, and SIGKILL to all where torchrun does not end in time."""
        deadline = time.monotonic() + self._node.settings.limits.kill_after_s
        self._process.terminate()
        while self.runs():
            if time.monotonic() >= deadline:
                log("torchrun does not end; killing it")
                # docker's client ends with the container's init, as all processes in it do.
                init = container.init_process() if self._node.settings.image else None
                for pid in (*self.workers(), init or self._process.pid):
                    send(pid, signal.SIGKILL)
                return
            self._node.tick()


def send(pid: int, number: int) -> bool:
    """Send a signal (0: none); returns whether the process is there."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True


def training_environment(node: SupervisedNode, rendezvous: Rendezvous | None) -> dict[str, str]:
    """Make the whole environment of torchrun: the node's variables, defaults below them, the agent's own above them."""
    settings, given = node.settings, node.settings.environ
    made = {
        # The plan's memory estimate assumes it: without it, blocks of odd sizes strand a part of the memory
        # (https://docs.pytorch.org/docs/stable/notes/cuda.html#optimizing-memory-usage-with-pytorch-alloc-conf).
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
    }
    if settings.region:
        made["AWS_DEFAULT_REGION"] = settings.region
    if settings.bucket:
        made["GPUFLEET_CHECKPOINT_URI"] = f"s3://{settings.bucket}/{FOLDER}"
    if rendezvous is not None:
        made |= _interfaces(rendezvous, given)
    # An empty variable counts as unset, as in a shell's ${NAME:-default}.
    made |= {name: value for name, value in given.items() if value or name not in made}
    made |= {
        **AWS_ENVIRONMENT,
        "PATH": _path(settings),
        "PYTHONPATH": python_path(given),
        "PYTHONUNBUFFERED": "1",
        # Images set it. A worker of packages without bytecode compiles them at each start: 8 s instead of 4 to import.
        "PYTHONDONTWRITEBYTECODE": "",
        "GPUFLEET_DRAIN_FILE": str(node.notices.path),
        "GPUFLEET_REGION": settings.region,
    }
    if (user := settings.user) is not None:
        made |= {"HOME": user.pw_dir, "USER": user.pw_name, "LOGNAME": user.pw_name}
    made |= node.credentials.environment()
    if settings.gpudirect and not settings.image:  # else the image's plugin counts (__main__.py, run-python)
        made |= efa_settings(settings.root, made)
    return made


def _path(settings: Settings) -> str:
    """PATH; first is the folder of the training's Python, with ``python``, accelerate and the like."""
    python, given = Path(settings.python), settings.environ.get("PATH", os.defpath)
    own = [str(python.parent)] if python.is_absolute() else []
    return ":".join([*own, given, *(str(settings.root / folder) for folder in PROGRAMS)])


def _interfaces(rendezvous: Rendezvous, given: Mapping[str, str]) -> dict[str, str]:
    """Keep NCCL's bootstrap and gloo off the bridges of containers, which no other node reaches."""
    # NCCL leaves out docker and lo by itself, and hangs on a veth (https://github.com/NVIDIA/nccl/issues/913).
    # Exclusions, as names differ: ens6, enp40s0 (https://github.com/aws/deep-learning-containers/pull/6469).
    made = {"NCCL_SOCKET_IFNAME": "^docker,lo,veth"}
    # Gloo takes names only, and by default the address of the host's own name, which may be docker0's:
    # https://docs.pytorch.org/docs/stable/distributed.html#choosing-the-network-interface-to-use
    if not given.get("GLOO_SOCKET_IFNAME"):
        # "2: enp71s0    inet 10.0.0.9/20 ..."
        shown = output_of(["ip", "-oneline", "-4", "address", "show", "to", f"{rendezvous.own_ip}/32"], 10.0) or ""
        if len(words := shown.split()) > 1:
            made["GLOO_SOCKET_IFNAME"] = words[1]
    return made
