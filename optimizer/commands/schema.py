"""``gpufleet schema``: JSON Schema of the documents that the commands read and write."""

from __future__ import annotations

from typing import Any

import click
from pydantic import BaseModel, ConfigDict
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaMode, JsonSchemaValue
from pydantic_core import core_schema

from optimizer.catalog.model import Source
from optimizer.commands.output import write_json
from optimizer.contract.plan import FleetPlan
from optimizer.contract.request import FleetRequest
from optimizer.performance.measured_runs import RUN_COLUMNS, RunRow
from optimizer.performance.rows import COLUMNS
from optimizer.search.problem import Rejection

_DIALECT = "https://json-schema.org/draft/2020-12/schema"
_ESTIMATES = {"fits": ["boolean", "null"], "fit": ["string", "null"], "error": ["string", "null"]}


class _Closed(BaseModel):
    model_config = ConfigDict(extra="forbid")


class _CatalogUsed(_Closed):
    as_of: str
    made_at: str
    sources: list[Source]


class _Nearest(_Closed):
    changes: dict[str, Any]
    distance: float | None
    flags: list[str]
    plan: FleetPlan


class _Answer(_Closed):
    """Answer of ``gpufleet recommend``; plans are best first, and rejected says why a type has none."""

    schema_version: int
    request: FleetRequest
    catalog: _CatalogUsed
    plans: list[FleetPlan]
    pareto: list[FleetPlan]
    nearest: list[_Nearest]
    rejected: list[Rejection]
    candidates: dict[str, list[Any]]
    searched_plans: int
    searched: dict[str, int]
    notes: list[str]
    elapsed_s: float


class _Schema(GenerateJsonSchema):
    """A request's numbers may be text (2B, 3d, 5k), and its number of frozen layers a number."""

    def function_before_schema(self, schema: core_schema.BeforeValidatorFunctionSchema) -> JsonSchemaValue:
        inner = super().function_before_schema(schema)
        if self.mode == "serialization" or inner.get("type") not in ("integer", "number", "string"):
            return inner
        return {"anyOf": [inner, {"type": "integer" if inner["type"] == "string" else "string"}]}


_MODELS: dict[str, tuple[type[BaseModel], JsonSchemaMode]] = {
    "request": (FleetRequest, "validation"),
    "plan": (FleetPlan, "serialization"),
    "answer": (_Answer, "serialization"),
}
NAMES = (*_MODELS, "report-row")


@click.command(
    epilog="""\b
Example:
  gpufleet schema request
  gpufleet schema answer > answer.schema.json
"""
)
@click.argument("name", type=click.Choice(NAMES))
def command(name: str) -> None:
    """Print the JSON Schema (draft 2020-12) of a request, a plan, recommend's answer, or a row of runs.

    A report-row is a measured run of gpufleet calibrate, and a row of estimate --batch, which adds its columns.
    """
    if name == "report-row":
        document = _row_schema()
    else:
        model, mode = _MODELS[name]
        document = model.model_json_schema(mode=mode, schema_generator=_Schema)
    write_json({"$schema": _DIALECT, **document})


def _row_schema() -> dict[str, Any]:
    """Return the schema of a row of runs: cells are text in the answer of estimate; a user's own columns stay."""
    defaults = {name: field.default for name, field in RunRow.model_fields.items() if not field.is_required()}
    given: dict[str, Any] = {
        name: {"type": ["string", "number", "null"]} | ({"default": defaults[name]} if defaults.get(name) else {})
        for name in RUN_COLUMNS
    }
    added = {name: {"type": _ESTIMATES.get(name, ["number", "null"])} for name in COLUMNS}
    return {"title": "Row", "type": "object", "properties": given | added}
