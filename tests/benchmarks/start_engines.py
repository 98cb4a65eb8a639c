"""Start each engine with the file that launch-config writes, at toy size.

    python -m tests.benchmarks.start_engines FOLDER [--engines accelerate deepspeed]

Two CPU processes train a Llama of two layers by transformers' Trainer for twenty steps, with SpotTolerantCallback.
Every rank gets SIGTERM in its tenth step, and the same command goes on. Prints a JSON line an engine and sharding: exit
status and losses of both starts, and the checkpoints.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from optimizer.launch_config import ENGINES, launch_config
from tests.plans import sample_plan

ROOT = Path(__file__).resolve().parents[2]
LLAMA: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 128, "vocab_size": 64, "max_position_embeddings": 64,
}  # fmt: skip
STEPS, STOP = 20, 10
TRAIN = f"""
import json, os, signal, sys
import torch
from transformers import AutoConfig, AutoModelForCausalLM, HfArgumentParser, Trainer, TrainerCallback, TrainingArguments
from bootstrap.training.integrations.transformers_callback import SpotTolerantCallback

class Stop(TrainerCallback):
    def on_step_begin(self, args, state, control, **_):
        if state.global_step == {STOP} - 1 and "STOPS" in os.environ:
            os.kill(os.getpid(), signal.SIGTERM)

class Samples(torch.utils.data.Dataset):
    def __len__(self):
        return 64
    def __getitem__(self, index):
        tokens = (torch.arange(32) * (1 + index % 3) + index) % 64
        return {{"input_ids": tokens, "labels": tokens}}

(arguments,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
torch.manual_seed(0)
spot = SpotTolerantCallback()
model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**json.loads(os.environ["MODEL"])))
trainer = Trainer(model, arguments, train_dataset=Samples(), callbacks=[spot, Stop()])
trainer.train(resume_from_checkpoint=spot.checkpoint)
"""


def start(folder: Path, arguments: list[str], *, stops: bool) -> tuple[int, list[float]]:
    """Exit status, and the losses that rank 0 logged."""
    environment = {
        **os.environ, "MODEL": json.dumps(LLAMA), "CUDA_VISIBLE_DEVICES": "", "AWS_EC2_METADATA_DISABLED": "true",
        "GPUFLEET_CHECKPOINT_URI": str(folder / "checkpoints"), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]), "ACCELERATE_USE_CPU": "true",
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
        **({"STOPS": "1"} if stops else {}),
    }  # fmt: skip
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*torchrun, *arguments, "--output_dir", "out", "--logging_steps", "1", "--use_cpu", "true"]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    text = done.stdout + done.stderr
    (folder / f"log-{'first' if stops else 'second'}.txt").write_text(text)
    lines = [line for line in text.replace("\r", "\n").splitlines() if "'loss'" in line]
    return done.returncode, [float(line.split("'loss':")[1].strip(" '").split("'")[0].split(",")[0]) for line in lines]


def main() -> None:
    """Start the engines."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--engines", nargs="+", default=["accelerate", "deepspeed"])
    options = parser.parse_args()
    for engine in options.engines:
        for sharding in ("ddp", "zero2", "zero3"):
            folder = options.folder.resolve() / engine / sharding
            folder.mkdir(parents=True)
            (folder / "train.py").write_text(TRAIN)
            plan = sample_plan(
                node_count=1,
                node={"gpu_count": 2},
                job={"architecture": LLAMA, "steps": STEPS, "global_batch": 4, "samples": 4 * STEPS,
                     "tokens": 128 * STEPS, "seq_len": 32, "precision": "fp32"},
                parallelism={"sharding": sharding, "data": 2, "micro_batch": 2, "grad_accum": 1,
                             "activation_checkpointing": "none"},
            )  # fmt: skip
            name = f"plan{ENGINES[engine].suffix}"
            (folder / name).write_text(launch_config(plan, engine, name)[0])
            arguments = list(ENGINES[engine].arguments(plan, name))
            statuses, losses = zip(*(start(folder, arguments, stops=stops) for stops in (True, False)), strict=True)
            checkpoints = sorted(path.parent.name for path in (folder / "checkpoints").rglob("manifest.json"))
            print(json.dumps({"engine": engine, "sharding": sharding, "exit": statuses, "losses": losses,
                              "checkpoints": checkpoints}), flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
