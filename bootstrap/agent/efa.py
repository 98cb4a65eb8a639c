"""Variables that make NCCL use EFA, in the smoke test as in training."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path


def efa_settings(root: Path, environ: Mapping[str, str]) -> dict[str, str]:
    """Make NCCL use EFA or fail; by default it silently falls back to TCP.

    Only with GPUDirect RDMA: to pass through host memory EFA is not known to beat TCP (docs/bootstrap.md), so NCCL and
    its plugin choose there.
    """
    # NCCL_NET: the plugin's name for NCCL, which then has no other network to choose:
    # https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html#nccl-net
    made = {"FI_PROVIDER": "efa", "NCCL_NET": "AWS Libfabric"}
    # Data loaders that fork, as torch's do by default, run the machine out of huge pages ("Cannot allocate memory"):
    # https://github.com/aws/aws-ofi-nccl/blob/master/doc/efa-env-var.md
    # https://github.com/aws/aws-ofi-nccl/issues/179
    made["FI_EFA_USE_HUGE_PAGE"] = environ.get("FI_EFA_USE_HUGE_PAGE", "0")
    folders = (root / "opt/amazon", root / "opt/aws-ofi-nccl")
    plugins = sorted(str(path) for folder in folders for path in folder.rglob("libnccl-net*.so*"))
    if plugins:
        plugin = Path(plugins[0])
        # NCCL loads the plugin by name, and a service has no loader path of its own.
        made["LD_LIBRARY_PATH"] = ":".join(filter(None, [str(plugin.parent), environ.get("LD_LIBRARY_PATH")]))
        # Newer plugins have no file under the plain name libnccl-net.so.
        if plugin.name.startswith("libnccl-net-ofi.so"):
            made["NCCL_NET_PLUGIN"] = "ofi"
    return made
