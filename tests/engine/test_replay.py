"""A repeated call is answered again and acted on once."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable
from typing import Any

import pytest

from tests.engine.replay import Replaying


class Service:
    """Counts what it did; fails first where told."""

    def __init__(self, *statuses: str) -> None:
        self.statuses = list(statuses)
        self.calls = 0

    def __call__(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        self.calls += 1
        start_response(self.statuses.pop(0) if self.statuses else "200 OK", [("X", "y")])
        return [b"answer ", str(self.calls).encode()]


def ask(application: Replaying, call: str, method: str = "POST") -> tuple[str, bytes]:
    answered: list[str] = []
    environ = {
        "REQUEST_METHOD": method,
        "HTTP_AMZ_SDK_INVOCATION_ID": call,
        "CONTENT_LENGTH": "4",
        "wsgi.input": io.BytesIO(b"body"),
    }
    body = b"".join(application(environ, lambda status, headers: answered.append(status)))
    return answered[-1], body


def test_a_repeated_call_gets_the_first_answer() -> None:
    service = Service("409 Conflict")
    application = Replaying(service)
    assert ask(application, "a") == ask(application, "a") == ("409 Conflict", b"answer 1")
    assert service.calls == 1
    assert ask(application, "b") == ("200 OK", b"answer 2")


def test_an_error_of_the_server_may_be_retried() -> None:
    application = Replaying(Service("500 Internal Server Error"))
    assert [ask(application, "a")[0] for _ in range(2)] == ["500 Internal Server Error", "200 OK"]


@pytest.mark.parametrize(("call", "method"), [("", "POST"), ("a", "GET")])
def test_reads_and_calls_without_an_id_are_passed_on(call: str, method: str) -> None:
    service = Service()
    application = Replaying(service)
    ask(application, call, method)
    ask(application, call, method)
    assert service.calls == 2
