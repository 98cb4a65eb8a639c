"""EC2 launch templates whose data is what was given.

moto 5.2 puts the tags of the template itself (TagSpecifications of CreateLaunchTemplate) into the template's data as
well, as if instances could carry tags of the type ``launch-template``:
https://docs.aws.amazon.com/AWSEC2/latest/APIReference/API_CreateLaunchTemplate.html
"""

from __future__ import annotations

from collections.abc import Callable

from moto.core.responses import ActionResult
from moto.ec2.responses import EC2Response

from tests.engine.moto_extension.teaching import teach

_create: Callable[[EC2Response], ActionResult] = EC2Response.create_launch_template


def install() -> None:
    """Put the action into moto's EC2."""
    teach(EC2Response, create_launch_template)


def create_launch_template(self: EC2Response) -> ActionResult:
    """CreateLaunchTemplate."""
    result = _create(self)
    template = self.ec2_backend.get_launch_template_by_name(self._get_param("LaunchTemplateName"))
    data = template.default_version().data
    given = [item for item in data.pop("TagSpecifications", []) if item["ResourceType"] != "launch-template"]
    if given:
        data["TagSpecifications"] = given
    return result
