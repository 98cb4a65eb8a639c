"""Fine-tuning in real torchrun runs on CPUs: adapters alone train, resume bit-equal, and merge into the base."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from bootstrap.contract.ledger import LEDGER_FILE, read_lines, read_loss
from tests.training.test_trainer import LLAMA, torchrun
from tests.warm import Warm

METHODS = {
    "lora": "--method lora --lora-rank 4 --precision bf16",
    "lora zero3": "--method lora --lora-rank 4 --precision bf16 --sharding zero3 --activation-checkpointing full",
    "lora attention": "--method lora --lora-targets attention --precision pure-bf16",
    "qlora": "--method qlora --lora-rank 4 --optimizer adamw8bit",
    "frozen": "--frozen 1 --precision fp32",
    "pure": "--precision pure-bf16",
}


def _flags(more: str) -> list[str]:
    return [
        "--architecture", json.dumps(LLAMA), "--seq-len", "32", "--global-batch", "8", "--micro-batch", "4",
        "--gpus-per-node", "2", "--schedule", "constant", "--learning-rate", "0.02", "--weights", "random",
        *more.split(),
    ]  # fmt: skip


@pytest.fixture(scope="module")
def trained(warm: Warm, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("methods")
    (folder / "flags.json").write_text(json.dumps({name: _flags(more) for name, more in METHODS.items()}))
    torchrun(warm, folder, 2, "tests.training.trainer_ranks", "--methods", "flags.json", "results.json")
    results: dict[str, dict[str, Any]] = json.loads((folder / "results.json").read_text(encoding="utf-8"))
    return results


@pytest.mark.timeout(300)
def test_the_loss_falls_and_only_the_chosen_part_changes(trained: dict[str, dict[str, Any]]) -> None:
    for name, result in trained.items():
        assert result["losses"][-1] < result["losses"][0] - 0.3, name
    for name in ("lora", "lora zero3", "qlora"):
        changed = trained[name]["changed"]
        assert changed and all(".lora_" in parameter for parameter in changed)
        assert len(changed) == 2 * 7 * 2  # A and B of seven projections in two layers
    assert not [name for name in trained["lora attention"]["changed"] if "mlp" in name]
    assert not [name for name in trained["frozen"]["changed"] if "embed" in name or "layers.0" in name]
    assert [name for name in trained["frozen"]["changed"] if "layers.1" in name]
    assert trained["lora"]["types"] == ["torch.bfloat16", "torch.float32"]
    assert trained["pure"]["types"] == trained["lora attention"]["types"] == ["torch.bfloat16"]
    assert "torch.uint8" in trained["qlora"]["types"]
    # Rounding of bf16 differs between autocast and FSDP2's policy.
    assert trained["lora"]["losses"] == pytest.approx(trained["lora zero3"]["losses"], rel=0.02)


# peft 0.21 asks transformers 5.23 by a name that it deprecates.
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")
@pytest.mark.timeout(300)
def test_adapters_resume_bit_equal_and_merge(warm: Warm, tmp_path: Path) -> None:
    whole, halves, flags = tmp_path / "whole", tmp_path / "halves", _flags(METHODS["qlora"])
    whole.mkdir()
    halves.mkdir()
    torchrun(warm, whole, 2, "bootstrap.trainer", *flags, "--steps", "4")
    for steps in ("2", "4"):
        torchrun(warm, halves, 2, "bootstrap.trainer", *flags, "--steps", steps)
    lines = (whole / "checkpoints" / LEDGER_FILE).read_text(encoding="utf-8").splitlines()
    losses = dict(filter(None, map(read_loss, read_lines(lines)[0])))
    assert losses.get(4), "the ledger has the last loss"
    first, second = (load_file(folder / "checkpoints/weights/model.safetensors") for folder in (whole, halves))
    assert first.keys() == second.keys()
    assert all(first[name].equal(second[name]) for name in first)
    newest = sorted((halves / "checkpoints").glob("step-*"))[-1]
    saved = (newest / "manifest.json").read_text(encoding="utf-8")
    assert "lora_A" in saved and "embed_tokens" not in saved and "base_layer" not in saved

    # peft reads the adapters; over the merged weights, less their product, they give the merged weights again.
    folder = whole / "checkpoints/adapters"
    scale = json.loads((folder / "adapter_config.json").read_text())["lora_alpha"] / 4
    adapters = load_file(folder / "adapter_model.safetensors")
    base = dict(first)
    for name in [name for name in first if f"base_model.model.{name.removesuffix('weight')}lora_A.weight" in adapters]:
        stem = f"base_model.model.{name.removesuffix('weight')}lora_"
        base[name] = first[name].float() - scale * adapters[f"{stem}B.weight"] @ adapters[f"{stem}A.weight"]
    fields = {name: value for name, value in LLAMA.items() if name != "model_type"}
    auto: Any = AutoModelForCausalLM
    model = auto.from_config(AutoConfig.for_model("llama", **fields), dtype=torch.float32)
    model.load_state_dict({name: tensor.float() for name, tensor in base.items()})
    merged = PeftModel.from_pretrained(model, str(folder)).merge_and_unload().state_dict()
    for name, tensor in first.items():
        torch.testing.assert_close(merged[name], tensor.float(), rtol=1e-5, atol=1e-6)
