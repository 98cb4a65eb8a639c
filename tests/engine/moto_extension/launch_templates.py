"""EC2 launch templates whose data is what was given, and whose second version works like the first.

moto 5.2 puts the tags of the template itself (TagSpecifications of CreateLaunchTemplate) into the template's data as
well, as if instances could carry tags of the type ``launch-template``; and a group cannot launch from a version with
user data that CreateLaunchTemplateVersion made:
https://docs.aws.amazon.com/AWSEC2/latest/APIReference/API_CreateLaunchTemplate.html
"""

from __future__ import annotations

from collections.abc import Callable

from moto.core.responses import ActionResult
from moto.ec2.responses import EC2Response
from moto.ec2.utils import parse_user_data

from tests.engine.moto_extension.teaching import teach

_create: Callable[[EC2Response], ActionResult] = EC2Response.create_launch_template
_create_version: Callable[[EC2Response], ActionResult] = EC2Response.create_launch_template_version


def install() -> None:
    """Put the actions into moto's EC2."""
    teach(EC2Response, create_launch_template, create_launch_template_version)


def create_launch_template(self: EC2Response) -> ActionResult:
    """CreateLaunchTemplate."""
    result = _create(self)
    template = self.ec2_backend.get_launch_template_by_name(self._get_param("LaunchTemplateName"))
    data = template.default_version().data
    given = [item for item in data.pop("TagSpecifications", []) if item["ResourceType"] != "launch-template"]
    if given:
        data["TagSpecifications"] = given
    return result


def create_launch_template_version(self: EC2Response) -> ActionResult:
    """CreateLaunchTemplateVersion; moto's groups cannot launch from a version whose user data it has not parsed."""
    result = _create_version(self)
    name, id_ = self._get_param("LaunchTemplateName"), self._get_param("LaunchTemplateId")
    backend = self.ec2_backend
    template = backend.get_launch_template_by_name(name) if name else backend.get_launch_template(id_)
    template.latest_version().data["UserData"] = parse_user_data(self._get_param("LaunchTemplateData.UserData"))
    return result
