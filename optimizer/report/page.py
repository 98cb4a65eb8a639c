"""The page of a report: the template with an answer's numbers and charts."""

from __future__ import annotations

import base64
import hashlib
from datetime import date, datetime
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from bootstrap.contract.words import counted
from optimizer.catalog.ttl import age_days
from optimizer.contract.units import short
from optimizer.report import charts, facts
from optimizer.report.answer import ReportAnswer
from optimizer.report.run import Run
from optimizer.training_code import describe_demands

_FOLDER = Path(__file__).parent


def render(answer: ReportAnswer, *, now: datetime, run: Run | None = None) -> str:
    """Return the page as HTML; ``now`` is its date."""
    plan = answer.plan
    drawn = {"cost": {name: charts.cost_against_time(answer, size, run) for name, size in charts.SIZES.items()}}
    if run is not None and len(run.losses) > 1:
        drawn["loss"] = {name: charts.loss_by_step(run, size) for name, size in charts.SMALL_SIZES.items()}
    script = (_FOLDER / "page.js").read_text(encoding="utf-8")
    environment = Environment(
        loader=FileSystemLoader(_FOLDER),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"usd": usd, "price": price, "hours": hours, "number": short, "count": count}
    environment.filters |= {"counted": counted, "age": lambda as_of: age(as_of, now.date())}
    return environment.get_template("page.html.j2").render(
        plan=plan,
        run=run,
        demands=describe_demands(plan),
        answer=answer,
        facts=facts,
        usd=usd,
        hours=hours,
        now=now,
        charts={
            name: {size: Markup(charts.draw(chart)) for size, chart in sizes.items()}  # noqa: S704 - Vega escapes
            for name, sizes in drawn.items()
        },
        style=Markup((_FOLDER / "page.css").read_text(encoding="utf-8")),  # noqa: S704 - our own file
        script=Markup(script),  # noqa: S704 - our own file
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
    )


def usd(value: float) -> str:
    """USD for people: whole dollars from 100 on, else cents."""
    return f"{value:,.0f}" if value >= 100 else f"{value:,.2f}"


def price(value: float) -> str:
    """USD of one unit, with all digits and at least cents."""
    whole, _, digits = f"{value:,.10f}".partition(".")
    return f"{whole}.{digits.rstrip('0').ljust(2, '0')}"


def hours(value: float) -> str:
    """Hours with their unit, minutes below one hour, seconds below two minutes."""
    if value < 1 / 30:
        return f"{value * 3600:.2g} s" if value * 3600 < 9.5 else f"{value * 3600:.0f} s"
    if value < 1:
        return f"{value * 60:,.2g} min" if value < 0.1 else f"{value * 60:,.0f} min"
    return f"{value:,.1f} h".replace(".0 h", " h") if value < 100 else f"{value:,.0f} h"


def count(value: float) -> str:
    """A large count in short: 2B, 8.03B, 512."""
    for size, suffix in ((1e12, "T"), (1e9, "B"), (1e6, "M")):
        if value >= size:
            return f"{value / size:.3g}{suffix}"
    return f"{value:,.0f}"


def age(as_of: date, today: date) -> str:
    """Age of a date in words."""
    days: Any = age_days(as_of, today)
    if days < 1:
        return "today"
    return counted(days, "day") if days < 730 else f"{days / 365.25:.1f} years"
