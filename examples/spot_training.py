"""Train a small GPT on spot capacity that comes and goes as in three AWS zones; the result is an undisturbed run's.

    python -m examples.spot_training

The trace (16 V100 nodes a zone, 16 hours in 2023) says when a zone has capacity; the adaptive policy of
``bootstrap.contract.pool_policy`` decides where to launch, when to move and when to pay on demand. Each launch starts
bootstrap/agent with torchrun and two CPU workers, each reclaim is a spot notice from a local metadata server, and the
checkpoint is all that goes from node to node. The trace's clock follows the training: a step is six minutes of work.
Exits 0 only if the work is done by the deadline, with every loss and parameter equal to the undisturbed run's.
"""

from __future__ import annotations

import argparse
import math
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from bootstrap.contract.pool_policy import Mode
from bootstrap.contract.pools import PoolEvent, came, left, reclaimed, refused
from bootstrap.training.ledger import read_ledger, table
from examples.interrupted_training import LIMIT_S, ROOT, DemoError, Node, compare, say
from examples.local_imds import LocalImds
from optimizer.economics.simulation.omniscient import lower_bound
from optimizer.economics.simulation.policies import POLICIES
from optimizer.economics.simulation.simulator import (
    DONE_HOURS,
    PoolsView,
    SimulatedJob,
    SimulatedRun,
    SpotPolicy,
    simulate,
)
from optimizer.economics.simulation.traces import CapacityTrace, read_trace
from optimizer.performance.types import Bools

TRACES = ROOT / "examples" / "traces"
GANG = 16
SAYS: dict[PoolEvent, str] = {
    came: "the whole gang came",
    reclaimed: "the nodes were taken back",
    left: "the run ended its nodes itself",
}
JOB = SimulatedJob(work_hours=12.0, deadline_hours=16.0, price_ratio=3.3, restart_hours=0.25)
# Steps that the training takes to leave: the ranks tell each other of a notice after one and read it after the next.
LEAVING_STEPS = 2
# A training process reads the notice within this time.
READ_S = 1.0


class Told:
    """Policy that says what it meets; refusals between two other events in one line."""

    def __init__(self, policy: SpotPolicy, zones: list[str]) -> None:
        self._policy, self._zones = policy, zones
        self._refusals: Counter[str] = Counter()

    def keep(self, view: PoolsView) -> Mode:
        """Return the policy's choice."""
        kept = self._policy.keep(view)
        if kept is Mode.ON_DEMAND and view.mode is not Mode.ON_DEMAND:
            slack_hours = view.left_hours - view.work_hours
            self.say(view.elapsed_hours, f"spot will not do: {slack_hours:.1f} h of slack left; on demand")
        return kept

    def next_try(self, view: PoolsView) -> int | None:
        """Return the policy's choice."""
        return self._policy.next_try(view)

    def note(self, event: PoolEvent, pool: int, hours: float) -> None:
        """Say the event."""
        self._policy.note(event, pool, hours)
        if event is refused:
            self._refusals[self._zones[pool]] += 1
        else:
            self.say(hours, f"{self._zones[pool]}: {SAYS[event]}")

    def say(self, hours: float, text: str) -> None:
        """Print a line of the trace's clock."""
        if self._refusals:
            counts = ", ".join(f"{zone} {count}" for zone, count in self._refusals.items())
            say(f"{'':8} refused: {counts}")
            self._refusals.clear()
        say(f"{hours:6.2f} h {text}")


class LiveRun(SimulatedRun):
    """Run of the simulation whose nodes train, never ahead of the trace's clock."""

    def __init__(
        self,
        available: Bools,
        gap_hours: float,
        policy: SpotPolicy,
        node: Node,
        pace: Path,
        imds: LocalImds,
        steps: int,
    ) -> None:
        prices = [dict.fromkeys(range(len(available)), 1 / JOB.price_ratio)] * available.shape[1]
        super().__init__(available.tolist(), gap_hours, JOB, prices, policy, [0.0])
        self._node, self._imds, self._steps = node, imds, steps
        self._step_hours = JOB.work_hours / steps
        self._pace = os.open(pace, os.O_RDWR | os.O_NONBLOCK)
        self._allowed = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._open = ExitStack()

    def __enter__(self) -> LiveRun:
        return self

    def __exit__(self, *error: object) -> None:
        self._open.close()
        os.close(self._pace)

    def launch(self, mode: Mode, pool: int) -> None:
        """Start the agent on a new node."""
        super().launch(mode, pool)
        self._imds.replace_instance()
        self._process = self._open.enter_context(self._node.running())

    def advance(self, hours: float) -> None:
        """Let the training do the steps of these hours."""
        super().advance(hours)
        if self._process is not None:
            held = LEAVING_STEPS if self.work > DONE_HOURS else 0
            self._let(self._steps_worked() - held)
            self._node.wait_for_step(self._allowed, self._process)

    def end(self, now_hours: float) -> None:
        """Stop the agent, as the group's end of a node does."""
        if self._process is not None:
            self._process.terminate()
            self._leave()
        super().end(now_hours)

    def reclaim(self, now_hours: float) -> None:
        """Give the two-minute notice."""
        self._imds.interrupt()
        self._leave()
        super().reclaim(now_hours)

    def finish(self) -> None:
        """Wait for the training's own end."""
        if self._process is None or self._allowed < self._steps:
            raise DemoError(f"the deadline came at step {self._node.steps_done()} of {self._steps}")
        self._node.wait(self._process)

    def _steps_worked(self) -> int:
        return self._steps - math.ceil(self.work / self._step_hours - 1e-9)

    def _let(self, steps: int) -> None:
        os.write(self._pace, bytes(max(0, steps - self._allowed)))
        self._allowed = max(self._allowed, steps)

    def _leave(self) -> None:
        """Wait until the node has saved and left, with the steps that were held back."""
        assert self._process is not None
        deadline = time.monotonic() + LIMIT_S
        while self._process.poll() is None:
            if self._node.is_told_to_leave() and self._node.steps_done() >= self._allowed:
                self._let(self._allowed + 1)
            if time.monotonic() > deadline:
                raise DemoError(f"the node does not leave:\n{self._node.log_tail()}")
            time.sleep(READ_S)
        self._node.wait(self._process)
        self._process = None
        self._open.close()
        while self._allowed > self._node.steps_done():
            os.read(self._pace, 1)  # that no step took
            self._allowed -= 1
        self.work = (self._steps - self._allowed) * self._step_hours


def demonstrate(folder: Path, imds: LocalImds, traces: list[CapacityTrace], steps: int) -> bool:
    """Train undisturbed and on spot; returns whether both runs are equal."""
    zones = [Path(trace.name).stem for trace in traces]
    available = np.stack([trace.nodes >= GANG for trace in traces])
    say(f"Undisturbed: {steps} steps of a small GPT, sharded by FSDP2, on two CPU processes (torchrun, gloo)")
    undisturbed = Node(folder / "undisturbed", imds, steps=steps)
    with undisturbed.running() as process:
        undisturbed.wait(process)
    say(f"step {undisturbed.steps_done():3}: done")
    say()
    say(
        f"On spot: the same run as {JOB.work_hours:g} h of work on {GANG} nodes, with a deadline of"
        f" {JOB.deadline_hours:g} h,\nin {', '.join(zones)}; on-demand costs {JOB.price_ratio:g} times spot,"
        f" a restart takes {60 * JOB.restart_hours:g} minutes"
    )
    pace = folder / "pace"
    os.mkfifo(pace)
    node = Node(folder / "spot", imds, steps=steps, pace=pace)
    policy = Told(POLICIES["adaptive"](len(zones), JOB), zones)
    with LiveRun(available, traces[0].gap_s / 3600, policy, node, pace, imds, steps) as run:
        run.play()
        run.finish()
    policy.say(run.elapsed_hours, f"step {node.steps_done()}: the work is done")
    say()
    equal = compare(undisturbed, node)
    say()
    say("Cost of this window as a share of on-demand from start to end")
    events = f"reclaimed {run.interruptions} times, in another zone {run.moves} times"
    say(f"  {'this run':24} {run.cost / JOB.on_demand_cost:.3f}, {events}")
    for name, cost in simulated_costs(available[None], traces[0].gap_s).items():
        say(f"  {name:24} {cost:.3f}")
    say()
    say("Where the real run's time went (its ledger, which outlived every process)")
    say(table(read_ledger(str(node.store))))
    say("EQUAL: spot changed nothing but the time" if equal else "NOT EQUAL: resuming changed the result")
    return equal


def simulated_costs(available: Bools, gap_s: float) -> dict[str, float]:
    """Cost of each policy of the simulation in the same window, and their lower bound."""
    prices = np.full((1, available.shape[1]), 1 / JOB.price_ratio)
    costs = {}
    for name, new_policy in POLICIES.items():
        played = simulate(available, gap_s / 3600, JOB, prices, new_policy, seed=0)
        late = ", late" if played.late[0] else ""
        costs[f"{name}, simulated{late}"] = float(played.cost[0])
    costs["lower bound"] = float(lower_bound(available, gap_s, JOB, prices).cost[0])
    return {name: cost / JOB.on_demand_cost for name, cost in costs.items()}


def main() -> int:
    """Run the demonstration; 0 if the work was done in time and both runs are equal."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=120, help="steps of each run, 12 hours of the trace")
    parser.add_argument("--keep", type=Path, help="keep logs, checkpoints and ledger in this new folder")
    options = parser.parse_args()
    traces = [read_trace(path) for path in sorted(TRACES.glob("*.json"))]
    with tempfile.TemporaryDirectory(prefix="gpufleet-demo-") as temporary, LocalImds().running() as imds:
        folder = options.keep or Path(temporary)
        try:
            return 0 if demonstrate(folder, imds, traces, options.steps) else 1
        except (DemoError, subprocess.TimeoutExpired) as error:
            say(f"FAILED: {error}")
            return 1


if __name__ == "__main__":
    sys.exit(main())
