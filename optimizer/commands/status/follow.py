"""Follow a run until it has ended."""

from __future__ import annotations

import sys
from collections.abc import Callable
from datetime import datetime

from bootstrap.contract.state import ENDED, ControllerState, Phase
from infra.naming import Names
from optimizer.commands.stack_file import StackFile, follow_policy
from optimizer.commands.status.live import watch
from optimizer.commands.status.reading import Reading, read_file

# The controller ticks once a minute.
POLL_S = 20


def follow(
    file: StackFile, names: Names, *, since: datetime, leaves: Callable[[ControllerState], bool] = lambda state: False
) -> Phase:
    """Show a run until a tick after ``since`` finds it ended, or it ``leaves`` the stack; return its phase."""

    def ended(reading: Reading) -> bool:
        state = reading.state
        return state is not None and state.updated_at > since and (state.phase in ENDED or leaves(state))

    last = watch(
        follow_policy(file.plan, file.config),
        file.stack,
        lambda: read_file(file, names),
        POLL_S,
        live=sys.stdout.isatty(),
        ended=ended,
    )
    assert last.state is not None  # ended
    return last.state.phase
