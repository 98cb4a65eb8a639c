"""Demands of plans on the training code: one wording for recommend, preview, stack set and preflight."""

from __future__ import annotations

from optimizer.contract.plan import SHORT_NAMES, FleetPlan

TRAINER = "python -m bootstrap.trainer"


def describe_demands(plan: FleetPlan) -> str:
    """Say who trains a plan: the reference trainer, or code that has the parts it lacks."""
    if not plan.beyond_trainer:
        return (
            f"The reference trainer ({TRAINER}) carries out this plan; nodes run it unless gpufleet:trainCommand names "
            "other code."
        )
    return (
        f"The reference trainer does not carry out this plan: {'; '.join(plan.beyond_trainer)}. {_demanded(plan)} "
        f"{other_code(plan)}"
    )


def other_code(plan: FleetPlan) -> str:
    """Name the ways to train a plan that is beyond the trainer."""
    own = "run code of your own with gpufleet:trainCommand, around bootstrap.training (docs/training.md)"
    if plan.job.architecture is None:
        return f"To train it, {own}."
    return f"`gpufleet launch-config PLAN --engine ENGINE` writes the layout for another engine; or {own}."


def _demanded(plan: FleetPlan) -> str:
    split = plan.parallelism
    needs = [f"{SHORT_NAMES[kind]} ({kind} parallelism {getattr(split, kind)})" for kind in split.beyond_data]
    needs += [f"{split.sharding} sharding"] * (split.sharding != "ddp")
    if not needs:
        return "The hours and memory are those of code that trains by data parallelism."
    return f"The hours and memory are those of code that implements {', '.join(needs)}."
