"""EC2 instances with the volumes and interfaces of their launch template, which end with them.

moto 5.2 leaves the volume of the machine image behind when the launch template maps the same device, and keeps the
primary network interface of a terminated instance:
https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/block-device-mapping-concepts.html (the template's mapping overrides
the image's) and https://docs.aws.amazon.com/AWSEC2/latest/APIReference/API_InstanceNetworkInterfaceSpecification.html
(DeleteOnTermination of the primary interface).
"""

from __future__ import annotations

import copy
import threading
from typing import Any

from moto.ec2.models.instances import Instance, InstanceState

_add_block_device = Instance.add_block_device
_prep_nics = Instance.prep_nics
_terminate = Instance.terminate


def install() -> None:
    """Put the methods into moto's instances."""
    Instance.add_block_device = add_block_device  # type: ignore[method-assign]
    Instance.prep_nics = prep_nics  # type: ignore[method-assign]
    Instance.terminate = terminate  # type: ignore[method-assign]


def template_data(instance: Instance) -> dict[str, Any]:
    """Data of the launch template version an instance was made from; empty where there is none."""
    backend: Any = instance.ec2_backend
    tags = {tag["key"]: tag["value"] for tag in instance.get_tags()}
    template = backend.launch_templates.get(tags.get("aws:ec2launchtemplate:id"))
    if template is None:
        return {}
    data: dict[str, Any] = template.get_version(tags["aws:ec2launchtemplate:version"]).data
    return data


def add_block_device(self: Instance, size: int, device_path: str, *args: Any, **kwargs: Any) -> None:
    """Attach a volume in place of the image's at the same device."""
    replaced = self.block_device_mapping.get(device_path)
    if replaced is not None:
        self.ec2_backend.detach_volume(replaced.volume_id, self.id, device_path)
        self.ec2_backend.delete_volume(replaced.volume_id)
    _add_block_device(self, size, device_path, *args, **kwargs)


def prep_nics(self: Instance, *args: Any, **kwargs: Any) -> None:
    """Make the instance's interfaces; the primary one goes with the instance unless the template says otherwise."""
    _prep_nics(self, *args, **kwargs)
    specified = template_data(self).get("NetworkInterfaces") or []
    kept = any(item.get("DeviceIndex") == 0 and item.get("DeleteOnTermination") is False for item in specified)
    if 0 in self.nics:
        self.nics[0].delete_on_termination = not kept


def terminate(self: Instance) -> InstanceState:
    """End the instance; one with ``shuts_down_s`` keeps its interfaces and its place for as long."""
    seconds = getattr(self, "shuts_down_s", 0)
    if not seconds:
        return _terminate(self)
    previous = copy.copy(self._state)
    self._state.name, self._state.code = "shutting-down", 32
    end = threading.Timer(seconds, _terminate, [self])
    end.daemon = True
    end.start()
    return previous
