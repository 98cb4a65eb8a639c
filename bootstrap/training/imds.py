"""IMDSv2 client for the metadata paths that announce the end of an instance.

https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/configuring-instance-metadata-service.html (read 2026-11)
"""

from __future__ import annotations

import http.client
import os
from urllib.parse import urlsplit

DEFAULT_ENDPOINT = "http://169.254.169.254"
ENDPOINT_VARIABLE = "AWS_EC2_METADATA_SERVICE_ENDPOINT"
# A token's longest life.
TOKEN_TTL_S = 21_600
# The service answers within about a millisecond.
TIMEOUT_S = 1.0
# Longer than any metadata value.
MAX_BYTES = 64 * 1024


class ImdsError(Exception):
    """The metadata service gave no usable answer."""


class Imds:
    """One metadata endpoint, reached directly: no proxy may see the token."""

    def __init__(self, endpoint: str | None = None, *, timeout_s: float = TIMEOUT_S) -> None:
        self.endpoint = endpoint or os.environ.get(ENDPOINT_VARIABLE) or DEFAULT_ENDPOINT
        parts = urlsplit(self.endpoint)
        if parts.scheme != "http" or not parts.hostname:
            raise ImdsError(f"{ENDPOINT_VARIABLE} is {self.endpoint!r}; expected http://HOST[:PORT]")
        self._host, self._port = parts.hostname, parts.port or 80
        self._timeout_s = timeout_s
        self._token = ""

    def get(self, path: str) -> str | None:
        """Value of ``/latest/meta-data/<path>``; None for 404, ImdsError for a timeout or any other status."""
        status, body = self._get(path) if self._token else (401, "")
        if status == 401:  # no token yet, or its six hours are over
            headers = {"X-aws-ec2-metadata-token-ttl-seconds": str(TOKEN_TTL_S)}
            status, token = self._request("PUT", "/latest/api/token", headers)
            if status != 200 or not token:
                raise ImdsError(f"PUT /latest/api/token answered {status}")
            self._token = token
            status, body = self._get(path)
        if status not in (200, 404):
            raise ImdsError(f"GET {path} answered {status}")
        return body if status == 200 else None

    def _get(self, path: str) -> tuple[int, str]:
        return self._request("GET", f"/latest/meta-data/{path}", {"X-aws-ec2-metadata-token": self._token})

    def _request(self, method: str, path: str, headers: dict[str, str]) -> tuple[int, str]:
        connection = http.client.HTTPConnection(self._host, self._port, timeout=self._timeout_s)
        try:
            connection.request(method, path, headers=headers)
            response = connection.getresponse()
            return response.status, response.read(MAX_BYTES).decode("utf-8", errors="replace").strip()
        except (OSError, http.client.HTTPException) as error:
            raise ImdsError(f"{method} {self.endpoint}{path}: {str(error) or type(error).__name__}") from error
        finally:
            connection.close()
