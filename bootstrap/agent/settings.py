"""Settings of a node: the variables of node.env and runtime.env (contract/node_env.py), read once."""

from __future__ import annotations

import json
import pwd
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class AgentLimits:
    """Counts and times of the agent, in seconds; ``GPUFLEET_AGENT`` replaces some of them, as JSON.

    Attributes:
        max_restarts: restarts of the workers by one torchrun, which take seconds; the loss of another node uses one.
        max_launches: failed torchruns in a row until the agent gives up; one whose workers, torchrun's own restarts
            counted in, lived ``healthy_s`` seconds each starts the count again.
        relaunch_delay_s: before a failed torchrun is started again.
        worker_pause_s: between two runs of a worker's command; the group may end the node in it.
        kill_after_s: until a torchrun is killed, which gives its workers 30 s after SIGTERM. With the 75 s for saving
            (training/notices.py) it is below the unit's TimeoutStopSec and a spot notice's two minutes.
        gang_test_s: limit of the gang test; 0 for none.
        join_limit_s, join_poll_s: until all nodes of the fleet are in service; between two looks, or two attempts to
            take the training's role.
        gpu_check_s: between two looks for a fatal Xid error.
        hook_heartbeat_s: between two heartbeats of the terminate hook; lib.sh has the same.
        tell_delay_s: between two attempts to report to the controller.
        rendezvous_port: where the nodes' torchruns meet; the gang test's meet one port above.
    """

    max_restarts: int = 10
    max_launches: int = 5
    healthy_s: float = 300.0
    relaunch_delay_s: float = 5.0
    worker_pause_s: float = 60.0
    kill_after_s: float = 32.0
    gang_test_s: float = 90.0
    join_limit_s: float = 1800.0
    join_poll_s: float = 10.0
    gpu_check_s: float = 60.0
    hook_heartbeat_s: float = 60.0
    tell_delay_s: float = 30.0
    rendezvous_port: int = 29400


class Settings:
    """Settings as typed values, read once; an empty variable has its default.

    infra and the set-up write them: a malformed variable ends the agent.

    Attributes:
        environ: all variables.
        root: prefix of the system's paths; ``/`` on a node, a folder in tests.
        run_dir: memory folder with the files that the node's processes share.
        progress_file: in which rank 0 says how far the job is (training/progress.py).
        credentials_dir: folder of the credentials of a training with a role of its own.
        log_file: of the agent's and the training's output (../gpufleet-train.service).
        instance_id: empty: ask the metadata service.
        group_name, terminate_hook, bucket, log_group: empty for none; without a group the agent ends with the training.
        in_group, is_gang: a group ends this node; several nodes train together.
        place_groups: groups of the node's place, its own first; a gang of two markets has two.
        image: container image that the training runs in, by digest; empty: in ``python``'s environment.
        train_role_arn: role whose credentials that user gets; empty: the node's own.
        limits: counts and times of the agent.
    """

    def __init__(self, environ: Mapping[str, str]) -> None:
        def text(name: str, default: str = "") -> str:
            return environ.get(name) or default

        self.environ = environ
        self.root = Path(text("ROOT", "/"))
        self.run_dir = Path(text("GPUFLEET_RUN_DIR", str(self.root / "run/gpufleet")))
        self.progress_file = self.run_dir / "progress.json"
        self.credentials_dir = self.run_dir.with_name(f"{self.run_dir.name}-credentials")
        self.log_file = self.root / "var/log/gpufleet/train.log"
        self.instance_id = text("GPUFLEET_INSTANCE_ID")
        self.region = text("GPUFLEET_REGION")
        self.place_groups = tuple(text("GPUFLEET_ASG_NAME").split(","))
        self.group_name = self.place_groups[0]
        self.in_group = self.group_name != ""
        self.terminate_hook = text("GPUFLEET_TERMINATE_HOOK")
        self.bucket = text("GPUFLEET_BUCKET")
        self.report_folder = text("GPUFLEET_REPORT_FOLDER", "control/nodes")
        self.log_group = text("GPUFLEET_LOG_GROUP")
        self.run_id = text("GPUFLEET_RUN")
        self.mode = text("GPUFLEET_MODE", "training")
        self.node_count = int(text("GPUFLEET_NODE_COUNT", "1"))
        self.is_gang = self.mode == "training" and self.node_count > 1
        self.gpus_per_node = int(text("GPUFLEET_GPUS_PER_NODE", "1"))
        self.gpudirect = text("GPUFLEET_GPUDIRECT", "0") != "0"
        self.python = text("GPUFLEET_PYTHON", "python3")
        self.image = text("GPUFLEET_IMAGE")
        self.train_archive = text("GPUFLEET_TRAIN_ARCHIVE")
        self.train_command = text("GPUFLEET_TRAIN_COMMAND")
        self.train_dir = Path(text("GPUFLEET_TRAIN_DIR", str(Path.cwd())))
        self.train_role_arn = text("GPUFLEET_TRAIN_ROLE_ARN")
        self.limits = AgentLimits(**json.loads(text("GPUFLEET_AGENT", "{}")))

    @property
    def user(self) -> pwd.struct_passwd | None:
        """User that torchrun runs as; None: the agent's own. A missing one is an error: it must not be root."""
        name = self.environ.get("GPUFLEET_TRAIN_USER")
        return pwd.getpwnam(name) if name else None
