"""Local instance metadata service (IMDSv2) that gives EC2's notices on demand, through the SDKs' variable
AWS_EC2_METADATA_SERVICE_ENDPOINT.
"""

from __future__ import annotations

import json
import secrets
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

TOKEN_PATH = "/latest/api/token"  # noqa: S105 - a path
METADATA_PATH = "/latest/meta-data/"
TOKEN_HEADER = "X-aws-ec2-metadata-token"  # noqa: S105 - a header's name
TTL_HEADER = "X-aws-ec2-metadata-token-ttl-seconds"
MAX_TTL_S = 21_600


class LocalImds:
    """State of the service.

    Attributes:
        values: answers by path below ``/latest/meta-data/``; an absent path is 404.
        statuses, delay_s: HTTP status by path, for faults; seconds before any answer, for hangs.
        requests: every request as ``METHOD path status``.
    """

    def __init__(self) -> None:
        self.values: dict[str, str] = {"instance-id": "i-0123456789abcdef0"}
        self.statuses: dict[str, int] = {}
        self.delay_s = 0.0
        self.requests: list[str] = []
        self._tokens: dict[str, float] = {}
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._server.daemon_threads = True

    @property
    def endpoint(self) -> str:
        """Value for AWS_EC2_METADATA_SERVICE_ENDPOINT."""
        return f"http://127.0.0.1:{self._server.server_port}"

    def interrupt(self, action: str = "terminate") -> None:
        """Give the two-minute spot notice."""
        when = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + 120))
        self.values["spot/instance-action"] = json.dumps({"action": action, "time": when})

    def recommend_rebalance(self) -> None:
        """Give the rebalance recommendation."""
        when = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        self.values["events/recommendations/rebalance"] = json.dumps({"noticeTime": when})

    def replace_instance(self) -> None:
        """Become another instance, without notices."""
        self.values = {"instance-id": "i-0fedcba9876543210"}

    def forget_tokens(self) -> None:
        """Make every token invalid."""
        self._tokens.clear()

    @contextmanager
    def running(self) -> Iterator[LocalImds]:
        """Serve until the context ends."""
        thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self._server.shutdown()
            self._server.server_close()
            thread.join()

    def _new_token(self, ttl: str | None) -> tuple[int, str]:
        if ttl is None or not ttl.isdigit() or not 1 <= int(ttl) <= MAX_TTL_S:
            return 400, ""
        token = secrets.token_urlsafe(24)
        self._tokens[token] = time.monotonic() + int(ttl)
        return 200, token

    def _value(self, path: str, token: str | None) -> tuple[int, str]:
        if token is None or time.monotonic() > self._tokens.get(token, 0.0):
            return 401, ""
        name = path.removeprefix(METADATA_PATH)
        if name in self.statuses:
            return self.statuses[name], ""
        return (200, self.values[name]) if name in self.values else (404, "")

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        service = self

        class Handler(BaseHTTPRequestHandler):
            def do_PUT(self) -> None:
                status, body = 404, ""
                if self.path == TOKEN_PATH:
                    status, body = service._new_token(self.headers.get(TTL_HEADER))
                self._answer(status, body)

            def do_GET(self) -> None:
                self._answer(*service._value(self.path, self.headers.get(TOKEN_HEADER)))

            def _answer(self, status: int, body: str) -> None:
                service.requests.append(f"{self.command} {self.path} {status}")
                time.sleep(service.delay_s)
                try:
                    self.send_response(status)
                    self.send_header("Content-Length", str(len(body)))
                    self.end_headers()
                    self.wfile.write(body.encode())
                except OSError:
                    pass  # the client gave up waiting

            def log_message(self, format: str, *args: object) -> None:
                pass

        return Handler
