"""Drain: the training saves its state before this node ends."""

from __future__ import annotations

import signal
import threading
import time

from bootstrap.agent.messages import log
from bootstrap.agent.node import SupervisedNode
from bootstrap.agent.torchrun import Torchrun, send
from bootstrap.training.notices import Notice


def drain(node: SupervisedNode, torchrun: Torchrun, notice: Notice) -> None:
    """Have the state saved, and end torchrun.

    A training process that reads the drain file (bootstrap.training) saves by itself; any other process gets SIGTERM,
    on which most frameworks save, and the same time.
    """
    told, heartbeat_at = "", 0.0
    signalled: list[int] = []
    while torchrun.runs():
        # Read in every pass: a later spot notice may leave less time.
        notice = node.leaving() or notice
        if str(notice) != told:
            told = str(notice)
            log(f"leaving: {notice}; {notice.save_by - time.time():.0f} s to save the state")
        if notice.source.startswith("autoscaling/") and time.monotonic() >= heartbeat_at:
            heartbeat_at = time.monotonic() + node.settings.hook_heartbeat_s
            threading.Thread(target=node.group.extend_terminate_hook, daemon=True).start()
        if not node.notices.is_read() and not signalled:
            # Between two starts torchrun has no workers; a later pass signals them.
            signalled = torchrun.workers()
            if signalled:
                log(f"no training process reads the drain file; sending SIGTERM to {len(signalled)}")
                for pid in signalled:
                    send(pid, signal.SIGTERM)
        if node.notices.is_saved():
            log("state is saved; ending torchrun")
            break
        if signalled and not any(send(pid, 0) for pid in signalled):
            log("the training processes have ended; ending torchrun")
            break
        if time.time() >= notice.save_by:
            log("state is NOT saved in time; ending torchrun")
            break
        node.tick()
    torchrun.end()
