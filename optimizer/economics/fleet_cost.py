"""From hours to dollars: nodes, volumes, storage, endpoints and controller of a fleet, elementwise over candidates."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from optimizer.economics.outcome import Outcome, lognormal_percentiles
from optimizer.units import HOURS_PER_MONTH, HOURS_PER_YEAR

Floats = NDArray[np.float64]

# gp3's included performance (https://docs.aws.amazon.com/ebs/latest/userguide/general-purpose.html#gp3-performance).
GP3_INCLUDED_IOPS = 3000
GP3_INCLUDED_MIB_PER_S = 125


@dataclass(frozen=True, kw_only=True, slots=True)
class HourlyRates:
    """What a fleet pays by the hour or month; USD, elementwise over candidates or scalar.

    Attributes:
        base_nodes, base_usd_per_hour: nodes that are never reclaimed, and the price of one.
        spot_nodes, spot_usd_per_hour: nodes that can be reclaimed, and the price of one.
        committed_usd_per_hour: price of one node of a one-year commitment made for this run; 0 for none.
        committed_nodes: nodes of that commitment.
        volume_usd_per_month: volumes of one node.
        storage_usd_per_month: the kept checkpoints and their key.
        endpoints_usd_per_hour: all interface endpoints.
        controller_usd_per_hour: what starts, meters and ends the nodes.
        reserve_hours: what the controller keeps to end the nodes in.
    """

    base_nodes: Floats
    base_usd_per_hour: Floats
    spot_nodes: Floats
    spot_usd_per_hour: Floats
    committed_nodes: Floats
    committed_usd_per_hour: Floats
    volume_usd_per_month: Floats
    storage_usd_per_month: Floats
    endpoints_usd_per_hour: Floats
    controller_usd_per_hour: Floats
    reserve_hours: Floats


@dataclass(frozen=True, kw_only=True, slots=True)
class FleetCost:
    """USD of the whole run; ``expected`` is the sum of the parts.

    ``reserve`` is not spent: the controller ends the fleet while a ceiling still pays for ending it, so a run gets done
    under a ceiling of what it costs and the reserve.
    """

    compute: Floats
    volumes: Floats
    storage: Floats
    transfer: Floats
    head_node: Floats
    expected: Floats
    p50: Floats
    p95: Floats
    reserve: Floats


def fleet_cost(run: Outcome, rates: HourlyRates) -> FleetCost:
    """Cost of a run.

    While the job waits for a reclaimed node, every other node is paid. A one-year commitment is paid to its end whether
    the run needs it or not (https://aws.amazon.com/ec2/pricing/reserved-instances/), so it costs whole years.
    """
    fleet_usd_per_hour = rates.base_nodes * rates.base_usd_per_hour + rates.spot_nodes * rates.spot_usd_per_hour
    with np.errstate(invalid="ignore"):
        waiting = np.where(
            run.waiting_hours > 0, run.waiting_hours * (fleet_usd_per_hour - rates.spot_usd_per_hour), 0.0
        )
        years = np.ceil(run.hours_p95 / HOURS_PER_YEAR)
        committed = np.where(
            rates.committed_nodes > 0,
            rates.committed_nodes * rates.committed_usd_per_hour * HOURS_PER_YEAR * years,
            0.0,
        )
        hourly = fleet_usd_per_hour * run.running_hours + waiting
        nodes = rates.base_nodes + rates.spot_nodes + rates.committed_nodes
        months = run.hours_expected / HOURS_PER_MONTH
        volumes = nodes * rates.volume_usd_per_month * months
        storage = rates.storage_usd_per_month * months
        transfer = rates.endpoints_usd_per_hour * run.hours_expected
        head_node = rates.controller_usd_per_hour * run.hours_expected
        varying = hourly + volumes + storage + transfer + head_node
        # Dollars spread like hours: everything but the commitment is paid by the hour.
        p50, p95 = lognormal_percentiles(varying, varying * run.hours_std / run.hours_expected)
        monthly = nodes * rates.volume_usd_per_month + rates.storage_usd_per_month
        # A commitment is paid for these hours too, its whole year being in the cost.
        all_usd_per_hour = (
            fleet_usd_per_hour
            + monthly / HOURS_PER_MONTH
            + rates.endpoints_usd_per_hour
            + rates.controller_usd_per_hour
        )
    return FleetCost(
        compute=hourly + committed,
        volumes=volumes,
        storage=storage,
        transfer=transfer,
        head_node=head_node,
        expected=varying + committed,
        p50=p50 + committed,
        p95=p95 + committed,
        reserve=all_usd_per_hour * rates.reserve_hours,
    )
