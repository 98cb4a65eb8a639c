"""Container that the training runs in where the stack has an image (gpufleet:image): docker's command line, its end.

Folders have the node's paths inside, so every variable holds there too. docker's client passes signals on and ends with
the container's exit status: https://docs.docker.com/reference/cli/docker/container/run/
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from bootstrap.agent.commands import BOOTSTRAP, output_of
from bootstrap.agent.settings import Settings

# One training container a node.
NAME = "gpufleet-train"
DOCKER_LIMIT_S = 30.0
# Variables of the node that the container gets; its PATH, libraries and locale are the image's.
PASSED = ("AWS_", "FI_", "GLOO_", "GPUFLEET_", "NCCL_", "OFI_", "OMP_", "PYTHON", "PYTORCH_", "TORCH_")
# The image's Python has another name than the node's, and what it starts starts no container.
OWN = frozenset({"GPUFLEET_PYTHON", "GPUFLEET_IMAGE"})
# EFA's devices and GDRCopy's, which NVIDIA's toolkit does not add; and the GPUs', which it adds, but which a container
# loses at the next `systemctl daemon-reload` (https://github.com/NVIDIA/nvidia-container-toolkit/issues/48).
DEVICES = ("infiniband/uverbs*", "gdrdrv", "nvidia[0-9]*", "nvidiactl", "nvidia-uvm*", "nvidia-modeset")
# Variables that may hold a path of the node, mounted at the same place.
PATHS = (
    "GPUFLEET_TRAIN_DIR", "GPUFLEET_SCRATCH_DIR", "GPUFLEET_DATA_DIR", "GPUFLEET_BASE_WEIGHTS",
    "GPUFLEET_CHECKPOINT_URI",
)  # fmt: skip


def command(
    settings: Settings, environment: Mapping[str, str], arguments: Sequence[str], name: str = ""
) -> tuple[list[str], dict[str, str]]:
    """Make the command that runs the image's Python with ``arguments`` as the training's user, and its environment.

    The container has the node's network, as the ranks' addresses are the node's, and no rights that the training would
    not have without it. Variables go by name: whoever lists processes sees no value.
    """
    passed = {key: value for key, value in environment.items() if key.startswith(PASSED) and key not in OWN}
    words = ["docker", "run", "--rm", *(["--name", name] if name else []), "--pull", "never"]
    # The agent's file has the output; by default docker would keep a second copy, without a limit:
    # https://docs.docker.com/engine/logging/configure/
    words += ["--log-driver", "none"]
    # docker's init passes signals on, reaps what torchrun's workers leave, and its end is the end of all processes.
    words += ["--init", "--network", "host", "--cap-drop", "ALL", "--security-opt", "no-new-privileges"]
    # NCCL and data loaders share more than docker's 64 MiB; /dev/shm of a machine has half of its memory too:
    # https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/troubleshooting.html#docker
    words += ["--shm-size", str(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2)]
    # EFA and NCCL pin memory (gpufleet-train.service has the same limit). NVIDIA's size of the stack:
    # https://docs.nvidia.com/deeplearning/frameworks/user-guide/index.html#setincshmem
    words += ["--ulimit", "memlock=-1", "--ulimit", "stack=67108864", "--ulimit", "nofile=1048576"]
    # docker's own service allows any size; gpufleet-train.service says why none.
    words += ["--ulimit", "core=0"]
    if (settings.root / "dev/nvidiactl").exists():
        words += ["--gpus", "all"]
    for device in (path for pattern in DEVICES for path in sorted((settings.root / "dev").glob(pattern))):
        words += ["--device", str(device)]
    if (user := settings.user) is not None:
        words += ["--user", f"{user.pw_uid}:{user.pw_gid}"]
        # The image does not know the user; libraries and mpirun ask for its name and write below its home.
        for file in ("/etc/passwd", "/etc/group"):
            words += ["--mount", f"type=bind,source={file},target={file},readonly"]
        for key, value in (("HOME", user.pw_dir), ("USER", user.pw_name), ("LOGNAME", user.pw_name)):
            words += ["--env", f"{key}={value}"]
    for key in sorted(passed):
        words += ["--env", key]
    for folder in _folders(settings, passed, user.pw_dir if user else ""):
        words += ["--mount", f"type=bind,source={folder},target={folder}"]
    if passed.get("GPUFLEET_TRAIN_DIR"):
        words += ["--workdir", passed["GPUFLEET_TRAIN_DIR"]]
    # The image's own entry point may print, or start a server.
    words += ["--entrypoint", "python3", settings.image, str(BOOTSTRAP / "agent"), "run-python", *arguments]
    # Not the training's HOME: docker's client, which is root's, runs programs that its configuration there names.
    return words, {**os.environ, **passed}


def _folders(settings: Settings, environment: Mapping[str, str], home: str) -> list[Path]:
    """Folders of the node that the container sees, none twice."""
    named = [environment.get(name, "") for name in PATHS]
    # Without NVMe, training keeps its copies of data here (create-training-user.sh).
    wanted = [BOOTSTRAP.parent, settings.run_dir, settings.credentials_dir, settings.root / "tmp/gpufleet-data"]
    wanted += [Path(path) for path in (home, *named) if path.startswith("/")]
    there = sorted({path for path in wanted if path.exists()})
    return [path for path in there if not any(other in path.parents for other in there)]


def init_process() -> int | None:
    """Process of the node that is the training container's init; None where the container does not run."""
    text = output_of(["docker", "inspect", "--format", "{{.State.Pid}}", NAME], DOCKER_LIMIT_S) or ""
    return int(text) if text.strip().isdecimal() and int(text) > 0 else None


def remove() -> None:
    """Remove the training container of an agent that was killed, and what runs in it."""
    found = output_of(["docker", "ps", "--all", "--quiet", "--filter", f"name=^{NAME}$"], DOCKER_LIMIT_S) or ""
    for container in found.split():
        output_of(["docker", "rm", "--force", container], DOCKER_LIMIT_S)
