"""Lengths of Capacity Blocks, and a purchase that is sent once. Offers: tests of preflight and of the command."""

from __future__ import annotations

import socketserver
import threading
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

import pytest
from botocore.exceptions import ClientError, ConnectTimeoutError, EndpointConnectionError, ReadTimeoutError

from optimizer.aws import blocks, clients, errors
from optimizer.aws.blocks import Offering, Search
from optimizer.contract.plan import CapacityBlock
from tests.unit.optimizer.commands.preflight.account import END, START


@pytest.mark.parametrize(
    ("hours", "window", "block_length"),
    [
        *((0.1, 9e9, 24), (24, 9e9, 24), (24.1, 9e9, 48), (336, 9e9, 336), (336.1, 9e9, 504), (4368.1, 9e9, 4368)),
        *((100, 50, 48), (100, 10, 24), (500, 400, 336)),
    ],
)
def test_a_block_is_of_days_then_weeks(hours: float, window: float, block_length: int) -> None:
    assert blocks.block_hours(hours, window) == block_length


@pytest.fixture
def silent(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bytes]]:
    """An endpoint that reads each request and answers none; the requests it got."""
    requests: list[bytes] = []

    class Silent(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            received = b""
            while b"Action=" not in received and (more := self.request.recv(65536)):
                received += more
            requests.append(received)
            while self.request.recv(65536):
                pass

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Silent) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.server_address[1]}")
        monkeypatch.setattr(clients, "READ_TIMEOUT_S", 0.2)
        monkeypatch.setattr(clients, "MAX_ATTEMPTS", 2)
        yield requests
        server.shutdown()


def test_a_purchase_without_an_answer_is_sent_once_and_its_outcome_is_unknown(silent: list[bytes]) -> None:
    offering = Offering(
        id="cb-0123456789abcdef0",
        search=Search(instance_type="p4d.24xlarge", region="us-east-1", nodes=2, hours=24),
        zone="us-east-1a",
        nodes=2,
        times=CapacityBlock(start=START, end=END),
        usd=Decimal("566.40"),
    )
    with pytest.raises(ReadTimeoutError) as raised:
        blocks.buy(clients.ec2_once("us-east-1"), offering)
    assert not blocks.is_refused(raised.value)
    (request,) = silent
    assert b"Action=PurchaseCapacityBlock" in request and b"DryRun" not in request
    # The same call by a client of other commands is sent again: the endpoint sees it.
    with pytest.raises(ReadTimeoutError):
        blocks.buy(clients.ec2("us-east-1"), offering)
    assert len(silent) == 3


def _client_error(code: str, status: int) -> ClientError:
    answer: Any = {"Error": {"Code": code}, "ResponseMetadata": {"HTTPStatusCode": status}}
    return ClientError(answer, "PurchaseCapacityBlock")


@pytest.mark.parametrize(
    ("error", "refused"),
    [
        (_client_error("UnauthorizedOperation", 403), True),
        (_client_error("RequestLimitExceeded", 503), True),
        (EndpointConnectionError(endpoint_url="http://127.0.0.1:9"), True),
        (ConnectTimeoutError(endpoint_url="http://127.0.0.1:9"), True),
        (_client_error("InternalError", 500), False),
        (_client_error("Unavailable", 503), False),
        (ReadTimeoutError(endpoint_url="http://127.0.0.1:9"), False),
        (errors.UnusableAnswerError("no id"), False),
    ],
)
def test_only_an_answer_or_no_connection_proves_that_nothing_was_bought(error: Exception, refused: bool) -> None:
    assert blocks.is_refused(error) == refused
