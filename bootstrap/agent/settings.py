"""Settings of a node: the variables of node.env and runtime.env (contract/node_env.py), read once."""

from __future__ import annotations

import json
import math
import pwd
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from bootstrap.contract.codec import FormatError
from bootstrap.contract.launcher import split_command
from bootstrap.contract.node_plan import NodePlan, read_node_plan

# torchrun gives its workers 30 s after SIGTERM, and is killed after this time. With the 75 s for saving
# (training/notices.py) it is below the unit's TimeoutStopSec and a spot notice's two minutes.
KILL_AFTER_S = 32.0
# Between heartbeats of a lifecycle hook; lib.sh has the same.
HOOK_HEARTBEAT_S = 60.0
MODES = ("training", "workers")


@dataclass(frozen=True)
class AgentLimits:
    """Counts and times of the agent, in seconds; ``GPUFLEET_AGENT`` replaces some of them, as JSON.

    Attributes:
        max_restarts: restarts of the workers by one torchrun, which take seconds; the loss of another node uses one.
        max_launches: failed torchruns in a row until the agent gives up; one whose workers, torchrun's own restarts
            counted in, lived ``healthy_s`` seconds each starts the count again.
        relaunch_delay_s: before a failed torchrun is started again.
        worker_pause_s: between two runs of a worker's command; the group may end the node in it.
        kill_after_s: until a torchrun that does not end is killed.
        gang_test_s: limit of the gang test; 0 for none.
        bad_host_hold_s: longest time that a node that failed a test keeps its host; 0 for none. It ends before the
            shortest terminate hook, 300 s (contract/timings.py).
        join_limit_s, join_poll_s: until all nodes of the fleet are in service; between two looks, or two attempts to
            take the training's role.
        gpu_check_s: between two looks for a fatal Xid error.
        tell_delay_s: between two attempts to report to the controller.
        rendezvous_port: where the nodes' torchruns meet; the gang test's meet one port above.
    """

    max_restarts: int = 10
    max_launches: int = 5
    healthy_s: float = 300.0
    relaunch_delay_s: float = 5.0
    worker_pause_s: float = 60.0
    kill_after_s: float = KILL_AFTER_S
    gang_test_s: float = 90.0
    bad_host_hold_s: float = 240.0
    join_limit_s: float = 1800.0
    join_poll_s: float = 10.0
    gpu_check_s: float = 60.0
    tell_delay_s: float = 30.0
    rendezvous_port: int = 29400


@dataclass(frozen=True)
class Settings:
    """Settings as typed values.

    Attributes:
        problems: what is wrong with the variables; a wrong number has its default, so that the node can still leave.
        environ: all variables.
        node_env: file of the variables, for messages.
        root: prefix of the system's paths; ``/`` on a node, a folder in tests.
        run_dir: memory folder with the files that the node's processes share.
        instance_id: empty: ask the metadata service.
        group_name, terminate_hook, bucket, log_group: empty for none; without a group the agent ends with the training.
        place_groups: groups of the node's place, its own first; a gang of two markets has two.
        image: container image that the training runs in, by digest; empty: in ``python``'s environment.
        train_user: user that torchrun runs as; empty: the agent's own.
        train_role_arn: role whose credentials that user gets; empty: the node's own.
        limits: counts and times of the agent.
        hook_heartbeat_s: between two heartbeats of the terminate hook.
    """

    problems: tuple[str, ...]
    environ: Mapping[str, str]
    node_env: str
    root: Path
    run_dir: Path
    instance_id: str
    region: str
    group_name: str
    place_groups: tuple[str, ...]
    terminate_hook: str
    bucket: str
    report_folder: str
    log_group: str
    run_id: str
    mode: str
    node_count: int
    gpus_per_node: int
    gpudirect: bool
    plan: NodePlan | None
    python: str
    image: str
    train_archive: str
    train_command: str
    train_dir: Path
    train_user: str
    train_role_arn: str
    limits: AgentLimits
    hook_heartbeat_s: float

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> Settings:
        """Read all variables; an empty one has its default."""
        read = _Reader(environ)
        root = Path(read.text("ROOT", "/"))
        run_dir = Path(read.text("GPUFLEET_RUN_DIR", str(root / "run/gpufleet")))
        region, (group_name, *others) = read.text("GPUFLEET_REGION"), read.text("GPUFLEET_ASG_NAME").split(",")
        mode = read.text("GPUFLEET_MODE", MODES[0])
        if mode not in MODES:
            read.problems.append(f"GPUFLEET_MODE is '{mode}'; expected training or workers in {read.file}")
        node_count = read.count("GPUFLEET_NODE_COUNT", 1)
        gpus_per_node = read.count("GPUFLEET_GPUS_PER_NODE", 1)
        train_command, python = read.text("GPUFLEET_TRAIN_COMMAND"), read.text("GPUFLEET_PYTHON", "python3")
        if split_command(train_command) is None:
            # Without the command, which may hold a token.
            read.problems.append(f"GPUFLEET_TRAIN_COMMAND in {read.file} has unbalanced quotes")
        if shutil.which(python) is None:
            read.problems.append(
                f"GPUFLEET_PYTHON is {python}, and there is no such program; steps/install-python-env.sh writes it"
            )
        train_user = read.text("GPUFLEET_TRAIN_USER")
        if train_user and user_of(train_user) is None:
            read.problems.append(
                f"GPUFLEET_TRAIN_USER is {train_user}, and there is no such user: run steps/create-training-user.sh"
            )
        if mode == MODES[0] and node_count > 1 and not (group_name and region):
            read.problems.append(
                f"GPUFLEET_NODE_COUNT is {node_count}: set GPUFLEET_ASG_NAME and GPUFLEET_REGION, to find the others"
            )
        return cls(
            environ=environ,
            node_env=read.file,
            root=root,
            run_dir=run_dir,
            instance_id=read.text("GPUFLEET_INSTANCE_ID"),
            region=region,
            group_name=group_name,
            place_groups=(group_name, *others),
            terminate_hook=read.text("GPUFLEET_TERMINATE_HOOK"),
            bucket=read.text("GPUFLEET_BUCKET"),
            report_folder=read.text("GPUFLEET_REPORT_FOLDER", "control/nodes"),
            log_group=read.text("GPUFLEET_LOG_GROUP"),
            run_id=read.text("GPUFLEET_RUN"),
            mode=mode,
            node_count=node_count,
            gpus_per_node=gpus_per_node,
            gpudirect=read.text("GPUFLEET_GPUDIRECT", "0") != "0",
            plan=read.plan(),
            python=python,
            image=read.text("GPUFLEET_IMAGE"),
            train_archive=read.text("GPUFLEET_TRAIN_ARCHIVE"),
            train_command=train_command,
            train_dir=Path(read.text("GPUFLEET_TRAIN_DIR", str(Path.cwd()))),
            train_user=train_user,
            train_role_arn=read.text("GPUFLEET_TRAIN_ROLE_ARN"),
            limits=read.limits(),
            hook_heartbeat_s=read.seconds("HOOK_HEARTBEAT_S", HOOK_HEARTBEAT_S),
            problems=tuple(read.problems),
        )

    @property
    def progress_file(self) -> Path:
        """File in which rank 0 says how far the job is (training/progress.py)."""
        return self.run_dir / "progress.json"

    @property
    def log_file(self) -> Path:
        """File of the agent's and the training's output (../gpufleet-train.service)."""
        return self.root / "var/log/gpufleet/train.log"

    @property
    def credentials_dir(self) -> Path:
        """Folder of the credentials of a training with a role of its own."""
        return self.run_dir.with_name(f"{self.run_dir.name}-credentials")

    @property
    def in_group(self) -> bool:
        """True where a group ends this node."""
        return bool(self.group_name)

    @property
    def is_gang(self) -> bool:
        """True where several nodes train together."""
        return self.mode == MODES[0] and self.node_count > 1


class _Reader:
    """Values of the variables, and what is wrong with them."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self.environ = environ
        self.problems: list[str] = []
        self.file = f"{environ.get('ROOT', '')}/etc/gpufleet/node.env"

    def text(self, name: str, default: str = "") -> str:
        return self.environ.get(name) or default

    def count(self, name: str, default: int, *, least: int = 1) -> int:
        text = self.text(name, str(default))
        if text.isascii() and text.isdecimal() and int(text) >= least:
            return int(text)
        self.problems.append(f"{name} is '{text}'; expected a count of at least {least} in {self.file}")
        return default

    def plan(self) -> NodePlan | None:
        try:
            return read_node_plan(self.environ)
        except FormatError as error:
            self.problems.append(f"{error} in {self.file}")
            return None

    def limits(self) -> AgentLimits:
        """AgentLimits with those that the variable replaces."""
        try:
            given = dict(json.loads(self.text("GPUFLEET_AGENT", "{}")))
        except (ValueError, TypeError):
            self.problems.append(f"GPUFLEET_AGENT is no JSON object in {self.file}")
            return AgentLimits()
        good = {}
        for name, value in given.items():
            default = getattr(AgentLimits, name, None)
            allowed = (int,) if isinstance(default, int) else (int, float)
            if default is not None and type(value) in allowed and 0 <= value < math.inf:
                good[name] = value
            else:
                self.problems.append(
                    f"GPUFLEET_AGENT has {name} {value!r} in {self.file}; expected one of {AgentLimits()}"
                )
        return AgentLimits(**good)

    def seconds(self, name: str, default: float) -> float:
        text = self.text(name, str(default))
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if 0 <= value < math.inf:
            return value
        self.problems.append(f"{name} is '{text}'; expected seconds in {self.file}")
        return default


def user_of(name: str) -> pwd.struct_passwd | None:
    """Entry of a user; None where there is none."""
    try:
        return pwd.getpwnam(name)
    except KeyError:
        return None
