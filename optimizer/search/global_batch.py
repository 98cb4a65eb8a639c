"""Global batch where the request gives none: one for all plans of an answer, so that their hours and dollars compare.

Pre-training starts from the batch that published models of the size had. A run that this batch leaves too few steps is
a shorter training or a fine-tuning: its batch is halved until it has the steps, down to the batches that published
fine-tunings had. The batch of a run with more steps than published ones is doubled, up to the largest of theirs. The
result is a power of two or three times one, which many numbers of ranks divide.
"""

from __future__ import annotations

import math
from typing import Final

from optimizer.workload.model import ModelSpec

# (parameters below, tokens): batches of GPT-3's models by size, 0.5M, 1M, 2M and 3.2M tokens (arXiv:2005.14165, table
# 2.1, 2020-05), as the powers of two behind them: 3.2M tokens are 1536 sequences of 2048.
_BATCH_TOKENS = ((1e9, 2**19), (5e9, 2**20), (50e9, 2**21), (math.inf, 3 * 2**20))
# Batches of images from 64 to 8192 gave ResNet-50 the same accuracy (arXiv:1706.02677, figure 1, 2017-06).
_LARGEST_IMAGES, _FEWEST_IMAGES = 8192, 64
# ViT's batch (arXiv:2010.11929, section 4.1, 2020-10), and Whisper's, of clips (arXiv:2212.04356, table 17, 2022-12).
_VIT_IMAGES, _CLIPS = 4096, 256
# Steps of Llama's warm-up alone (arXiv:2302.13971, section 2.3, 2023-02): a run with fewer pre-trains nothing.
_PRE_TRAINING_STEPS = 2000
# Steps and tokens a step of long pre-trainings: 2T tokens by 4M each (Llama 2, arXiv:2307.09288, table 1, 2023-07), and
# 16M, the most of Llama 3 (arXiv:2407.21783, section 3.4.1, 2024-07).
_LONG_STEPS, _MOST_TOKENS = 500_000, 2**24
# Sequences: Alpaca and Vicuna (github.com/lm-sys/FastChat README, 2023-04), Tulu 3 (arXiv:2411.15124, 2024-11).
_FINE_TUNING_BATCH = 128
# Sequences: BERT's fine-tunings (arXiv:1810.04805, appendix A.3, 2018-10), LIMA (arXiv:2305.11206, section 3, 2023-05).
_SMALLEST_BATCH = 32
# A run with fewer learns little: LIMA, 1,000 examples seen 15 times, has 234 steps of 64 (arXiv:2305.11206, section 3).
FEW_STEPS: Final = 200
# GPUs of AWS's full nodes: a smaller batch would leave some without a sequence, however long it is.
_FULL_NODE_GPUS = 8


def choose_global_batch(
    model: ModelSpec, samples: int, seq_len: int, *, fine_tunes: bool = False, owned: int = 1
) -> int:
    """Choose the samples of one step for a run of ``samples``.

    Args:
        model: any but a module; no published run says how large a batch a module learns from.
        seq_len: tokens of a sample.
        fine_tunes: part of the model is frozen or has adapters, however long the run is.
        owned: GPUs that the user owns, of three nodes for instance: all work where they divide the batch.
    """
    if model.counts_samples:
        largest = {"image": _VIT_IMAGES, "speech": _CLIPS}.get(model.architecture, _LARGEST_IMAGES)
        batch = _halve(largest, samples, steps=_PRE_TRAINING_STEPS, least=_FEWEST_IMAGES)
        if model.architecture == "speech":  # fine-tunings too are of sequences
            batch = _halve(batch, samples, steps=FEW_STEPS, least=_SMALLEST_BATCH)
    else:
        tokens = next(tokens for below, tokens in _BATCH_TOKENS if model.parameters < below)
        batch = max(_round_number(tokens / seq_len), _FULL_NODE_GPUS)
        while samples > _LONG_STEPS * batch and 2 * batch * seq_len <= _MOST_TOKENS:
            batch *= 2
        batch = _halve(batch, samples, steps=_PRE_TRAINING_STEPS, least=_FINE_TUNING_BATCH)
        if fine_tunes:
            batch = min(batch, _FINE_TUNING_BATCH)
        batch = _halve(batch, samples, steps=FEW_STEPS, least=_SMALLEST_BATCH)
    while batch > samples:
        batch //= 2
    near = owned * 2.0 ** round(math.log2(batch / owned))
    return int(near) if batch % owned and near % owned == 0 and near <= samples else batch


def _halve(batch: int, samples: int, *, steps: int, least: int) -> int:
    while batch // 2 >= least and samples < steps * batch:
        batch //= 2
    return batch


def _round_number(value: float) -> int:
    """Return the nearest of 2^k and 3 x 2^k."""
    power: int = 2 ** int(math.log2(max(value, 1.0)))
    return min((power, power * 3 // 2, 2 * power), key=lambda number: abs(number - value))
