"""Errors of a request name what was meant, and its reference page has every key."""

from __future__ import annotations

from datetime import date
from pathlib import Path
from typing import Any, get_args

import click
import pytest
from pydantic_core.core_schema import ErrorType

from optimizer.commands.recommend import command as recommend
from optimizer.contract.errors import InvalidInputError, describe_wrong
from optimizer.contract.request import (
    SECTIONS,
    Constraints,
    FleetRequest,
    Workload,
    find_keys,
    flag_of,
    read_request_file,
    request_from_dict,
)
from tools.request_reference import REFERENCE, reference

GOOD: dict[str, Any] = {"model": "gpt2-xl", "workload": {"tokens": "1B", "seq_len": 1024}}


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"constraints": {"sharding": ["fsdp"]}}, "did you mean zero3?"),
        ({"constraints": {"parallelism": ["tp"]}}, "did you mean tensor?"),
        ({"constraints": {"purchase_options": ["ondemand"]}}, "did you mean on-demand?"),
        ({"constraints": {"budget": 3000}}, "did you mean budget_usd?"),
        ({"workload": {"tokens": 5, "method": "dpo"}}, "plan it as full or lora over the tokens of both answers"),
        ({"workload": {"tokens": 5, "framework": "deepspeed"}}, "did you mean megatron-deepspeed?"),
        ({"workload": {"tokens": 5, "seqlen": 1024}}, "did you mean seq_len?"),
        ({"seq_len": 1024}, "did you mean workload.seq_len?"),
        ({"max-nodes": 4}, "did you mean constraints.max_nodes?"),
        ({"compile": True}, "did you mean workload.compiled?"),
        ({"constraints": {"existing_reservations": [{"instance": "p5.48xlarge"}]}}, "did you mean instance_type?"),
        ({"objective": "fame"}, "(got 'fame')\n"),
    ],
)
def test_a_near_name_is_suggested(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidInputError) as caught:
        request_from_dict(GOOD | changes)
    assert says in str(caught.value)


def test_every_flag_and_key_of_a_request_leads_to_the_other() -> None:
    fields = {field for model in (FleetRequest, Workload, Constraints) for field in model.model_fields}
    flags = {parameter.name: parameter.opts[0] for parameter in recommend.params if parameter.name in fields}
    for field in fields:
        assert any(key.rpartition(".")[2] == field for key in find_keys(flag_of(field)))
        assert flags.get(field, flag_of(field)) == flag_of(field)
        given = f"--{field.replace('_', '-')}"
        if flags.get(field) != given:
            with pytest.raises(click.UsageError, match=f"mean (the key .*)?{flags.get(field, f'{field} of ')}"):
                recommend.make_context("recommend", [given, "1"])


@pytest.mark.parametrize(
    ("constraints", "says"),
    [
        ({"regions": "us-east-1"}, "constraints.regions: a list is needed (got 'us-east-1')\n"),
        (
            {"deadline_hours": date(2026, 12, 1)},  # YAML's 2026-12-01
            "'2026-12-01' is not a duration; write hours (48 or 48h), days (3d) or minutes (90min)\n",
        ),
        ({"budget_usd": "1e308"}, "constraints.budget_usd: must be at most 1e+12 ("),
        ({"existing_reservations": [{"usd_per_hour": 1e308}]}, "0.usd_per_hour: must be at most 1e+12 ("),
        (
            {"budget_usd": "lots"},
            "write a number, or one with a suffix, like 5k\n",
        ),
        ({"parallelism": []}, "constraints.parallelism: must have at least 1 entry (got [])\n"),
        ({"deadline_hours": "9999999999d"}, "constraints.deadline_hours: must be at most "),
    ],
)
def test_a_value_of_another_kind_or_beyond_reason_is_refused_in_words(constraints: dict[str, Any], says: str) -> None:
    """A "valid tuple" was needed; a budget of 1e308 was printed with its 300 digits."""
    with pytest.raises(InvalidInputError) as caught:
        request_from_dict(GOOD | {"constraints": constraints})
    assert says in str(caught.value)


@pytest.mark.parametrize("model", [[1, 2], None, 7.5, True])
def test_a_model_of_another_kind_is_refused_once(model: Any) -> None:
    """The kinds of the union had a line each ("model.dict[str,any]"), and true was a model of one parameter."""
    with pytest.raises(InvalidInputError) as caught:
        request_from_dict(GOOD | {"model": model})
    assert str(caught.value).count("model: ") == 1 and "is needed (got " in str(caught.value)


@pytest.mark.parametrize("kind", get_args(ErrorType))
def test_no_word_of_pydantics_is_shown(kind: str) -> None:
    context = dict.fromkeys(("gt", "ge", "lt", "le", "expected", "pattern", "min_length", "max_length"), 1)
    said = describe_wrong({"type": kind, "msg": "Input should be", "ctx": context})
    assert ("Input should be" in said) == (kind == "value_error")


def test_a_missing_file_says_how_to_get_one(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match=r"reqest.yaml cannot be read: No such file or directory\n") as caught:
        read_request_file(tmp_path / "reqest.yaml")
    assert "next: gpufleet init FOLDER" in str(caught.value)


def test_the_reference_is_current_and_has_every_key() -> None:
    text = reference()
    assert REFERENCE.read_text(encoding="utf-8") == text, "run `make docs`"
    for model in SECTIONS.values():
        for name, field in model.model_fields.items():
            assert f"| `{name}` |" in text
            assert field.description, f"{model.__name__}.{name} has no description"
