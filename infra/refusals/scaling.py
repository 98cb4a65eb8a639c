"""Refusals of sizes that cannot be right: gang window, layout of workers, scaling, warm pool and schedules."""

from __future__ import annotations

from zoneinfo import available_timezones

from infra.settings import Schedule, Settings
from optimizer.plan import FleetPlan

# A node boots, installs what its image lacks and is tested in up to half an hour; a window below half of that gives up
# every gang, and one of more than a day waits for nodes at full price.
GANG_WINDOW_MINUTES = (15, 1440)
# https://docs.aws.amazon.com/autoscaling/ec2/userguide/ec2-auto-scaling-quotas.html
SCHEDULES = 125


def scaling_refusals(settings: Settings) -> list[str]:
    """Whether a group of this kind can scale as asked."""
    problems = _window_refusals(settings)
    if settings.mode == "workers":
        problems += _layout_refusals(settings.plan)
        problems += _worker_refusals(settings)
    else:
        problems += _gang_refusals(settings)
    schedules = settings.scaling.schedules if settings.scaling else ()
    if len(schedules) > SCHEDULES:
        problems.append(f"gpufleet:scaling has {len(schedules)} schedules: Auto Scaling takes {SCHEDULES} for a group")
    for schedule in schedules:
        problems += [f"gpufleet:scaling schedule {schedule.cron!r}: {reason}" for reason in _cron_refusals(schedule)]
    times = [(schedule.cron, schedule.timezone) for schedule in schedules]
    for cron, timezone in sorted({time for time in times if times.count(time) > 1}):
        problems.append(f"gpufleet:scaling schedule {cron!r} {timezone} is there twice: one time has one size")
    return problems


def _window_refusals(settings: Settings) -> list[str]:
    minutes, (least, most) = settings.gang_window_minutes, GANG_WINDOW_MINUTES
    if least <= minutes <= most:
        return []
    return [
        f"gpufleet:gangWindowMinutes is {minutes}: a node's set-up and tests take up to 30 minutes, and a fleet that "
        f"waits for its last node is paid for; use {least} to {most}"
    ]


def _layout_refusals(plan: FleetPlan) -> list[str]:
    """A worker trains alone: the plan's layout must not reach over several nodes."""
    split, nodes = plan.parallelism, plan.node_count
    model = split.tensor * split.pipeline * split.context
    whole = plan.node.ranks % model == 0 and (split.data // nodes) % split.expert == 0
    if nodes == 1 or (split.sharding == "ddp" and whole):
        return []
    return [
        f"gpufleet:mode workers runs the whole model on each node, and the plan spreads it over {nodes} "
        f"({split.in_short}, {split.sharding}), so its memory is not that of one node: take a plan whose sharding "
        "is ddp (`gpufleet recommend --sharding ddp --parallelism data`), or one for one node (--max-nodes 1)"
    ]


def _gang_refusals(settings: Settings) -> list[str]:
    scaling, nodes = settings.scaling, settings.plan.node_count
    given = [f"warmPool {settings.warm_pool}"] if settings.warm_pool else []
    problems = []
    if scaling:
        given += [f"scaling.minNodes {scaling.min_nodes}"] if scaling.min_nodes else []
        given += ["scaling.gpuUtilizationPercent"] if scaling.gpu_utilization_percent is not None else []
        given += ["scaling.queue"] if scaling.queue else []
        for schedule in scaling.schedules:
            if schedule.nodes not in (0, nodes):
                problems.append(
                    f"gpufleet:scaling schedule {schedule.cron!r} asks for {schedule.nodes} nodes, and a gang has 0 or "
                    f"{nodes}: fewer cannot train, and would be paid for"
                )
    if given:
        problems.append(
            f"gpufleet:{', '.join(given)}: for gpufleet:mode workers only. A training gang is started whole by its "
            "controller and has one size; schedules of 0 and all nodes may pause it"
        )
    return problems


def _worker_refusals(settings: Settings) -> list[str]:
    scaling, plan, pool = settings.scaling, settings.plan, settings.warm_pool
    problems = []
    if plan.purchase.fallback == "on-demand":
        problems.append(
            "purchase.fallback on-demand does not go with gpufleet:mode workers: it replaces an incomplete gang, "
            "and fewer workers go on; use a plan with fallback none, and on_demand_base for nodes that must be there"
        )
    if scaling:
        if scaling.min_nodes > plan.node_count:
            problems.append(
                f"gpufleet:scaling minNodes {scaling.min_nodes} is above the plan's {plan.node_count} nodes, the most "
                "there can be: set a plan of more nodes"
            )
        if scaling.gpu_utilization_percent is not None and scaling.queue:
            problems.append(
                "gpufleet:scaling has gpuUtilizationPercent and queue: two policies would pull the group two ways, one "
                "starting the nodes that the other ends; keep one"
            )
        woken = scaling.min_nodes > 0 or any(schedule.nodes for schedule in scaling.schedules)
        if scaling.gpu_utilization_percent is not None and not woken:
            problems.append(
                "gpufleet:scaling gpuUtilizationPercent with minNodes 0: a group without nodes has no utilisation to "
                "grow by; set minNodes 1, or a schedule that brings nodes"
            )
        for schedule in scaling.schedules:
            if not scaling.min_nodes <= schedule.nodes <= plan.node_count:
                problems.append(
                    f"gpufleet:scaling schedule {schedule.cron!r} asks for {schedule.nodes} nodes: the group has "
                    f"{scaling.min_nodes} (minNodes) to {plan.node_count} (the plan's)"
                )
    if pool:
        problems += [f"gpufleet:warmPool {pool}: {reason}" for reason in _pool_refusals(settings)]
    return problems


def _pool_refusals(settings: Settings) -> list[str]:
    """https://docs.aws.amazon.com/autoscaling/ec2/userguide/ec2-auto-scaling-warm-pools.html"""
    option, nodes = settings.plan.purchase.option, settings.plan.node_count
    problems = []
    if not 0 < settings.warm_pool <= nodes:
        problems.append(f"it takes 1 to {nodes} nodes, the plan's, or 0 for none")
    if option == "spot":
        problems.append("AWS keeps no spot instance in a warm pool; use a plan with purchase on-demand")
    elif option != "on-demand":
        problems.append(
            f"a stopped node leaves its place in the {option} capacity, which is paid for all the same; use none"
        )
    if not settings.scaling:
        problems.append("without gpufleet:scaling the group has one size, and nothing takes a node from the pool")
    if not settings.train_command:
        problems.append("without gpufleet:trainCommand a node has no work to be ready for")
    return problems


# What Auto Scaling is sure to take of crontab(5); some write 7 for Sunday, and a step without a range.
# https://docs.aws.amazon.com/autoscaling/ec2/userguide/ec2-auto-scaling-scheduled-scaling.html
_CRON = (("minute", 0, 59), ("hour", 0, 23), ("day of month", 1, 31), ("month", 1, 12), ("day of week", 0, 6))
_NAMES = {
    "month": ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec"),
    "day of week": ("sun", "mon", "tue", "wed", "thu", "fri", "sat"),
}


def _cron_refusals(schedule: Schedule) -> list[str]:
    problems = []
    fields = schedule.cron.split()
    if len(fields) != len(_CRON):
        problems.append(f"it has {len(fields)} fields, and Auto Scaling takes 5: minute, hour, day, month, day of week")
    else:
        for text, (name, least, most) in zip(fields, _CRON, strict=True):
            if not _in_range(text, name, least, most):
                problems.append(f"{name} is {text!r}, and takes {least} to {most}, lists, ranges, steps or *")
    # A machine without a time zone database knows none, and leaves the check to AWS.
    known = available_timezones()
    if known and schedule.timezone not in known:
        problems.append(f"timezone {schedule.timezone!r} is not an IANA name, like Europe/Berlin or Etc/UTC")
    return problems


def _in_range(text: str, name: str, least: int, most: int) -> bool:
    for part in text.lower().split(","):
        span, slash, step = part.partition("/")
        if slash and not (step.isascii() and step.isdigit() and int(step)):
            return False
        if span == "*":
            continue
        if slash and "-" not in span:
            return False
        ends = [_number(end, name, least) for end in span.split("-")]
        if len(ends) > 2 or ends != sorted(ends) or not all(least <= end <= most for end in ends):
            return False
    return True


def _number(text: str, name: str, least: int) -> int:
    names = _NAMES.get(name, ())
    if text in names:
        return names.index(text) + least
    return int(text) if text.isascii() and text.isdigit() else -1
