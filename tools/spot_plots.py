"""Draw docs/images/spot.svg from the results of tests/benchmarks: ``python -m tools.spot_plots [FILE.svg]``."""

from __future__ import annotations

import sys
from pathlib import Path

import matplotlib as mpl
import pandas as pd
from matplotlib.figure import Figure

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "tests" / "benchmarks" / "results"
PICTURE = ROOT / "docs" / "images" / "spot.svg"
LOOKS = {
    "fallback": ("#999999", "s"),
    "greedy": ("#d95f02", "^"),
    "uniform_progress": ("#7570b3", "v"),
    "adaptive": ("#1b9e77", "o"),
    "omniscient": ("#000000", "_"),
}


def draw() -> Figure:
    """Draw the cost by deadline on one pool of AWS, and the cost over the lower bound on several pools."""
    figure = Figure(figsize=(11, 4.6), layout="constrained")
    one, several = figure.subplots(1, 2)
    rows = pd.read_csv(RESULTS / "spot_policies_202611.csv")
    runs = rows[(rows.pools == "one") & ~rows.trace.str.startswith("gcp-")]
    for policy, (color, marker) in LOOKS.items():
        mean = runs[runs.policy == policy].groupby("deadline_over_work").mean_normalised_cost.mean()
        if len(mean):
            one.plot(mean.index, mean, color=color, marker=marker, label=policy)
    one.set(title="One pool: AWS traces", xlabel="deadline over work")
    one.set(ylabel="mean cost (on-demand = 1)", ylim=(0, None))
    one.legend(fontsize=8)
    zones = rows[~rows.pools.str.startswith("one")]
    keys = ["pools", "gang", "deadline_over_work"]
    cases = zones.pivot_table(index=keys, columns="policy", values="mean_normalised_cost", sort=False)
    over = cases.div(cases["omniscient"], axis=0)
    names = [f"{pools}, {gang} × {factor:g}" for pools, gang, factor in over.index]
    for policy, (color, marker) in LOOKS.items():
        if policy != "omniscient":
            several.plot(over[policy], range(len(over)), marker, color=color, label=policy, alpha=0.8)
    several.set_yticks(range(len(over)), names, fontsize=7)
    several.invert_yaxis()
    several.set(title="Several pools: traces, nodes × deadline", xlabel="mean cost over the lower bound")
    several.grid(axis="x", alpha=0.3)
    several.legend(fontsize=8)
    return figure


def write(path: Path) -> None:
    """Write the picture, the same bytes for the same results."""
    with mpl.rc_context({"svg.hashsalt": "gpufleet", "svg.fonttype": "none"}):
        draw().savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    write(Path(sys.argv[1]) if len(sys.argv) > 1 else PICTURE)
