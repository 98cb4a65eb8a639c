"""Refusals of sizes that cannot be right: gang window, layout of workers, scaling, warm pool and schedules."""

from __future__ import annotations

from collections.abc import Iterator
from zoneinfo import available_timezones

from bootstrap.contract.words import counted
from infra.settings import ScalingSettings, Schedule, StackSettings
from optimizer.contract.plan import FleetPlan

# A node takes up to half an hour to its last test; a window of more than a day waits for nodes at full price.
GANG_WINDOW_MINUTES = range(15, 1440 + 1)
# https://docs.aws.amazon.com/autoscaling/ec2/userguide/ec2-auto-scaling-quotas.html
SCHEDULES = 125
# Fields of crontab(5) with the values that Auto Scaling is sure to take. Some crons, and libraries like croniter, also
# take 7 for Sunday, a step without a range, ranges that wrap around, ?, L and #; Auto Scaling may refuse these:
# https://docs.aws.amazon.com/autoscaling/ec2/userguide/ec2-auto-scaling-scheduled-scaling.html
_CRON_FIELDS = {
    "minute": range(60),
    "hour": range(24),
    "day of month": range(1, 32),
    "month": range(1, 13),
    "day of week": range(7),
}
_CRON_NAMES = {
    "month": ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec"),
    "day of week": ("sun", "mon", "tue", "wed", "thu", "fri", "sat"),
}


def scaling_refusals(settings: StackSettings) -> Iterator[str]:
    """Problems of the number of nodes over time."""
    minutes = settings.gang_window_minutes
    if minutes not in GANG_WINDOW_MINUTES:
        yield (
            f"gpufleet:gangWindowMinutes is {minutes}: a node's set-up and tests take up to 30 minutes, and a fleet "
            f"that waits for its last node is paid for; use {GANG_WINDOW_MINUTES[0]} to {GANG_WINDOW_MINUTES[-1]}"
        )
    if settings.mode == "workers":
        yield from _layout_refusals(settings.plan)
        yield from _worker_refusals(settings)
    else:
        yield from _gang_refusals(settings)
    schedules = settings.scaling.schedules if settings.scaling else ()
    if len(schedules) > SCHEDULES:
        yield f"gpufleet:scaling has {len(schedules)} schedules: Auto Scaling takes {SCHEDULES} for a group"
    for schedule in schedules:
        yield from (f"gpufleet:scaling schedule {schedule.cron!r}: {reason}" for reason in _cron_refusals(schedule))
    times = [(schedule.cron, schedule.timezone) for schedule in schedules]
    for cron, timezone in sorted({time for time in times if times.count(time) > 1}):
        yield f"gpufleet:scaling schedule {cron!r} {timezone} is there twice: one time has one size"


def _layout_refusals(plan: FleetPlan) -> Iterator[str]:
    """A worker trains alone: the plan's layout must not span several nodes."""
    split, nodes = plan.parallelism, plan.node_count
    model_ranks = split.tensor * split.pipeline * split.context
    whole = plan.node.ranks % model_ranks == 0 and (split.data // nodes) % split.expert == 0
    if nodes > 1 and not (split.sharding == "ddp" and whole):
        yield (
            f"gpufleet:mode workers runs the whole model on each node, and the plan spreads it over {nodes} "
            f"({split.in_short}, {split.sharding}), so its memory is not that of one node: take a plan whose sharding "
            "is ddp (`gpufleet recommend --sharding ddp --parallelism data`), or one for one node (--max-nodes 1)"
        )


def _gang_refusals(settings: StackSettings) -> Iterator[str]:
    scaling, nodes = settings.scaling or ScalingSettings(), settings.plan.node_count
    for schedule in scaling.schedules:
        if schedule.nodes not in (0, nodes):
            yield (
                f"gpufleet:scaling schedule {schedule.cron!r} asks for "
                f"{counted(schedule.nodes, 'node')}, and a gang has 0 or "
                f"{nodes}: fewer cannot train, and would be paid for"
            )
    for_workers = {
        f"warmPool {settings.warm_pool}": settings.warm_pool,
        f"scaling.minNodes {scaling.min_nodes}": scaling.min_nodes,
        "scaling.gpuUtilizationPercent": scaling.gpu_utilization_percent,
        "scaling.queue": scaling.queue,
    }
    if given := [key for key, value in for_workers.items() if value]:
        yield (
            f"gpufleet:{', '.join(given)}: for gpufleet:mode workers only. A training gang is started whole by its "
            "controller and has one size; schedules of 0 and all nodes may pause it"
        )


def _worker_refusals(settings: StackSettings) -> Iterator[str]:
    scaling, nodes = settings.scaling or ScalingSettings(), settings.plan.node_count
    utilization = scaling.gpu_utilization_percent is not None
    if settings.plan.purchase.fallback == "on-demand":
        yield (
            "purchase.fallback on-demand does not go with gpufleet:mode workers: it replaces an incomplete gang, "
            "and fewer workers go on; use a plan with fallback none, and on_demand_base for nodes that must be there"
        )
    if top_up := settings.plan.purchase.on_demand_top_up:
        yield (
            f"purchase.on_demand_top_up {top_up} does not go with gpufleet:mode workers: where fewer run, they may "
            "be the rented ones beside an idle reservation; use a plan of its nodes alone (--purchase reserved)"
        )
    if scaling.min_nodes > nodes:
        yield (
            f"gpufleet:scaling minNodes {scaling.min_nodes} is above the plan's "
            f"{counted(nodes, 'node')}, the most there can be: "
            "set a plan of more nodes"
        )
    if utilization and scaling.queue:
        yield (
            "gpufleet:scaling has gpuUtilizationPercent and queue: two policies would pull the group two ways, one "
            "starting the nodes that the other ends; keep one"
        )
    if utilization and not (scaling.min_nodes or any(schedule.nodes for schedule in scaling.schedules)):
        yield (
            "gpufleet:scaling gpuUtilizationPercent with minNodes 0: a group without nodes has no utilisation to "
            "grow by; set minNodes 1, or a schedule that brings nodes"
        )
    for schedule in scaling.schedules:
        if not scaling.min_nodes <= schedule.nodes <= nodes:
            yield (
                f"gpufleet:scaling schedule {schedule.cron!r} asks for "
                f"{counted(schedule.nodes, 'node')}: the group has "
                f"{scaling.min_nodes} (minNodes) to {nodes} (the plan's)"
            )
    if settings.warm_pool:
        yield from (f"gpufleet:warmPool {settings.warm_pool}: {reason}" for reason in _pool_refusals(settings))


def _pool_refusals(settings: StackSettings) -> Iterator[str]:
    """https://docs.aws.amazon.com/autoscaling/ec2/userguide/ec2-auto-scaling-warm-pools.html"""
    option, nodes = settings.plan.purchase.option, settings.plan.node_count
    if not 0 < settings.warm_pool <= nodes:
        yield f"it takes 1 to {nodes} nodes, the plan's, or 0 for none"
    if option == "spot":
        yield "AWS keeps no spot instance in a warm pool; use a plan with purchase on-demand"
    elif option != "on-demand":
        yield f"a stopped node leaves its place in the {option} capacity, which is paid for all the same; use none"
    if not settings.scaling:
        yield "without gpufleet:scaling the group has one size, and nothing takes a node from the pool"
    if not settings.train_command:
        yield "without gpufleet:trainCommand a node has no work to be ready for"


def _cron_refusals(schedule: Schedule) -> Iterator[str]:
    texts = schedule.cron.split()
    if len(texts) != len(_CRON_FIELDS):
        yield f"it has {counted(len(texts), 'field')}, and Auto Scaling takes 5: minute, hour, day, month, day of week"
    else:
        for text, (field, values) in zip(texts, _CRON_FIELDS.items(), strict=True):
            if not all(_is_cron(part, field, values) for part in text.lower().split(",")):
                yield f"{field} is {text!r}, and takes {values[0]} to {values[-1]}, lists, ranges, steps or *"
    # A machine without a time zone database knows none, and leaves the check to AWS.
    known = available_timezones()
    if known and schedule.timezone not in known:
        yield f"timezone {schedule.timezone!r} is not an IANA name, like Europe/Berlin or Etc/UTC"


def _is_cron(part: str, field: str, values: range) -> bool:
    """Judge one part of a field's list: *, a value or a range; a step follows * or a range."""
    span, slash, step = part.partition("/")
    if slash and not (_is_number(step) and int(step) and (span == "*" or "-" in span)):
        return False
    if span == "*":
        return True
    names = _CRON_NAMES.get(field, ())
    ends = [
        names.index(end) + values[0] if end in names else int(end) if _is_number(end) else -1 for end in span.split("-")
    ]
    return len(ends) <= 2 and ends == sorted(ends) and all(end in values for end in ends)


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit()
