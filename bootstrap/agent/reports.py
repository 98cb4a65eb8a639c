"""Reports of this node's state to the controller, in one thread, until the newest is told."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass

from bootstrap.agent.group import GroupClient
from bootstrap.agent.messages import log


@dataclass(frozen=True)
class State:
    """State of the node (contract/report.py)."""

    name: str
    exit_status: int
    step: str = ""
    done_steps: int | None = None


class Reports:
    """The newest state, told again and again until that succeeds; an older one never follows a newer."""

    def __init__(self, group: GroupClient, delay_s: float) -> None:
        self._group, self._delay_s = group, delay_s
        self._changed = threading.Condition()
        self._newest: State | None = None
        self._told: State | None = None
        threading.Thread(target=self._work, name="reports", daemon=True).start()

    def tell(self, name: str, exit_status: int, step: str = "", *, done_steps: int | None = None) -> None:
        """Have the controller told; returns at once."""
        with self._changed:
            self._newest = State(name, exit_status, step, done_steps)
            self._changed.notify_all()

    def wait(self, limit_s: float) -> None:
        """Return when the newest state is told, or the time is over."""
        with self._changed:
            self._changed.wait_for(lambda: self._newest == self._told, timeout=limit_s)

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._newest != self._told)
                state = self._newest
            assert state is not None
            if self._group.report(state.name, state.exit_status, state.step, state.done_steps):
                if self._told is None or self._told.name != state.name:
                    log(f"the controller knows that this node is {state.name}")
                with self._changed:
                    self._told = state
                    self._changed.notify_all()
            else:
                log(
                    f"the controller could not be told that this node is {state.name}; trying again in "
                    f"{self._delay_s:g} s"
                )
                time.sleep(self._delay_s)
