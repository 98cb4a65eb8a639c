"""Error of the peak memory by layout: measured peaks above the estimated ones, at the 95th percentile."""

from __future__ import annotations

import numpy as np

from optimizer.performance.inputs import Inputs
from optimizer.performance.types import DDP, Number

# Measured peak above the estimate that 19 of 20 rows of a layout stay below (of fewer rows, all), in rows of plain
# PyTorch and the reference trainer on one to four H200 (data/measured_runs.csv, 2026-11-21, and
# tests/benchmarks/results/h200_x2_trainer_202611.csv; a test compares). No layout takes less than all of them together:
# the rows are of one GPU model.
ALL_LAYOUTS = 0.032  # 193 rows: 0.024
DDP_LAYOUTS = 0.035  # 19
SHARDED = ALL_LAYOUTS  # 33 rows: 0.009; ZeRO-1 to ZeRO-3 over data ranks
TENSOR = 0.038  # 5
CONTEXT = ALL_LAYOUTS  # 7 rows: 0.009
EXPERT = ALL_LAYOUTS  # 5 rows: 0.002
CONVOLUTIONAL = 0.079  # 19: cuDNN's workspace
# No measured peak has pipeline stages, fused kernels, or an encoder with a decoder: as far off as the worst above.
UNMEASURED = CONVOLUTIONAL


def margin(x: Inputs) -> Number:
    """95th percentile of a measured peak above the estimated one, as a share of the estimate."""
    splits = ((x.tensor, TENSOR), (x.context, CONTEXT), (x.expert, EXPERT), (x.pipeline, UNMEASURED))
    several = x.data * x.context > 1
    share = np.where(several, np.where(x.sharding == DDP, DDP_LAYOUTS, SHARDED), ALL_LAYOUTS)
    for ranks, own in splits:
        share = np.where(ranks > 1, np.maximum(share, own), share)
    share = np.where(x.convolutions > 0, np.maximum(share, CONVOLUTIONAL), share)
    return np.where((x.fused_kernels > 0) | (x.t5_like > 0), np.maximum(share, UNMEASURED), share)
