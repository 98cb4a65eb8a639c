"""``recommend --respect-quotas``: reads what the account's quotas leave free in the regions of an answer."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from optimizer.aws import clients, errors, quotas
from optimizer.aws.errors import CHECK_CREDENTIALS
from optimizer.catalog.refresh import enabled_regions
from optimizer.commands.output import write_notes
from optimizer.commands.progress import steps
from optimizer.contract.errors import GpufleetError
from optimizer.recommend import Recommendation
from optimizer.search.problem import QuotaRoom, Rooms

# EC2 and Service Quotas throttle by account and region, so regions side by side do not slow each other:
# https://docs.aws.amazon.com/ec2/latest/devguide/ec2-api-throttling.html
_REGIONS_AT_ONCE = 8
# Binding constraints that no quota changes.
_RULED_OUT = ("memory", "precision", "image", "global_batch", "sharding", "region")


def read_rooms(answer: Recommendation) -> Rooms:
    """Read the quotas and running vCPUs of the types in play; regions that do not answer are noted and left out.

    Raises:
        GpufleetError: no region answered, as without credentials.
    """
    problem = answer.problem
    ruled_out = {entry.instance_type for entry in answer.rejected if entry.binding_constraint in _RULED_OUT}
    types = sorted({instance.name for instance in problem.instance_types} - ruled_out)
    try:
        regions = sorted(set(problem.regions) & set(enabled_regions()))
    except GpufleetError as error:
        raise _not_read([error.got]) from error

    def read(region: str) -> Rooms | str:
        try:
            rooms = _read_region(region, types)
        except (errors.UnusableAnswerError, *errors.AWS_ERRORS) as error:
            advance(f"{region}: not read")
            return f"quotas of {region} could not be read, so no plan is there: {errors.reason(error)}"
        advance(f"{region}: read")
        return rooms

    with steps("quotas of regions", len(regions)) as advance, ThreadPoolExecutor(_REGIONS_AT_ONCE) as pool:
        answers = list(pool.map(read, regions))
    failures = [answer for answer in answers if isinstance(answer, str)]
    if len(failures) == len(answers):
        raise _not_read(failures)
    write_notes(failures)
    return {key: room for rooms in answers if not isinstance(rooms, str) for key, room in rooms.items()}


def _read_region(region: str, types: Sequence[str]) -> Rooms:
    ec2, service_quotas = clients.ec2(region), clients.service_quotas(region)
    running = quotas.running(ec2)
    # Without the account's id, reservations shared with it count too: room is rather too small than too large.
    reserved, requested = quotas.reserved(ec2, None), quotas.requested_spot(ec2)
    known: dict[str, QuotaRoom] = {}

    def room(quota: quotas.Quota | None) -> QuotaRoom | None:
        if quota is None:
            return None
        if quota.code not in known:
            used = (
                quotas.used_on_spot(quota, running, requested)
                if quota.market == "spot"
                else quotas.used_on_demand(quota, running, reserved)
            )
            known[quota.code] = QuotaRoom(
                region=region,
                name=quota.name,
                code=quota.code,
                value=quotas.limit(service_quotas, quota),
                used=used,
                increase=partial(quota.increase, region=region),
            )
        return known[quota.code]

    rooms: dict[Any, QuotaRoom | None] = {}
    for name in types:
        rooms[region, "on-demand", name] = room(quotas.on_demand(name))
        rooms[region, "spot", name] = room(quotas.spot(name))
    return rooms


def _not_read(reasons: Sequence[str]) -> GpufleetError:
    return GpufleetError(
        "--respect-quotas is set, and no quota could be read: " + "; ".join(dict.fromkeys(reasons)),
        limit="quotas and running instances of one region at least",
        why="what they leave free is unknown",
        next_step=f"{CHECK_CREDENTIALS} (docs/preflight.md has the permissions); or leave out --respect-quotas",
    )
