"""Fixtures of the engine's tests: the tools of this machine, an empty emulated AWS."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import pytest

pytest.register_assert_rewrite("tests.engine.facts", "tests.engine.scenarios", "tests.engine.tagging")

from tests.engine import provider_binary, pulumi_cli  # noqa: E402  after the line above
from tests.engine.deployment import REGION, Tools  # noqa: E402
from tests.engine.emulated_aws import emulated_aws  # noqa: E402
from tests.engine.inventory import Client, clients  # noqa: E402


def unavailable(reason: str) -> NoReturn:
    """Skip the test for a user who lacks something; fail it in CI, where it must run."""
    if os.environ.get("CI") == "true":
        pytest.fail(reason)
    pytest.skip(reason)


@pytest.fixture(scope="session")
def tools(tmp_path_factory: pytest.TempPathFactory) -> Tools:
    """The real engine and the real provider, or the reason for their absence."""
    pulumi = pulumi_cli.find_pulumi(os.environ["PATH"])
    if pulumi is None:
        unavailable(f"no Pulumi CLI: {pulumi_cli.HOW_TO_GET_IT}")
    provider = provider_binary.find_provider_binary(os.environ, tmp_path_factory.mktemp("terraform-init"))
    if provider is None:
        unavailable(f"no terraform-provider-aws: {provider_binary.HOW_TO_GET_IT}")
    return Tools(pulumi=pulumi, aws_provider=provider)


@pytest.fixture
def aws(tmp_path: Path) -> Iterator[Client]:
    """boto3 clients of the test's own, empty emulated AWS."""
    with emulated_aws(tmp_path, {}) as endpoint:
        yield clients(endpoint, REGION)
