from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from optimizer.workload.profile.records import ModuleProfile
from tests.unit.optimizer.commands.conftest import Gpufleet

MODULES = "tests.unit.optimizer.workload.modules"
HAS_TORCH = importlib.util.find_spec("torch") is not None
needs_torch = pytest.mark.skipif(not HAS_TORCH, reason="a profile needs torch: pip install 'gpufleet[torch]'")
H100 = ("--gpu", "h100-80gb", "--gpus", "8", "--micro-batch", "64")


def line(fixed: float, sample: float) -> dict[str, float]:
    return {"fixed_bytes": fixed, "bytes_per_sample": sample}


def one_pass(width: str, checkpointing: str, sample: float, flops: float) -> dict[str, Any]:
    return {
        "width": width,
        "checkpointing": checkpointing,
        "saved": line(1e6, sample),
        "peak": [line(2e9, sample), line(0, 1.25 * sample)],
        "traffic": line(1e9, 5 * sample),
        "product_elements": line(3e8, 1e6),
        "flops": {"matmul": flops, "attention": flops / 10},
        "kernels": 900,
    }


# A module as gpufleet profile would describe it: 100 million parameters in 12 blocks.
PROFILE: dict[str, Any] = {
    "name": "my.models:build",
    "module_class": "Net",
    "parameters": [{"dtype": "float32", "parameters": 100_000_000, "trainable": 100_000_000, "element_bytes": 4}],
    "buffer_bytes": 0,
    "forward_flops": {"matmul": 2e10, "attention": 2e9},
    "backward_flops": {"matmul": 4e10, "attention": 4e9},
    "convolution_outputs": 0,
    "blocks": {"class_names": ["Block"], "count": 12, "largest_parameters": 8_000_000},
    "largest_unit_parameters": 8_000_000,
    "passes": [
        one_pass("16-bit", "none", 200e6, 6e10),
        one_pass("16-bit", "full", 20e6, 8e10),
        one_pass("32-bit", "none", 400e6, 6e10),
        one_pass("32-bit", "full", 40e6, 8e10),
    ],
    "torch": "2.11.0",
    "as_of": "2026-11-21",
}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A profile in a file."""
    path = tmp_path / "model.json"
    path.write_text(ModuleProfile.model_validate(PROFILE).model_dump_json(), encoding="utf-8")
    return path


def estimated(gpufleet: Gpufleet, model: Path | str, *arguments: str) -> dict[str, Any]:
    code, out, err = gpufleet("estimate", "--model", str(model), *H100, *arguments, "--format", "json")
    assert code == 0, err
    found: dict[str, Any] = json.loads(out)
    return found


# --- a profile is a model ---------------------------------------------------------------------------------------------


def test_an_estimate_has_the_profiles_memory_and_flops(gpufleet: Gpufleet, model: Path) -> None:
    found = estimated(gpufleet, model)
    assert found["unit"] == "samples"
    # The highest of the lines at 64 samples.
    assert found["memory_gib"]["activations"] * 2**30 == pytest.approx(64 * 1.25 * 200e6)
    assert found["memory_gib"]["weights"] * 2**30 == pytest.approx(4e8)
    # Useful FLOPs: 6.6e10 a sample, whatever is computed again.
    flops = found["mfu"] * 8 * 989.5e12
    assert flops == pytest.approx(6.6e10 * found["tokens_per_second"], rel=1e-3)
    full = estimated(gpufleet, model, "--activation-checkpointing", "full")
    assert full["memory_gib"]["activations"] * 2**30 == pytest.approx(2e9 + 64 * 20e6)
    assert full["time_s"]["matmul"] > found["time_s"]["matmul"]
    assert estimated(gpufleet, model, "--precision", "tf32")["memory_gib"]["activations"] == pytest.approx(
        2 * found["memory_gib"]["activations"]
    )


def test_fsdp_gathers_the_largest_block_in_place_of_16_bit_copies(gpufleet: Gpufleet, model: Path) -> None:
    found = estimated(gpufleet, model, "--sharding", "zero3", "--activation-checkpointing", "full")
    assert found["memory_gib"]["weights"] * 2**30 == pytest.approx(4e8 / 8 + 2 * 2 * 8e6)
    # 2 GB do not depend on the batch; 0.2 of them were copies of the weights.
    assert found["memory_gib"]["activations"] * 2**30 == pytest.approx(1.8e9 + 64 * 20e6)


def test_frozen_and_16_bit_parameters_have_smaller_states(gpufleet: Gpufleet, tmp_path: Path) -> None:
    def gib(**parameters: Any) -> dict[str, float]:
        entry = PROFILE["parameters"][0] | parameters
        path = tmp_path / "model.json"
        profile = ModuleProfile.model_validate(PROFILE | {"parameters": [entry]})
        path.write_text(profile.model_dump_json(), encoding="utf-8")
        found: dict[str, float] = estimated(gpufleet, path, "--activation-checkpointing", "full")["memory_gib"]
        return found

    whole, adapter, narrow = gib(), gib(trainable=1_000_000), gib(dtype="bfloat16", element_bytes=2)
    assert adapter["weights"] == whole["weights"]
    assert adapter["optimizer_state"] == pytest.approx(whole["optimizer_state"] / 100)
    assert narrow["weights"] == pytest.approx(whole["weights"] / 2)
    assert narrow["optimizer_state"] == pytest.approx(whole["optimizer_state"] / 2)


def test_recommend_trains_it_by_samples(gpufleet: Gpufleet, model: Path) -> None:
    asked = ("--samples", "50M", "--global-batch", "512", "--instance-type", "p5*", "--max-nodes", "2")
    code, out, err = gpufleet("recommend", "--model", str(model), *asked, "--format", "json")
    assert code == 0, err
    plan = json.loads(out)["plans"][0]
    assert plan["job"]["global_batch"] == 512
    assert (plan["parallelism"]["tensor"], plan["parallelism"]["pipeline"]) == (1, 1)
    assert plan["parallelism"]["activation_checkpointing"] in ("none", "full")
    assert plan["memory"]["peak_gib"] <= plan["memory"]["limit_gib"]


@pytest.mark.parametrize(
    ("command", "arguments", "says"),
    [
        ("recommend", ("--samples", "1M"), "global_batch is missing"),
        ("recommend", ("--tokens", "1B", "--global-batch", "64"), "samples or steps"),
        ("recommend", ("--samples", "1M", "--global-batch", "64", "--seq-len", "512"), "samples or steps"),
        ("estimate", (*H100, "--tensor", "2"), "data-parallel"),
        ("estimate", (*H100, "--activation-checkpointing", "selective"), "none or full"),
        ("estimate", (*H100, "--framework", "megatron"), "is a profiled module"),
        ("estimate", (*H100, "--precision", "fp8"), "is counted in samples"),
        ("estimate", (*H100, "--seq-len", "512"), "samples of the shape"),
    ],
)
def test_what_no_profile_can_answer_is_refused(
    gpufleet: Gpufleet, model: Path, command: str, arguments: tuple[str, ...], says: str
) -> None:
    code, out, err = gpufleet(command, "--model", str(model), *arguments)
    assert (code, out) == (2, "")
    assert says in err


def test_a_module_stored_in_16_bits_is_not_trained_in_32(gpufleet: Gpufleet, tmp_path: Path) -> None:
    path = tmp_path / "model.json"
    narrow = PROFILE | {"passes": PROFILE["passes"][:2]}
    path.write_text(ModuleProfile.model_validate(narrow).model_dump_json(), encoding="utf-8")
    code, _, err = gpufleet("estimate", "--model", str(path), *H100, "--precision", "fp32")
    assert code == 2
    assert "stored in 16 bits" in err


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"passes": []}, "passes"),
        ({"buffer_bytes": -1}, "buffer_bytes"),
        ({"surprise": 1}, "surprise"),
        ({"schema_version": 2}, "schema_version"),
    ],
)
def test_a_spoilt_profile_names_the_field(
    gpufleet: Gpufleet, tmp_path: Path, change: dict[str, Any], says: str
) -> None:
    path = tmp_path / "model.json"
    written = ModuleProfile.model_validate(PROFILE).model_dump(mode="json") | change
    path.write_text(json.dumps(written), encoding="utf-8")
    code, out, err = gpufleet("estimate", "--model", str(path), *H100)
    assert (code, out) == (2, "")
    assert says in err


# --- the command ------------------------------------------------------------------------------------------------------


@needs_torch
def test_the_file_it_writes_is_a_model(gpufleet: Gpufleet, tmp_path: Path) -> None:
    out_file = tmp_path / "mlp.json"
    code, out, err = gpufleet("profile", f"{MODULES}:mlp", "--out", str(out_file), "--format", "json")
    assert code == 0, err
    assert json.loads(out) == json.loads(out_file.read_text(encoding="utf-8"))
    assert estimated(gpufleet, out_file)["parameters"] == 640 * 2560 + 2560 + 2560 * 10 + 10


@needs_torch
def test_the_table_and_csv_show_every_pass(gpufleet: Gpufleet) -> None:
    code, out, _ = gpufleet("profile", f"{MODULES}:blocks")
    assert code == 0
    for words in ("6 x Block", "16-bit", "32-bit", "full", "GFLOP"):
        assert words in out
    code, out, _ = gpufleet("profile", f"{MODULES}:blocks", "--format", "csv")
    lines = out.splitlines()
    assert len(lines) == 5
    assert lines[0].startswith("name,parameters,trainable_parameters,width,checkpointing")


@pytest.mark.parametrize("target", ["mlp", "a:b:c", "a/b.py:f", ":f", "a:", "a.:f"])
def test_what_names_no_function(gpufleet: Gpufleet, target: str) -> None:
    code, _, err = gpufleet("profile", target)
    assert code == 2
    assert "MODULE:FUNCTION" in err


def test_without_torch_it_says_how_to_install_it(gpufleet: Gpufleet, monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "torch" else found(name, *a))
    for arguments in (("profile", f"{MODULES}:mlp"), ("estimate", "--model", f"{MODULES}:mlp", *H100)):
        code, out, err = gpufleet(*arguments)
        assert (code, out) == (4, "")
        assert "pip install 'gpufleet[torch]'" in err
