"""Fine-tuning on one GPU: each method's speed and peak memory, against the estimate and a loop by hand with peft.

    python -m tests.benchmarks.measure_finetuning --size 8b --gpu h200 --out results.jsonl

One process a method, so that memory is its own; synthetic tokens, random weights. ``--size tiny`` runs on a CPU.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 8,
             "num_key_value_heads": 4, "vocab_size": 256},
    # Llama 3.2 1B and Llama 3.1 8B.
    "1b": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
           "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 128256, "tie_word_embeddings": True},
    "8b": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
           "num_key_value_heads": 8, "vocab_size": 128256},
}  # fmt: skip
METHODS = {
    "full": "",
    "lora": "--method lora",
    "lora attention": "--method lora --lora-targets attention",
    "qlora": "--method qlora",
    "8-bit moments": "--optimizer adamw8bit",
    "pure bf16": "--precision pure-bf16",
    "half frozen": "--frozen {half}",
}
WARM_UP, STEPS = 5, 20


def main() -> None:
    arguments = _arguments()
    if arguments.method:
        print(json.dumps(_by_hand(arguments) if arguments.by_hand else _trainer(arguments)))
        return
    for method in METHODS:
        for by_hand in (False, True) if method in ("full", "lora", "qlora") else (False,):
            command = [sys.executable, "-m", __spec__.name, *sys.argv[1:], "--method", method]
            environment = os.environ | {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
            done = subprocess.run(
                command + ["--by-hand"] * by_hand, env=environment, capture_output=True, text=True, check=False
            )
            row = {"size": arguments.size, "method": method, "code": "by hand with peft" if by_hand else "trainer"}
            if done.returncode:
                row["error"] = done.stderr[-500:]
            else:
                row |= json.loads(done.stdout.splitlines()[-1])
            if arguments.gpu and not by_hand:
                row["predicted"] = _predicted(arguments, method)
            text = json.dumps(row)
            print(text, flush=True)
            with arguments.out.open("a", encoding="utf-8") as file:
                file.write(text + "\n")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SHAPES, default="tiny")
    parser.add_argument("--seq-len", type=int, default=2048)
    parser.add_argument("--micro-batch", type=int, default=4)
    parser.add_argument("--checkpointing", choices=("none", "full"), default="full")
    parser.add_argument("--gpu", help="of gpufleet estimate --gpu; left out: no prediction")
    parser.add_argument("--out", type=Path, default=Path("finetuning.jsonl"))
    parser.add_argument("--method", choices=METHODS, help=argparse.SUPPRESS)
    parser.add_argument("--by-hand", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def _flags(method: str, size: str) -> list[str]:
    return METHODS[method].format(half=SHAPES[size]["num_hidden_layers"] // 2).split()


def _architecture(arguments: argparse.Namespace) -> dict[str, Any]:
    return {"model_type": "llama", "max_position_embeddings": arguments.seq_len, **SHAPES[arguments.size]}


def _predicted(arguments: argparse.Namespace, method: str) -> dict[str, Any]:
    config = arguments.out.with_suffix(".config.json")
    config.write_text(json.dumps(_architecture(arguments)), encoding="utf-8")
    command = [
        sys.executable, "-c", "from optimizer.cli import main; main()", "estimate", "--model", str(config),
        "--gpu", arguments.gpu, "--gpus", "1", "--seq-len", str(arguments.seq_len),
        "--micro-batch", str(arguments.micro_batch), "--activation-checkpointing", arguments.checkpointing,
         "--weights", "random",
        "--framework", "gpufleet", "--format", "json", *_flags(method, arguments.size),
    ]  # fmt: skip
    answer = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return {name: answer[name] for name in ("step_time_s", "tokens_per_second", "peak_memory_gib")}


def _trainer(arguments: argparse.Namespace) -> dict[str, float]:
    import torch
    import torch.distributed as dist

    from bootstrap.trainer.config import parse_config
    from bootstrap.trainer.run import assemble, set_device

    config = parse_config(
        ["--architecture", json.dumps(_architecture(arguments)), "--seq-len", str(arguments.seq_len),
         "--micro-batch", str(arguments.micro_batch), "--activation-checkpointing", arguments.checkpointing,
         *_flags(arguments.method, arguments.size)],
        {},
    )  # fmt: skip
    device = set_device(config)
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo", store=store, rank=0, world_size=1
    )
    parts = assemble(config, device)
    tokens = torch.randint(config.architecture["vocab_size"], (arguments.micro_batch, arguments.seq_len), device=device)
    return _timed(lambda: parts.stepper.step([{"input_ids": tokens, "labels": tokens}]), arguments)


def _by_hand(arguments: argparse.Namespace) -> dict[str, float]:
    """Time transformers' model with peft and a plain loop, as its documentation writes it."""
    import peft
    import torch
    import transformers

    from bootstrap.trainer.adapters import ATTENTION, FEED_FORWARD, quantize

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    settings = transformers.AutoConfig.for_model("llama", **SHAPES[arguments.size], use_cache=False)
    adapts = arguments.method != "full"
    auto: Any = transformers.AutoModelForCausalLM
    model: Any = auto.from_config(settings, dtype=torch.bfloat16 if adapts else torch.float32)
    if arguments.method == "qlora":
        for layer in model.model.layers:
            quantize(layer, device)
    model.to(device)
    if arguments.checkpointing == "full":
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if adapts:
        names = [*ATTENTION, *FEED_FORWARD]
        model = peft.get_peft_model(model, peft.LoraConfig(r=16, lora_alpha=32, target_modules=names))
    model.train()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=device.type == "cuda")
    tokens = torch.randint(settings.vocab_size, (arguments.micro_batch, arguments.seq_len), device=device)

    def step() -> None:
        with torch.autocast(device.type, torch.bfloat16):
            loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return _timed(step, arguments)


def _timed(step: Any, arguments: argparse.Namespace) -> dict[str, float]:
    import torch

    has_gpu = torch.cuda.is_available()
    warm_up, steps = (WARM_UP, STEPS) if has_gpu else (1, 2)
    for _ in range(warm_up):
        step()
    if has_gpu:
        torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(steps):
        step()
    if has_gpu:
        torch.cuda.synchronize()
    seconds = (time.perf_counter() - start) / steps
    peak = torch.cuda.max_memory_allocated() / 2**30 if has_gpu else 0.0
    return {
        "step_time_s": seconds,
        "tokens_per_second": arguments.micro_batch * arguments.seq_len / seconds,
        "peak_memory_gib": peak,
    }


if __name__ == "__main__":
    main()
