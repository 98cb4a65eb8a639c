"""Progress file beside the notice files, which the agent reads for tokens per second; rank 0 writes it.

    {"schema_version": 1, "at": 1795276800.5, "step": 1200, "samples": 307200, "tokens": 629145600}

Other training code may write it: ``at`` in Unix seconds, totals, tokens null where unknown, replaced by a rename.
"""

from __future__ import annotations

import json
import logging
import time
from pathlib import Path

from bootstrap.training.environment import node_plan
from bootstrap.training.notices import NoticeFiles

logger = logging.getLogger(__name__)

NAME = "progress.json"
# Between writes; the agent reads once a minute.
INTERVAL_S = 1.0


def read_step(path: Path) -> int | None:
    """Read the steps done; None where the file is missing or unreadable."""
    try:
        return int(json.loads(path.read_text(encoding="utf-8"))["step"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


class ProgressFile:
    """Writer of the agent's progress file, if any; a failure is logged once and never stops training."""

    def __init__(self, *, global_batch: int) -> None:
        self._notices = NoticeFiles.from_environment()
        self._global_batch = global_batch
        plan = node_plan()
        self._tokens_per_sample = plan.seq_len if plan else None
        self._written_at = 0.0
        self._failed = False

    def update(self, step: int) -> None:
        """Write that ``step`` steps are done, at most once a second."""
        now = time.monotonic()
        if self._notices is None or now - self._written_at < INTERVAL_S:
            return
        is_first, self._written_at = not self._written_at, now
        samples = step * self._global_batch
        tokens = None if self._tokens_per_sample is None else samples * self._tokens_per_sample
        facts = {"schema_version": 1, "at": round(time.time(), 3), "step": step, "samples": samples, "tokens": tokens}
        path = self._notices.path.with_name(NAME)
        new = path.with_suffix(".new")
        try:
            new.write_text(json.dumps(facts), encoding="utf-8")
            new.replace(path)
            if is_first:  # the launcher of an earlier process went on after its fault
                self._notices.at_fault.unlink(missing_ok=True)
        except OSError as error:
            if not self._failed:
                logger.error("progress is not published: %s", error)
            self._failed = True
