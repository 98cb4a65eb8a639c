"""An AWS that refuses one call, as with a missing permission, a full quota or an outage in mid-deployment.

``POST /refuse-next`` with ``{"action": "CreateVpc", "code": "UnauthorizedOperation"}`` arms it; the next call of that
action is refused, and acts on nothing.
"""

from __future__ import annotations

import contextlib
import http.client
import io
import json
import urllib.parse
from collections.abc import Callable, Iterable
from typing import Any
from xml.sax.saxutils import escape

from tests.engine.inventory import Client
from tests.engine.replay import Application

PATH = "/refuse-next"


def refuse_next(aws: Client, action: str, code: str) -> None:
    """Let the emulated AWS of these clients refuse the next call of ``action`` with the error ``code``."""
    connection = http.client.HTTPConnection(urllib.parse.urlsplit(aws("sts").meta.endpoint_url).netloc)
    with contextlib.closing(connection):
        connection.request("POST", PATH, json.dumps({"action": action, "code": code}))
        assert connection.getresponse().status == 200


class Refusing:
    """``application`` with refusals; knows the actions of services that name them (not S3's and Lambda's paths)."""

    def __init__(self, application: Application) -> None:
        self._application = application
        self._refused: dict[str, str] = {}

    def __call__(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        """Answer one request (WSGI)."""
        if environ["REQUEST_METHOD"] != "POST":
            return self._application(environ, start_response)
        body = environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        environ["wsgi.input"] = io.BytesIO(body)
        if environ["PATH_INFO"] == PATH:
            order = json.loads(body)
            self._refused[order["action"]] = order["code"]
            start_response("200 OK", [])
            return [b""]
        action = action_of(environ, body)
        code = self._refused.pop(action, None)
        if code is None:
            return self._application(environ, start_response)
        start_response("400 Bad Request", [("x-amzn-ErrorType", code)])
        return [refusal(environ, code, f"{action} is refused by the test")]


def action_of(environ: dict[str, Any], body: bytes) -> str:
    """The action a request asks for: a field of the query protocol, or a header of the JSON one; empty for others."""
    target = environ.get("HTTP_X_AMZ_TARGET", "")
    if target:
        return str(target).rpartition(".")[2]
    if environ.get("CONTENT_TYPE", "").startswith("application/x-www-form-urlencoded"):
        return urllib.parse.parse_qs(body.decode()).get("Action", [""])[0]
    return ""


def refusal(environ: dict[str, Any], code: str, message: str) -> bytes:
    """The error as the protocols write it; EC2's XML differs from the others'."""
    if environ.get("HTTP_X_AMZ_TARGET"):
        return json.dumps({"__type": code, "message": message}).encode()
    error = f"<Error><Code>{escape(code)}</Code><Message>{escape(message)}</Message></Error>"
    return (
        f"<Response><Errors>{error}</Errors><RequestID>0</RequestID></Response>"
        if "/ec2/" in environ.get("HTTP_AUTHORIZATION", "")
        else f"<ErrorResponse>{error}<RequestId>0</RequestId></ErrorResponse>"
    ).encode()
