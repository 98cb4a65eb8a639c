"""Names: patterns of AWS's, and known names near to a wrong one: other codes' words, and misspellings."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

# Zone ids, unlike names, mean the same zone in every account:
# https://docs.aws.amazon.com/global-infrastructure/latest/regions/az-ids.html
# A Local or Wavelength Zone's have more parts (usw2-lax1-az1): https://docs.aws.amazon.com/ram/latest/userguide/working-with-az-ids.html
REGION = r"^[a-z]{2}(-[a-z]+)+-\d$"
ZONE_ID = r"^[a-z0-9]+-az\d+$"
INSTANCE_TYPE = r"^[a-z0-9-]+\.[a-z0-9-]+$"

# Words of other training codes and of AWS's pages, in lower case, for values and keys of a request.
SYNONYMS = {
    "fsdp": "zero3",
    "fsdp1": "zero3",
    "fsdp2": "zero3",
    "full_shard": "zero3",
    "shard_grad_op": "zero2",
    "stage1": "zero1",
    "stage2": "zero2",
    "stage3": "zero3",
    "dp": "data",
    "tp": "tensor",
    "pp": "pipeline",
    "cp": "context",
    "ep": "expert",
    "float32": "fp32",
    "float16": "fp16",
    "half": "fp16",
    "bfloat16": "bf16",
    "float8": "fp8",
    "adamw_torch": "adamw",
    "pytorch": "torch",
    "deepspeed": "megatron-deepspeed",
    "ondemand": "on-demand",
    "od": "on-demand",
    "ri": "reserved",
    "capacity-blocks": "capacity-block",
    "price": "cost",
    "cheapest": "cost",
    "speed": "time",
    "fastest": "time",
    "batch_size": "global_batch",
    "sequence_length": "seq_len",
    "max_length": "seq_len",
    "dtype": "precision",
    "purchase": "purchase_options",
    "capacity_reservations": "existing_reservations",
}


def near_names(value: str, known: Iterable[str], *, cutoff: float = 0.6) -> list[str]:
    """Up to three of ``known`` that ``value`` may have meant, the nearest first; case does not count."""
    names = {name.lower(): name for name in sorted(known)}
    text = value.strip().lower()
    if (meant := SYNONYMS.get(text, "")) in names:
        return [names[meant]]
    return [names[name] for name in difflib.get_close_matches(text, names, n=3, cutoff=cutoff)]
