"""Time what an adaptive gang adds to the controller's tick: ``python -m tests.benchmarks.measure_tick``.

Plays random weather over eight places, the most that a plan of six alternates has, with each spot policy: CPU time of
``decide`` in every tick, and of the import of the modules that only an adaptive gang needs, which a cold start pays.
Each history begins with a new instance of the function: without a table in its settings, it computes one.
A Lambda of 1,769 MB has one vCPU, and ours has 256 MB:
https://docs.aws.amazon.com/lambda/latest/dg/configuration-memory.html
Writes ``results/tick_<yyyymm>.md`` and the raw times.
"""

from __future__ import annotations

import gc
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from tempfile import TemporaryDirectory

import numpy as np

from bootstrap.contract import one_group
from bootstrap.contract.run_terms import table_terms
from bootstrap.contract.settings import ControllerSettings
from bootstrap.controller.decide import decide
from tests.benchmarks.spot_zones import heading, write_results
from tests.unit.bootstrap.controller.world import MINUTE, World, adaptive, place

GOAL_MS = 100.0
VCPU_SHARE = 256 / 1769
HOURS, HISTORIES, IMPORTS = 24, 2, 9
ZONES = tuple(f"az{number}" for number in range(1, 7))
PLACES = {
    **{f"spot p4d {zone}": place(zone, "spot", 10.0 + number) for number, zone in enumerate(ZONES)},
    "on-demand p4d az2": place("az2", "on-demand", 30.0, hours=16),
    "on-demand p4d az1": place("az1", "on-demand", 30.0, hours=16),
}
MODULES = "bootstrap.contract.pool_policy", "bootstrap.controller.spot_policy"
_IMPORT = """
import time, base64, bootstrap.contract.pools, bootstrap.controller.ends
began = time.process_time()
import {}
print((time.process_time() - began) * 1e3)
"""


def stacks() -> dict[str, ControllerSettings]:
    """Return the settings of each case: today's, those that ship the table, and those without room for it."""
    bare = adaptive(places=PLACES, deadline_hours=40.0, steps=0)
    terms = table_terms(bare)
    assert terms
    return {
        "fallback": replace(bare, spot_policy="fallback"),
        "adaptive": replace(bare, table=one_group.pack(terms)),
        "adaptive, no table in the settings": bare,
    }


def play(settings: ControllerSettings, seed: int) -> list[tuple[str, float]]:
    """Phase and CPU ms of each tick of a history; the same weather for every case."""
    one_group.table.cache_clear()
    one_group.unpack.cache_clear()
    weather = np.random.default_rng(seed)
    world = World(settings)
    world.boot = timedelta(minutes=8)
    ticks = []
    for _ in range(HOURS):
        for zone in ZONES:
            world.rooms[("spot", f"subnet-{zone}")] = int(weather.choice([0, 0, 2, 9]))
        for minute in range(60):
            if minute == 30 and weather.random() < 0.5:
                for key in world.alive():
                    if world.nodes[key].lifecycle == "spot":
                        world.interrupt(key)
            state, seen = world.state, world.observe()
            began = time.process_time()
            decide(world.config, state, seen, world.now)
            spent_ms = (time.process_time() - began) * 1e3
            world.tick()
            # The function keeps one state, and Python's collector walks all that is kept.
            world.decisions.clear()
            ticks.append((world.phase, spent_ms))
            world.advance(MINUTE)
    return ticks


def import_ms() -> float:
    """Median CPU time of the modules' import in a fresh process that compiles them: the function's zip has no .pyc."""
    code = _IMPORT.format(", ".join(MODULES))
    with TemporaryDirectory() as nothing:
        env = {**os.environ, "PYTHONPYCACHEPREFIX": nothing, "PYTHONDONTWRITEBYTECODE": "1"}
        times = [
            subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, check=True)
            for _ in range(IMPORTS)
        ]
    return statistics.median(float(done.stdout) for done in times)


def summarise(name: str, spent_ms: Sequence[float]) -> str:
    """Line of the table: mean, 99th percentile and most of one policy's ticks."""
    p99 = statistics.quantiles(spent_ms, n=100)[98]
    cells = (statistics.mean(spent_ms), p99, max(spent_ms))
    return f"| {name} | {len(spent_ms)} | " + " | ".join(f"{ms:.2f} | {ms / VCPU_SHARE:.1f}" for ms in cells) + " |"


def main() -> None:
    """Write the results."""
    gc.freeze()
    ticks = {
        policy: [tick for seed in range(HISTORIES) for tick in play(settings, seed)]
        for policy, settings in stacks().items()
    }
    imported = import_ms()
    means, most = (
        {policy: statistic([ms for _, ms in of_policy]) for policy, of_policy in ticks.items()}
        for statistic in (statistics.mean, max)
    )
    added, worst = ((of["adaptive"] - of["fallback"]) / VCPU_SHARE for of in (means, most))
    lines = [
        "# Controller's tick with an adaptive gang",
        "",
        f"CPU time of `decide` on a shared machine, and at 256 MB of a Lambda ({VCPU_SHARE:.3f} vCPU): {HISTORIES} "
        f"histories of {HOURS} h, {len(PLACES)} places. Goal: at most {GOAL_MS:g} ms of Lambda time more. Adaptive "
        f"adds {added:.1f} ms a tick on average and {worst:.1f} ms to the longest one, and {imported / VCPU_SHARE:.0f} "
        f"ms to a cold start, where its modules are imported ({imported:.1f} ms here; every stack's function "
        f"imports them). Lambda's figures are computed, CPU time here over the share of a core: nothing ran on AWS.",
        *heading("Ticks", ("policy", "ticks", "mean, ms", "Lambda", "p99, ms", "Lambda", "most, ms", "Lambda")),
        *(summarise(policy, [ms for _, ms in of_policy]) for policy, of_policy in ticks.items()),
    ]
    rows = [
        {
            "policy": policy,
            "history": i // (60 * HOURS),
            "tick": i % (60 * HOURS),
            "phase": phase,
            "cpu_ms": f"{ms:.3f}",
        }
        for policy, of_policy in ticks.items()
        for i, (phase, ms) in enumerate(of_policy)
    ]
    write_results("tick", lines, rows)
    print("\n".join(lines))


if __name__ == "__main__":
    main()
