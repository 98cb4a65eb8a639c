"""Carry out a worked example of docs/quick-start.md at toy size on two CPU processes: from its request to its weights.

    python -m examples.worked lora

``lora``, ``spot`` or ``resnet``: gpufleet chooses the page's fleet, and the reference trainer trains a toy model by the
plan's method and layout, started by the node's agent. ``spot`` meets an interruption. Exits 0 if all steps are done.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from bootstrap.training.ledger import read_ledger, table
from examples.interrupted_training import ROOT, DemoError, Node, say
from examples.local_imds import LocalImds

LLAMA = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 256, "max_position_embeddings": 64,
}  # fmt: skip
# Architecture, steps and flags of each example's toy. The spot run is long enough for a notice, which takes a second.
TOYS: dict[str, tuple[dict[str, Any], int, str]] = {
    "lora": (LLAMA, 30, "--seq-len 32 --method lora --lora-rank 4 --weights random --learning-rate 0.02"),
    "spot": (LLAMA, 300, "--seq-len 32"),
    "resnet": ({"torchvision": "resnet18"}, 3, "--seq-len 1 --optimizer sgd --learning-rate 1e-4"),
}


def choose(name: str, folder: Path) -> dict[str, Any]:
    """Best plan of the page's request."""
    page = (ROOT / "docs" / "quick-start.md").read_text(encoding="utf-8")
    (folder / f"{name}.yaml").write_text(re.findall(rf"`{name}\.yaml`:\n\n```yaml\n(.*?)```", page, re.DOTALL)[0])
    command = [
        sys.executable,
        "-c",
        "from optimizer.cli import main; main()",
        "recommend",
        str(folder / f"{name}.yaml"),
    ]
    answer = subprocess.run([*command, "--format", "json"], cwd=ROOT, capture_output=True, text=True, check=False)
    if answer.returncode:
        raise DemoError(answer.stderr)
    plan: dict[str, Any] = json.loads(answer.stdout)["plans"][0]
    return plan


def train(name: str, plan: dict[str, Any], folder: Path, imds: LocalImds) -> None:
    """Train the toy to its end, and show what it left."""
    architecture, steps, flags = TOYS[name]
    layout = plan["parallelism"]
    node = Node(folder / name, imds, steps=steps)
    node.losses_file = node.out / "metrics.jsonl"
    node.environment["GPUFLEET_TRAIN_COMMAND"] = (
        f"-m bootstrap.trainer --architecture '{json.dumps(architecture)}' --steps {steps} --out {node.out} {flags} "
        f"--global-batch 8 --gpus-per-node 2 --sharding {layout['sharding']} --log-every 1 --precision fp32 "
        "--schedule constant "
        f"--activation-checkpointing {layout['activation_checkpointing']}"
    )
    if name == "spot":
        with node.running() as process:
            node.wait_for_step(steps // 10, process)
            imds.interrupt()
            node.wait(process)
        say(f"step {node.steps_done() - 1}: spot notice; saved, and the node left; a new node starts")
        imds.replace_instance()
    with node.running() as process:
        node.wait(process)
    losses = node.losses()
    if (ended_at := max(losses, default=0)) != steps:
        raise DemoError(f"ended at step {ended_at} of {steps}:\n{node.log_tail()}")
    for step in (1, steps):
        say(f"step {step}: loss {losses[step]:.3f}")
    kept = sorted(path.relative_to(node.store) for path in node.store.rglob("*.safetensors"))
    say(f"weights: {', '.join(map(str, kept))}")
    say(table(read_ledger(str(node.store))))


def main() -> int:
    """Run one example; 0 if its training ended well."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=TOYS)
    parser.add_argument("--keep", type=Path, help="keep logs, checkpoints and ledger in this new folder")
    options = parser.parse_args()
    name = options.name
    with tempfile.TemporaryDirectory(prefix="gpufleet-worked-") as temporary, LocalImds().running() as imds:
        folder = options.keep or Path(temporary)
        folder.mkdir(exist_ok=True)
        try:
            say(f"$ gpufleet recommend {name}.yaml")
            plan = choose(name, folder)
            cost, hours = plan["cost_usd"]["expected"], plan["hours"]["expected"]
            fleet = f"{plan['node_count']} × {plan['instance_type']}, {plan['purchase']['option']} in {plan['region']}"
            say(f"plan: {fleet}, {plan['parallelism']['sharding']}: {hours:.1f} h, {cost:,.2f} USD")
            say("the same method and sharding with a toy model on two CPU processes (torchrun, gloo)")
            train(name, plan, folder, imds)
        except (DemoError, subprocess.TimeoutExpired) as error:
            say(f"FAILED: {error}")
            return 1
    say("DONE")
    return 0


if __name__ == "__main__":
    sys.exit(main())
