"""Notes beside an answer: what of the request is not used, what plan 1 needs and waits for, what would change it."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime

import numpy as np

from bootstrap.contract import trainer
from bootstrap.contract.timings import BLOCK_TAIL
from bootstrap.contract.words import counted
from optimizer.contract.hardware import Offer, break_even_hours
from optimizer.contract.plan import FleetPlan, describe_undriven, usable_hours
from optimizer.contract.request import ExistingReservation
from optimizer.contract.units import HOURS_PER_YEAR, short, usd_text
from optimizer.performance.case import lengths
from optimizer.performance.frameworks import CNN_DEFAULT, TRAINER, fp8_note, slow_attention_note
from optimizer.performance.setups import positions_note
from optimizer.search.candidates import CandidateTable, find_candidates
from optimizer.search.global_batch import FEW_STEPS
from optimizer.search.problem import Problem, Rejection
from optimizer.search.purchases import PricedPurchase
from optimizer.search.ranking import rank_first

# (nodes, share of the time that a zone had at least so many spot nodes at once): median of 16 zones with 16 one-GPU
# nodes, V100 on AWS in August 2023 (three zones, https://github.com/skypilot-org/spot-traces) and H100 on another cloud
# in October 2025 (13, SkyNomad, NSDI'27).
SPOT_TOGETHER = ((16, 0.42), (12, 0.44), (8, 0.53), (4, 0.63), (2, 0.75))
# A run of a tenth of the break-even hours: ten a year make a reservation pay.
_LONG_SHARE = 0.1
# Least saving worth a note, of the plan's expected dollars.
_LEAST_SAVING = 0.05


def list_notes(
    problem: Problem,
    tables: Sequence[CandidateTable],
    rejected: Sequence[Rejection],
    used: Collection[PricedPurchase],
    plan: FleetPlan | None,
) -> list[str]:
    """Say what matters to whom asked, and of ``plan``, which is the first, to whom buys it; plans have ``used``."""
    notes = [*_note_workload(problem), *_note_code(problem), *_note_purchases(problem, tables, rejected, used)]
    if plan is None:
        return notes
    return [
        *notes,
        *_note_compiler(problem, plan),
        *(
            f"{plan.instance_type} {why}: first set gpufleet:amiId to an image of your own"
            for why in [describe_undriven(plan.node.gpu, plan.node.gpu_count)]
            if why
        ),
        *note_commitments(plan, problem.catalog.offer(plan.instance_type, plan.region)),
        *_note_nodes(plan),
        *_note_input(plan, problem.recipe.samples_per_vcpu_s),
    ]


def _note_workload(problem: Problem) -> Iterator[str]:
    work, model, recipe, amount = problem.request.workload, problem.model, problem.recipe, problem.amount
    slow = fp8_note(recipe.precision, recipe.framework, compiled=work.compiled)
    attention = slow_attention_note(model, recipe.seq_len, recipe.framework)
    yield from filter(None, (slow, attention, positions_note(model, recipe.seq_len), model.head_note))
    if work.precision == "fp32" and any("tf32" in instance.gpu.peak_tflop_per_s for instance in problem.instance_types):
        yield "precision fp32 leaves the tensor cores idle: --precision tf32 uses them, on 32-bit weights too"
    if model.quantised:
        yield (
            f"{model.name} is quantised ({model.quantised}), and the plan trains weights of 16 or 32 bits: dequantise "
            "the checkpoint first"
        )
    if model.counts_samples and work.tokens is not None:
        unit = "images" if model.takes_images else f"clips of {model.encoder_tokens} frames"
        yield (
            f"{model.name} has no tokens to count: {work.tokens:,} tokens are taken for {work.tokens:,} samples "
            f"({unit})"
        )
    if model.counts_samples and work.seq_len is not None:
        yield f"{model.name} fixes the length of its samples: seq_len {work.seq_len} is not used"
    if model.architecture == "seq2seq":
        inputs, targets = lengths(model, recipe)
        yield (
            f"{model.name} reads {inputs:,} tokens and writes {targets:,} (--target-len; default: span corruption's); "
            "tokens of the request are those it reads"
        )
    if work.steps is None and amount.steps < FEW_STEPS:
        yield (
            f"only {counted(amount.steps, 'step')} of {counted(amount.global_batch, 'sample')}: published "
            f"fine-tunings take {FEW_STEPS} at least; train on more data, or give a smaller --global-batch"
        )


def _note_code(problem: Problem) -> Iterator[str]:
    """Say what of the request asks for training code of the user's own, and what that code may do."""
    reach = problem.reach
    # A request that names another framework needs no note.
    if reach.beyond_trainer and problem.request.workload.framework in trainer.FRAMEWORKS:
        may = f", which may use {', '.join(reach.axes)} parallelism (--parallelism data narrows it)"
        asked = "" if problem.request.constraints.parallelism or not problem.model.has_like_layers else may
        yield f"plans are for training code of your own{asked}: {'; '.join(reach.beyond_trainer)}"


def _note_purchases(
    problem: Problem,
    tables: Sequence[CandidateTable],
    rejected: Sequence[Rejection],
    used: Collection[PricedPurchase],
) -> Iterator[str]:
    """Say which reservations and settings of spot nodes no plan uses, and why."""
    limits, types = problem.request.constraints, {instance.name for instance in problem.instance_types}
    options, has_block = ", ".join(limits.purchase_options), any(o.capacity_block for o in limits.usable_reservations)
    if not has_block and "spot" not in limits.purchase_options and limits.spot_fallback != "none":
        yield (
            f"spot_fallback {limits.spot_fallback} is not used: purchase_options ({options}) leave out spot; add "
            "--purchase spot"
        )
    for owned in limits.existing_reservations:
        why = ""
        if owned not in limits.usable_reservations:
            why = f"purchase_options ({options}) leave out {owned.option}"
        elif owned.region not in problem.regions:
            why = f"regions ({', '.join(limits.regions)}) leave it out"
        elif owned.instance_type not in types:
            why = f"instance_types ({', '.join(limits.instance_types)}) leave it out"
        elif owned.capacity_block and not usable_hours([owned.capacity_block], datetime.now(UTC)):
            over = (owned.capacity_block.end - BLOCK_TAIL).astimezone(UTC)
            why = f"its Capacity Block is over, AWS ended the nodes from {over:%Y-%m-%d %H:%M} UTC on"
        elif not any(owned in (purchase.reservation, *purchase.following) for purchase in used):
            why = _describe_unused(problem, owned, tables, rejected)
        if why:
            yield f"the reservation of {owned.count} {owned.instance_type} in {owned.region} is not used: {why}"


def _describe_unused(
    problem: Problem, owned: ExistingReservation, tables: Sequence[CandidateTable], rejected: Sequence[Rejection]
) -> str:
    """Say why no plan of the answer is on owned nodes: no candidate keeps the limits, or others are better."""
    limits = problem.request.constraints
    table = next((table for table in tables if table.fastest.instance.name == owned.instance_type), None)
    if table is None:
        return next(entry.reason for entry in rejected if entry.instance_type == owned.instance_type)
    uses = [i for i, purchase in enumerate(table.purchases) if owned in (purchase.reservation, *purchase.following)]
    on_owned = table.keep(np.flatnonzero(np.isin(table.purchase, uses)))
    if (rejection := on_owned.reject(limits)) is not None:
        return rejection.reason
    usd = float(on_owned.cost.expected[on_owned.feasible(limits)].min())
    return f"other plans are better; the cheapest on it costs {usd:,.2f} USD expected"


def _note_input(plan: FleetPlan, samples_per_vcpu_s: float) -> Iterator[str]:
    """Say that a step waits for its samples, where it does."""
    workers = trainer.loader_workers(plan.node.vcpus, plan.node.ranks)
    rate = samples_per_vcpu_s * workers
    if rate and plan.step_time_s <= plan.parallelism.micro_batch * plan.parallelism.grad_accum / rate * 1.005:
        yield (
            f"the GPUs wait for their input: {workers} of the {plan.node.vcpus} vCPUs prepare {rate:,.0f} samples/s "
            f"for each GPU, at {samples_per_vcpu_s:,.0f} a vCPU (docs/data.md); smaller files or decoding on the GPU "
            "help; the request's samples_per_vcpu_s says how fast your own loader is"
        )


def _note_nodes(plan: FleetPlan) -> Iterator[str]:
    """Warn of nodes that talk through host memory, and of spot nodes that may not come together."""
    nodes, node = plan.node_count, plan.node
    if nodes > 1 and node.efa_cards and not node.gpudirect:
        yield (
            f"{plan.instance_type} has EFA without GPUDirect RDMA: {nodes} nodes exchange through host memory, "
            "measured on no run, so that time may be half or double (docs/estimator.md); one node, or P types from "
            "p4d on, have no such doubt"
        )
    together = next((entry for entry in SPOT_TOGETHER if nodes >= entry[0]), None)
    if plan.purchase.option == "spot" and together is not None:
        advice = "" if plan.purchase.fallback == "on-demand" else "; --spot-fallback on-demand shortens the wait"
        yield (
            f"{nodes} spot nodes must come together: the median zone of published traces had {together[0]} at once "
            f"{together[1]:.0%} of the time, one 81%; the hours begin with their launch{advice}"
        )


def note_commitments(plan: FleetPlan, offer: Offer | None) -> Iterator[str]:
    """Say what a plan's new reservation bills, or from how much use a reservation beats a long run on demand."""
    if offer is None or offer.on_demand is None or offer.reserved_1yr is None:
        return
    hours, nodes, place = plan.hours.expected, plan.node_count, f"{plan.instance_type} in {plan.region}"
    price, needed = offer.reserved_1yr, break_even_hours(offer.reserved_1yr, offer.on_demand)
    year_usd = price.usd_per_hour * HOURS_PER_YEAR
    if any(node.market == "reserved-1yr" for node in plan.node_prices_usd_per_hour):
        years = math.ceil(plan.hours.p95 / HOURS_PER_YEAR)
        term = "a one-year reservation" + (f", {years} times in turn," if years > 1 else "")
        yield (
            f"{term} of {nodes} x {place} bills {years * nodes * year_usd:,.0f} USD, used or not, all in the "
            f"plan; its {short(hours)} h cost {nodes * hours * offer.on_demand.usd_per_hour:,.0f} USD on demand; buy "
            "it first: the stack buys none"
        )
    elif plan.purchase.option == "on-demand" and needed is not None and hours >= _LONG_SHARE * needed:
        yield (
            f"a 1-year reservation of {place} costs {year_usd:,.0f} USD a node, used or not ({price.source}, "
            f"{price.as_of}): it beats on-demand above {needed:,.0f} h of use; this run uses {short(hours)} h"
        )


def _note_compiler(problem: Problem, plan: FleetPlan) -> Iterator[str]:
    """Say what compiled code saves on the plan's instance type, of models that the trainer is known to compile."""
    model, recipe = problem.model, problem.recipe
    kinds = ("decoder", "encoder", "cnn")
    known = recipe.framework in (TRAINER, CNN_DEFAULT) and model.architecture in kinds and not model.experts
    if recipe.compiled or not known or not recipe.tuning.trains_all or problem.request.objective != "cost":
        return
    # One type: all of them would double the time of an answer.
    own = tuple(instance for instance in problem.instance_types if instance.name == plan.instance_type)
    compiled = replace(problem.revise(compiled=True), instance_types=own)
    candidate = rank_first(find_candidates(compiled)[0], compiled.request)
    usd = float(candidate.table.cost.expected[candidate.row]) if candidate else math.inf
    saved = plan.cost_usd.expected - usd
    if candidate and saved >= _LEAST_SAVING * plan.cost_usd.expected:
        purchase, hours = candidate.purchase, candidate.table.outcome.hours_expected[candidate.row]
        yield (
            f"--compile would save {saved:,.{0 if saved >= 10 else 2}f} USD: {candidate.nodes} x {plan.instance_type}, "
            f"{purchase.in_short} in {purchase.offer.region}, {short(hours)} h and "
            f"{usd_text(usd, is_old=purchase.stale)} USD expected"
        )
