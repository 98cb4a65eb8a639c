"""Configuration with which a GPU node joins the cluster of platform eks."""

from __future__ import annotations

import json
from typing import Any

from infra.kubernetes.constants import GPU_TAINT, STACK_LABEL
from infra.naming import Names, slug


def node_config(names: Names, *, endpoint: str, authority: str, service_cidr: str, nvme: bool) -> str:
    """NodeConfig of a GPU node, as nodeadm reads it from user data (JSON is YAML).

    ``authority`` is the API's certificate authority, base64. NVMe disks hold images, logs and emptyDir volumes.
    https://awslabs.github.io/amazon-eks-ami/nodeadm/doc/api/
    """
    key, value, effect = GPU_TAINT
    spec: dict[str, Any] = {
        "cluster": {
            "name": names.cluster,
            "apiServerEndpoint": endpoint,
            "certificateAuthority": authority,
            "cidr": service_cidr,
        },
        "kubelet": {
            "flags": [
                f"--node-labels={STACK_LABEL}={slug(names.stack)}",
                f"--register-with-taints={key}={value}:{effect}",
            ]
        },
    }
    if nvme:
        spec["instance"] = {"localStorage": {"strategy": "RAID0"}}
    return json.dumps({"apiVersion": "node.eks.aws/v1alpha1", "kind": "NodeConfig", "spec": spec}, indent=2)
