"""End of a run on a notice, for SpotTolerantRun and the engines' callbacks; end of a process."""

from __future__ import annotations

import logging
import os
import sys
from typing import NoReturn

from bootstrap.training.errors import Interrupted
from bootstrap.training.ledger import Ledger
from bootstrap.training.rank_group import RankGroup
from bootstrap.training.watcher import Watcher

logger = logging.getLogger(__name__)


def leave_together(ranks: RankGroup, ledger: Ledger, watcher: Watcher, *, step: int, is_saved: bool) -> Interrupted:
    """Tell ledger and node that the run stops after ``step``, and close ``ranks``; every rank raises the result."""
    reason = next(filter(None, ranks.gather(str(watcher.stop_notice or ""))), "a notice")
    interrupted = Interrupted(reason=reason, step=step, saved=is_saved)
    if ranks.rank == 0:
        logger.warning("%s", interrupted)
    ledger.end("stop", step, reason)
    # Rank 0 writes the ledger first: torchrun ends all ranks when one exits.
    ranks.maximum(0)
    if ranks.local_rank == 0:
        watcher.announce_saved()
    ranks.close()
    return interrupted


def end_process(code: int) -> NoReturn:
    """Exit without Python's shutdown, for a script whose last lines use gloo (``RankGroup.close`` says why)."""
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)
