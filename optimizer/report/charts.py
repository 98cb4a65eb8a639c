"""Charts of a report: Vega-Lite specifications, drawn to SVG while the page is made.

The page needs no script for them, so they print and load as they are. Colours are CSS variables of ``page.css``: one
SVG serves both colour schemes. Each chart is drawn wide and narrow, and the style sheet shows the one that fits.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from vl_convert import vegalite_to_svg

from optimizer.contract.plan import FleetPlan, PurchaseOption, Spread
from optimizer.contract.units import short
from optimizer.report.answer import AnswerPlan, ReportAnswer
from optimizer.report.facts import FAR
from optimizer.report.run import Run

# Width and height of the plotting area, px. The page is readable down to 320 px: WCAG 2.1, 1.4.10.
SIZES = {"wide": (860, 430), "narrow": (272, 300)}
SMALL_SIZES = {"wide": (860, 240), "narrow": (272, 220)}

# A mark's link in Vega is resolved against this address; the page's own fragments must not be.
_VEGA_BASE_URL = "https://vega.github.io/vega-datasets/"

# Least ratio of a logarithmic axis's ends: it has two round numbers.
_LEAST_SPAN = 3.0

COLOURS: dict[PurchaseOption, str] = {
    "on-demand": "var(--on-demand)",
    "spot": "var(--spot)",
    "reserved": "var(--reserved)",
    "capacity-block": "var(--capacity-block)",
}
_AXIS = {"labelColor": "var(--muted)", "titleColor": "var(--muted)", "gridColor": "var(--line)"}
_CONFIG = {
    "font": "system-ui, sans-serif",
    "background": "transparent",
    "view": {"stroke": None},
    "axis": _AXIS
    | {"domain": False, "ticks": False, "labelFontSize": 12, "titleFontSize": 12, "titleFontWeight": "normal"}
    | {"labelPadding": 6, "titlePadding": 10, "gridWidth": 1},
}
_HOURS_LABEL = (
    "datum.value < 1 / 30 ? format(datum.value * 3600, '.2~r') + ' s' : "
    "datum.value < 1 ? format(datum.value * 60, '.2~r') + ' min' : format(datum.value, ',.3~r') + ' h'"
)
_USD_LABEL = "'$' + format(datum.value, ',.3~r')"
_PLAIN_LABEL = "format(datum.value, ',~r')"


def draw(specification: dict[str, Any]) -> str:
    """Draw a Vega-Lite specification as SVG text that refers to nothing outside the page."""
    # No base URL is allowed, so a specification that asks for data fails here.
    svg = vegalite_to_svg(specification | {"config": _CONFIG}, allowed_base_urls=[])
    return svg.replace(f'xlink:href="{_VEGA_BASE_URL}#', 'href="#')


def cost_against_time(answer: ReportAnswer, sizes: tuple[int, int], run: Run | None = None) -> dict[str, Any]:
    """Specify the chart of all candidates: dollars against hours, spreads, Pareto front, limits, what a run took."""
    plan, limits = answer.plan, answer.plan.job
    rows = [_row(candidate, candidate.plan == plan) for candidate in answer.candidates]
    took = [{"hours": run.hours, "usd": run.usd}] if run and run.hours and run.usd else []
    hours, usd = _domains(answer, took)
    # Round in seconds or minutes where the labels are.
    unit = 1 / 3600 if hours[1] < 1 / 15 else 1 / 60 if hours[1] < 2 else 1.0
    x = _axis("hours", hours, "expected time", _HOURS_LABEL, sizes[0] // 48, unit)
    y = _axis("usd", usd, "expected USD", _USD_LABEL, sizes[1] // 45)
    colour: dict[str, Any] = {"field": "option", "type": "nominal", "legend": None}
    colour["scale"] = {"domain": list(COLOURS), "range": list(COLOURS.values())}
    chosen = "datum.chosen"
    layers = _limit_layers(hours, usd, limits.deadline_hours, limits.budget_usd)
    front = sorted((row for row in rows if row["front"]), key=lambda row: row["hours"])
    if len(front) > 1:
        line = {
            "type": "line",
            "interpolate": "step-after",
            "stroke": "var(--ink)",
            "strokeWidth": 1.25,
            "opacity": 0.5,
        }
        layers.append({"data": {"values": front}, "mark": line, "encoding": {"x": x, "y": y}})
    tail = {"type": "rule", "strokeCap": "round", "aria": False}
    layers.append(
        {
            "mark": tail,
            "encoding": {
                "x": {"field": "hours_p50", "type": "quantitative", "scale": x["scale"]},
                "y": {"field": "usd_p50", "type": "quantitative", "scale": y["scale"]},
                "x2": {"field": "hours_p95"},
                "y2": {"field": "usd_p95"},
                "color": colour,
                "strokeWidth": {"condition": {"test": chosen, "value": 4}, "value": 1.5},
                "opacity": {"condition": {"test": chosen, "value": 0.9}, "value": 0.38},
            },
        }
    )
    layers.append(
        {
            # The chosen plan is drawn last, above its neighbours.
            "transform": [{"calculate": "datum.chosen ? 1 : 0", "as": "above"}],
            "mark": {"type": "point", "strokeWidth": 2, "opacity": 1},
            "encoding": {
                "x": x,
                "y": y,
                "color": colour,
                "fill": {
                    "condition": {"test": "datum.measured", **{k: v for k, v in colour.items() if k != "legend"}},
                    "value": "var(--paper)",
                },
                "size": {"condition": {"test": chosen, "value": 170}, "value": 62},
                "shape": {"condition": {"test": "datum.old", "value": "diamond"}, "value": "circle"},
                "order": {"field": "above", "type": "quantitative"},
                "href": {"field": "href"},
                "description": {"field": "words"},
            },
        }
    )
    name = {"type": "text", "dy": 20, "fontSize": 13, "fontWeight": 600, "aria": False} | _aside(rows, hours)
    halo = {"fill": "none", "stroke": "var(--paper)", "strokeWidth": 4, "strokeJoin": "round", "opacity": 0.85}
    layers += [
        {
            "transform": [{"filter": chosen}],
            "mark": name | look,
            "encoding": {"x": x, "y": y, "text": {"field": "name"}},
        }
        for look in (halo, {"fill": "var(--ink)"})
    ]
    if took:
        words = f"this run: {short(took[0]['hours'])} h, {took[0]['usd']:,.2f} USD"
        cross = {"type": "point", "shape": "cross", "size": 150, "filled": True, "fill": "var(--ink)", "opacity": 1}
        encoding = {"x": x, "y": y, "description": {"value": words}}
        layers.append({"data": {"values": took}, "mark": cross, "encoding": encoding})
    return _chart(rows, layers, sizes)


def _domains(
    answer: ReportAnswer, took: Sequence[Mapping[str, float]]
) -> tuple[tuple[float, float], tuple[float, float]]:
    """Ends of the axes of hours and dollars; ``took`` has those of a run."""
    plans, limits = [candidate.plan for candidate in answer.candidates], answer.plan.job
    hours = [getattr(plan.hours, name) for plan in plans for name in Spread.model_fields]
    usd = [getattr(plan.cost_usd, name) for plan in plans for name in Spread.model_fields]
    return (
        _domain([*hours, *(run["hours"] for run in took)], limits.deadline_hours),
        _domain([*usd, *(run["usd"] for run in took)], limits.budget_usd),
    )


def steps_against_time(plan: FleetPlan, run: Run, sizes: tuple[int, int]) -> dict[str, Any]:
    """Specify the chart of the steps done against the hours since the first start, beside the plan's."""
    whole_h, steps = plan.hours.expected, plan.job.steps
    hours = min(whole_h, max(point["hours"] for point in run.points))  # as far as the run is
    planned: list[dict[str, float]] = [{"hours": 0, "step": 0}, {"hours": hours, "step": steps * hours / whole_h}]
    return _beside_plan(run.points, planned, _plain("step", "steps done", 5), sizes)


def speed_against_time(plan: FleetPlan, run: Run, sizes: tuple[int, int]) -> dict[str, Any]:
    """Specify the chart of the speed, checkpoints included, beside the plan's."""
    y = _plain("speed", "samples/s" if plan.job.seq_len == 1 else "tokens/s", 5) | {"scale": {"domainMin": 0}}
    planned = [{"hours": hours, "speed": plan.tokens_per_second} for hours in (0, run.speeds[-1]["hours"])]
    return _beside_plan(run.speeds, planned, y, sizes)


def _beside_plan(
    rows: Sequence[Mapping[str, float]],
    planned: Sequence[Mapping[str, float]],
    y: dict[str, Any],
    sizes: tuple[int, int],
) -> dict[str, Any]:
    """Specify a chart of a run's rows by the hours since its first start, a line a process, beside a dashed line."""
    x = _plain("hours", "since the first start", sizes[0] // 90)
    x["axis"]["labelExpr"] = _HOURS_LABEL
    dashed = {"type": "line", "stroke": "var(--muted)", "strokeWidth": 1.5, "strokeDash": [5, 4]}
    line = {"type": "line", "stroke": "var(--accent)", "strokeWidth": 2, "strokeJoin": "round"}
    layers: list[dict[str, Any]] = [
        {"data": {"values": list(planned)}, "mark": dashed, "encoding": {"x": x, "y": y}},
        {"mark": line, "encoding": {"x": x, "y": y, "detail": {"field": "process"}}},
    ]
    return _chart(list(rows), layers, sizes)


def loss_by_step(run: Run, sizes: tuple[int, int]) -> dict[str, Any]:
    """Specify the chart of the loss."""
    x, y = _plain("step", "step", sizes[0] // 90), _plain("loss", "loss", 5) | {"scale": {"zero": False}}
    line = {"type": "line", "stroke": "var(--accent)", "strokeWidth": 1.75}
    return _chart(list(run.losses), [{"mark": line, "encoding": {"x": x, "y": y}}], sizes)


def _plain(field: str, title: str, ticks: int) -> dict[str, Any]:
    """Specify a linear axis."""
    axis = {"labelExpr": _PLAIN_LABEL, "tickCount": ticks}
    return {"field": field, "type": "quantitative", "title": title, "axis": axis}


def _chart(rows: list[Any], layers: list[dict[str, Any]], sizes: tuple[int, int]) -> dict[str, Any]:
    return {"width": sizes[0], "height": sizes[1], "data": {"values": rows}, "layer": layers, "padding": 6}


def _row(candidate: AnswerPlan, chosen: bool) -> dict[str, Any]:
    plan = candidate.plan
    place = plan.purchase.zone_id or plan.region
    name = f"number {candidate.number}" if candidate.number else "on the Pareto front"
    fleet = f"{plan.node_count} × {plan.instance_type}"
    measured = plan.calibration.rows > 0
    speed = f"{plan.node.gpu} measured" if measured else f"{plan.node.gpu} not measured"
    split = plan.parallelism
    return {
        "hours": plan.hours.expected,
        "hours_p50": plan.hours.p50,
        "hours_p95": plan.hours.p95,
        "usd": plan.cost_usd.expected,
        "usd_p50": plan.cost_usd.p50,
        "usd_p95": plan.cost_usd.p95,
        "option": plan.purchase.option,
        "front": candidate.on_front,
        "measured": measured,
        "old": plan.spot_range is not None,
        "chosen": chosen,
        "name": fleet,
        "href": f"#{candidate.key}",
        "words": f"{fleet}, {plan.purchase.in_short} in {place} ({name}): {short(plan.hours.expected)} h, "
        f"95% within {short(plan.hours.p95)} h; {plan.cost_usd.expected:,.0f} USD, 95% within "
        f"{plan.cost_usd.p95:,.0f} USD; {split.in_short} {split.sharding}, micro-batch {split.micro_batch} × "
        f"{split.grad_accum}; {speed}",
    }


def _domain(values: Sequence[float], limit: float | None) -> tuple[float, float]:
    """Return the ends of a logarithmic axis: the values with a margin, and the limit unless it is far above."""
    low, high = min(values), max(values)
    if limit is not None and limit <= FAR * high:
        low, high = min(low, limit), max(high, limit)
    margin = max(1.12, (high / low) ** 0.05, math.sqrt(_LEAST_SPAN * low / high))
    return low / margin, high * margin


def _axis(
    field: str, domain: tuple[float, float], title: str, label: str, ticks: int, unit: float = 1.0
) -> dict[str, Any]:
    values = [tick * unit for tick in _ticks(domain[0] / unit, domain[1] / unit, ticks)]
    return {
        "field": field,
        "type": "quantitative",
        "title": title,
        "scale": {"type": "log", "domain": list(domain), "nice": False},
        "axis": {"values": values, "labelExpr": label, "grid": True},
    }


def _ticks(low: float, high: float, most: int) -> list[float]:
    """Round numbers of a logarithmic axis: the finest of three series that has no more than ``most``."""
    decades = range(math.floor(math.log10(low)) - 1, math.ceil(math.log10(high)) + 1)
    ticks: list[float] = []
    for digits in ((1, 1.5, 2, 3, 4, 5, 6, 8), (1, 2, 5), (1, 3), (1,)):
        ticks = [digit * 10.0**decade for decade in decades for digit in digits]
        ticks = [tick for tick in ticks if low <= tick <= high]
        if len(ticks) <= max(2, most):
            break
    return ticks


def _limit_layers(
    hours: tuple[float, float],
    usd: tuple[float, float],
    deadline_hours: float | None,
    budget_usd: float | None,
) -> list[dict[str, Any]]:
    """Shade what a limit excludes, with its line and its name."""
    ends = {"x": {"datum": hours[0]}, "x2": {"datum": hours[1]}, "y": {"datum": usd[0]}, "y2": {"datum": usd[1]}}
    lines = []
    if deadline_hours is not None and deadline_hours < hours[1]:
        side = "right" if _place(deadline_hours, hours) > 0.5 else "left"
        lines.append(("x", f"deadline {deadline_hours:,g} h", deadline_hours, side))
    if budget_usd is not None and budget_usd < usd[1]:
        lines.append(("y", f"budget ${budget_usd:,g}", budget_usd, "left"))
    # Below the budget's line where that is near the top, so that the two names do not meet.
    top = min(usd[1], budget_usd) if budget_usd is not None and _place(budget_usd, usd) > 0.85 else usd[1]
    areas, names = [], []
    for axis, words, limit, side in lines:
        at: dict[str, Any] = {axis: {"datum": limit}}
        corner = {"y": {"datum": top}} if axis == "x" else {"x": {"datum": hours[0]}}
        area = {"type": "rect", "fill": "var(--excluded)", "opacity": 0.5}
        rule = {"type": "rule", "stroke": "var(--limit)", "strokeWidth": 1.5, "strokeDash": [6, 4]}
        text = {"type": "text", "text": words, "fontSize": 12, "fill": "var(--limit)", "align": side}
        text |= {"baseline": "top", "dy": 7, "dx": 6 if side == "left" else -6}
        areas.append((area, ends | at))
        names += [(rule, at), (text, at | corner)]
    return [
        {"data": {"values": [{}]}, "mark": mark | {"aria": False}, "encoding": encoding}
        for mark, encoding in areas + names
    ]


def _place(value: float, axis: tuple[float, float]) -> float:
    """Return the place of a value on a logarithmic axis, 0 to 1 within its ends."""
    return math.log(value / axis[0]) / math.log(axis[1] / axis[0])


def _aside(rows: Sequence[dict[str, Any]], hours: tuple[float, float]) -> dict[str, Any]:
    """Align the chosen plan's name so that it stays inside the chart."""
    (chosen,) = [row for row in rows if row["chosen"]][:1]
    place = _place(chosen["hours"], hours)
    return {"align": "left" if place < 0.25 else "right" if place > 0.75 else "center"}
