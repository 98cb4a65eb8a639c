"""Configurations with which other training engines carry out a plan, each in the engine's own format."""

from __future__ import annotations

from optimizer.contract.errors import InvalidInputError
from optimizer.contract.plan import FleetPlan
from optimizer.launch_config import accelerate, deepspeed, megatron_core, torchtitan
from optimizer.launch_config.engine import Engine

__all__ = ["ENGINES", "Engine", "launch_config"]

ENGINES: dict[str, Engine] = {
    engine.name: engine for engine in (torchtitan.ENGINE, accelerate.ENGINE, deepspeed.ENGINE, megatron_core.ENGINE)
}


def launch_config(plan: FleetPlan, engine_name: str, file_name: str) -> tuple[str, list[str]]:
    """Return the configuration's text and the launch lines, for a configuration saved as ``file_name``.

    Raises:
        InvalidInputError: the engine cannot carry out a part of the plan; engines that can are named.
    """
    engine = ENGINES[engine_name]
    # No engine's configuration file has which part of the model trains.
    words = plan.job.tuning.in_words
    parts = [f"{words}: the training script decides what trains, not {', '.join(ENGINES)}"] if words else []
    if refusals := [*parts, *engine.refusals(plan)]:
        able = [engine.name for engine in ENGINES.values() if not engine.refusals(plan)]
        next_step = "plan with less: gpufleet recommend --parallelism, --sharding, --precision"
        if parts:
            next_step = (
                "train with the reference trainer, or with a script of your own (docs/models.md, docs/trainer.md)"
            )
        elif able:
            next_step = f"--engine {' or '.join(able)} can"
        raise InvalidInputError(
            f"{engine.name} cannot carry out this plan: {'; '.join(refusals)}",
            limit="every part of the plan",
            why="with another layout the predicted memory, speed and cost do not hold",
            next_step=next_step,
        )
    return engine.text(plan, file_name), engine.launch_lines(plan, file_name)
