"""Daemon sets that offer a node's GPUs and EFA cards to its pods."""

from __future__ import annotations

from infra.kubernetes.container_images import efa_plugin_image, nvidia_plugin_image
from infra.kubernetes.objects import Manifest, build_object, gpu_toleration

_DEVICE_PLUGINS = ("device-plugins", "/var/lib/kubelet/device-plugins")
_INFINIBAND = ("infiniband", "/dev/infiniband")


def nvidia_plugin(registry: str, selector: dict[str, str]) -> Manifest:
    """NVIDIA's device plugin, from its public registry or a mirror."""
    container = {
        "name": "nvidia-device-plugin",
        "image": nvidia_plugin_image(registry),
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
    }
    return _daemon_set(container, [_DEVICE_PLUGINS], selector)


def efa_plugin(region: str, selector: dict[str, str]) -> Manifest:
    """AWS's EFA device plugin; privileged as in AWS's own chart, as it reads the host's InfiniBand devices."""
    container = {
        "name": "aws-efa-k8s-device-plugin",
        "image": efa_plugin_image(region),
        "securityContext": {"privileged": True, "runAsUser": 0},
        "resources": {"requests": {"cpu": "10m", "memory": "20Mi"}},
    }
    plugin = _daemon_set(container, [_DEVICE_PLUGINS, _INFINIBAND], selector)
    plugin["spec"]["template"]["spec"]["hostNetwork"] = True
    return plugin


def _daemon_set(container: Manifest, folders: list[tuple[str, str]], selector: dict[str, str]) -> Manifest:
    name = container["name"]
    labels = {"app.kubernetes.io/name": name}
    mounts = [{"name": folder, "mountPath": path} for folder, path in folders]
    volumes = [{"name": folder, "hostPath": {"path": path, "type": "Directory"}} for folder, path in folders]
    return {
        **build_object("apps/v1", "DaemonSet", name, "kube-system"),
        "spec": {
            "selector": {"matchLabels": labels},
            "template": {
                "metadata": {"labels": labels},
                "spec": {
                    "priorityClassName": "system-node-critical",
                    "automountServiceAccountToken": False,
                    "nodeSelector": selector,
                    "tolerations": [gpu_toleration()],
                    "containers": [{**container, "volumeMounts": mounts}],
                    "volumes": volumes,
                },
            },
        },
    }
