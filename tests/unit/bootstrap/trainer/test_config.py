"""Flags over the node's variables, batch sizes of the ranks there are, and what is refused."""

from __future__ import annotations

import json

import pytest

from bootstrap.trainer import __main__
from bootstrap.trainer.config import TrainerConfig, parse_config
from bootstrap.trainer.mesh import with_batches
from bootstrap.training.errors import ConfigurationError

LLAMA = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 256,
}  # fmt: skip


def parse(*flags: str, **plan: object) -> TrainerConfig:
    return parse_config(flags, {"GPUFLEET_PLAN": json.dumps({"architecture": LLAMA} | plan)})


def test_the_plan_has_the_defaults_of_the_flags() -> None:
    config = parse("--micro-batch", "4", micro_batch=2, sharding="zero2", compiled=True, seq_len=128, global_batch=0)
    assert (config.micro_batch, config.sharding, config.compiled, config.seq_len) == (4, "zero2", True, 128)
    assert (config.family, config.learning_rate, config.global_batch) == ("decoder", 3e-4, 0)
    # torchrun's, as in a first trial of two tensor ranks.
    of_torchrun = {"GPUFLEET_PLAN": json.dumps({"architecture": LLAMA}), "LOCAL_WORLD_SIZE": "2"}
    assert parse_config(["--tensor-parallel", "2"], of_torchrun).gpus_per_node == 2
    assert parse_config([], of_torchrun | {"GPUFLEET_GPUS_PER_NODE": "8"}).gpus_per_node == 8


@pytest.mark.parametrize(
    ("flags", "plan", "reason"),
    [
        ("", {"micro_batch": "two"}, "GPUFLEET_PLAN.micro_batch is 'two', and must be a whole number"),
        ("", {"sharding": "zero4"}, "expected one of ddp, zero1"),
        ("", {"compiled": "yes"}, "GPUFLEET_PLAN.compiled is 'yes', and must be true or false"),
        ("", {"micro_batch": 0}, "--micro-batch is 0; expected at least 1"),
        ("", {"pipeline_parallel": 2}, "pipeline parallelism is 2.*launch-config"),
        ("--gpus-per-node 3", {"tensor_parallel": 3}, "does not divide the attention heads"),
        ("", {"architecture": "{"}, "GPUFLEET_PLAN.architecture is"),
        ("", {"method": "lora"}, "lora of rank 16 on all projections would train over random values.*baseWeights"),
        ("", {"architecture": {"model_type": "vit"}, "seq_len": 197}, "--seq-len is 197; expected 1"),
        ("", {"seq_len": 510, "context_parallel": 4}, "--seq-len is 510.* give a multiple of 4"),
        (
            "--gpus-per-node 4",
            {"seq_len": 510, "tensor_parallel": 4, "sequence_parallel": True},
            "--seq-len is 510.* give a multiple of 4",
        ),
        ("", {"frozen": "1"}, "frozen embedding and the first 1 layers would train over random values"),
    ],
)
def test_bad_values_are_refused_with_value_and_limit(flags: str, plan: dict[str, object], reason: str) -> None:
    with pytest.raises(ConfigurationError, match=reason):
        parse(*flags.split(), **plan)


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        ("--architecture missing.json", "--architecture: neither JSON nor a file that can be read .*missing.json"),
        ("--steps many", "--steps: invalid int value: 'many'"),
        ("--sharding zero4", "--sharding: invalid choice: 'zero4'"),
        ("--sahrding zero1", "unrecognized arguments: --sahrding zero1; .*--help"),
        ("--context-parallel 0", "--context-parallel is 0; expected at least 1"),
        # Neither is below 0.
        ("--learning-rate nan", "--learning-rate is nan; expected at least 0"),
        ("--weight-decay inf", "--weight-decay is inf; expected at least 0"),
        # Only 32 bits of it count in the order of the samples.
        ("--seed 4294967296", "--seed is 4294967296; expected 0 to 4294967295"),
    ],
)
def test_bad_flags_are_refused_with_the_reason(flags: str, reason: str) -> None:
    """By argparse's own status (2), torchrun would start the same command again."""
    with pytest.raises(ConfigurationError, match=reason):
        parse(*flags.split())


@pytest.mark.parametrize(
    ("flags", "ranks", "limit", "expected"),
    [
        ("--micro-batch 2 --grad-accum 3", 4, None, (24, 2, 3)),
        ("--micro-batch 4 --global-batch 32", 2, None, (32, 4, 4)),
        ("--micro-batch 4 --global-batch 24", 4, None, (24, 3, 2)),  # 6 samples a rank: 4 does not divide them
        ("--micro-batch 4 --global-batch 32", 2, 2, (32, 2, 8)),  # halved: twice the accumulation
        ("--micro-batch 8 --global-batch 8", 8, None, (8, 1, 1)),
    ],
)
def test_global_batch_stays_whatever_the_ranks(
    flags: str, ranks: int, limit: int | None, expected: tuple[int, int, int]
) -> None:
    config = with_batches(parse(*flags.split()), ranks, micro_batch_limit=limit)
    assert (config.global_batch, config.micro_batch, config.grad_accum) == expected


def test_ranks_that_do_not_divide_the_global_batch_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="--global-batch is 10, which 4 data ranks do not divide"):
        with_batches(parse("--global-batch", "10"), 4, micro_batch_limit=None)


def test_a_rank_with_one_micro_batch_has_nothing_to_balance() -> None:
    config = parse("--micro-batch", "4", "--balance", "measured", global_batch=8)
    with pytest.raises(ConfigurationError, match="a rank has one micro-batch of 4 samples: give a smaller"):
        with_batches(config, 2, micro_batch_limit=None)
    assert with_batches(config, 2, micro_batch_limit=2).grad_accum == 2


def test_a_fault_of_one_rank_s_own_is_told(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Samples, disks and images differ between ranks; what all ranks refuse, rank 0 tells."""

    class EndedError(Exception):
        pass

    def end(code: int) -> None:
        raise EndedError(code)

    def run(_: TrainerConfig) -> None:
        raise ConfigurationError("token 70,000 in /data")

    monkeypatch.setattr(__main__, "end_process", end)
    monkeypatch.setattr(__main__, "train", run)
    monkeypatch.setenv("RANK", "1")
    for flags, told in ((["--architecture", '{"model_type": "llama"}'], 1), (["--architecture", "{}"], 0)):
        caplog.clear()
        monkeypatch.setattr("sys.argv", ["trainer", *flags])
        with pytest.raises(EndedError, match="78"):
            __main__.main()
        assert len(caplog.records) == told
