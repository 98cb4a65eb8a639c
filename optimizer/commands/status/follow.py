"""Follow a run, a line an event, until it has ended."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from bootstrap.contract.state import ENDED
from optimizer.commands.stack.file import StackFile
from optimizer.commands.status.live import print_events
from optimizer.commands.status.reading import Reading, read

if TYPE_CHECKING:
    from bootstrap.contract.state import Phase
    from infra.naming import Names

# The controller ticks once a minute.
POLL_S = 20


def follow(file: StackFile, names: Names, *, since: datetime) -> Phase:
    """Print what changes in a run until a tick after ``since`` finds it ended; return its phase."""
    before: Reading | None = None
    while True:
        reading = read(names, datetime.now(UTC))
        print_events(file.plan, before, reading)
        before = reading
        state = reading.state
        if state is not None and state.phase in ENDED and state.updated_at > since:
            return state.phase
        time.sleep(POLL_S)
