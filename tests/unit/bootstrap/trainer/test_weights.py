from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from bootstrap.contract.trainer import AUTO, family_of
from bootstrap.trainer import weights
from bootstrap.trainer.weights import INDEX_NAME, load_weights, save_weights
from bootstrap.training.errors import CheckpointError, ConfigurationError
from bootstrap.training.stores import open_store
from tests.unit.bootstrap.trainer.weights_ranks import build
from tests.unit.bootstrap.training.conftest import BUCKET
from tests.warm import TRAINER, Warm

LIBRARY: Any = transformers
SHAPE = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 32, "intermediate_size": 24}


def model_of(kind: str, seed: int, **more: Any) -> Any:
    torch.manual_seed(seed)
    auto = getattr(LIBRARY, AUTO[family_of({"model_type": kind})])
    return auto.from_config(LIBRARY.AutoConfig.for_model(kind, **SHAPE | more, use_cache=False))


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("qwen2", {"num_key_value_heads": 1, "tie_word_embeddings": True}),
        ("bert", {}),
        # transformers' names of these are not those of published files.
        ("gpt_neox", {}),
        ("vit", {"image_size": 16, "patch_size": 8}),
    ],
)
def test_transformers_reads_what_is_written_and_writes_what_is_read(
    tmp_path: Path, kind: str, more: dict[str, Any]
) -> None:
    model = model_of(kind, 0, **more)
    if kind == "gpt_neox":
        model = model.bfloat16()  # pure-bf16, of a model that was built in 32 bits
        model.config.dtype = torch.float32
    save_weights(model, str(tmp_path / "ours"), architecture={})
    loaded = type(model).from_pretrained(tmp_path / "ours")
    assert loaded.dtype == model.dtype
    theirs = loaded.state_dict()
    assert all(torch.equal(theirs[name], tensor) for name, tensor in model.state_dict().items())
    assert json.loads((tmp_path / "ours" / "config.json").read_text())["architectures"] == [type(model).__name__]

    model.save_pretrained(tmp_path / "theirs", max_shard_size="4KB")
    save_file({"again": torch.ones(1)}, tmp_path / "theirs" / "consolidated.safetensors")
    index = json.loads((tmp_path / "theirs" / INDEX_NAME).read_text())
    assert load_file(tmp_path / "ours" / "model.safetensors").keys() == index["weight_map"].keys()
    other = model_of(kind, 1, **more)
    load_weights(other, str(tmp_path / "theirs"))
    assert all(torch.equal(other.state_dict()[name], tensor) for name, tensor in model.state_dict().items())


@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")  # torch.compile's own
def test_s3_holds_files_with_an_index_that_replace_older_ones(
    aws: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPUFLEET_SCRATCH_DIR", str(tmp_path))
    uri = f"s3://{BUCKET}/weights/final"
    for seed, file_bytes in (1, 10**6), (0, 700):
        monkeypatch.setattr(weights, "FILE_BYTES", file_bytes)
        save_weights(build(seed), uri, architecture={"torchvision": "resnet50"})
    # Readers of transformers would prefer it.
    assert "weights/final/model.safetensors" not in open_store(f"s3://{BUCKET}").names("weights/")
    model = build(2)
    load_weights(torch.compile(model), uri)  # type: ignore[arg-type]
    assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in build(0).state_dict().items())


def test_weights_of_another_architecture_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"has no complete weights; expected model\.safetensors"):
        load_weights(build(0), str(tmp_path))
    save_weights(build(0), str(tmp_path), architecture={})
    tensors = load_file(tmp_path / "model.safetensors")
    assert "head.weight" not in tensors
    save_file({**tensors, "layers.0.up.weight": torch.zeros(20, 5)}, tmp_path / "model.safetensors")
    with pytest.raises(ConfigurationError, match=r"layers.0.up.weight has shape \[20, 5\], the model's \[20, 6\]"):
        load_weights(build(0), str(tmp_path))
    save_file({name: tensor for name, tensor in tensors.items() if "embed" not in name}, tmp_path / "model.safetensors")
    with pytest.raises(ConfigurationError, match=r"lacks 2 of the model's 16 tensors, such as embed.weight, head"):
        load_weights(build(0), str(tmp_path))


QUERY = "model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        # Read as its 8 bits are, without the scale beside it, a weight would be some hundred times too large.
        (lambda t: {f"{QUERY}.weight": t[f"{QUERY}.weight"].to(torch.float8_e4m3fn)}, "q_proj.weight is of F8_E4M3"),
        (lambda t: {f"{QUERY}.bias": torch.ones(16)}, f"1 tensors beside the model's, such as {QUERY}.bias"),
        (lambda t: {"lm_head.weight": t["model.embed_tokens.weight"] + 1}, "lm_head.weight differs from model.embed_"),
        (lambda t: {"lm_head.weight": t["model.embed_tokens.weight"].clone()}, ""),
        (lambda t: {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}, ""),
    ],
)
def test_weights_that_would_make_another_model_are_refused(tmp_path: Path, change: Any, says: str) -> None:
    more = {"num_key_value_heads": 2, "tie_word_embeddings": True}
    model_of("llama", 0, **more).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file({**tensors, **change(tensors)}, tmp_path / "model.safetensors")
    with pytest.raises(ConfigurationError, match=says) if says else contextlib.nullcontext():
        load_weights(model_of("llama", 1, **more), str(tmp_path))


def test_a_place_that_takes_no_weights_is_named_with_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "full").write_bytes(b"no folder")
    with pytest.raises(
        CheckpointError, match=r"final weights are not in .*full/weights: .*start the same command again"
    ):
        save_weights(build(0), str(tmp_path / "full" / "weights"), architecture={})


def test_a_file_that_is_no_safetensors_is_named(tmp_path: Path) -> None:
    save_weights(build(0), str(tmp_path), architecture={})
    (tmp_path / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 2\n")
    with pytest.raises(ConfigurationError, match=r"model\.safetensors cannot be read .*git lfs pull"):
        load_weights(build(0), str(tmp_path))
    (tmp_path / INDEX_NAME).write_text('{"metadata": ')
    with pytest.raises(ConfigurationError, match=rf"{INDEX_NAME} cannot be read"):
        load_weights(build(0), str(tmp_path))


def test_ranks_write_and_read_every_layout(warm: Warm, tmp_path: Path) -> None:
    warm.torchrun(tmp_path, 4, "tests.unit.bootstrap.trainer.weights_ranks", str(tmp_path), modules=TRAINER)
    index = json.loads((tmp_path / INDEX_NAME).read_text())
    assert len(set(index["weight_map"].values())) > 1 and "head.weight" not in index["weight_map"]
    assert json.loads((tmp_path / "config.json").read_text()) == {"a": 1}
