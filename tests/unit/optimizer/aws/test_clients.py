from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from botocore.exceptions import CredentialRetrievalError

from optimizer.aws import clients


def test_clients_retry_by_botocores_standard_and_do_not_wait_forever() -> None:
    for client, region in ((clients.ec2("eu-north-1"), "eu-north-1"), (clients.pricing(), "us-east-1")):
        config: Any = client.meta.config  # its options are set at run time, unknown to the stubs
        assert client.meta.region_name == region
        assert config.retries["mode"] == "standard"
        assert config.retries["total_max_attempts"] == clients.MAX_ATTEMPTS
        assert (config.connect_timeout, config.read_timeout) == (clients.CONNECT_TIMEOUT_S, clients.READ_TIMEOUT_S)
        assert "gpufleet/" in str(config.user_agent_extra)


def test_an_endpoint_in_the_environment_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:5555")
    assert clients.ec2("us-east-1").meta.endpoint_url == "http://127.0.0.1:5555"


@pytest.mark.parametrize("printed", ["hello", "[1]", '{"Version": 1}'])
def test_a_program_that_prints_no_credentials_is_named(
    printed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name)
    (tmp_path / "config").write_text(f"[default]\ncredential_process = echo '{printed}'\n")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    with pytest.raises(CredentialRetrievalError, match="custom-process"):
        clients.sts("us-east-1")
