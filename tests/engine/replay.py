"""A lost response is answered again, not acted on twice.

moto's development server now and then loses a response under load (the connection ends after the action). The AWS SDKs
then repeat the request, and one that creates something would fail as a duplicate of itself. All attempts at one call
carry the same ``amz-sdk-invocation-id`` header, so a repeated one gets the first answer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

Application = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]
Answer = tuple[str, list[tuple[str, str]], bytes]


class Replaying:
    """``application`` that keeps its answers to changing calls, except server errors (5xx), which may be retried."""

    def __init__(self, application: Application) -> None:
        self._application = application
        self._answers: dict[str, Answer] = {}

    def __call__(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        """Answer one request (WSGI)."""
        call = environ.get("HTTP_AMZ_SDK_INVOCATION_ID", "")
        if not call or environ["REQUEST_METHOD"] in ("GET", "HEAD"):
            return self._application(environ, start_response)
        if call not in self._answers:
            status, headers, body = self._ask(environ)
            if status.startswith("5"):
                start_response(status, headers)
                return [body]
            self._answers[call] = status, headers, body
        else:
            environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        status, headers, body = self._answers[call]
        start_response(status, headers)
        return [body]

    def _ask(self, environ: dict[str, Any]) -> Answer:
        started: list[tuple[str, list[tuple[str, str]]]] = []

        def start(status: str, headers: list[tuple[str, str]], *_: Any) -> Callable[[bytes], None]:
            started.append((status, headers))
            return lambda data: None

        chunks = self._application(environ, start)
        body = b"".join(chunks)
        close = getattr(chunks, "close", None)
        if close is not None:
            close()
        return *started[-1], body
