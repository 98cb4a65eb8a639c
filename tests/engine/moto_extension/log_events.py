"""FilterLogEvents by the streams' prefix, and always in order of time.

https://docs.aws.amazon.com/AmazonCloudWatchLogs/latest/APIReference/API_FilterLogEvents.html
"""

from __future__ import annotations

import json

from moto.logs.responses import LogsResponse

from tests.engine.moto_extension.teaching import teach


def install() -> None:
    """Let moto's CloudWatch Logs find events by prefix."""
    teach(LogsResponse, filter_log_events)


def filter_log_events(self: LogsResponse) -> str:
    """Answer FilterLogEvents; streams by names, or by prefix."""
    group, names = self._get_param("logGroupName"), self._get_param("logStreamNames", [])
    if prefix := self._get_param("logStreamNamePrefix"):
        streams = self.logs_backend.groups[group].streams if group in self.logs_backend.groups else {}
        # For moto an empty list is all streams.
        names = [name for name in streams if name.startswith(prefix)] or [prefix]
    start, end, limit = (self._get_param(name) for name in ("startTime", "endTime", "limit"))
    token, pattern = self._get_param("nextToken"), self._get_param("filterPattern")
    events, following, searched = self.logs_backend.filter_log_events(
        group, names, start, end, limit, token, pattern, interleaved=True
    )
    return json.dumps({"events": events, "nextToken": following, "searchedLogStreams": searched})
