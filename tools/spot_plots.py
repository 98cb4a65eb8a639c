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
    "greedy": ("#d95f02", "^"),
    "uniform_progress": ("#7570b3", "v"),
    "adaptive": ("#1b9e77", "o"),
    "omniscient": ("#000000", "_"),
}


def draw() -> Figure:
    """Draw the cost by deadline on the traces of AWS."""
    figure = Figure(figsize=(6, 4.6), layout="constrained")
    axes = figure.subplots()
    rows = pd.read_csv(RESULTS / "spot_policies_202611.csv")
    runs = rows[(rows.curve == "shipped") & ~rows.trace.str.startswith("gcp-")]
    for policy, (color, marker) in LOOKS.items():
        mean = runs[runs.policy == policy].groupby("deadline_factor").mean_normalised_cost.mean()
        axes.plot(mean.index, mean, color=color, marker=marker, label=policy)
    axes.set(title=f"One pool: {runs.trace.nunique()} AWS traces", xlabel="deadline over work")
    axes.set(ylabel="mean cost (on-demand = 1)", ylim=(0, None))
    axes.legend(fontsize=8)
    return figure


def write(path: Path) -> None:
    """Write the picture, the same bytes for the same results."""
    with mpl.rc_context({"svg.hashsalt": "gpufleet", "svg.fonttype": "none"}):
        draw().savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    write(Path(sys.argv[1]) if len(sys.argv) > 1 else PICTURE)
