"""A node's training, from the first start to the node's end.

In a group the node stays until the group ends it, so that no node waits out a hook.
"""

from __future__ import annotations

import json
import signal
import threading
import time
from contextlib import closing
from dataclasses import dataclass
from types import FrameType

from bootstrap.agent.commands import BOOTSTRAP, AgentError, log, output_of
from bootstrap.agent.node import SupervisedNode
from bootstrap.agent.rendezvous import Rendezvous, listens, meet, wait_until_chosen
from bootstrap.agent.settings import Settings
from bootstrap.agent.torchrun import TEST_JOIN_S, Torchrun, send
from bootstrap.contract.report import EXIT_AT_FAULT
from bootstrap.training.errors import ConfigurationError
from bootstrap.training.notices import Notice, hook_limit_s, notice_limit_s
from bootstrap.training.progress import read_step
from bootstrap.training.watcher import poll_interval_s

# Attempts to take the training's role: in a stack's first minute its policies are still spreading through AWS.
ROLE_TRIES = 12
# Gang tests that fail or hang in a row until the node gives up: after so many, replacing the blamed hosts is no cure.
MAX_GANG_FAILURES = 3
# Between two reports of the steps done, from which the controller knows the work that is left.
STEPS_REPORT_S = 300.0
# torchrun's own start and end.
TORCHRUN_S = 60.0
# For the newest report, within the few seconds that the notice leaves.
LAST_REPORT_S = 5.0


def supervise(settings: Settings) -> int:
    """Train until the command is done, fails again and again, or this node ends; returns the exit status."""
    # Before anything is started: a wrong limit is an error now, not when the node ends.
    try:
        limit_s, _, _ = notice_limit_s(), hook_limit_s(), poll_interval_s()  # the watcher's too
    except ConfigurationError as error:
        raise AgentError(str(error)) from error
    with closing(SupervisedNode(settings)) as node:

        def ask_drain(number: int, frame: FrameType | None) -> None:
            if node.leaving() is None:
                reason = f"the agent got {signal.Signals(number).name}"
                node.notices.write_stop(Notice(source=reason, detail="", save_by=time.time() + limit_s))

        # The unit's KillMode=mixed sends SIGTERM here and not to torchrun, which would give the workers only 30 s to
        # save (torch 2.11 has no option for it).
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, ask_drain)
        return _train(node)


def _train(node: SupervisedNode) -> int:
    settings = node.settings
    if not settings.train_command.strip():
        log("nothing to train: GPUFLEET_TRAIN_COMMAND is empty")
        return finish(node, 0)
    if not _has_credentials(node):
        return give_up(node, 1, f"the training's role {settings.train_role_arn} cannot be taken")
    failures = 0
    gang = _Gang()
    while True:
        rendezvous = meet(node, gang.bad_hosts) if settings.is_gang else None
        if settings.mode == "training" and not settings.is_gang:
            wait_until_chosen(node)
        if rendezvous is not None and (proof := gang.prove(node, rendezvous)).failure:
            if rendezvous.own_id in proof.bad_hosts:
                return be_replaced(node, proof.failure, "gang-test")
            if gang.failures >= MAX_GANG_FAILURES or not (proof.bad_hosts or proof.hung):
                return give_up(node, 1, proof.failure)
            log(f"{proof.failure}; {'waiting for the replacement' if proof.bad_hosts else 'testing again'}")
            node.rest(settings.limits.relaunch_delay_s)
            continue
        began, status, fault = time.monotonic(), 0, ""
        if node.leaving() is None:
            if settings.mode == "workers":
                node.group.protect_from_scale_in(on=True)
            try:
                torchrun = Torchrun(node, rendezvous)
            except OSError as error:
                # A shell's status for a program that cannot be run.
                status = 126
                log(f"torchrun does not start: {error}")
            else:
                status, fault = _run_once(node, torchrun)
        if node.leaving() is not None:
            leave(node)
            return 0
        if settings.in_group and (fault := fault or (_broken_gpu() if status else "")):
            return be_replaced(node, fault, "check-xid-errors" if "Xid" in fault else "check-gpus")
        if status == 0:
            node.reports.tell("done", 0)
            if settings.mode == "training":
                log("training is complete")
                return finish(node, 0)
            failures = 0
            log(f"the command is done; starting it again in {settings.limits.worker_pause_s:g} s")
            node.group.protect_from_scale_in(on=False)
            node.rest(settings.limits.worker_pause_s)
            continue
        if status == EXIT_AT_FAULT:
            return give_up(node, status, "the training command says that its settings are at fault")
        lived_s = time.monotonic() - began
        failures = 1 if lived_s >= settings.limits.healthy_s * (settings.limits.max_restarts + 1) else failures + 1
        if failures >= settings.limits.max_launches:
            reason = f"torchrun failed {failures} times in a row within {settings.limits.healthy_s:g} s a start"
            return give_up(node, status, f"{reason}, the last with status {status}")
        log(f"torchrun ended with status {status} after {lived_s:.0f} s; starting it again")
        node.rest(settings.limits.relaunch_delay_s)


def _has_credentials(node: SupervisedNode) -> bool:
    """Take the training's role; a leaving node needs none."""
    for _ in range(ROLE_TRIES):
        if node.leaving() is not None or node.credentials.take():
            return True
        node.rest(node.settings.limits.join_poll_s)
    return False


@dataclass(frozen=True, kw_only=True)
class Proof:
    """Result of a gang test; without a ``failure`` the gang trains."""

    failure: str = ""
    hung: bool = False  # a collective hangs though all nodes live: their software is at fault
    bad_hosts: frozenset[str] = frozenset()  # instance ids, to be replaced


class _Gang:
    """Gang tests of this node: which members passed one, and whom the failed ones blame."""

    def __init__(self) -> None:
        self.failures = 0
        self.bad_hosts: frozenset[str] = frozenset()
        self._proven: frozenset[str] = frozenset()

    def prove(self, node: SupervisedNode, rendezvous: Rendezvous) -> Proof:
        """Run the gang test with the other nodes, unless the same members have passed it."""
        settings = node.settings
        # Without a group nothing would replace the bad host.
        is_wanted = settings.limits.gang_test_s > 0 and settings.in_group and rendezvous.members != self._proven
        if not is_wanted or node.leaving() is not None:
            return Proof()
        if not rendezvous.is_host and listens(rendezvous.host_ip, settings.limits.rendezvous_port):
            log("the others train already: this node joins them without the gang test")
            return Proof()
        file = settings.run_dir / "gang.json"
        file.unlink(missing_ok=True)
        command = [
            "-m", "bootstrap.smoke", "gang", "--name", rendezvous.own_id,
            "--time-limit-s", f"{settings.limits.gang_test_s:g}", "--out", str(file),
        ]  # fmt: skip
        torchrun = Torchrun(node, rendezvous, test=command)
        deadline = time.monotonic() + TEST_JOIN_S + settings.limits.gang_test_s + TORCHRUN_S
        while torchrun.runs():
            if node.leaving() is not None or time.monotonic() >= deadline:
                torchrun.end()
                return Proof()
            node.tick()
        try:
            report = json.loads(file.read_text(encoding="utf-8"))
            error, hung, bad_hosts = report["error"], bool(report["hung"]), frozenset(map(str, report["bad_hosts"]))
            missed = [test for test in report["tests"] if test["verdict"] != "pass"]
            for test in missed:
                log(f"gang test: {test['verdict']} {test['name']} {test['value']} {test['unit']}: {test['note']}")
            log(f"gang test: {report['verdict']} in {report['duration_s']} s")
            has_passed = report["passed"] is True
        except (OSError, ValueError, KeyError, TypeError) as fault:
            log(f"the gang test gave no report ({fault!r}): the gang trains without it")
            return Proof()
        if has_passed:
            self._proven, self.failures = rendezvous.members, 0
            return Proof()
        failed = ", ".join(test["name"] for test in missed if test["verdict"] == "fail")
        reason = f"the gang test failed: {error or failed}"
        # Training would hang like the test, while it is paid for.
        if error and not bad_hosts and not hung:
            log(f"{reason}: no host is to blame, and the gang trains without it")
            return Proof()
        self.failures += 1
        self.bad_hosts |= bad_hosts
        blamed = f"; bad: {', '.join(sorted(bad_hosts))}" if bad_hosts else ""
        return Proof(failure=reason + blamed, hung=hung, bad_hosts=bad_hosts)


def _run_once(node: SupervisedNode, torchrun: Torchrun) -> tuple[int, str]:
    """Wait for torchrun, or end it on a notice or when a GPU broke; returns its exit status and the fault."""
    fault, look_at = "", time.monotonic() + node.settings.limits.gpu_check_s
    tell_at = time.monotonic() + STEPS_REPORT_S
    node.reports.tell("training", 0)
    while torchrun.runs():
        if (notice := node.leaving()) is not None:
            _drain(node, torchrun, notice)
            break
        if node.settings.in_group and time.monotonic() >= look_at:
            look_at = time.monotonic() + node.settings.limits.gpu_check_s
            fault = _broken_gpu("--xid")
            if fault:
                torchrun.end()
                break
        if lone := torchrun.trains_alone():
            log(f"FAIL {lone}")
            torchrun.end()
            return EXIT_AT_FAULT, ""
        if time.monotonic() >= tell_at:
            tell_at = time.monotonic() + STEPS_REPORT_S
            node.reports.tell("training", 0, done_steps=read_step(node.settings.progress_file))
        node.tick()
    return torchrun.status(), fault


def _broken_gpu(*options: str) -> str:
    """GPU fault that makes this node unable to train; empty for none."""
    # nvidia-smi has 70 s in it.
    return (output_of([str(BOOTSTRAP / "steps/find-broken-gpu.sh"), *options], 120.0) or "").strip()


def _drain(node: SupervisedNode, torchrun: Torchrun, notice: Notice) -> None:
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
            heartbeat_at = time.monotonic() + node.settings.limits.hook_heartbeat_s
            threading.Thread(target=node.group.extend_terminate_hook, daemon=True).start()
        if not node.notices.listener.exists() and not signalled:
            # Between two starts torchrun has no workers; a later pass signals them.
            signalled = torchrun.workers()
            if signalled:
                log(f"no training process reads the drain file; sending SIGTERM to {len(signalled)}")
                for pid in signalled:
                    send(pid, signal.SIGTERM)
        if node.notices.saved.exists():
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


def leave(node: SupervisedNode) -> None:
    """Let the group end this node now."""
    node.reports.wait(LAST_REPORT_S)
    node.group.complete_terminate_hook()
    log("this node has left the run")


def finish(node: SupervisedNode, status: int) -> int:
    """Return the exit status after the training; in a group only when the group ends this node."""
    if not node.settings.in_group:
        return status
    if node.settings.mode == "workers":
        node.group.protect_from_scale_in(on=False)
    _stand_by(node)
    return 0


def give_up(node: SupervisedNode, status: int, reason: str) -> int:
    """End a run whose command cannot be started, or fails again and again."""
    log(f"{reason}; giving up: {node.settings.log_file} has its output")
    node.reports.tell("gave-up", status)
    _send_log(node, "training gave up")
    return finish(node, EXIT_AT_FAULT)  # the unit does not restart it


def be_replaced(node: SupervisedNode, fault: str, check: str) -> int:
    """Have the group replace this node, which failed a check: a GPU broke, or the gang test blames it."""
    log(f"this node cannot train any more: {fault}")
    node.reports.tell("sick", 0, check)
    _send_log(node, f"this node failed {check}: {fault}")
    while not node.group.ask_to_be_replaced() and node.leaving() is None:
        log("the group could not be told that this node is unhealthy; trying again")
        node.rest(node.settings.limits.tell_delay_s)
    _stand_by(node)
    return 0


def _stand_by(node: SupervisedNode) -> None:
    log("waiting for the group to end this node, which is paid until then")
    while (notice := node.leaving()) is None:
        node.tick()
    log(f"leaving: {notice}")
    leave(node)


def _send_log(node: SupervisedNode, title: str) -> None:
    """Send the end of the output to the log group, before the node ends: the image may have no CloudWatch agent."""
    if not node.group.send_log("train", title, node.settings.log_file):
        log("the log could not be sent to CloudWatch Logs")
