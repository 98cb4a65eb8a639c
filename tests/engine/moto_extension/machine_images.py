"""Machine images with the enhanced networking that Amazon's own all have.

https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/enhanced-networking-ena.html
"""

from __future__ import annotations

from moto.ec2.models.amis import Ami


def install() -> None:
    """Let DescribeImages answer with EnaSupport."""
    Ami.ena_support = True  # type: ignore[attr-defined]
