"""The repository's program, carried out by the real engine and judged by the real AWS provider.

Most of a deployment's time is the provider's own waiting (25 seconds for each queue and queue policy), so the scenarios
run at the same time, each with an emulated AWS of its own (a gigabyte, half a core); in one test, so that no way of
spreading tests over workers starts them twice.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.engine.deployment import Tools
from tests.engine.scenarios import SCENARIOS


@pytest.mark.engine
# Above all of them on a busy machine; each run of the CLI has its own limit.
@pytest.mark.timeout(1500)
def test_a_fleet_comes_stays_and_goes(tools: Tools, tmp_path_factory: pytest.TempPathFactory) -> None:
    with ThreadPoolExecutor(len(SCENARIOS)) as pool:
        runs = {
            name: pool.submit(scenario, tools, tmp_path_factory.mktemp(name)) for name, scenario in SCENARIOS.items()
        }
    failures = []
    for name, run in runs.items():
        failure = run.exception()
        if failure is not None:
            failure.add_note(f"scenario: {name}")
            failures.append(failure)
    if failures:
        raise BaseExceptionGroup(f"{len(failures)} of {len(runs)} scenarios failed", failures)
