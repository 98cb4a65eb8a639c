"""Variables of the training: what torchrun and its workers inherit beside the node's own."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from bootstrap.agent.commands import AWS_ENVIRONMENT, output_of, python_path
from bootstrap.agent.efa import efa_settings
from bootstrap.agent.node import SupervisedNode
from bootstrap.agent.rendezvous import Rendezvous
from bootstrap.agent.settings import Settings
from bootstrap.contract.checkpoint import FOLDER

# A system service's PATH lacks the programs of the EFA installer, which brings Open MPI, and CUDA:
# https://docs.aws.amazon.com/dlami/latest/devguide/tutorial-efa-using.html
PROGRAMS = ("opt/amazon/efa/bin", "opt/amazon/openmpi/bin", "usr/local/cuda/bin")


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
