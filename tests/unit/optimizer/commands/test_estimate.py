from __future__ import annotations

import csv
import io
import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from optimizer.commands.estimate import command
from optimizer.contract.errors import GpufleetError, InvalidInputError
from optimizer.performance.calibration import load
from optimizer.performance.confidence import DENSE
from optimizer.performance.measured_runs import RUNS
from optimizer.performance.rows import COLUMNS

H100 = ["--gpu", "h100-80gb", "--gpus", "16"]


def run(*arguments: str) -> Result:
    return CliRunner().invoke(command, list(arguments), catch_exceptions=False)


def as_json(*arguments: str) -> dict[str, object]:
    result = run(*arguments, "--format", "json")
    assert result.exit_code == 0
    answer = json.loads(result.stdout)
    assert isinstance(answer, dict)
    return answer


def test_json_holds_the_configuration_its_estimate_and_the_error_band() -> None:
    result = as_json("--model", "llama-3.1-8b", *H100, "--seq-len", "8k", "--global-batch", "64", "--micro-batch", "2")
    assert result["parameters"] == 8_030_261_248
    assert (result["nodes"], result["data"], result["grad_accum"], result["sharding"]) == (2, 16, 2, "zero3")
    assert result["tokens_per_second"] == pytest.approx(64 * 8000 / result["step_time_s"])  # type: ignore[operator]
    assert sum(result["memory_gib"].values()) == pytest.approx(result["peak_memory_gib"])  # type: ignore[attr-defined]
    assert sum(result["time_s"].values()) == pytest.approx(result["step_time_s"])  # type: ignore[attr-defined]
    low, middle, high = (result[f"tokens_per_second{end}"] for end in ("_low", "", "_high"))
    assert low < middle < high  # type: ignore[operator]
    assert result["measured_rows"] == load().residuals[f"{DENSE} on H100 in torch"].rows > 0
    assert "measured runs of a dense decoder" in str(result["calibration"])


def test_the_table_names_every_part_and_says_whether_it_fits() -> None:
    small = run("--model", "gpt2", *H100).stdout
    parts = ("weights", "gradients", "optimizer state", "activations", "logits", "matmul", "MFU", "tokens/s", "fits")
    assert all(part in small for part in parts)
    large = run("--model", "llama-3.1-70b", "--gpu", "h100-80gb", "--gpus", "1").stdout
    assert "DOES NOT FIT" in large


def test_a_peak_between_expected_and_p95_limit_may_not_fit() -> None:
    """The tightest measured run, at 99.8% of the limit: neither refused nor called safe."""
    with RUNS.open(newline="") as file:
        tightest = [row for row in csv.DictReader(file) if row["row_id"] == "h200-steps-53"]
    text = io.StringIO()
    writer = csv.DictWriter(text, list(tightest[0]))
    writer.writeheader()
    writer.writerows(tightest)
    answer = CliRunner().invoke(command, ["--batch", "-", "--format", "json"], input=text.getvalue())
    (row,) = json.loads(answer.stdout)
    assert (row["fits"], row["fit"]) == (True, "may not fit")
    assert 131.8 < row["predicted_peak_memory_gib"] < row["predicted_p95_memory_gib"]  # 131.8 measured
    tight = ("--seq-len", "1024", "--micro-batch", "17", "--framework", "torch")
    one = run("--model", "llama-3.2-1b", "--gpu", "h100-80gb", "--gpus", "1", *tight)
    assert "MAY NOT FIT" in one.stdout and "one run in twenty" in " ".join(one.stderr.split())


def test_csv_is_one_row_with_a_column_for_every_part() -> None:
    (row,) = csv.DictReader(io.StringIO(run("--model", "7B", *H100, "--format", "csv").stdout))
    reserve = ("fragmentation_gib", "cuda_context_gib", "nccl_gib")
    others = ("peak_memory_gib", "p95_memory_gib", "limit_gib", "needed_gib", "gpu_memory_gib", *reserve)
    parts = [name for name in row if name.endswith("_gib") and name not in others]
    assert sum(float(row[name]) for name in parts) == pytest.approx(float(row["peak_memory_gib"]))
    beyond = sum(float(row[name]) for name in reserve)
    assert float(row["peak_memory_gib"]) + beyond == pytest.approx(float(row["needed_gib"]))


def test_experts_sequence_and_chunks_are_part_of_the_configuration() -> None:
    layout = ("--gpu", "h100-80gb", "--gpus", "64", "--tensor", "2", "--pipeline", "2", "--global-batch", "128")
    extra = ("--expert", "8", "--virtual-stages", "4", "--seq-len", "4096")
    result = as_json("--model", "mixtral-8x7b", *layout, *extra, "--framework", "megatron-core")
    assert (result["data"], result["expert"], result["sequence_parallel"], result["virtual_stages"]) == (16, 8, True, 4)
    assert result["time_s"]["expert_communication"] > 0  # type: ignore[index]
    whole = as_json("--model", "mixtral-8x7b", *layout, "--framework", "megatron-core", "--seq-len", "4096")
    assert whole["sequence_parallel"] is True  # as the framework does
    assert result["memory_gib"]["weights"] < whole["memory_gib"]["weights"]  # type: ignore[index]
    text = " ".join(run("--model", "mixtral-8x7b", *layout, *extra, "--framework", "megatron-core").stdout.split())
    for words in ("experts over 8 data ranks", "sequence parallel", "4 chunks a stage", "expert communication"):
        assert words in text


@pytest.mark.parametrize(
    ("model", "split", "sharding"),
    [("llama-2-7b", "1", "zero3"), ("llama-2-7b", "16", "zero3"), ("bert-large", "1", "ddp"), ("resnet50", "1", "ddp")],
)
def test_a_decoder_is_sharded_over_data_and_context_ranks(model: str, split: str, sharding: str) -> None:
    assert as_json("--model", model, *H100, "--context", split)["sharding"] == sharding


def test_an_instance_type_brings_its_gpus_and_network() -> None:
    result = as_json("--model", "llama-2-7b", "--instance-type", "p5.48xlarge", "--nodes", "2")
    assert (result["gpu"], result["gpus"], result["nodes"]) == ("h100-80gb", 16, 2)
    slow = as_json("--model", "gpt2", "--instance-type", "g4dn.12xlarge", "--precision", "fp16", "--seq-len", "1024")
    assert slow["measured_rows"] == 0
    assert "no measured run on T4" in str(slow["calibration"])


def test_eager_fp8_says_that_it_is_slower_than_bf16() -> None:
    eager, compiled = (
        run("--model", "llama-3.1-8b", "--gpu", "h200", "--gpus", "8", "--precision", "fp8", *how)
        for how in ((), ("--compile",))
    )
    assert "1.5 to 2.4 times as slow" in eager.stderr and "casts" not in compiled.stderr


def test_a_cnn_counts_images() -> None:
    result = as_json("--model", "resnet50", "--gpu", "h200", "--gpus", "1", "--micro-batch", "256")
    assert (result["unit"], result["sharding"], result["seq_len"]) == ("samples", "ddp", 1)
    # Measured 4,690 images/s (H200, torch 2.11, bf16, 2026-11-21).
    assert result["tokens_per_second"] == pytest.approx(4690, rel=0.1)
    assert "samples/s" in run("--model", "resnet50", "--gpu", "h200", "--gpus", "1").stdout
    # "step of 1 samples", and "1 samples/s (1 to 1), 0 a GPU" of two parts of a GPU.
    slow = run("--model", "vit-b-16", "--instance-type", "g6f.large", "--nodes", "2", "--micro-batch", "1").stdout
    assert "step of 2 samples" in slow and re.search(r"\n[0-9.]+ samples/s, 0\.[1-9]", slow)
    assert (
        "step of 1 sequence of 512 tokens"
        in run("--model", "gpt2", *H100[:2], "--gpus", "1", "--seq-len", "512").stdout
    )


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--model", "llama-9", *H100], "llama-9"),
        (["--model", "gpt2"], "--instance-type and --gpu"),
        (["--model", "gpt2", *H100, "--instance-type", "p5.48xlarge"], "--instance-type and --gpu"),
        (["--model", "gpt2", "--instance-type", "p5.48xlarge", "--gpus", "8"], "--gpus with --instance-type"),
        (["--model", "gpt2", "--instance-type", "p99.metal"], "p99.metal"),
        (["--model", "gpt2", *H100, "--precision", "bf61"], "did you mean bf16"),
        (["--model", "gpt2", *H100, "--global-batch", "24"], "a multiple of 16"),
        (["--model", "llama-2-7b", *H100, "--seq-len", "1e300"], "workload.seq_len"),
        (["--model", "gpt2", "--gpu", "h100", "--gpus", "13"], "nodes x GPUs"),
        (["--model", "gpt2", "--gpu", "h100-80", "--gpus", "8"], "did you mean h100-80gb"),
        (["--model", "resnet50", *H100, "--seq-len", "512"], "images"),
    ],
)
def test_a_wrong_configuration_says_what_is_wrong(arguments: list[str], says: str) -> None:
    with pytest.raises(InvalidInputError) as error:
        run(*arguments)
    assert says in str(error.value)


@pytest.mark.parametrize(
    ("gpu", "precision", "exit_code", "says"),
    [
        ("v100-32gb", "bf16", 2, "V100 does not compute in bf16\n  limit: it does in fp32, fp16\n"),
        ("t4-16gb", "tf32", 2, "Turing has no such matrix units"),
        ("a100-80gb", "fp8", 2, "A100 does not compute in fp8"),
        # Blackwell does; what nobody published is missing data.
        ("rtx-pro-4500-32gb", "fp8", 4, "RTX PRO 4500 has no fp8 peak in the GPU table"),
    ],
)
def test_a_precision_the_gpu_lacks_is_told_from_one_without_a_figure(
    gpu: str, precision: str, exit_code: int, says: str
) -> None:
    with pytest.raises(GpufleetError, match=says) as error:
        run("--model", "gpt2", "--gpu", gpu, "--gpus", "1", "--precision", precision)
    assert error.value.exit_code == exit_code


@pytest.mark.parametrize(
    ("model", "framework", "says"),
    [
        ("resnet50", "megatron", "resnet50 is a CNN"),
        ("t5-base", "megatron-core", r"t5-base has an encoder \(seq2seq\)"),
        ("vit-b-16", "torchvision", r"vit-b-16 has an encoder \(image\)"),
        ("resnet50", "torchtitan", "limit: torchvision, torch"),
        ("gpt2", "torchvision", "gpt2 is a transformer"),
    ],
)
def test_a_framework_that_does_not_train_the_model_is_refused(model: str, framework: str, says: str) -> None:
    with pytest.raises(InvalidInputError, match=says):
        run("--model", model, *H100, "--framework", framework)


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--out", "x.csv", "--model", "gpt2"],
        ["--batch", "x.csv", "--model", "gpt2"],
        ["--model", "gpt2", *H100, "--micro-batch", "0"],
        ["--model", "gpt2", *H100, "--sharding", "zero4"],
        ["--batch", "x.csv", "--format", "table"],
    ],
)
def test_wrong_usage_exits_2(arguments: list[str]) -> None:
    assert run(*arguments).exit_code == 2


def test_batch_adds_its_columns_and_passes_the_others_through(tmp_path: Path) -> None:
    out, again = tmp_path / "out.csv", tmp_path / "again.csv"
    result = run("--batch", str(RUNS), "--out", str(out))
    assert result.exit_code == 0
    with RUNS.open(newline="") as before, out.open(newline="") as after:
        given, rows_after = list(csv.DictReader(before)), list(csv.DictReader(after))
    assert f"{len(given)} of {len(given)} rows" in result.stderr
    assert list(rows_after[0]) == [*given[0], *COLUMNS]
    for old, new in zip(given, rows_after, strict=True):
        assert {name: new[name] for name in old} == old
        assert new["fits"] == "true"
        assert new["error"] == ""
        assert float(new["predicted_tokens_per_second_per_gpu"]) == pytest.approx(
            float(old["tokens_per_second_per_gpu"]), rel=0.6
        )
    run("--batch", str(out), "--out", str(again))
    assert out.read_text() == again.read_text()  # the columns of an output are replaced


def test_a_table_from_standard_input_as_json() -> None:
    table = 'model,gpu,gpus,note\nllama-2-7b,h100-80gb,8,"a, b"\nllama-2-7b,abacus,8,last\n'
    result = CliRunner().invoke(
        command, ["--batch", "-", "--format", "json"], input=table.encode("utf-8-sig"), catch_exceptions=False
    )
    assert result.exit_code == 0
    first, second = json.loads(result.stdout)
    assert list(first) == ["model", "gpu", "gpus", "note", *COLUMNS]
    assert (first["note"], second["note"]) == ("a, b", "last")
    assert (first["gpus"], first["fits"], first["error"]) == ("8", True, None)
    assert first["predicted_step_time_s"] > 0
    assert "abacus" in second["error"]
    assert second["fits"] is None


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("model;gpu;gpus\nllama-2-7b;h100-80gb;8\n", "separated by commas"),
        ("model\tgpu\nllama-2-7b\th100-80gb\n", "separated by commas"),
        ("model,gpu,gpus,gpu\nllama-2-7b,h100-80gb,8,t4-16gb\n", "more than one column gpu"),
    ],
)
def test_a_table_whose_columns_are_not_clear_is_refused(content: str, says: str, tmp_path: Path) -> None:
    path = tmp_path / "in.csv"
    path.write_text(content)
    with pytest.raises(InvalidInputError, match=says):
        run("--batch", str(path))


def test_a_table_of_which_no_row_can_be_estimated_is_a_failure(tmp_path: Path) -> None:
    path, out = tmp_path / "in.csv", tmp_path / "out.csv"
    path.write_text("model,gpu\nllama-2-7b,abacus\n")
    with pytest.raises(GpufleetError, match="no row of") as error:
        run("--batch", str(path), "--out", str(out))
    assert error.value.exit_code == 1
    assert "abacus" in out.read_text()  # the reasons are written all the same


@pytest.mark.parametrize("content", [None, b"", b"\xff\xfe\x00broken"])
def test_a_table_that_cannot_be_read(content: bytes | None, tmp_path: Path) -> None:
    path = tmp_path / "in.csv"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(InvalidInputError, match=r"in\.csv"):
        run("--batch", str(path))
