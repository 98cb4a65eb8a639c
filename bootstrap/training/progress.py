"""How far training has come, in one small file of this node: what the metrics publisher makes tokens per second of.

Rank 0 alone writes it, so that one node publishes the whole job's figure. Any training code may write the file instead:

    {"schema_version": 1, "at": 1795276800.5, "step": 1200, "samples": 307200, "tokens": 629145600}

``at`` is the Unix time at which ``step`` optimizer steps were done; samples and tokens are the whole job's so far,
tokens null where nobody knows them. Replace it by a rename: a reader must never see half of it.
"""

from __future__ import annotations

import json
import logging
import os
import time
from pathlib import Path

from bootstrap.training.environment import count_from_environment

logger = logging.getLogger(__name__)

PROGRESS_FILE_VARIABLE = "GPUFLEET_PROGRESS_FILE"
# The plan's: the samples of a language model are sequences of one length.
SEQ_LEN_VARIABLE = "GPUFLEET_SEQ_LEN"
# The reader looks once a minute.
INTERVAL_S = 1.0


class Progress:
    """Writer of one process. A file that cannot be written is logged once and never stops training.

    Args:
        path: the file, or None to write nothing.
        global_batch: samples of one step over all ranks.
        tokens_per_sample: None where nobody knows them.
    """

    def __init__(self, path: Path | None, *, global_batch: int, tokens_per_sample: int | None) -> None:
        self._path = path
        self._global_batch = global_batch
        self._tokens_per_sample = tokens_per_sample
        self._last = 0.0
        self._failed = False

    @classmethod
    def from_environment(cls, *, global_batch: int, tokens_per_sample: int | None = None) -> Progress:
        """To launch.sh's file; the plan's sequence length if not told otherwise.

        Raises:
            ConfigurationError: ``GPUFLEET_SEQ_LEN`` is not a count.
        """
        path = os.environ.get(PROGRESS_FILE_VARIABLE)
        return cls(
            Path(path) if path else None,
            global_batch=global_batch,
            tokens_per_sample=tokens_per_sample or count_from_environment(SEQ_LEN_VARIABLE),
        )

    def update(self, step: int) -> None:
        """``step`` steps are done; written at most once a second."""
        now = time.monotonic()
        if self._path is None or now - self._last < INTERVAL_S:
            return
        self._last = now
        samples = step * self._global_batch
        tokens = None if self._tokens_per_sample is None else samples * self._tokens_per_sample
        facts = {"schema_version": 1, "at": round(time.time(), 3), "step": step, "samples": samples, "tokens": tokens}
        new = self._path.with_suffix(".new")
        try:
            new.write_text(json.dumps(facts), encoding="utf-8")
            new.replace(self._path)
        except OSError as error:
            if not self._failed:
                logger.error("progress is not published: %s", error)
            self._failed = True
