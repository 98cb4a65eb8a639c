"""``FleetRequest``: a model, an amount of training, limits and an objective, read from YAML or built from flags."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import fields
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from bootstrap.contract.fine_tuning import OTHER_METHODS, FineTuning, Method, Target
from optimizer.contract.errors import InvalidInputError, describe_invalid, unreadable
from optimizer.contract.plan import CapacityBlock, PurchaseOption, Sharding, left_out
from optimizer.contract.spelling import REGION, near_names
from optimizer.contract.units import parse_count, parse_hours, parse_usd

Objective = Literal["cost", "time", "pareto"]
Axis = Literal["data", "tensor", "pipeline", "context", "expert"]


def _no_bool(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError("a number is needed, not yes or no")
    return value


# Far above any run: Llama 3 was trained on 1.56e13 tokens (arXiv:2407.21783).
MOST_SAMPLES = 10**15
# Far above any useful batch.
MOST_BATCH = 10**9
# 1 EiB.
MOST_DATA_GIB = 2**30
# Far above any run, and short to print.
MOST_USD = 10**12
MOST_HOURS = 10**9

_REQUEST_FORM = "a request is a mapping with model, workload, constraints, objective"

Number = BeforeValidator(_no_bool)
# The limits stand beside int, where a JSON Schema of text or numbers has them.
AllSamples = Annotated[int, Field(ge=1, le=MOST_SAMPLES), BeforeValidator(parse_count), Number]
Samples = Annotated[int, Field(ge=1, le=MOST_BATCH), BeforeValidator(parse_count), Number]
Hours = Annotated[float, Field(gt=0, le=MOST_HOURS), BeforeValidator(parse_hours), Number]
Usd = Annotated[
    float,
    Field(gt=0, le=MOST_USD, allow_inf_nan=False),
    BeforeValidator(lambda value: parse_usd(value) if isinstance(value, str) else value),
    Number,
]


_TUNING: dict[str, Any] = {item.name: Field(default=item.default, **item.metadata) for item in fields(FineTuning)}


def _frozen(value: Any) -> Any:
    """YAML's number of layers as text; 0 is none."""
    return str(value) if type(value) is int and value else "none" if value == 0 else value


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


def _model_kind(value: Any) -> Any:
    """One refusal in place of one for each kind of the union."""
    if isinstance(value, bool) or not isinstance(value, str | int | dict):
        raise ValueError("a name, a number of parameters like 7B, or a mapping of architecture fields is needed")
    return value


class Workload(_Model):
    """The training to do; exactly one of tokens, samples and steps is given."""

    tokens: AllSamples | None = Field(default=None, description="Tokens to train on (2B, 500M), of T5 its inputs'.")
    samples: AllSamples | None = Field(default=None, description="Sequences, images or clips to train on.")
    steps: AllSamples | None = Field(default=None, description="Optimizer steps; needs a global batch too.")
    seq_len: Samples | None = Field(default=None, description="Tokens of a sequence, of T5's input.")
    target_len: Samples | None = left_out(
        "Tokens that the decoder of T5 or Whisper writes; default: span corruption's, the longest text."
    )
    global_batch: Samples | None = Field(default=None, description="Samples of a step; left out, recommend chooses.")
    precision: Literal["fp32", "tf32", "fp16", "bf16", "pure-bf16", "fp8"] = Field(
        default="bf16", description="bf16 keeps 32-bit weights, pure-bf16 does not."
    )
    optimizer: Literal["adamw", "adam", "sgd", "adafactor", "adamw8bit"] = Field(
        default="adamw", description="The optimizer; adamw8bit keeps 8-bit moments."
    )
    method: Method = _TUNING["method"]
    lora_rank: Annotated[int, Number] = _TUNING["lora_rank"]
    lora_alpha: Annotated[int, Number] = _TUNING["lora_alpha"]
    lora_targets: Target = _TUNING["lora_targets"]
    frozen: Annotated[str, BeforeValidator(_frozen)] = _TUNING["frozen"]
    framework: Literal[
        "torch",
        "torchvision",
        "gpufleet",
        "torchtitan",
        "composer-fsdp",
        "megatron",
        "megatron-core",
        "megatron-deepspeed",
        "nemo",
        "nemo-fp32",
        "nanotron",
    ] = Field(
        default="gpufleet",
        description="Profile of the training code: memory, host costs, kinds of parallelism. gpufleet is the reference "
        "trainer; what it does not train is estimated as torch.",
    )
    compiled: bool = Field(default=False, description="The training code is compiled (torch.compile).")
    samples_per_vcpu_s: Annotated[float, Field(ge=0, le=MOST_SAMPLES, allow_inf_nan=False), Number] | None = left_out(
        "Samples a second that a vCPU prepares, 0 for no bound; default: 250 for images, else 0."
    )
    data_gib: Annotated[float, Field(gt=0, le=MOST_DATA_GIB, allow_inf_nan=False), Number] | None = left_out(
        "Size of the training data in S3, which each node copies to its disk; null counts no copy."
    )
    data_files: Annotated[int, Field(ge=1, le=MOST_SAMPLES), Number] | None = left_out(
        "Files of the data, each a request; null for files so large that bytes decide. Needs data_gib."
    )
    data_region: Annotated[str, Field(pattern=REGION)] | None = left_out(
        "Region of the data's bucket; null for the fleet's own. Bytes that leave a region are billed."
    )
    lustre_gib: Annotated[int, Field(ge=1, le=MOST_DATA_GIB), Number] | None = left_out(
        "Storage of an FSx for Lustre file system that the nodes read the data from, in place of copies: "
        "1200, or a multiple of 2400. Needs data_gib."
    )

    @property
    def tuning(self) -> FineTuning:
        """Part of the model that trains."""
        return FineTuning(**self.model_dump(include={item.name for item in fields(FineTuning)}))

    @model_validator(mode="after")
    def _one_amount(self) -> Self:
        given = [name for name in ("tokens", "samples", "steps") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"give exactly one of tokens, samples and steps (got {', '.join(given) or 'none'})")
        for name in ("data_files", "data_region", "lustre_gib"):
            if (value := getattr(self, name)) is not None and self.data_gib is None:
                raise ValueError(f"{name} is {value} and data_gib missing: give the size of the data too")
        # https://docs.aws.amazon.com/fsx/latest/APIReference/API_CreateFileSystem.html
        if self.lustre_gib and self.lustre_gib != 1200 and self.lustre_gib % 2400:
            raise ValueError(
                f"lustre_gib {self.lustre_gib} is no size of FSx for Lustre: 1200, 2400 and further multiples of 2400 "
                "GiB are"
            )
        if self.lustre_gib and self.data_gib and self.data_gib > self.lustre_gib:
            raise ValueError(
                f"lustre_gib {self.lustre_gib} is below data_gib {self.data_gib:g}: what is read stays in the file "
                "system"
            )
        if self.lustre_gib is not None and self.data_region is not None:
            raise ValueError(
                f"lustre_gib is {self.lustre_gib} and data_region {self.data_region}: nobody plans what a file system "
                "reads across regions, which is billed by the GB; copy the data, or leave lustre_gib out"
            )
        if self.steps is not None and self.global_batch is None:
            raise ValueError("steps needs global_batch: without it the amount of training is unknown")
        if self.steps and self.global_batch and self.steps * self.global_batch > MOST_SAMPLES:
            raise ValueError(
                f"steps x global_batch is {self.steps * self.global_batch:.3g}, the limit {MOST_SAMPLES:.0e}"
            )
        return self


class ExistingReservation(_Model):
    """Capacity the user already owns."""

    instance_type: str = Field(description="Type, like p5.48xlarge.")
    region: str = Field(description="Region, like us-east-1.")
    count: Annotated[int, Field(ge=1, le=1000), Number] = Field(description="Instances of it.")
    capacity_reservation_id: str | None = Field(
        default=None, pattern=r"^cr-[0-9a-f]{8,17}$", description="Its id; a Capacity Block must have one."
    )
    usd_per_hour: Annotated[float, Field(ge=0, le=MOST_USD, allow_inf_nan=False), Number] | None = Field(
        default=None, description="Price of one more hour of one instance; 0 by default, as it is already paid."
    )
    capacity_block: CapacityBlock | None = Field(default=None, description="Null for a reservation of another kind.")

    @property
    def option(self) -> PurchaseOption:
        """The purchase option of its nodes."""
        return "capacity-block" if self.capacity_block else "reserved"

    @model_validator(mode="after")
    def _known_price(self) -> Self:
        if self.capacity_block and self.capacity_reservation_id is None:
            raise ValueError("give capacity_reservation_id: a Capacity Block is bought first, and has one then")
        if self.capacity_reservation_id is None and self.usd_per_hour is None:
            raise ValueError(
                "give capacity_reservation_id, or usd_per_hour: without an id the stack makes a capacity reservation "
                "of its own, billed on demand unless reserved instances you own cover it"
            )
        return self


class Quote(_Model):
    """A price that the user negotiated, in place of the catalog's."""

    instance_type: str = Field(description="Type, like p5.48xlarge.")
    region: str = Field(description="Region, like us-east-1.")
    option: Literal["on-demand", "spot", "reserved"] = Field(description="Purchase option whose price it is.")
    usd_per_hour: Annotated[float, Field(ge=1e-4, le=MOST_USD, allow_inf_nan=False), Number] = Field(
        description="Price of one instance; of option reserved, that of a one-year commitment without upfront payment."
    )
    source: str = Field(min_length=1, description="Where the price is written down, like the contract's number.")
    as_of: date = Field(description="Day of the quote.")

    @model_validator(mode="after")
    def _is_known(self) -> Self:
        # The day may have begun where the user is.
        if self.as_of > datetime.now(UTC).date() + timedelta(days=1):
            raise ValueError(f"as_of {self.as_of} is to come: give the day on which the price was quoted")
        return self


class Constraints(_Model):
    """Hard limits. Budget and deadline bind the 95th percentile, so that a plan keeps them."""

    budget_usd: Usd | None = Field(default=None, description="Most it may cost, at the 95th percentile: 5k.")
    deadline_hours: Hours | None = Field(default=None, description="Longest it may take, at the 95th percentile: 3d.")
    regions: tuple[str, ...] = Field(
        default=(), description="Region names or patterns (us-*); empty for all. eu-* includes London and Zurich."
    )
    purchase_options: tuple[PurchaseOption, ...] = Field(
        default=("on-demand", "spot"),
        min_length=1,
        description="Ways to buy; nodes that you own are existing_reservations of the file.",
    )
    instance_types: tuple[str, ...] = Field(default=(), description="Types, families (p5) or patterns (g6*).")
    gpus: tuple[str, ...] = left_out("GPU models (H100) or keys (a100-80gb).", default=())
    max_nodes: Annotated[int, Field(ge=1, le=1000), Number] = Field(default=64, description="Most nodes of the fleet.")
    parallelism: tuple[Axis, ...] | None = Field(
        default=None, min_length=1, description="Kinds your code can do; default: the trainer's, beyond it all."
    )
    sharding: tuple[Sharding, ...] | None = Field(
        default=None, min_length=1, description="Shardings your code can do; default: the trainer's, beyond it all."
    )
    existing_reservations: tuple[ExistingReservation, ...] = Field(
        default=(), description="Used unless purchase_options are given without their option."
    )
    quotes: tuple[Quote, ...] = Field(default=(), description="Prices you negotiated, in place of the catalog's.")
    spot_fallback: Literal["none", "on-demand"] = Field(
        default="none", description="Replaces missing spot nodes (its price binds the budget too) and ended blocks."
    )

    @model_validator(mode="after")
    def _each_once(self) -> Self:
        ids = [owned.capacity_reservation_id for owned in self.existing_reservations if owned.capacity_reservation_id]
        if twice := {reservation for reservation in ids if ids.count(reservation) > 1}:
            raise ValueError(f"existing_reservations has {min(twice)} twice: a block would follow itself")
        return self

    @property
    def usable_reservations(self) -> tuple[ExistingReservation, ...]:
        """The reservations that purchase_options let the search use."""
        if "purchase_options" not in self.model_fields_set:
            return self.existing_reservations
        return tuple(owned for owned in self.existing_reservations if owned.option in self.purchase_options)


class FleetRequest(_Model):
    """A model, an amount of training, limits, and what to optimise."""

    model: Annotated[str | int | dict[str, Any], BeforeValidator(_model_kind)] = Field(
        description="Preset, config.json, Hugging Face id, profile, module:function or size (7B)."
    )
    workload: Workload = Field(description="The training to do.")
    constraints: Constraints = Field(default=Constraints(), description="Limits of the fleet.")
    objective: Objective = Field(default="cost", description="Rank by dollars or hours, or list the front of both.")
    hour_usd: Annotated[float, Field(ge=0, le=MOST_USD, allow_inf_nan=False), Number] = Field(
        default=0.0, description="What an hour of waiting is worth, USD; the ranking adds it to the dollars."
    )


# Models of a request by the key that holds them; "" is the request itself.
SECTIONS: dict[str, type[BaseModel]] = {
    "": FleetRequest,
    "workload": Workload,
    "constraints": Constraints,
    "existing_reservations": ExistingReservation,
    "capacity_block": CapacityBlock,
    "quotes": Quote,
}


# Flags of recommend whose field has another name.
FLAG_FIELDS = {
    "budget": "budget_usd",
    "deadline": "deadline_hours",
    "region": "regions",
    "purchase": "purchase_options",
    "instance_type": "instance_types",
    "gpu": "gpus",
    "compile": "compiled",
}


def flag_of(field: str) -> str:
    """Return the flag of a field: "--budget" of budget_usd."""
    flags = {name: flag for flag, name in FLAG_FIELDS.items()}
    return f"--{flags.get(field, field).replace('_', '-')}"


def find_keys(name: str) -> list[str]:
    """Find the keys that a flag, or a key in another section, names: "workload.data_gib" of "--data-gib"."""
    key = name.lstrip("-").replace("-", "_")
    wanted = {key, FLAG_FIELDS.get(key, key)}
    return [
        ".".join(filter(None, (section, found)))
        for section, model in SECTIONS.items()
        for found in model.model_fields
        if found in wanted
    ]


def request_from_dict(data: Mapping[str, Any], *, origin: str = "the request") -> FleetRequest:
    """Check ``data`` as a FleetRequest; InvalidInputError names every wrong field with its place, value and limit."""
    try:
        return FleetRequest.model_validate(data)
    except ValidationError as error:
        raise InvalidInputError(
            f"{origin} is not valid:\n    " + "\n    ".join(describe_invalid(error, hint=_hint)),
            next_step="docs/request.md has every key, gpufleet recommend --help every flag",
        ) from error


def _hint(problem: Mapping[str, Any]) -> str:
    """The value or key that was meant, in words; empty where none is near."""
    near: list[str] = []
    if problem["loc"][-1:] == ("method",) and (other := OTHER_METHODS.get(str(problem["input"]).lower())):
        return f"; {other}"
    if problem["type"] == "literal_error":
        near = near_names(str(problem["input"]), re.findall(r"'([^']+)'", problem["ctx"]["expected"]))
    elif problem["type"] == "extra_forbidden":
        *places, key = (str(part) for part in problem["loc"] if isinstance(part, str))
        section = places[-1] if places else ""
        near = near_names(key, SECTIONS.get(section, FleetRequest).model_fields) or find_keys(key)
    return f"; did you mean {' or '.join(near)}?" if near else ""


def read_request_file(path: Path) -> dict[str, Any]:
    """Read a request's YAML as a mapping, unchecked, so that flags can be laid over it; else InvalidInputError."""
    # Imported here: a request made of flags does not need them.
    from ruamel.yaml import YAML
    from ruamel.yaml.constructor import DuplicateKeyError
    from ruamel.yaml.error import YAMLError

    try:
        # YAML 1.2: 1:30 is text and not 90, "no" is text and not false, and a key given twice is an error.
        data = YAML(typ="safe", pure=True).load(path.read_text(encoding="utf-8-sig"))
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInputError(
            unreadable(path, error),
            next_step="gpufleet init FOLDER lays out an example; gpufleet recommend --help has the flags of one",
        ) from error
    except (YAMLError, RecursionError, ValueError) as error:
        if isinstance(error, DuplicateKeyError):
            error.note = None  # how a program lets the second key win
        raise InvalidInputError(f"{path} is not YAML: {error}", next_step="mend the file, or use flags") from error
    if not isinstance(data, dict) or not all(isinstance(key, str) for key in data):
        kind = "nothing" if data is None else f"a {type(data).__name__}"
        raise InvalidInputError(f"{path} holds {kind}", limit=_REQUEST_FORM, next_step="see examples/request.yaml")
    if "schema_version" in data:
        raise InvalidInputError(
            f"{path} holds {'plans' if 'plans' in data else 'a plan'}, and no request",
            limit=_REQUEST_FORM,
            next_step=f"gpufleet preview {path}; a request is as in examples/request.yaml",
        )
    return data
