"""EC2 security group rules that keep their description, whatever they refer to.

moto 5.2 shows the description of a rule for an address range only, not of one for a group or a prefix list:
https://docs.aws.amazon.com/AWSEC2/latest/APIReference/API_SecurityGroupRule.html
"""

from __future__ import annotations

import inspect
from typing import Any

from moto.ec2.models.security_groups import SecurityGroupRule

_init = SecurityGroupRule.__init__
_signature = inspect.signature(_init)


def install() -> None:
    """Put the description into moto's rules."""
    SecurityGroupRule.__init__ = init  # type: ignore[method-assign]
    SecurityGroupRule.description = property(description)  # type: ignore[method-assign, assignment]


def init(self: Any, *args: Any, **kwargs: Any) -> None:
    """Make a rule; a prefix list comes with its description."""
    _init(self, *args, **kwargs)
    given = _signature.bind(self, *args, **kwargs).arguments
    self.prefix_list_description = (given.get("prefix_list_id") or {}).get("Description")


def description(self: Any) -> str | None:
    """The rule's description."""
    sources = (self.ip_range.get("Description"), self.source_group.get("Description"), self.prefix_list_description)
    return next((text for text in sources if text), None)
