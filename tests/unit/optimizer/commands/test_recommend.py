"""``gpufleet recommend`` as a user runs it: answers, exit statuses and messages."""

from __future__ import annotations

import csv
import io
import json
import math
import os
import re
import shlex
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import yaml

from optimizer.cli import main
from optimizer.commands.output import json_text

ISSUE_FLAGS = (
    *("--model", "llama-3.1-8b", "--tokens", "2B", "--seq-len", "8192"),
    *("--budget", "3000", "--deadline", "48h"),
)
CONTRACT = {
    *("schema_version", "request", "catalog", "plans", "pareto", "rejected", "searched_plans", "elapsed_s"),
    *("nearest", "notes", "searched", "candidates"),
}


def gpufleet(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the command line in this process, once for the same words; with other variables in a process of its own."""
    if environment:
        command = [sys.executable, "-c", "from optimizer.cli import main; main()", *arguments]
        given = os.environ | environment
        return subprocess.run(command, capture_output=True, text=True, timeout=120, env=given, check=False)
    reads_files = any("/" in word or "." in word for word in arguments if not word.startswith("-"))
    return (run_here if reads_files else answered)(*arguments)


def run_here(*arguments: str) -> subprocess.CompletedProcess[str]:
    out, err = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True) for _ in range(2))
    code: object = 0
    with patch.object(sys, "argv", ["gpufleet", *arguments]), redirect_stdout(out), redirect_stderr(err):
        try:
            main()
        except SystemExit as ended:
            code = ended.code or 0
    texts = [stream.buffer.getvalue().decode() for stream in (out, err)]
    return subprocess.CompletedProcess(arguments, int(str(code)), *texts)


answered = cache(run_here)


def answer(*arguments: str) -> dict[str, Any]:
    done = gpufleet("recommend", *arguments, "--format", "json")
    assert done.returncode == 0, done.stderr
    document: dict[str, Any] = json.loads(done.stdout)
    return document


def test_flags_give_the_contracts_json() -> None:
    document = answer(*ISSUE_FLAGS)
    assert set(document) == CONTRACT
    assert document["schema_version"] == 1
    assert set(document["catalog"]) >= {"as_of", "sources"}
    assert document["plans"] and document["pareto"] and document["rejected"]
    for plan in document["plans"]:
        assert plan["cost_usd"]["p95"] <= 3000
        assert plan["hours"]["p95"] <= 48
        assert set(plan["cost_usd"]["breakdown"]) == {"compute", "volumes", "storage", "transfer", "head_node"}
        assert set(plan["parallelism"]) == {
            *("data", "sharding", "tensor", "pipeline", "context", "expert", "sequence_parallel", "virtual_stages"),
            *("micro_batch", "grad_accum", "activation_checkpointing"),
        }
        assert all(price["source"] and price["as_of"] for price in plan["prices"])
    # The shipped spot prices are old: plans at a list price come before them.
    ages = [plan["spot_range"] is not None for plan in document["plans"]]
    assert ages == sorted(ages) and True in ages
    for entry in document["rejected"]:
        assert set(entry) == {"instance_type", "reason", "binding_constraint", "value", "limit"}
    assert document["searched_plans"] > 1000


def test_the_text_is_json_in_ascii_and_has_no_nan() -> None:
    document = {"name": "NaN × Infinity", "items": [1e-7, 1e16, 0.1, 10**20, True, None], "empty": {}}
    text = json_text(document)
    assert json.loads(text) == document and text.isascii() and "\n    1e" in text
    for number in (math.nan, math.inf, -math.inf):
        with pytest.raises(ValueError, match="JSON"):
            json_text({"items": [{"value": number}]})


def test_the_same_request_as_yaml_gives_the_same_plans(tmp_path: Path, repository: Path) -> None:
    by_flags = answer(*ISSUE_FLAGS)
    by_file = answer(str(repository / "examples" / "request.yaml"))
    assert by_file["plans"] == by_flags["plans"]
    assert by_file["request"] == by_flags["request"]


def test_flags_override_the_file(repository: Path) -> None:
    document = answer(
        str(repository / "examples" / "request.yaml"), "--samples", "1k", "--region", "us-*", "--max-nodes", "2"
    )
    assert document["request"]["workload"]["tokens"] is None
    assert document["request"]["workload"]["samples"] == 1000
    assert {plan["region"][:2] for plan in document["plans"]} == {"us"}


def test_five_dollars_exit_3_and_name_what_stops_each_type() -> None:
    done = gpufleet("recommend", *ISSUE_FLAGS[:-4], "--budget", "5", "--deadline", "48h", "--format", "json")
    assert done.returncode == 3
    document = json.loads(done.stdout)
    assert document["plans"] == []
    assert len(document["rejected"]) > 60
    assert all(entry["binding_constraint"] and entry["reason"] for entry in document["rejected"])
    assert "budget 5.00 USD" in done.stderr
    table = gpufleet("recommend", *ISSUE_FLAGS[:-4], "--budget", "5", "--explain")
    assert table.returncode == 3
    for entry in document["rejected"]:
        assert entry["instance_type"] in table.stdout


def test_an_answer_that_cannot_be_saved_is_printed_all_the_same() -> None:
    done = gpufleet("recommend", *ISSUE_FLAGS, "--format", "json", "--save", "/dev/full")
    assert done.returncode == 1
    assert json.loads(done.stdout)["plans"]
    assert "cannot be written" in done.stderr and "Traceback" not in done.stderr


def lines_of(*arguments: str) -> dict[str, str]:
    """The lines of an answer by their first word; wrapped ones are whole."""
    text = re.sub(r"\n +", " ", gpufleet("recommend", *arguments).stdout)
    return dict(line.split(maxsplit=1) for line in text.splitlines())


def test_the_answer_is_six_lines_of_what_a_buyer_needs() -> None:
    best = answer(*ISSUE_FLAGS)["plans"][0]
    lines = lines_of(*ISSUE_FLAGS)
    assert list(lines) == ["Buy", "Faster", "Cheaper", "Spot", "Fits", "Next"]
    assert lines["Buy"].startswith(f"{best['node_count']} x {best['instance_type']} (")
    assert f"{math.ceil(best['cost_usd']['expected']):,} USD, " in lines["Buy"]
    assert (
        f"needs {best['node_count'] * best['node']['vcpus']} vCPUs of AWS's P quota in {best['region']}"
        in lines["Fits"]
    )
    assert "142 days old: add --refresh" in re.sub(r"\d+ days", "142 days", lines["Spot"])
    assert "gpufleet up plans.json" in lines["Next"]
    assert not re.search(r"DP\d|zero\d", " ".join(lines.values()))


def test_only_measured_gpus_promise_their_hours() -> None:
    for instance_type, is_measured in (("p5.48xlarge", True), ("g6.48xlarge", False)):
        bought = lines_of(*ISSUE_FLAGS[:-4], "--instance-type", instance_type, "--purchase", "on-demand")["Buy"]
        assert ("; 19 in 20 under " in bought, "; estimated under " in bought) == (is_measured, not is_measured)


def test_what_is_faster_or_cheaper_is_what_the_search_finds_at_current_prices() -> None:
    """The second to the fifth row of the table were spot at prices 142 days old."""
    flags = ("--model", "gpt2", "--samples", "10k", "--seq-len", "1024")
    lines = lines_of(*flags, "--objective", "time")
    first = answer(*flags, "--objective", "time", "--purchase", "on-demand")["plans"][0]
    cheapest = answer(*flags, "--purchase", "on-demand")["plans"][0]
    assert lines["Buy"].startswith(f"{first['node_count']} x ")
    assert lines["Cheaper"].startswith(f"1 x {cheapest['instance_type']} (1 ")
    assert lines_of(*flags)["Faster"].startswith(f"{first['node_count']} x {first['instance_type']} (")


def with_reservation(folder: Path, instance_type: str, limits: dict[str, Any], **owned: Any) -> Path:
    """A request by who owns a reservation of two nodes."""
    place = {"instance_type": instance_type, "region": "us-east-1", "count": 2}
    request = {
        "model": "gpt2",
        "workload": {"samples": 10_000, "seq_len": 1024},
        "constraints": {"existing_reservations": [place | owned], **limits},
    }
    file = folder / "request.yaml"
    file.write_text(yaml.safe_dump(request))
    return file


def test_what_is_owned_needs_no_quota(tmp_path: Path) -> None:
    file = with_reservation(tmp_path, "p4de.24xlarge", {}, capacity_reservation_id="cr-0123456789abcdef0")
    lines = lines_of(str(file))
    assert lines["Fits"].endswith("needs only what is reserved") and lines["Next"].startswith(f"gpufleet up {file}")


def test_every_form_says_where_a_plan_goes_without_capacity() -> None:
    flags = (*ISSUE_FLAGS, "--instance-type", "p4d.24xlarge", "--region", "us-east-1", "--purchase", "spot")
    best = answer(*flags)["plans"][0]
    first = best["alternates"][0]
    lines = gpufleet("recommend", *flags, "--explain").stdout.splitlines()
    usd = f"~{first['cost_usd']['expected']:,.2f} USD"
    assert f"else spot in {first['zone_id']} ({usd})" in " ".join(" ".join(lines[:8]).split())
    table = lines[lines.index("The plan's place, and the next ones where it has no capacity") + 2 :]
    places = [place["zone_id"] for place in (best["purchase"], *best["alternates"])]
    assert [line.split()[0] for line in table[: len(places)]] == places
    (row, *_) = csv.DictReader(io.StringIO(gpufleet("recommend", *flags, "--format", "csv").stdout))
    assert row["alternates"].startswith(f"{first['zone_id']}/p4d.24xlarge/spot={first['cost_usd']['expected']:g} ")


def test_capacity_blocks_without_a_price_are_missing_data() -> None:
    done = gpufleet("recommend", *ISSUE_FLAGS, "--purchase", "capacity-block")
    assert done.returncode == 4
    assert "the request has no Capacity Block" in done.stderr
    assert "gpufleet blocks find" in done.stderr and "catalog refresh" not in done.stderr


BAD = {
    "unknown model": (["--model", "llama-9", "--tokens", "1B", "--seq-len", "2048"], "llama-9"),
    "unknown region": ([*ISSUE_FLAGS, "--region", "mars-1"], "mars-1"),
    "no amount": (["--model", "gpt2-xl", "--seq-len", "1024"], "tokens, samples and steps"),
    "steps without batch": (["--model", "gpt2-xl", "--seq-len", "1024", "--steps", "5"], "global_batch"),
    "no sequence length": (["--model", "llama-3.1-8b", "--tokens", "1B"], "next: --seq-len 2048, or the length"),
    "no model": (["--tokens", "1B"], "model"),
    "batch beyond reason": ([*ISSUE_FLAGS, "--global-batch", "1e18"], "1000000000"),
    # One step of it was planned, for 1,917,057 USD: 4,096 times the training.
    "batch beyond the training": ([*ISSUE_FLAGS, "--global-batch", "1B"], "global_batch is 1,000,000,000"),
    "no parallelism": ([*ISSUE_FLAGS, "--parallelism", ""], "constraints.parallelism.0"),
    "framework of CNNs": ([*ISSUE_FLAGS, "--framework", "torchvision"], "is a transformer"),
    "beyond the positions": (["--model", "gpt2-xl", "--samples", "9", "--seq-len", "4096"], "1024"),
    "no such flag": (["--colour", "red"], "--colour"),
    "GPU for a type": ([*ISSUE_FLAGS, "--instance-type", "H100"], "g6e, g6f, g7"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_exits_2_with_its_value_and_no_traceback(name: str) -> None:
    arguments, value = BAD[name]
    done = gpufleet("recommend", *arguments)
    assert done.returncode == 2, done.stdout + done.stderr
    assert value in done.stderr
    assert "Traceback" not in done.stderr and "after validation" not in done.stderr
    assert done.stdout == ""


FILES = {
    "broken YAML": ("model: [llama", "YAML"),
    "a list": ("- model", "list"),
    "empty": ("", "nothing"),
    "unknown key": ("model: gpt2-xl\nworkload: {tokens: 1B, seq_len: 1024}\nbudget: 5", "budget"),
    "key given twice": ("model: gpt2-xl\nmodel: gpt2\nworkload: {tokens: 1B, seq_len: 1024}", "duplicate"),
    "time of day for hours": (
        "model: gpt2-xl\nworkload: {tokens: 1B, seq_len: 1024}\nconstraints: {deadline_hours: 1:30}",
        "1:30",
    ),
    "nested without end": ("[" * 1000, "YAML"),
    "owned capacity of unknown price": (
        "model: gpt2-xl\nworkload: {tokens: 1B, seq_len: 1024}\nconstraints: {existing_reservations: "
        "[{instance_type: p5.48xlarge, region: us-east-1, count: 1}]}",
        "capacity_reservation_id",
    ),
    "reserved type unknown": (
        "model: gpt2-xl\nworkload: {tokens: 1B, seq_len: 1024}\nconstraints: {existing_reservations: "
        "[{instance_type: p99.xl, region: us-east-1, count: 1, usd_per_hour: 1}]}",
        "p99.xl",
    ),
    # "no model is given" before.
    "an answer": ('{"schema_version": 1, "request": {}, "plans": []}', "holds plans, and no request"),
    "a plan": ('{"schema_version": 1, "instance_type": "p5.48xlarge"}', "holds a plan, and no request"),
    "section is a number": ("model: gpt2-xl\nworkload: 5", "workload"),
}


@pytest.mark.parametrize("name", FILES)
def test_bad_files_exit_2(name: str, tmp_path: Path) -> None:
    text, message = FILES[name]
    file = tmp_path / "request.yaml"
    file.write_text(text)
    done = gpufleet("recommend", str(file))
    assert done.returncode == 2, done.stdout + done.stderr
    assert message in done.stderr
    assert "Traceback" not in done.stderr and "suppress" not in done.stderr


@pytest.mark.parametrize("place", ["model: *a5", "model: gpt2\nconstraints: *a5"])
def test_a_value_of_a_million_is_shown_by_its_beginning(tmp_path: Path, place: str) -> None:
    file = tmp_path / "request.yaml"
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 6)]
    file.write_text("\n".join([*lines, place]))
    done = gpufleet("recommend", str(file))
    assert done.returncode == 2 and "[[" in done.stderr, done.stderr
    assert len(done.stderr) < 10_000


def test_every_problem_is_reported_at_once(tmp_path: Path) -> None:
    file = tmp_path / "request.yaml"
    file.write_text("model: gpt2-xl\nworkload: {tokens: many, seq_len: -1}\nconstraints: {budget_usd: -3}\n")
    done = gpufleet("recommend", str(file))
    assert done.returncode == 2
    for value in ("many", "-1", "-3"):
        assert value in done.stderr


# Modules of other requests, commands and formats; each adds at least 10 ms to a cold start.
UNNEEDED = {
    *("torch", "pulumi", "boto3", "pandas", "yaml", "ruamel", "rich"),
    *(
        "optimizer.clouds",
        "optimizer.catalog.select",
        "optimizer.performance.fit",
        "optimizer.performance.runs",
    ),
}


def test_no_module_is_imported_that_the_request_does_not_need() -> None:
    code = (
        "import sys; sys.argv = ['gpufleet', 'recommend', *sys.argv[1:], '--format', 'json']\n"
        "from optimizer.cli import main\ntry: main()\nexcept SystemExit: pass\n"
        "import os; print(os.environ['OPENBLAS_NUM_THREADS'], *sys.modules, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code, *ISSUE_FLAGS], capture_output=True, text=True, timeout=120)
    assert json.loads(done.stdout)["plans"], done.stderr
    threads, *modules = done.stderr.splitlines()[-1].split()
    assert not UNNEEDED & set(modules)
    assert threads == os.environ.get("OPENBLAS_NUM_THREADS", "1")


BIG_FLAGS = (
    *("--model", "llama-3.1-70b", "--tokens", "100M", "--seq-len", "8192", "--max-nodes", "4"),
    *("--instance-type", "p4de", "--instance-type", "p5", "--region", "us-*"),
)


def test_the_table_says_who_trains_the_plans() -> None:
    explained = gpufleet("recommend", *BIG_FLAGS, "--all")  # the earlier name of --explain
    assert "The reference trainer (python -m bootstrap.trainer) carries out this plan" in explained.stdout
    assert "GiB a GPU" in explained.stdout and "--explain" not in explained.stdout
    flags = (*BIG_FLAGS, "--parallelism", "tensor,pipeline", "--explain")
    staged = " ".join(gpufleet("recommend", *flags).stdout.split())
    assert "The reference trainer does not carry out" in staged and "pipeline parallelism is" in staged
    assert "gpufleet launch-config PLAN --engine" in staged
    plain = answer(*BIG_FLAGS, "--parallelism", "data", "--max-nodes", "16")
    for plan in plain["plans"]:
        assert [plan["parallelism"][kind] for kind in ("tensor", "pipeline", "context", "expert")] == [1, 1, 1, 1]


def test_exit_3_names_code_of_the_users_own_where_the_trainer_has_no_plan() -> None:
    """175B parameters with fused projections fit twelve p4d only in pipeline stages, which the trainer has not."""
    flags = ("--model", "gpt3-175b", "--samples", "1000", "--seq-len", "2048", "--instance-type", "p4d")
    done = gpufleet("recommend", *flags, "--max-nodes", "12")
    assert done.returncode == 3
    assert "--parallelism data,tensor,pipeline,context,expert, with training code of your own" in done.stderr
    image = ("--model", "resnet50", "--samples", "1M", "--global-batch", "7", "--instance-type", "p5.48xlarge")
    refused = gpufleet("recommend", *image)
    assert "a --global-batch that the GPUs of a node divide" in refused.stderr
    assert "--parallelism" not in refused.stderr  # an image model is split over data ranks alone


def test_the_front_has_no_dearer_plan_for_milliseconds() -> None:
    """Four nodes in eu-north-1 cost 7% more than in us-east-1 and took 0.00001 h less."""
    flags = ("--model", "llama-3.2-1b", "--tokens", "5B", "--seq-len", "2048", "--objective", "pareto")
    plans = answer(*flags, "--purchase", "on-demand", "--instance-type", "p5en")["plans"]
    hours = [plan["hours"]["expected"] for plan in plans]
    assert len(hours) > 3 and all(later < 0.999 * earlier for earlier, later in pairwise(hours)), hours


def test_a_repeatable_flag_takes_commas_too() -> None:
    where = ("--purchase", "spot,on-demand", "--region", "us-east-1,us-east-2")
    asked = answer(*ISSUE_FLAGS, "--instance-type", "p4d,p5", *where)["request"]["constraints"]
    assert asked["instance_types"] == ["p4d", "p5"] and asked["purchase_options"] == ["spot", "on-demand"]
    assert asked["regions"] == ["us-east-1", "us-east-2"]


def test_explain_has_the_staging(tmp_path: Path) -> None:
    file = tmp_path / "request.yaml"
    file.write_text(
        "model: llama-3.1-8b\nworkload: {tokens: 500M, seq_len: 4096, data_gib: 400, data_files: 20000, "
        "data_region: eu-west-1}\n"
        "constraints: {deadline_hours: 24, purchase_options: [spot], spot_fallback: on-demand}\n"
    )
    explained = gpufleet("recommend", str(file), "--explain").stdout
    assert "of transfer from eu-west-1" in " ".join(explained.split())
    assert "bound by requests" in explained


CNN_FLAGS = ("--model", "resnet50", "--instance-type", "p4d", "--max-nodes", "1", "--region", "us-east-1")


def test_a_cnns_tokens_are_samples_and_it_says_so() -> None:
    as_tokens = gpufleet("recommend", *CNN_FLAGS, "--tokens", "2M", "--seq-len", "512", "--format", "json")
    said = [
        "resnet50 has no tokens to count: 2,000,000 tokens are taken for 2,000,000 samples (images)",
        "resnet50 fixes the length of its samples: seq_len 512 is not used",
    ]
    document = json.loads(as_tokens.stdout)
    assert document["notes"] == said
    assert all(f"note: {line}\n" in as_tokens.stderr for line in said)
    as_samples = answer(*CNN_FLAGS, "--samples", "2M", "--framework", "torchvision")
    assert as_samples["notes"] == []
    assert as_samples["plans"] == document["plans"]
    assert document["plans"][0]["job"]["samples"] == 2_000_000


def test_reservations_that_the_limits_leave_out_are_named(tmp_path: Path) -> None:
    file = with_reservation(tmp_path, "p4de.24xlarge", {"instance_types": ["p4de"], "max_nodes": 2}, usd_per_hour=1)
    used = answer(str(file))
    assert used["plans"][0]["purchase"]["option"] == "reserved" and not used["notes"]
    for flags, reason in (
        (("--region", "us-west-2"), "regions (us-west-2) leave it out"),
        (("--instance-type", "p4d"), "instance_types (p4d) leave it out"),
        (("--purchase", "spot"), "purchase_options (spot) leave out reserved"),
    ):
        done = gpufleet("recommend", str(file), *flags, "--format", "json")
        assert reason in done.stderr
        assert all(plan["purchase"]["option"] != "reserved" for plan in json.loads(done.stdout)["plans"])


def test_a_reservation_the_catalog_has_no_offer_of_is_used(tmp_path: Path) -> None:
    file = with_reservation(tmp_path, "p5e.48xlarge", {"instance_types": ["p5e"], "max_nodes": 2}, usd_per_hour=3.5)
    plan = answer(str(file))["plans"][0]
    assert (plan["region"], plan["purchase"]["option"]) == ("us-east-1", "reserved")
    assert plan["prices"][0]["usd"] == 3.5


FP8_FLAGS = ("--model", "llama-3.1-8b", "--tokens", "1B", "--seq-len", "8192", "--precision", "fp8")


def test_eager_fp8_says_that_it_is_slow_and_compiled_it_is_fast() -> None:
    flags = (*FP8_FLAGS, "--instance-type", "p5", "--max-nodes", "1", "--region", "us-east-1")
    eager, compiled = (answer(*flags, *how) for how in ((), ("--compile",)))
    assert "more in casts than it saves" in eager["notes"][0]
    assert ["precision fp8 is not one of" in note for note in compiled["notes"]] == [True]
    assert [document["request"]["workload"]["compiled"] for document in (eager, compiled)] == [False, True]
    hours, fewer = (document["plans"][0]["hours"]["expected"] for document in (eager, compiled))
    assert fewer < 0.6 * hours
    assert not answer(*flags, "--framework", "megatron-core")["notes"]


def test_exit_3_ends_with_a_command_that_has_a_plan() -> None:
    asked = "--model gpt2-xl --samples 200k --seq-len 1024 --deadline 5h --parallelism data,tensor"
    flags = (*asked.split(), "--instance-type", "p4d", "--instance-type", "p5", "--purchase", "on-demand")
    done = gpufleet("recommend", *flags, "--budget", "5", "--format", "json")
    assert done.returncode == 3
    nearest = json.loads(done.stdout)["nearest"]
    assert nearest[0]["plan"]["job"]["budget_usd"] == nearest[0]["changes"]["budget_usd"] > 5
    words = shlex.split(json.loads(done.stderr.splitlines()[-1])["error"]["next"].removesuffix(" has a plan"))
    assert words[0] == "gpufleet" and words[-len(nearest[0]["flags"]) :] == nearest[0]["flags"]
    again = gpufleet(*words[1:])
    assert again.returncode == 0
    assert json.loads(again.stdout)["plans"][0]["hours"]["p95"] <= 5
    table = gpufleet("recommend", *flags, "--budget", "5").stdout
    assert "No plan keeps the limits" in table and " ".join(nearest[0]["flags"]) in table


def test_sequences_beyond_the_models_positions_are_noted() -> None:
    flags = ("--model", "llama-2-7b", "--samples", "10k", "--instance-type", "p4d", "--max-nodes", "1")
    assert "beyond the 4,096 positions" in gpufleet("recommend", *flags, "--seq-len", "8192").stderr
    assert "positions" not in gpufleet("recommend", *flags, "--seq-len", "4096").stderr


@pytest.mark.parametrize(
    ("method", "flags", "says"),
    [
        ("awq", (), "is quantised (awq), and method is full"),
        ("gptq", ("--method", "lora"), "is quantised (gptq), and the plan trains weights of 16 or 32 bits"),
        ("fp8", (), "is quantised (fp8), and the plan trains weights of 16 or 32 bits"),
    ],
)
def test_a_quantised_checkpoint_is_not_trained_without_a_word(
    method: str, flags: tuple[str, ...], says: str, tmp_path: Path
) -> None:
    config = {
        "model_type": "llama", "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2,
        "num_attention_heads": 4, "vocab_size": 1000, "quantization_config": {"quant_method": method},
    }  # fmt: skip
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config))
    work = ("--tokens", "10M", "--seq-len", "512", "--instance-type", "g6.xlarge")
    done = gpufleet("recommend", "--model", str(file), *work, *flags)
    assert done.returncode == (2 if method == "awq" else 0) and says in done.stderr


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--model", "gemma-2-2b", "--seq-len", "4096"), "attention with soft caps is written out"),
        (("--model", "mistral-7b", "--seq-len", "32768"), "a window of 4,096 tokens at seq_len 32,768 is a mask"),
        (("--model", "gpt2", "--seq-len", "1024", "--precision", "fp32"), "--precision tf32 uses them"),
    ],
)
def test_slow_arithmetic_is_named_and_promises_no_hours(flags: tuple[str, ...], says: str) -> None:
    where = ("--samples", "1000", "--instance-type", "p5.48xlarge", "--purchase", "on-demand")
    done = gpufleet("recommend", *flags, *where)
    assert says in done.stderr
    assert "; estimated under" in " ".join(done.stdout.split()) or "gpt2" in flags


SMALL = ("recommend", "--model", "gpt2", "--samples", "10k", "--seq-len", "1024", "--region", "us-west-2")


def test_refresh_plans_at_todays_spot_prices(emulated_url: str, tmp_path: Path) -> None:
    types = ("--instance-type", "g5.xlarge", "--instance-type", "g6e.xlarge")
    place = {"AWS_ENDPOINT_URL": emulated_url, "XDG_CACHE_HOME": str(tmp_path)}
    done = gpufleet(*SMALL, *types, "--format", "json", **place)
    assert json.loads(done.stdout)["plans"][0]["purchase"]["option"] == "on-demand"
    assert "days old: add --refresh" in done.stderr
    assert re.search(r"^truer: gpufleet recommend --model .* --refresh reads today's", done.stderr, re.MULTILINE)
    done = gpufleet(*SMALL, *types, "--format", "json", "--refresh", **place)
    assert done.returncode == 0, done.stderr
    first = json.loads(done.stdout)["plans"][0]
    assert first["purchase"]["option"] == "spot" and first["purchase"]["zone_id"] in first["zone_ids"]
    assert first["prices"][0]["source"] == "spot-price-history" and first["spot_range"] is None
    assert "spot prices of 2 types in 1 region are of today" in done.stderr
    # The next answer has them too.
    again = gpufleet(*SMALL, *types, "--format", "csv", **place)
    row = next(csv.DictReader(io.StringIO(again.stdout)))
    assert (row["price_source"], row["price_stale"], row["cost_usd_dearest"]) == ("spot-price-history", "no", "")
    assert row["zone_id"] == first["purchase"]["zone_id"]


@pytest.mark.parametrize(
    ("flags", "environment", "status", "says"),
    [
        ((), {}, 1, "nothing could be read from AWS"),
        (("--purchase", "on-demand"), {}, 2, "add --purchase spot"),
        ((), {"GPUFLEET_CATALOG": "optimizer/catalog/data/snapshot"}, 2, "unset GPUFLEET_CATALOG"),
    ],
)
def test_a_refresh_that_cannot_be_says_why(
    flags: tuple[str, ...], environment: dict[str, str], status: int, says: str, tmp_path: Path
) -> None:
    done = gpufleet(*SMALL, *flags, "--refresh", **{"XDG_CACHE_HOME": str(tmp_path)} | environment)
    assert (done.returncode, done.stdout) == (status, "")
    assert says in done.stderr and "Traceback" not in done.stderr


def test_a_wrong_flag_is_not_blamed_on_the_file_alone() -> None:
    request = "examples/request.yaml"
    wrong = gpufleet("recommend", request, "--sharding", "zero9")
    assert wrong.returncode == 2 and f"{request} with the flags is not valid:\n" in wrong.stderr
    assert "the request is not valid:\n" in gpufleet("recommend", *ISSUE_FLAGS, "--sharding", "zero9").stderr
