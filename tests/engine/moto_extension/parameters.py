"""AWS's public SSM parameters of Deep Learning AMIs, which moto lacks.

https://docs.aws.amazon.com/dlami/latest/devguide/find-dlami-id.html
"""

from __future__ import annotations

import re
from datetime import UTC, datetime
from typing import Any

from moto.ec2.models import ec2_backends
from moto.ssm.models import Parameter, ParameterDict

from tests.engine.emulated_aws import amazon_image, dlami_name

_load = ParameterDict._check_loading_status


def install() -> None:
    """Give each published Deep Learning AMI its parameter."""
    ParameterDict._check_loading_status = _with_images  # type: ignore[method-assign]


def _with_images(self: Any, key: str) -> None:
    _load(self, key)
    if not re.fullmatch(r"/aws/service/deeplearning/ami/(x86_64|arm64)/[a-z0-9.-]+/latest/ami-id", key):
        return
    image = amazon_image(dlami_name(key), key.split("/")[5])["ami_id"]
    if dict.__contains__(self, key) or image not in ec2_backends[self.account_id][self.region_name].amis:
        return
    published = Parameter(  # type: ignore[abstract]
        account_id=self.account_id,
        name=key,
        value=image,
        parameter_type="String",
        description=None,
        allowed_pattern=None,
        keyid=None,
        last_modified_date=datetime.now(UTC),
        version=1,
        data_type="aws:ec2:image",
    )
    dict.__setitem__(self, key, [published])
