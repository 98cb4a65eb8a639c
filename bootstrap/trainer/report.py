"""Report of a run on rank 0: a console line every few steps, and JSON lines of the same."""

from __future__ import annotations

import json
import logging
import math
import os
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, TextIO

import torch

from bootstrap.trainer.clock import StepClock
from bootstrap.trainer.config import TrainerConfig
from bootstrap.trainer.loop import StepResult
from bootstrap.trainer.optimize import DivergedError

logger = logging.getLogger(__name__)

METRICS_NAME = "metrics.jsonl"
# A larger share of the step time makes the console line say that the run waits for its data.
INPUT_BOUND_SHARE = 0.05


# Numbers on their way from the device: facts of a line, names and values of the numbers, the event after their copy,
# and whether they make a line or are only to be checked.
Entry = tuple[dict[str, Any], list[str], torch.Tensor, torch.cuda.Event | None, bool]


class Report(AbstractContextManager["Report"]):
    """Reports every ``--log-every`` steps; a line appears when the device has its numbers, and no step waits for it.

    ``metrics.jsonl`` loses what an earlier start wrote of the first step and later. But for fp16, whose steps may be
    left out, a loss or gradient norm that is not finite raises a DivergedError a step or two later.

    Args:
        clock: ticks at each step's end, before ``step`` is called.
        on_loss: called with step and loss of each line.
    """

    def __init__(self, config: TrainerConfig, *, clock: StepClock, on_loss: Callable[[int, float], object]) -> None:
        self._config, self._clock, self._on_loss = config, clock, on_loss
        self._refuses_infinity = config.precision != "fp16"
        self._entries: deque[Entry] = deque()
        self._counted = 0
        self._waited_s = 0.0
        self._path = Path(config.out) / METRICS_NAME
        self._file: TextIO | None = None
        self._is_writer = os.environ.get("RANK", "0") == "0"

    def __exit__(self, *_: object) -> None:
        """Write the last lines."""
        if self._file is not None:
            self._clock.synchronize()
            self._write_ready()
            self._file.close()

    def step(self, step: int, result: StepResult, *, data_wait_s: float) -> None:
        """Report that ``step`` steps are done; ``data_wait_s`` is ``Loader.wait_s``."""
        if not self._is_writer:
            return
        if self._file is None:
            self._file = self._opened(step)
        self._write_ready()
        is_last = step == self._config.steps
        is_line = is_last or step % self._config.log_every == 0
        if not (is_line or self._refuses_infinity):
            return
        facts = {"step": step, "learning_rate": result.learning_rate, "data_wait_s": data_wait_s}
        self._add(facts, {"loss": result.loss, "gradient_norm": result.gradient_norm}, is_line=is_line)
        if is_last:
            # The final checkpoint waits for the device anyway, and its event in the ledger takes the last loss.
            self._clock.synchronize()
            self._write_ready()

    def evaluation(self, step: int, loss: torch.Tensor) -> None:
        """Report the mean loss of held-out samples after ``step`` steps."""
        if self._file is not None:
            self._add({"step": step}, {"evaluation_loss": loss})

    def _opened(self, step: int) -> TextIO:
        """Drop the lines from ``step`` on, and a torn one: an earlier start did these steps after its checkpoint."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        if self._path.is_file():
            lines = self._path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
            new = self._path.with_suffix(".new")
            new.write_text("".join(line for line in lines if _step_of(line) < step), encoding="utf-8")
            new.replace(self._path)
        return self._path.open("a", encoding="utf-8")

    def _add(self, facts: dict[str, Any], values: dict[str, torch.Tensor], *, is_line: bool = True) -> None:
        stacked = torch.stack([value.detach().float() for value in values.values()])
        ready = None
        if stacked.is_cuda:
            host = torch.empty(stacked.shape, pin_memory=True)
            stacked = host.copy_(stacked, non_blocking=True)
            ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
            ready.record()
        self._entries.append((facts, list(values), stacked, ready, is_line))
        self._write_ready()

    def _write_ready(self) -> None:
        while self._entries:
            facts, names, numbers, ready, is_line = self._entries[0]
            if ready is not None and not ready.query():  # type: ignore[no-untyped-call]
                return
            self._entries.popleft()
            values = dict(zip(names, numbers.tolist(), strict=True))
            if self._refuses_infinity and not all(map(math.isfinite, values.values())):
                self._entries.clear()  # what follows is no more finite
                step, found = facts["step"], " and ".join(f"{name} {value:g}" for name, value in values.items())
                raise DivergedError(
                    f"step {step:,}: {found}. The weights are lost from here on; a start goes on from the newest "
                    f"checkpoint, so move away those from step-{step - 1:08d} on"
                )
            if is_line:
                speed = self._speed(facts.pop("data_wait_s")) if "data_wait_s" in facts else {}
                self._write(facts | values | speed)

    def _speed(self, waited_s: float) -> dict[str, Any]:
        """Speed over the steps that finished since the last line."""
        durations = self._clock.durations_s[self._counted :]
        self._counted += len(durations)
        waited, self._waited_s = waited_s - self._waited_s, waited_s
        facts: dict[str, Any] = {}
        if durations:
            step_time_s = sum(durations) / len(durations)
            facts["step_time_s"] = step_time_s
            unit = "samples" if self._config.counts_samples else "tokens"
            facts[f"{unit}_per_second"] = self._config.global_batch * self._config.seq_len / step_time_s
            facts["data_wait_share"] = min(1.0, max(0.0, waited) / sum(durations))
        if torch.cuda.is_available():
            facts["peak_allocated_gib"] = torch.cuda.max_memory_allocated() / 2**30
            facts["peak_reserved_gib"] = torch.cuda.max_memory_reserved() / 2**30
        return facts

    def _write(self, facts: dict[str, Any]) -> None:
        assert self._file is not None
        self._file.write(json.dumps({name: _short(value) for name, value in facts.items()}) + "\n")
        self._file.flush()
        logger.info("%s", self._line(facts))
        if "loss" in facts:
            self._on_loss(facts["step"], facts["loss"])

    def _line(self, facts: dict[str, Any]) -> str:
        start = f"step {facts['step']:,}/{self._config.steps:,}"
        if "evaluation_loss" in facts:
            return f"{start}  evaluation loss {facts['evaluation_loss']:.4f}"
        forms = {
            "loss": "loss {:.4f}",
            "gradient_norm": "gradient norm {:.3f}",
            "learning_rate": "lr {:.2e}",
            "step_time_s": "{:.3f} s/step",
            "tokens_per_second": "{:,.0f} tokens/s",
            "samples_per_second": "{:,.1f} samples/s",
            "peak_reserved_gib": "memory {:.1f} GiB",
            "data_wait_share": "data wait {:.1%}",
        }
        parts = [form.format(facts[name]) for name, form in forms.items() if name in facts]
        if facts.get("data_wait_share", 0) > INPUT_BOUND_SHARE:
            parts.append("(bound by its input: docs/data.md)")
        return "  ".join([start, *parts])


def _step_of(line: str) -> float:
    """Step of a line; infinity where it is torn."""
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return math.inf


def _short(value: Any) -> Any:
    if not isinstance(value, float):
        return value
    return float(f"{value:.6g}") if math.isfinite(value) else None  # JSON has no infinity
