"""The sixty requests of tests/choices/README.md: the expert's choice, and the answer."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from infra.offline.preview import resources
from optimizer.contract.plan import FleetPlan
from optimizer.contract.request import FLAG_FIELDS, Constraints, Workload, request_from_dict
from optimizer.recommend import recommend
from tests.unit.optimizer.search.requests import calibration, catalog

PAGE = Path(__file__).with_name("README.md")
# Flags that repeat.
LISTS = {"regions", "purchase_options", "instance_types", "parallelism", "gpus"}


@dataclass(frozen=True, slots=True)
class Choice:
    """A row of the page."""

    number: int
    request: str
    families: tuple[str, ...]
    nodes: range
    most_splits: int | None
    purchase: str
    is_open: bool

    def misses(self, plan: FleetPlan) -> list[str]:
        """Differences of the plan from the expert's choice."""
        wrong = []
        family = plan.instance_type.partition(".")[0].partition("-")[0]
        if self.families != ("-",) and family not in self.families:
            wrong.append(f"family {plan.instance_type}")
        if plan.node_count not in self.nodes:
            wrong.append(f"{plan.node_count} nodes")
        if self.most_splits is not None and len(plan.parallelism.beyond_data) > self.most_splits:
            wrong.append(plan.parallelism.in_short)
        if self.purchase not in ("any", plan.purchase.option):
            wrong.append(plan.purchase.option)
        return wrong


def choices() -> Iterator[Choice]:
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) != 7 or not cells[0].isdigit():
            continue
        least, most = cells[3].split("-")
        yield Choice(
            number=int(cells[0]),
            request=cells[1].strip("`"),
            families=tuple(re.split(", ", cells[2])),
            nodes=range(int(least), int(most) + 1),
            most_splits=None if cells[4] == "-" else int(cells[4]),
            purchase=cells[5],
            is_open=cells[6].endswith("**open**"),
        )


def as_request(flags: str) -> dict[str, Any]:
    """A request from flags, without a process: the names of the fields are those of the flags."""
    request: dict[str, Any] = {"workload": {}, "constraints": {}}
    words = shlex.split(flags)
    for flag, value in zip(words[::2], words[1::2], strict=True):
        name = flag.removeprefix("--").replace("-", "_")
        name = FLAG_FIELDS.get(name, name)
        if name in Workload.model_fields:
            request["workload"][name] = value
        elif name in Constraints.model_fields:
            request["constraints"][name] = value.split(",") if name in LISTS else value
        else:
            request[name] = value
    return request


def test_the_page_has_sixty_requests_and_few_are_open() -> None:
    rows = list(choices())
    assert [row.number for row in rows] == list(range(1, 61))
    assert len({row.request for row in rows}) == 60
    assert sum(row.is_open for row in rows) <= 4


@pytest.mark.parametrize("row", list(choices()), ids=lambda row: str(row.number))
def test_the_answer_is_the_experts(row: Choice) -> None:
    plans = recommend(request_from_dict(as_request(row.request)), catalog(), calibration()).plans
    assert plans, "no plan"
    assert resources(plans[0], stack="dev"), "preview refuses what recommend answers"
    misses = row.misses(plans[0])
    assert bool(misses) == row.is_open, misses or "the answer is the expert's now: take **open** from the page"
