"""Variables and files that a program finds: the gang as each launcher asks for it."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

# torchrun's own for its only worker; a launcher within would take them for a rank's.
TORCHRUNS = re.compile(r"(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)|ROLE_NAME|TORCHELASTIC_\w+")
EXPANDED = re.compile(r"\$\{(GPUFLEET_\w+|MASTER_ADDR|MASTER_PORT)\}")


def program_environment(
    environ: Mapping[str, str], rank: int | None, addresses: Sequence[tuple[str, int]]
) -> dict[str, str]:
    """Make the program's environment: this node's, without torchrun's own variables, with the gang's.

    Under mpirun ``rank`` is None: MPICH gives all ranks the first node's variables, so none of them may name a node.
    """
    made = {name: value for name, value in environ.items() if not TORCHRUNS.fullmatch(name)}
    host, port = addresses[0]
    made |= {
        "GPUFLEET_NODE_COUNT": str(len(addresses)), "GPUFLEET_RANKS": str(len(addresses) * _slots(made)),
        "MASTER_ADDR": host, "MASTER_PORT": str(port),
    }  # fmt: skip
    if rank is None:
        return made
    made["GPUFLEET_NODE_RANK"] = str(rank)
    if len(addresses) > 1:
        # https://www.tensorflow.org/guide/distributed_training#TF_CONFIG
        workers = [f"{address}:{number}" for address, number in addresses]
        task = {"type": "worker", "index": rank}
        made["TF_CONFIG"] = json.dumps({"cluster": {"worker": workers}, "task": task})
    return made


def write_files(environ: Mapping[str, str], addresses: Sequence[str]) -> dict[str, str]:
    """Write host files beside the agent's files; returns the variables by which launchers find them and each other."""
    folder, slots = Path(environ["GPUFLEET_DRAIN_FILE"]).parent, _slots(environ)
    hosts, hydra_hosts = folder / "hosts", folder / "hosts.hydra"
    hosts.write_text("".join(f"{address} slots={slots}\n" for address in addresses), encoding="utf-8")
    hydra_hosts.write_text("".join(f"{address}:{slots}\n" for address in addresses), encoding="utf-8")
    # The bundle's folder, as Ubuntu starts no program from /run (noexec):
    # https://salsa.debian.org/kernel-team/initramfs-tools/-/blob/master/init
    shell = Path(__file__).with_name("remote_shell.py")
    made = {
        "GPUFLEET_HOSTFILE": str(hosts),
        # Open MPI 4, Open MPI 5 (https://docs.open-mpi.org/en/v5.0.x/mca.html). Without a tree the first node starts
        # all daemons: the others have no remote shell.
        **{f"OMPI_MCA_{name}": value for name, value in _open_mpi("orte", "rsh", hosts, shell).items()},
        **{f"PRTE_MCA_{name}": value for name, value in _open_mpi("prte", "ssh", hosts, shell).items()},
        # The default excludes lo alone, and no other node reaches a bridge of containers:
        # https://horovod.readthedocs.io/en/stable/mpi.html
        "OMPI_MCA_btl_tcp_if_exclude": "lo,docker0",
        # MPICH: https://github.com/pmodels/mpich/blob/main/doc/wiki/how_to/Using_the_Hydra_Process_Manager.md
        "HYDRA_HOST_FILE": str(hydra_hosts), "HYDRA_LAUNCHER": "rsh", "HYDRA_LAUNCHER_EXEC": str(shell),
        # Intel MPI: "Hydra Environment Variables" of
        # https://intel.com/content/www/us/en/docs/mpi-library/developer-reference-linux/2021-15/
        "I_MPI_HYDRA_HOST_FILE": str(hydra_hosts), "I_MPI_HYDRA_BOOTSTRAP": "rsh",
        "I_MPI_HYDRA_BOOTSTRAP_EXEC": str(shell),
    }  # fmt: skip
    if interface := environ.get("GLOO_SOCKET_IFNAME"):
        # By default the address of the host's name, which another node may not resolve.
        made |= {"HYDRA_IFACE": interface, "I_MPI_HYDRA_IFACE": interface}
    if os.geteuid() == 0:
        # In a container.
        made |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return {name: value for name, value in made.items() if name not in environ}


def _open_mpi(runtime: str, launcher: str, hosts: Path, shell: Path) -> dict[str, str]:
    return {
        f"{runtime}_default_hostfile": str(hosts),
        f"plm_{launcher}_agent": str(shell),
        f"plm_{launcher}_no_tree_spawn": "1",
    }


def expand(words: Sequence[str], environ: Mapping[str, str]) -> list[str]:
    """Replace ``${GPUFLEET_...}``, ``${MASTER_ADDR}`` and ``${MASTER_PORT}``; any other text stays as it is."""
    return [EXPANDED.sub(lambda found: environ.get(found[1], found[0]), word) for word in words]


def _slots(environ: Mapping[str, str]) -> int:
    return int(environ.get("GPUFLEET_GPUS_PER_NODE") or 1)
