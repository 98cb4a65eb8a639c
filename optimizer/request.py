"""FleetRequest: what the user wants trained, and within which limits. Read from YAML, or built from flags."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from optimizer.errors import InvalidInputError
from optimizer.plan import PurchaseOption
from optimizer.units import parse_count, parse_hours

Objective = Literal["cost", "time", "pareto"]

Samples = Annotated[int, BeforeValidator(lambda value: value if value is None else parse_count(value))]
Hours = Annotated[float, BeforeValidator(lambda value: value if value is None else parse_hours(value))]
Usd = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Workload(_Model):
    """How much to train, and in what shape; exactly one of tokens, samples and steps is given."""

    tokens: Samples | None = Field(default=None, description="Tokens to train on (samples for a CNN).")
    samples: Samples | None = Field(default=None, description="Sequences (or images) to train on.")
    steps: Samples | None = Field(default=None, description="Optimizer steps; needs global_batch.")
    seq_len: Samples | None = Field(default=None, description="Tokens of one sequence; none for a CNN.")
    global_batch: Samples | None = Field(
        default=None, description="Sequences (or images) of one optimizer step; null lets the search choose."
    )
    precision: Literal["fp32", "tf32", "fp16", "bf16", "fp8"] = "bf16"
    optimizer: Literal["adamw", "adam", "sgd", "adafactor"] = "adamw"

    @model_validator(mode="after")
    def _one_amount(self) -> Self:
        given = [name for name in ("tokens", "samples", "steps") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"give exactly one of tokens, samples and steps (got {', '.join(given) or 'none'})")
        if self.steps is not None and self.global_batch is None:
            raise ValueError("steps needs global_batch: without it the amount of training is unknown")
        return self


class Reservation(_Model):
    """Capacity the user already owns."""

    instance_type: str
    region: str
    count: Annotated[int, Field(ge=1)]
    capacity_reservation_id: str | None = Field(default=None, pattern=r"^cr-[0-9a-f]{8,17}$")
    usd_per_hour: Annotated[float, Field(ge=0, allow_inf_nan=False)] = Field(
        default=0.0, description="What one more hour of one instance costs; 0 where the commitment is already paid."
    )


class Constraints(_Model):
    """Hard limits. Budget and deadline bind the 95th percentile, so that a plan that is picked keeps them."""

    budget_usd: Usd | None = None
    deadline_hours: Hours | None = None
    regions: tuple[str, ...] = Field(default=(), description="Region names or patterns (us-*); empty for all.")
    purchase_options: tuple[PurchaseOption, ...] = Field(default=("on-demand", "spot"), min_length=1)
    instance_types: tuple[str, ...] = Field(
        default=(), description="Types (p5.48xlarge), families (p5) or patterns (g6*); empty for all."
    )
    max_nodes: Annotated[int, Field(ge=1, le=1000)] = 64
    existing_reservations: tuple[Reservation, ...] = ()


class FleetRequest(_Model):
    """A model, an amount of training, limits, and what to optimise."""

    model: str | int | dict[str, Any] = Field(
        description="A preset, a Hugging Face config.json, a parameter count (7B), or architecture fields."
    )
    workload: Workload
    constraints: Constraints = Constraints()
    objective: Objective = "cost"


def request_from_dict(data: Mapping[str, Any], *, origin: str = "the request") -> FleetRequest:
    """Check ``data`` as a FleetRequest.

    Raises:
        InvalidInputError: every wrong field at once, each with its place, value and limit.
    """
    try:
        return FleetRequest.model_validate(data)
    except ValidationError as error:
        lines = []
        for problem in error.errors():
            place = ".".join(str(part) for part in problem["loc"] if not str(part).startswith("function-"))
            value = problem.get("input")
            shown = "" if isinstance(value, dict) else f" (got {value!r})"
            lines.append(f"{place or 'request'}: {problem['msg'].removeprefix('Value error, ')}{shown}")
        raise InvalidInputError(
            f"{origin} is not a valid request:\n    " + "\n    ".join(dict.fromkeys(lines)),
            next_step="gpufleet recommend --help",
        ) from error


def read_request_file(path: Path) -> dict[str, Any]:
    """Read a request's YAML as a dictionary, unchecked, so that flags can be laid over it.

    Raises:
        InvalidInputError: the file cannot be read, is not YAML, or holds no mapping.
    """
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInputError(f"{path} cannot be read: {error}", next_step="gpufleet recommend --help") from error
    except yaml.YAMLError as error:
        raise InvalidInputError(f"{path} is not YAML: {error}", next_step="mend the file, or use flags") from error
    if not isinstance(data, dict) or not all(isinstance(key, str) for key in data):
        kind = "nothing" if data is None else f"a {type(data).__name__}"
        raise InvalidInputError(
            f"{path} holds {kind}",
            limit="a request is a mapping with model, workload, constraints, objective",
            next_step="see examples/request.yaml",
        )
    return data
