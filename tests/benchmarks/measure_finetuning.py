"""Measure fine-tuning on one GPU: each method by the trainer, and LoRA and QLoRA by a loop written with peft.

``torchrun --standalone --nproc-per-node 1 -m tests.benchmarks.measure_finetuning OUT.jsonl [--cases 8b] [--tiny]``
appends one JSON object a measurement; ``--rows`` writes the same cases to OUT in the columns of measured_runs.csv, for
``gpufleet estimate --batch``, and measures nothing. Random weights, one synthetic batch again and again, as in
measure_trainer.py.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from bootstrap.trainer import run as trainer
from bootstrap.trainer.adapters import ATTENTION, FEED_FORWARD, quantize
from tests.benchmarks.measure_trainer import Bench, Case, batches, configuration, measure_trainer, write_rows

FULL = "--micro-batch 4 --activation-checkpointing full --weights random"
NONE = "--micro-batch 4 --weights random"
METHODS = (
    "", "--method lora", "--method qlora", "--method lora --lora-targets attention", "--optimizer adamw8bit",
    "--precision pure-bf16",
)  # fmt: skip
CASES: list[Case] = [
    # All weights of 8B in fp32 with their moments leave no room for micro-batches of four.
    *(("llama-8b", 2048, f"{FULL} {method}") for method in (*METHODS[1:], "--frozen 16")),
    *(("llama-8b", 8192, f"{FULL} --micro-batch 1 {method}") for method in METHODS[1:3]),
    *(("llama-8b", 2048, f"{NONE} --micro-batch 1 {method}") for method in METHODS[1:3]),
    *(("llama-1b", 2048, f"{NONE} {method}") for method in (*METHODS, "--frozen 8")),
    *(("llama-1b", 2048, f"{NONE} --micro-batch 1 {method}") for method in METHODS[:3]),
    *(("llama-3b", 2048, f"{FULL} {method}") for method in METHODS[:3]),
]
BY_HAND = [
    CASES[0],
    CASES[1],
    ("llama-1b", 2048, f"{NONE} --method lora"),
    ("llama-1b", 2048, f"{NONE} --method qlora"),
]


def measure_by_hand(bench: Bench, case: Case) -> None:
    """Measure transformers' model with peft and a plain loop, as their documentation writes it."""
    import peft
    import transformers

    config = configuration(case, bench.world, bench.tiny)
    shape = {name: value for name, value in config.architecture.items() if name != "model_type"}
    auto: Any = transformers.AutoModelForCausalLM
    settings = transformers.AutoConfig.for_model("llama", **shape, use_cache=False)
    model: Any = auto.from_config(settings, dtype=torch.bfloat16)
    if config.tuning.method == "qlora":
        for layer in model.model.layers:
            quantize(layer, bench.device)
    model.to(bench.device)
    if config.activation_checkpointing == "full":
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    names = [*ATTENTION, *FEED_FORWARD]
    model = peft.get_peft_model(model, peft.LoraConfig(r=16, lora_alpha=32, target_modules=names)).train()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=not bench.tiny)
    (batch,) = batches(bench, config, 0, 1)

    def step() -> None:
        with torch.autocast(bench.device.type, torch.bfloat16):
            loss = model(input_ids=batch["input_ids"], labels=batch["input_ids"]).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    seconds, steps = bench.seconds(step)
    bench.write(
        part="tuning", loop="by hand", model=case[0], seq_len=config.seq_len, flags=case[2], gpus=1,
        step_s=round(seconds, 6), steps=steps,
        tokens_per_second_per_gpu=round(config.micro_batch * config.seq_len / seconds, 1),
    )  # fmt: skip


def main() -> None:
    """Measure the chosen cases."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seconds", type=float, default=460.0)
    parser.add_argument("--cases", default="", help="Regular expression of the measurements' names.")
    parser.add_argument("--tiny", action="store_true", help="Check this script on the CPU.")
    parser.add_argument("--rows", action="store_true", help="Write the rows of the cases and measure nothing.")
    options = parser.parse_args()
    if options.rows:
        write_rows(options.out, CASES, 1, "tuning")
        return
    bench = Bench(options)
    trainer.init_process_group(bench.device)
    packages = ("torch", "transformers", "peft", "bitsandbytes")
    bench.write(part="versions", gpus=1, **{name: importlib.metadata.version(name) for name in packages})
    for number, case in enumerate(CASES):
        bench.attempt(f"{case}", partial(measure_trainer, bench, "tuning", case, row_id=f"tuning-{number:02}"))
        if case in BY_HAND:
            bench.attempt(f"by hand {case}", partial(measure_by_hand, bench, case))
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    main()
