"""The S3 server of the store tests, for data and weights on S3."""

from __future__ import annotations

from tests.unit.bootstrap.training.conftest import aws, moto_url

__all__ = ["aws", "moto_url"]
