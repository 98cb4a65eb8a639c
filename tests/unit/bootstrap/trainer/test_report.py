from __future__ import annotations

import json
import logging
import math
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from torch.nn.parallel import DistributedDataParallel

from bootstrap.contract.measured import parse
from bootstrap.trainer.clock import StepClock
from bootstrap.trainer.config import TrainerConfig, parse_config
from bootstrap.trainer.loop import StepResult
from bootstrap.trainer.measured import MEASURED_STEPS, WARMUP_STEPS, record
from bootstrap.trainer.optimize import DivergedError
from bootstrap.trainer.report import Report
from bootstrap.training.stores import LocalStore

CPU = torch.device("cpu")
ARCHITECTURE = {
    "model_type": "qwen2",
    "num_hidden_layers": 2,
    "hidden_size": 16,
    "intermediate_size": 40,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
}


PREDICTED = {"step_time_s": 0.001, "step_time_p95_s": 0.0012, "tokens_per_second": 32_000, "peak_memory_gib": 60.5}
PLAN = {"architecture": ARCHITECTURE, "seq_len": 8, "micro_batch": 2, "steps": 1000, "predicted": PREDICTED}
NODE = {
    "GPUFLEET_RUN": "0123456789ab",
    "GPUFLEET_STACK": "dev",
    "GPUFLEET_GPU": "H100",
    "GPUFLEET_INSTANCE_TYPE": "p5.48xlarge",
    "GPUFLEET_PLAN": json.dumps(PLAN),
}


def configured(out: Path, **settings: Any) -> TrainerConfig:
    return TrainerConfig(out=str(out), architecture=ARCHITECTURE, **settings)


def result(loss: float, norm: float = 1.0) -> StepResult:
    return StepResult(loss=torch.tensor(loss), gradient_norm=torch.tensor(norm), learning_rate=1e-3)


@pytest.fixture
def config() -> TrainerConfig:
    return parse_config([], NODE)


@pytest.fixture
def wait(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Lets time pass for step clocks, so that busy test machines count no seconds."""
    seconds = [0.0]
    monkeypatch.setattr("bootstrap.trainer.clock.time", SimpleNamespace(perf_counter=lambda: seconds[0]))

    def wait(duration_s: float) -> None:
        seconds[0] += duration_s

    return wait


def test_report_writes_every_few_steps_to_console_and_file(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, wait: Callable[[float], None]
) -> None:
    caplog.set_level(logging.INFO, "bootstrap.trainer.report")
    clock = StepClock(CPU)
    clock.restart()
    losses: dict[int, float] = {}
    config = configured(tmp_path, log_every=5, steps=12, global_batch=32, seq_len=10)
    with Report(config, clock=clock, on_loss=losses.__setitem__) as report:
        for step in range(1, 13):
            wait(0.016)
            clock.tick()
            waited_s = step * 0.004
            report.step(step, result(step / 4, 3.0), data_wait_s=waited_s)
            if step == 7:
                wait(5)
                report.evaluation(7, torch.tensor(2.5))
                clock.restart()
        assert losses == {5: 1.25, 10: 2.5, 12: 3.0}, "the last is known before the run ends"

    written = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in written] == [5, 7, 10, 12]
    assert written[0] == {
        "step": 5,
        "learning_rate": 1e-3,
        "loss": 1.25,
        "gradient_norm": 3.0,
        "step_time_s": 0.016,
        "tokens_per_second": 20_000,
        "data_wait_share": 0.25,
    }
    assert written[1] == {"step": 7, "evaluation_loss": 2.5}
    assert written[2]["step_time_s"] == written[3]["step_time_s"] == 0.016, "an evaluation counts as a step"
    assert "step 5/12  loss 1.2500  gradient norm 3.000  lr 1.00e-03  0.016 s/step  20,000 tokens/s" in caplog.text
    assert "(bound by its input: docs/data.md)" in caplog.text and "step 7/12  evaluation loss 2.5000" in caplog.text


def test_steps_that_a_resume_does_again_are_reported_once(tmp_path: Path) -> None:
    for first, end, loss in ((1, 7, 1.0), (4, 9, 2.0)):  # killed after step 7, with a checkpoint of step 3
        clock = StepClock(CPU)
        with Report(configured(tmp_path, log_every=2), clock=clock, on_loss=print) as report:
            for step in range(first, end + 1):
                report.step(step, result(loss), data_wait_s=0)
        with (tmp_path / "metrics.jsonl").open("a") as torn:
            torn.write('{"step": ')
    *lines, _ = (tmp_path / "metrics.jsonl").read_text().splitlines()
    expected = [(2, 1.0), (4, 2.0), (6, 2.0), (8, 2.0)]
    assert [(line["step"], line["loss"]) for line in map(json.loads, lines)] == expected


def test_a_run_ends_at_the_step_whose_loss_or_gradient_is_not_finite(tmp_path: Path) -> None:
    """Each step is checked, though only every tenth writes a line; fp16 skips such steps, and JSON has null."""
    nan, infinite = math.nan, math.inf

    def run(precision: str, norms: list[float]) -> list[dict[str, Any]]:
        config = configured(tmp_path / precision, precision=precision, log_every=10, steps=10)
        with Report(config, clock=StepClock(CPU), on_loss=print) as report:
            for step, norm in enumerate(norms, 1):
                report.step(step, result(2.0, norm), data_wait_s=0)
        return [json.loads(line) for line in (tmp_path / precision / "metrics.jsonl").read_text().splitlines()]

    with pytest.raises(DivergedError, match=r"step 3: loss 2 and gradient_norm nan.* from step-00000002 on"):
        run("bf16", [1.0, 1.0, nan, nan, nan])
    lines = run("fp16", [1.0, 1.0, *[infinite] * 8])
    assert [(line["step"], line["gradient_norm"]) for line in lines] == [(10, None)]


def test_only_rank_0_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    with Report(configured(tmp_path, steps=1), clock=StepClock(CPU), on_loss=print) as report:
        report.step(1, result(1.0), data_wait_s=0)
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("one_rank")
def test_the_measured_run_is_of_its_last_steps(
    tmp_path: Path, config: TrainerConfig, monkeypatch: pytest.MonkeyPatch, wait: Callable[[float], None]
) -> None:
    library: Any = transformers
    model = library.AutoModelForCausalLM.from_config(library.AutoConfig.for_model(**ARCHITECTURE))
    for name, value in NODE.items():
        monkeypatch.setenv(name, value)
    answers, store = threading.Event(), LocalStore(tmp_path)
    write = store.write
    monkeypatch.setattr(store, "write", lambda name, parts: answers.wait() and write(name, parts))
    clock = StepClock(CPU)
    replica = DistributedDataParallel(model)  # has no config of its own
    clock.restart()
    for step in range(1, WARMUP_STEPS + MEASURED_STEPS + 1):
        wait(0.5 if step <= WARMUP_STEPS else 0.003 + 0.002 * (step % 2))
        clock.tick()
    record(replace(config, global_batch=4), replica, clock, store, waited_s=0.05)
    answers.set()  # no step has waited for the store
    for thread in threading.enumerate():
        if thread.name == "measured-run":
            thread.join()
    (path,) = tmp_path.glob("measured/0123456789ab-*.json")
    row = parse(path.read_text(), "the row")
    assert row.measured.steps == MEASURED_STEPS
    assert row.measured.step_time_s == pytest.approx(0.004) and row.measured.step_time_p95_s == pytest.approx(0.005)
    assert row.measured.tokens_per_second == pytest.approx(8000) and row.measured.data_wait_share == pytest.approx(0.25)
    assert row.predicted is not None and row.predicted.peak_memory_gib == 60.5
    cells = row.columns()
    expected = {
        "model": "qwen2",
        "architecture": "decoder",
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "ffn_size": 40,
        "gated_mlp": 1,
        "kv_heads": 2,
        "head_dim": 4,
        "gpu": "H100",
        "gpus": 1,
        "micro_batch": 2,
        "framework": "gpufleet",
    }
    assert {name: cells[name] for name in expected} == expected
