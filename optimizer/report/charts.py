"""Charts of a report: Vega-Lite specifications, drawn to SVG while the page is made.

The page needs no script for them, so they print and load as they are. Colours are CSS variables of ``page.css``: one
SVG serves both colour schemes. Each chart is drawn wide and narrow, and the style sheet shows the one that fits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from vl_convert import vegalite_to_svg

from optimizer.contract.plan import PurchaseOption
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
    hours, usd = (
        _domain(
            [row[name + part] for row in rows for part in ("", "_p50", "_p95")] + [run[name] for run in took], limit
        )
        for name, limit in (("hours", limits.deadline_hours), ("usd", limits.budget_usd))
    )
    x = _axis("hours", hours, "expected time", _HOURS_LABEL, sizes[0] // 48)
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
    name = {"type": "text", "dy": 20, "fontSize": 13, "fontWeight": 600, "aria": False}
    name["align"] = _side(plan.hours.expected, hours)
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


def loss_by_step(run: Run, sizes: tuple[int, int]) -> dict[str, Any]:
    """Specify the chart of the loss, on linear axes."""
    encoding: dict[str, Any] = {}
    for axis, field, ticks in (("x", "step", sizes[0] // 90), ("y", "loss", 5)):
        label = {"labelExpr": _PLAIN_LABEL, "tickCount": ticks}
        encoding[axis] = {"field": field, "type": "quantitative", "title": field, "axis": label}
    encoding["y"]["scale"] = {"zero": False}
    line = {"type": "line", "stroke": "var(--accent)", "strokeWidth": 1.75}
    return _chart(list(run.losses), [{"mark": line, "encoding": encoding}], sizes)


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


def _axis(field: str, domain: tuple[float, float], title: str, label: str, ticks: int) -> dict[str, Any]:
    return {
        "field": field,
        "type": "quantitative",
        "title": title,
        "scale": {"type": "log", "domain": list(domain), "nice": False},
        "axis": {"tickCount": ticks, "labelExpr": label, "labelOverlap": "greedy", "labelSeparation": 8, "grid": True},
    }


def _side(value: float, axis: tuple[float, float]) -> str:
    """Alignment of a name at a value of a logarithmic axis, towards its middle."""
    return "right" if value**2 > axis[0] * axis[1] else "left"


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
        # At the bottom, where it does not meet the budget's name.
        lines.append(("x", f"deadline {deadline_hours:,g} h", deadline_hours, _side(deadline_hours, hours), "bottom"))
    if budget_usd is not None and budget_usd < usd[1]:
        lines.append(("y", f"budget ${budget_usd:,g}", budget_usd, "left", "top"))
    areas, names = [], []
    for axis, words, limit, side, base in lines:
        at: dict[str, Any] = {axis: {"datum": limit}}
        corner = {"y": {"datum": usd[0]}} if axis == "x" else {"x": {"datum": hours[0]}}
        area = {"type": "rect", "fill": "var(--excluded)", "opacity": 0.5}
        rule = {"type": "rule", "stroke": "var(--limit)", "strokeWidth": 1.5, "strokeDash": [6, 4]}
        text = {"type": "text", "text": words, "fontSize": 12, "fill": "var(--limit)", "align": side}
        text |= {"baseline": base, "dy": 7 if base == "top" else -7, "dx": 6 if side == "left" else -6}
        areas.append((area, ends | at))
        names += [(rule, at), (text, at | corner)]
    return [
        {"data": {"values": [{}]}, "mark": mark | {"aria": False}, "encoding": encoding}
        for mark, encoding in areas + names
    ]
