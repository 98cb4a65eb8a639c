"""Gang test (bootstrap/smoke/gang.py) of all nodes together, before their first step."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass

from bootstrap.agent.messages import log
from bootstrap.agent.node import SupervisedNode
from bootstrap.agent.rendezvous import Rendezvous, listens
from bootstrap.agent.torchrun import TEST_JOIN_S, Torchrun

# torchrun's own start and end.
TORCHRUN_S = 60.0


@dataclass(frozen=True, kw_only=True)
class Proof:
    """Result of a gang test; neither passed nor failed where there was none, which ends no node."""

    passed: bool = False
    failure: str = ""
    hung: bool = False  # a collective hangs though all nodes live: their software is at fault
    bad_hosts: frozenset[str] = frozenset()  # instance ids, to be replaced


def prove_gang(node: SupervisedNode, rendezvous: Rendezvous) -> Proof:
    """Run the test with the other nodes."""
    settings = node.settings
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
        passed, verdict, error, hung = report["passed"], report["verdict"], report["error"], report["hung"]
        bad_hosts = frozenset(map(str, report["bad_hosts"]))
        missed = [test for test in report["tests"] if test["verdict"] != "pass"]
        lines = [f"{test['verdict']} {test['name']} {test['value']} {test['unit']}: {test['note']}" for test in missed]
    except (OSError, ValueError, KeyError, TypeError) as fault:
        log(f"the gang test gave no report ({fault!r}): the gang trains without it")
        return Proof()
    for line in lines:
        log(f"gang test: {line}")
    log(f"gang test: {verdict} in {report.get('duration_s')} s")
    if passed is True:
        return Proof(passed=True)
    failed = ", ".join(test["name"] for test in missed if test["verdict"] == "fail")
    reason = f"the gang test failed: {error or failed}"
    # Training would hang like the test, while it is paid for.
    if error and not bad_hosts and not hung:
        log(f"{reason}: no host is to blame, and the gang trains without it")
        return Proof()
    if bad_hosts:
        reason += f"; bad: {', '.join(sorted(bad_hosts))}"
    return Proof(failure=reason, hung=bool(hung), bad_hosts=bad_hosts)
