"""Reference trainer in real torchrun runs on CPUs: every layout trains the same, resumes in another, and halves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.training.trainer_ranks import STEPS
from tests.warm import TRAINER, Warm

LLAMA = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 256, "max_position_embeddings": 64,
}  # fmt: skip
QWEN3 = LLAMA | {"model_type": "qwen3", "head_dim": 8, "tie_word_embeddings": True}
# Biases of projections split by columns and of those split by rows.
BIASED = LLAMA | {"attention_bias": True, "mlp_bias": True}
# Ranks have parts of the vocabulary of two sizes, and the padding token is in the samples.
ODD = LLAMA | {"vocab_size": 255, "pad_token_id": 7}
BERT = {
    "model_type": "bert", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "vocab_size": 256, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
}  # fmt: skip
RESNET = {"torchvision": "resnet18"}
VIT = {
    "model_type": "vit", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "image_size": 32, "patch_size": 8, "num_labels": 16,
}  # fmt: skip
GLOBAL_BATCH = 8
RANKS = 4

# Layouts of four ranks by model; the first is what the others of the model are compared with.
LAYOUTS: dict[str, tuple[dict[str, Any], str]] = {
    "llama ddp": (LLAMA, "--micro-batch 2"),
    "llama ddp accumulated": (LLAMA, "--micro-batch 1"),
    "llama zero1 accumulated": (LLAMA, "--sharding zero1 --micro-batch 1"),
    "llama zero2 accumulated": (LLAMA, "--sharding zero2 --micro-batch 1"),
    "llama zero3": (LLAMA, "--sharding zero3 --micro-batch 2"),
    "llama zero3 full": (LLAMA, "--sharding zero3 --activation-checkpointing full"),
    "llama zero3 selective": (LLAMA, "--sharding zero3 --activation-checkpointing selective"),
    "llama tp2": (LLAMA, "--tensor-parallel 2 --micro-batch 4"),
    "llama tp2 zero3": (LLAMA, "--tensor-parallel 2 --sharding zero3 --sequence-parallel --micro-batch 4"),
    "llama cp2": (LLAMA, "--context-parallel 2 --micro-batch 4"),
    # Two key-value heads a tensor rank; with eight ranks they would be repeated.
    "llama tp2 cp2 zero2": (LLAMA, "--tensor-parallel 2 --context-parallel 2 --sharding zero2 --micro-batch 4"),
    "qwen3 ddp": (QWEN3, "--micro-batch 2"),
    "qwen3 tp2 zero1": (QWEN3, "--tensor-parallel 2 --sharding zero1 --sequence-parallel --micro-batch 4"),
    "biased ddp": (BIASED, "--micro-batch 2"),
    "biased tp2 zero2 accumulated selective": (
        BIASED,
        "--tensor-parallel 2 --sharding zero2 --micro-batch 1 --activation-checkpointing selective",
    ),
    "odd ddp": (ODD, "--micro-batch 2"),
    "odd tp2 zero3": (ODD, "--tensor-parallel 2 --sharding zero3 --micro-batch 2"),
    "bert ddp": (BERT, "--micro-batch 2"),
    "bert zero3 accumulated": (BERT, "--sharding zero3 --micro-batch 1 --activation-checkpointing full"),
    "resnet ddp": (RESNET, "--micro-batch 2 --optimizer sgd --learning-rate 1e-4"),
    "resnet zero3": (RESNET, "--micro-batch 2 --optimizer sgd --learning-rate 1e-4 --sharding zero3"),
    "vit ddp": (VIT, "--micro-batch 2"),
    "vit zero3 accumulated full": (VIT, "--sharding zero3 --micro-batch 1 --activation-checkpointing full"),
}  # fmt: skip


def flags_of(architecture: dict[str, Any], more: str) -> list[str]:
    seq_len = "1" if "torchvision" in architecture or architecture["model_type"] == "vit" else "32"
    return [
        "--architecture", json.dumps(architecture), "--seq-len", seq_len, "--global-batch", str(GLOBAL_BATCH),
        "--precision", "fp32", "--gpus-per-node", str(RANKS), "--schedule", "constant", *more.split(),
    ]  # fmt: skip


def torchrun(warm: Warm, folder: Path, ranks: int, *arguments: str) -> str:
    variables = {
        "AWS_EC2_METADATA_DISABLED": "true", "HF_HUB_OFFLINE": "1",
        "GPUFLEET_CHECKPOINT_URI": str(folder / "checkpoints"), "GPUFLEET_DRAIN_FILE": str(folder / "drain"),
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",  # as the agent: a restart would find the first start's addresses
    }  # fmt: skip
    return warm.torchrun(folder, ranks, *arguments, modules=TRAINER, **variables)


@pytest.fixture(scope="module")
def measured(warm: Warm, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, list[float]]]:
    folder = tmp_path_factory.mktemp("layouts")
    layouts = {name: flags_of(*layout) for name, layout in LAYOUTS.items()}
    (folder / "layouts.json").write_text(json.dumps(layouts), encoding="utf-8")
    torchrun(warm, folder, RANKS, "tests.training.trainer_ranks", "layouts.json", "losses.json")
    found: dict[str, dict[str, list[float]]] = json.loads((folder / "losses.json").read_text(encoding="utf-8"))
    return found


@pytest.mark.timeout(400)
def test_every_layout_has_the_same_losses(measured: dict[str, dict[str, list[float]]]) -> None:
    """Same global batch, same seed: loss, gradient norm and evaluation agree within the rounding of fp32."""
    first: dict[str, dict[str, list[float]]] = {}
    for name, found in measured.items():
        reference = first.setdefault(name.split()[0], found)
        # Batch norms over two samples enlarge rounding, and after the first step the gradient is another one.
        relative, steps = (1e-3, 1) if "resnet" in name else (2e-5, None)
        for what in ("loss", "norm", "evaluation"):
            assert found[what][:steps] == pytest.approx(reference[what][:steps], rel=relative), f"{what} of {name}"
    assert len(first) == 7


def test_states_are_shared_out(measured: dict[str, dict[str, list[float]]]) -> None:
    whole = measured["llama ddp"]["held"][0]
    assert measured["llama ddp accumulated"]["held"] == [whole]
    for name in ("llama zero1 accumulated", "llama zero2 accumulated", "llama zero3", "llama tp2 zero3"):
        assert measured[name]["held"][0] == pytest.approx(whole / RANKS, rel=0.02), name
    assert measured["llama tp2"]["held"][0] == pytest.approx(whole / 2, rel=0.02)


def test_zero1_and_2_gather_once_a_step_and_zero1_reduces_once(measured: dict[str, dict[str, list[float]]]) -> None:
    """FSDP2's groups are two layers, two tables and the last norm; two micro-batches (performance/collectives.py)."""
    groups = 5
    for name, gathers, reductions in (
        ("llama zero1 accumulated", groups, groups),
        ("llama zero2 accumulated", groups, 2 * groups),
    ):
        assert (measured[name]["gathers"], measured[name]["reductions"]) == ([gathers], [reductions]), name
    assert measured["llama zero3"]["gathers"][0] > groups


@pytest.mark.timeout(400)
def test_run_out_of_memory_halves_and_resumes_in_another_layout(
    warm: Warm, tmp_path: Path, measured: dict[str, dict[str, list[float]]]
) -> None:
    """Rank 1 runs out while rank 0 waits; torchrun starts both anew. Another layout ends with the same losses."""
    common = [*flags_of(LLAMA, "--micro-batch 2"), "--log-every", "1", "--out", "out", "--gpus-per-node", "2"]
    log = torchrun(
        warm, tmp_path, 2, "--max-restarts", "1", "-m", "tests.training.trainer_ranks", "--room", "1", *common,
        "--sharding", "zero3", "--steps", "2",
    )  # fmt: skip
    assert "with micro-batch 2: the next start has at most 1" in log
    torchrun(
        warm, tmp_path, 2, "bootstrap.trainer", *common, "--tensor-parallel", "2", "--steps", str(STEPS),
        "--evaluate-every", str(STEPS), "--evaluation-steps", "1",
    )  # fmt: skip
    lines = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    steps = {line["step"]: line["loss"] for line in lines if "loss" in line}
    assert list(steps) == list(range(1, STEPS + 1))
    assert list(steps.values()) == pytest.approx(measured["llama ddp"]["loss"], rel=1e-5)
    assert [line["step"] for line in lines if "evaluation_loss" in line] == [STEPS]
    assert (tmp_path / "checkpoints" / "weights" / "model.safetensors").is_file()
