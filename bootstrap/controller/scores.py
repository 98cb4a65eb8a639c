"""Ask for the spot placement scores of the zones that a gang may go to, and keep them for a while.

Scores are a hint: they order places of equal cost that the run knows nothing of. Without an answer nothing changes.
https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/spot-placement-score.html
"""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

from botocore.exceptions import BotoCoreError, ClientError

from bootstrap.contract.settings import ControllerSettings
from bootstrap.contract.state import ControllerState
from bootstrap.controller.clients import Clients
from bootstrap.controller.observation import Tick

# A refused gang asks again after minutes at the earliest (phases.RETRY_WAITS); spot capacity changes as fast.
SCORES_LAST = timedelta(minutes=10)


def read_scores(
    clients: Clients, settings: ControllerSettings, state: ControllerState | None, now: datetime, problems: list[str]
) -> dict[str, int] | None:
    """Return the scores, 1 to 10, by zone id, empty where AWS gives none; None: not asked, the old ones stay.

    A stack always asks the same question, as AWS may limit new ones within 24 hours: all spot types of its places
    together. AWS scores low where they are fewer than three, and the order of the zones is all that counts here.
    """
    spot = [place for place in settings.places.values() if place.purchase == "spot"]
    if len({place.subnets for place in spot}) < 2 or not _may_choose(state, now):
        return None
    query: dict[str, Any] = {
        "InstanceTypes": sorted({name for place in spot for name in place.instance_types.split(",")}),
        "TargetCapacity": settings.node_count,
        "SingleAvailabilityZone": True,
        "RegionNames": [settings.region],
    }
    try:
        # At most ten zones: https://docs.aws.amazon.com/AWSEC2/latest/APIReference/API_GetSpotPlacementScores.html
        answer = clients.ec2.get_spot_placement_scores(**query)
    except (ClientError, BotoCoreError) as error:
        problems.append(f"no spot placement scores, so places keep their order: {error}")
        return {}
    return {score["AvailabilityZoneId"]: score["Score"] for score in answer["SpotPlacementScores"]}


def keep_scores(tick: Tick, state: ControllerState) -> ControllerState:
    """Take in new scores."""
    if tick.seen.scores is None:
        return state
    return replace(state, scores=dict(tick.seen.scores), scored_at=tick.now)


def _may_choose(state: ControllerState | None, now: datetime) -> bool:
    """Return whether a place may be chosen in this tick, and no answer is at hand."""
    if state is None:
        return True
    if state.scored_at and now - state.scored_at < SCORES_LAST:
        return False
    waits = state.phase == "waiting" and not (state.next_attempt_at and now < state.next_attempt_at)
    return waits or state.phase == "starting" or (state.phase == "running" and state.complete_since is None)
