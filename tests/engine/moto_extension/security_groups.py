"""EC2 security groups that interfaces hold, and rules that keep their description, whatever they refer to.

moto 5.2 deletes a group that interfaces use, and shows the description of a rule for an address range only, not of one
for a group or a prefix list: https://docs.aws.amazon.com/AWSEC2/latest/APIReference/API_DeleteSecurityGroup.html and
https://docs.aws.amazon.com/AWSEC2/latest/APIReference/API_SecurityGroupRule.html
"""

from __future__ import annotations

import inspect
from typing import Any

from moto.ec2.exceptions import DependencyViolationError
from moto.ec2.models.security_groups import SecurityGroupBackend, SecurityGroupRule

_delete = SecurityGroupBackend._delete_security_group
_init = SecurityGroupRule.__init__
_signature = inspect.signature(_init)


def install() -> None:
    """Put both into moto."""
    SecurityGroupBackend._delete_security_group = delete  # type: ignore[method-assign]
    SecurityGroupRule.__init__ = init  # type: ignore[method-assign]
    SecurityGroupRule.description = property(description)  # type: ignore[method-assign, assignment]


def delete(self: Any, vpc_id: str | None, group_id: str) -> None:
    """Delete a group; refused while an interface has it."""
    if any(group.id == group_id for interface in self.enis.values() for group in interface.group_set):
        raise DependencyViolationError(f"resource {group_id} has a dependent object")
    _delete(self, vpc_id, group_id)


def init(self: Any, *args: Any, **kwargs: Any) -> None:
    """Make a rule; a prefix list comes with its description."""
    _init(self, *args, **kwargs)
    given = _signature.bind(self, *args, **kwargs).arguments
    self.prefix_list_description = (given.get("prefix_list_id") or {}).get("Description")


def description(self: Any) -> str | None:
    """The rule's description."""
    sources = (self.ip_range.get("Description"), self.source_group.get("Description"), self.prefix_list_description)
    return next((text for text in sources if text), None)
