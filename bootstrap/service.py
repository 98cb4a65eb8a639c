"""Parts of the node's services that send to CloudWatch: client, and failures logged once a cause. Needs boto3."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

REGION_VARIABLE = "GPUFLEET_REGION"


def make_client(name: str, region: str, *, connect_timeout_s: int, read_timeout_s: int, attempts: int) -> Any:
    """Make a boto3 client whose calls end in time: at most ``attempts`` × both timeouts, and short waits.

    Raises:
        NoCredentialsError: there are none now; a client made without them never asks again, whatever comes later.
    """
    import boto3
    from botocore.config import Config
    from botocore.exceptions import NoCredentialsError

    retries: Any = {"mode": "standard", "total_max_attempts": attempts}
    config = Config(connect_timeout=connect_timeout_s, read_timeout=read_timeout_s, retries=retries)
    session: Any = boto3.Session(region_name=region)  # the stubs know clients by literal names only
    if session.get_credentials() is None:
        raise NoCredentialsError
    return session.client(name, config=config)


def log_to_journal() -> None:
    """Write messages as they are, as the journal has times and names; botocore's only from warnings on."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    logging.getLogger("botocore").setLevel(logging.WARNING)


class Failures:
    """Keeps a service alive when a call fails, and logs each cause once."""

    def __init__(self, logger: logging.Logger, failing: str, again: str) -> None:
        self._logger, self._failing, self._again = logger, failing, again
        self._cause = ""

    @contextmanager
    def caught(self) -> Iterator[None]:
        """Catch whatever the body raises, log a new cause, and the first success after it."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - no network, throttled, no permission: nothing ends the service
            if (cause := f"{type(error).__name__}: {error}") != self._cause:
                self._logger.warning("%s: %s", self._failing, cause)
                self._cause = cause
            return
        if self._cause:
            self._logger.info(self._again)
            self._cause = ""
