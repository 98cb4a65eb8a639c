"""EC2 placement groups, which moto 5.2 does not have.

https://docs.aws.amazon.com/AWSEC2/latest/APIReference/API_CreatePlacementGroup.html and its neighbours.
"""

from __future__ import annotations

import secrets
from typing import Any

from moto.core.responses import ActionResult, EmptyResult
from moto.ec2.exceptions import EC2ClientError
from moto.ec2.models.core import TaggedEC2Resource
from moto.ec2.responses import EC2Response
from moto.ec2.utils import generic_filter

from tests.engine.moto_extension.capacity_reservations import reservations
from tests.engine.moto_extension.instances import template_data
from tests.engine.moto_extension.teaching import teach


class PlacementGroup(TaggedEC2Resource):
    """One group; the attributes are named as moto's serializer finds them for the response's fields."""

    def __init__(self, backend: Any, request: dict[str, Any], tags: dict[str, str]) -> None:
        self.ec2_backend = backend
        self.id = self.group_id = f"pg-{secrets.token_hex(8)}1"
        self.group_name = request["GroupName"]
        self.group_arn = f"arn:aws:ec2:{backend.region_name}:{backend.account_id}:placement-group/{self.group_name}"
        self.state = "available"
        self.strategy = request.get("Strategy") or "cluster"
        self.partition_count = request.get("PartitionCount")
        self.spread_level = request.get("SpreadLevel") or ("rack" if self.strategy == "spread" else None)
        self.add_tags(tags)

    @property
    def tags(self) -> Any:
        """Tags as the response shows them."""
        return self.get_tags()

    def get_filter_value(self, filter_name: str, method_name: str | None = None) -> Any:
        """Value the filter of DescribePlacementGroups compares."""
        simple = {"group-name": self.group_name, "group-arn": self.group_arn, "state": self.state}
        if filter_name in simple:
            return simple[filter_name]
        return super().get_filter_value(filter_name, method_name)


def install() -> None:
    """Put the actions into moto's EC2."""
    teach(EC2Response, create_placement_group, describe_placement_groups, delete_placement_group)


def groups(backend: Any) -> dict[str, PlacementGroup]:
    """The backend's groups by name; moto's reset empties them with everything else."""
    kept: dict[str, PlacementGroup] = backend.__dict__.setdefault("placement_groups", {})
    return kept


def create_placement_group(self: EC2Response) -> ActionResult:
    """CreatePlacementGroup."""
    request = self._get_params()
    name = request["GroupName"]
    if name in groups(self.ec2_backend):
        raise EC2ClientError("InvalidPlacementGroup.Duplicate", f"The placement group '{name}' already exists.")
    tags = self._parse_tag_specification("placement-group").get("placement-group", {})
    group = groups(self.ec2_backend)[name] = PlacementGroup(self.ec2_backend, request, tags)
    return ActionResult({"PlacementGroup": group})


def describe_placement_groups(self: EC2Response) -> ActionResult:
    """DescribePlacementGroups."""
    request, known = self._get_params(), groups(self.ec2_backend)
    for name in request.get("GroupNames") or []:
        if name not in known:
            raise _unknown(name)
    wanted = [
        group
        for group in known.values()
        if group.group_name in (request.get("GroupNames") or known)
        and group.group_id in (request.get("GroupIds") or [group.group_id])
    ]
    return ActionResult({"PlacementGroups": generic_filter(self._filters_from_querystring(), wanted)})


def delete_placement_group(self: EC2Response) -> ActionResult:
    """DeletePlacementGroup; refused while instances of the group run or shut down, or capacity is reserved in it.

    https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/cr-cpg.html
    """
    name = self._get_param("GroupName")
    if name not in groups(self.ec2_backend):
        raise _unknown(name)
    arn = groups(self.ec2_backend)[name].group_arn
    reserved = [
        one
        for one in reservations(self.ec2_backend).values()
        if one.placement_group_arn == arn and one.state == "active"
    ]
    if reserved or instances_in(self.ec2_backend, name):
        raise EC2ClientError("InvalidPlacementGroup.InUse", f"The placement group '{name}' is in use.")
    del groups(self.ec2_backend)[name]
    return EmptyResult()


def instances_in(backend: Any, name: str) -> list[str]:
    """Ids of the instances that are in the group, by their launch template; terminated ones have left it."""
    return [
        instance.id
        for instance in backend.all_instances()
        if instance.state != "terminated" and (template_data(instance).get("Placement") or {}).get("GroupName") == name
    ]


def _unknown(name: str) -> EC2ClientError:
    return EC2ClientError("InvalidPlacementGroup.Unknown", f"The Placement Group '{name}' is unknown.")
