"""Measure the loss of unequal GPUs whose shares follow predicted instead of measured speeds.

Takes measured runs of one model, sequence length and precision on two GPU models of one suite, gives one GPU of each
the share of a batch by the estimator's speeds, and the measured time. The loss is the extra time of a step over shares
by measured speed. ``python -m tests.benchmarks.mixed_balance``
"""

from __future__ import annotations

import csv
import itertools
import tempfile
from collections import defaultdict
from pathlib import Path

import numpy as np

from optimizer.cli import cli
from optimizer.performance.measured_runs import RUNS

# Standard deviations of the log errors of two GPUs, as `calibration.json` has them: both measured, one not, neither.
ERRORS = ((0.08, 0.08), (0.08, 0.2), (0.2, 0.2))


def pairs(runs: Path) -> list[tuple[str, float, float, float]]:
    """List suite and model, speed ratio, and the loss of predicted and of equal shares, for each pair of GPU models."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "predicted.csv"
        cli.main(["estimate", "--batch", str(runs), "--out", str(out)], standalone_mode=False)
        rows = list(csv.DictReader(out.read_text(encoding="utf-8").splitlines()))
    best: dict[tuple[str, ...], dict[str, tuple[float, float]]] = defaultdict(dict)
    for row in rows:
        if row["tokens_per_second_per_gpu"] and row["predicted_tokens_per_second_per_gpu"]:
            speeds = float(row["tokens_per_second_per_gpu"]), float(row["predicted_tokens_per_second_per_gpu"])
            run = best[row["suite"], row["model"], row["seq_len"], row["precision"]]
            run[row["gpu"]] = max(run.get(row["gpu"], (0.0, 0.0)), speeds)
    losses = []
    for name, of_gpu in best.items():
        for a, b in itertools.combinations(sorted(of_gpu), 2):
            (real_a, said_a), (real_b, said_b) = of_gpu[a], of_gpu[b]
            ideal = 1 / (real_a + real_b)
            predicted = max(said_a / real_a, said_b / real_b) / (said_a + said_b)
            equal = 0.5 / min(real_a, real_b)
            losses.append((f"{' '.join(name)}: {a}, {b}", real_a / real_b, predicted / ideal - 1, equal / ideal - 1))
    return losses


def main() -> None:
    """Print the table, its means, and the loss if errors were independent."""
    losses = pairs(RUNS)
    print("run: GPUs | measured speed ratio | lost with predicted shares | lost with equal shares")
    for name, ratio, *shares in losses:
        print(f"{name} | {ratio:.2f} | {shares[0]:.1%} | {shares[1]:.1%}")
    lost = np.array([[predicted, equal] for _, _, predicted, equal in losses])
    (predicted, equal), most = lost.mean(axis=0), lost[:, 0].max()
    print(f"{len(losses)} pairs: mean {predicted:.1%}, most {most:.1%}; with equal shares mean {equal:.1%}")
    rng = np.random.default_rng(0)
    for errors in ERRORS:
        speed = np.exp(rng.normal(0, 1, (200_000, 2)) * errors)
        loss = speed.mean(axis=1) / speed.min(axis=1) - 1
        mean, p95 = loss.mean(), np.quantile(loss, 0.95)
        print(f"independent errors of {errors[0]:.0%} and {errors[1]:.0%}: mean {mean:.1%}, p95 {p95:.1%}")


if __name__ == "__main__":
    main()
