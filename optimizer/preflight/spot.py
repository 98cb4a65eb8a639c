"""Check how likely the spot nodes come: AWS's placement score of as many nodes as the plan buys.

https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/spot-placement-score.html
"""

from __future__ import annotations

from collections.abc import Iterator

from optimizer.aws.errors import UnusableAnswerError
from optimizer.preflight.model import Context, Finding, Level, unknown

_CHECK = "spot placement score"
# AWS defines the ends of its scale only, 10 "highly likely to succeed" and 1 "not likely"; the upper third counts as
# likely here, the lower third as unlikely.
LIKELY = 7
UNLIKELY = 3
# With fewer types AWS answers with a low score whatever the capacity is:
# https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/how-sps-works.html
TYPES_FOR_A_FAIR_SCORE = 3


def check_spot_score(context: Context) -> Iterator[Finding]:
    """Check the score at the plan's own number of spot nodes, in one zone for a gang."""
    plan, target = context.plan, context.target
    nodes = target.spot_nodes
    if nodes == 0:
        return
    types = [plan.instance_type, *plan.purchase.spot_types]
    pages = context.ec2.get_paginator("get_spot_placement_scores").paginate(
        InstanceTypes=types,
        TargetCapacity=nodes,
        TargetCapacityUnitType="units",
        SingleAvailabilityZone=target.one_zone,
        RegionNames=[context.region],
    )
    scores: dict[str, int] = {}
    for page in pages:
        for answer in page["SpotPlacementScores"]:
            score = int(answer["Score"])
            if not 1 <= score <= 10:
                raise UnusableAnswerError(f"a spot placement score of {score}, and the scale is 1 to 10")
            scores[answer["AvailabilityZoneId"] if target.one_zone else answer["Region"]] = score
    best = max(scores, key=lambda place: scores[place], default="")
    # Without a chosen zone the Pulumi program takes any zone that offers the type.
    zone = context.zone_ids[0] if context.zone_ids else best
    place = zone if target.one_zone else context.region
    wanted = f"{nodes} spot {' or '.join(types)} in {place or context.region}"
    if place not in scores:
        yield unknown(
            _CHECK,
            f"AWS gave no score for {wanted}" + (f"; {best} has {scores[best]} of 10" if best else ""),
            why="a zone AWS leaves out is none of its ten best",
            next_step=f"pulumi config set gpufleet:zoneId {best}" if best else "gpufleet preflight another --plan N",
        )
        return
    score = scores[place]
    likely, fair = score >= LIKELY, len(types) >= TYPES_FOR_A_FAIR_SCORE
    level: Level = "ok" if likely else "warning"
    if score <= UNLIKELY and fair and plan.purchase.fallback == "none":
        level = "error"
    text, next_step = f"{score} of 10 for {wanted}", "gpufleet recommend --purchase on-demand"
    if target.one_zone and scores[best] > score:
        text += f"; {best} has {scores[best]}"
        next_step = f"pulumi config set gpufleet:zoneId {best}"
    why = (
        "AWS's estimate, now, of whether the request succeeds; no promise of capacity, and nothing about how long it "
        "lasts (docs/preflight.md)"
    )
    if not fair:
        why += (
            f"; AWS scores fewer than {TYPES_FOR_A_FAIR_SCORE} types low whatever there is, and these are {len(types)}"
        )
    yield Finding(_CHECK, text, level=level, value=score, limit=LIKELY, why=why, next_step="" if likely else next_step)
