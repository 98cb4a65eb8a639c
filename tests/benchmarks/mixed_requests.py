"""Count how often a mixed fleet is cheaper, and time the search: random requests over the whole shipped catalog.

Deadlines lie between two thirds of what the fastest fleet takes and ten times as much, so that most bind. Every request
owns some nodes: without, nothing is mixed. ``python -m tests.benchmarks.mixed_requests [REQUESTS] [SEED]``
"""

from __future__ import annotations

import random
import sys
import time
from typing import Any

import numpy as np

from optimizer import recommend
from optimizer.catalog import load
from optimizer.contract.request import request_from_dict
from optimizer.mixed import find_mixed
from optimizer.mixed.describe import summarise
from optimizer.performance.calibration import load as load_calibration

# Models, with the sequence length where the model does not fix it.
MODELS = {
    "gpt2": 1024,
    "gpt2-xl": 1024,
    "bert-large": 512,
    "resnet50": None,
    "llama-3.2-1b": 4096,
    "llama-3.1-8b": 8192,
}
OWNED = ("p4d.24xlarge", "p5.48xlarge", "g5.48xlarge", "p4de.24xlarge", "g6e.12xlarge")


def random_request(rng: random.Random) -> dict[str, Any]:
    """Make a request without a deadline."""
    model = rng.choice(list(MODELS))
    workload: dict[str, Any] = {"samples": int(10 ** rng.uniform(4.5, 8)), "seq_len": MODELS[model]}
    if rng.random() < 0.5:
        workload["global_batch"] = rng.choice([64, 128, 256, 512, 1024])
    limits: dict[str, Any] = {"purchase_options": rng.choice([["on-demand"], ["on-demand", "spot"]])}
    place = {"region": rng.choice(["us-east-1", "us-west-2"]), "count": rng.randint(1, 6)}
    limits["existing_reservations"] = [{"instance_type": rng.choice(OWNED), **place, "usd_per_hour": 0}]
    limits["purchase_options"] = [*limits["purchase_options"], "reserved"]
    return {"model": model, "workload": workload, "constraints": limits}


def main(requests: int, seed: int) -> None:
    """Print a line for each request with a mixed fleet, and the processor time of the search for one."""
    rng, catalog, calibration = random.Random(seed), load(), load_calibration()  # noqa: S311
    spent: list[float] = []

    def timed(*args: Any) -> Any:
        started = time.process_time()
        fleets = find_mixed(*args)
        spent.append(time.process_time() - started)
        return fleets

    savings: list[float] = []
    mixed = done = 0
    sys.modules["optimizer.recommend"].__dict__["find_mixed"] = timed
    while done < requests:
        wanted = random_request(rng)
        free = recommend(request_from_dict(wanted), catalog, calibration)
        if not free.pareto:
            continue
        fastest = min(plan.hours.p95 for plan in free.pareto)
        wanted["constraints"]["deadline_hours"] = fastest * 10 ** rng.uniform(-0.2, 1)
        answer = recommend(request_from_dict(wanted), catalog, calibration)
        done += 1
        for fleet in answer.mixed_fleets[:1]:
            mixed += 1
            print(f"{wanted['model']}, {wanted['constraints']['deadline_hours']:.1f} h: {summarise(fleet)}")
            if fleet["beats"]:
                savings.append(fleet["saving_usd"] / fleet["beats"]["cost_usd"])
    ends = f", saving {min(savings):.1%} to {max(savings):.1%} where a plan keeps the limits" if savings else ""
    print(f"{done} requests, {mixed} with a cheaper mix{ends}")
    median, high = np.quantile(spent, [0.5, 0.9])
    print(f"processor time of find_mixed: median {median * 1e3:.0f} ms, 90th percentile {high * 1e3:.0f} ms")


if __name__ == "__main__":
    main(*(int(value) for value in (sys.argv[1:] + ["50", "0"][len(sys.argv) - 1 :])))
