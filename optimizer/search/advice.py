"""Sentences about the choice: cheaper plans passed over, the knee of a time objective, capacity of large fleets."""

from __future__ import annotations

from bootstrap.contract.trainer import loader_workers
from bootstrap.contract.words import counted
from optimizer.contract.plan import FleetPlan
from optimizer.contract.units import short, usd_text
from optimizer.search.candidates import CandidateTable

# (nodes, share of the time that a zone had at least so many spot nodes at once): median of 16 zones with 16 one-GPU
# nodes, V100 on AWS in August 2023 (three zones, https://github.com/skypilot-org/spot-traces) and H100 on another cloud
# in October 2025 (13, SkyNomad, NSDI'27).
SPOT_TOGETHER = ((16, 0.42), (12, 0.44), (8, 0.53), (4, 0.63), (2, 0.75))
# GPUs from which an answer names quota and capacity: eight nodes of eight GPUs, a choice of ours.
LARGE_GPUS = 64
# Days from which an answer without a deadline names them, a choice of ours.
LONG_DAYS = 30


def describe_passed_over(better: tuple[CandidateTable, int], plan: FleetPlan) -> str:
    """Say which nominally better candidate a plan ties with, and why the plan is the surer or the simpler one."""
    table, row = better
    configuration = int(table.configuration[row])
    split, nodes = table.fastest.parallelism(configuration), int(table.fastest.nodes[configuration])
    hours, usd = float(table.outcome.hours_expected[row]), float(table.cost.expected[row])
    purchase = table.purchases[table.purchase[row]]
    option, dollars = purchase.option, f"{usd_text(usd, is_old=purchase.stale)} USD"
    simpler = [f"no {kind} parallelism" for kind in split.beyond_data if kind not in plan.parallelism.beyond_data]
    if nodes > plan.node_count:
        simpler.append(f"{counted(plan.node_count, 'node')} instead of {nodes}")
    if option == "spot" and plan.purchase.option != "spot":
        simpler.append("no spot interruptions")
    candidate = f"{nodes} x {table.fastest.instance.name} {option}"
    p95s = f"{float(table.cost.p95[row]):,.2f} against {plan.cost_usd.p95:,.2f}"
    error = float(table.fastest.relative_error[configuration])
    if plan.calibration.rows and not table.fastest.measured and plan.calibration.relative_error < error:
        unknown = f"{no_run(plan.job.precision)} on {table.fastest.instance.gpu.name} was measured"
        return f"{candidate}: {dollars} (p95 {p95s}) in {short(hours)} h; {', '.join([unknown, *simpler])}"
    by_p95 = plan.spot_range and plan.instance_type != table.fastest.instance.name
    compared = f" (at old prices p95 decides: {p95s})" if by_p95 else ""
    tie = f"{candidate} ({split.in_short}): {dollars}{compared} in {short(hours)} h is a tie (error {error:.0%})"
    return f"{tie}; this plan has {', '.join(simpler) or 'fewer splits'}"


def no_run(precision: str) -> str:
    """Name the measured runs that are missing; a GPU may have others in bf16."""
    return "no run" if precision == "bf16" else f"no {precision} run"


def describe_length(plan: FleetPlan) -> list[str]:
    """Say that a run without a deadline is long."""
    days = plan.hours.expected / 24
    if plan.job.deadline_hours is not None or days < LONG_DAYS:
        return []
    return [f"the cheapest takes {days:,.0f} days: --deadline bounds them, gpufleet what-if shows what that costs"]


def describe_knee(plan: FleetPlan, fastest: tuple[CandidateTable, int]) -> list[str]:
    """Say where a time objective stopped, if the fastest candidate is another."""
    table, row = fastest
    hours, usd = float(table.outcome.hours_expected[row]), float(table.cost.expected[row])
    saved = plan.hours.expected - hours
    if saved <= 0.05 * plan.hours.expected or usd <= plan.cost_usd.expected:
        return []
    nodes = int(table.fastest.nodes[table.configuration[row]])
    dollars = usd_text(usd, is_old=table.purchases[table.purchase[row]].stale)
    return [
        f"{nodes} x {table.fastest.instance.name} would take {short(hours)} h for {dollars} USD, "
        f"{(usd - plan.cost_usd.expected) / saved:,.0f} USD per hour saved: beyond the knee (docs/economics.md); "
        "--objective pareto lists all"
    ]


def describe_input(plan: FleetPlan, samples_per_vcpu_s: float) -> list[str]:
    """Say that a step waits for its samples, where it does."""
    workers = loader_workers(plan.node.vcpus, plan.node.ranks)
    rate = samples_per_vcpu_s * workers
    samples = plan.parallelism.micro_batch * plan.parallelism.grad_accum
    if not rate or plan.step_time_s > samples / rate * 1.005:
        return []
    return [
        f"the GPUs wait for their input: {workers} of the {plan.node.vcpus} vCPUs prepare {rate:,.0f} samples/s for "
        f"each GPU, at {samples_per_vcpu_s:,.0f} a vCPU (docs/data.md); smaller files or decoding on the GPU help; the "
        "request's samples_per_vcpu_s says how fast your own loader is"
    ]


def describe_capacity(plan: FleetPlan) -> list[str]:
    """Warn of a plan whose nodes may not come together."""
    notes = []
    nodes = plan.node_count
    together = next((entry for entry in SPOT_TOGETHER if nodes >= entry[0]), None)
    if plan.purchase.option == "spot" and together is not None:
        advice = "" if plan.purchase.fallback == "on-demand" else "; --spot-fallback on-demand shortens the wait"
        notes.append(
            f"{nodes} spot nodes must come together: the median zone of published traces had {together[0]} at once "
            f"{together[1]:.0%} of the time, one 81%; the hours begin with their launch{advice}"
        )
    if plan.purchase.option in ("spot", "on-demand") and plan.gpus >= LARGE_GPUS and nodes > 1:
        notes.append(
            f"{nodes} x {plan.instance_type} need a quota of {nodes * plan.node.vcpus:,} vCPUs and free nodes in one "
            "zone: gpufleet preflight checks quotas, a Capacity Block reserves nodes"
        )
    return notes


def describe_network(plan: FleetPlan) -> list[str]:
    """Warn of a plan whose nodes talk through host memory."""
    node = plan.node
    if plan.node_count == 1 or not node.efa_cards or node.gpudirect:
        return []
    return [
        f"{plan.instance_type} has EFA without GPUDirect RDMA: {plan.node_count} nodes exchange through host "
        "memory, measured on no run, so that time may be half or double (docs/estimator.md); one node, or P types from "
        "p4d on, have no such doubt"
    ]
