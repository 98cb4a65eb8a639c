"""The schemas describe what the commands read and write."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator, ValidationError
from ruamel.yaml import YAML

from optimizer.commands.schema import NAMES
from optimizer.performance.rows import Row
from tests.unit.optimizer.commands.conftest import Gpufleet
from tests.wheel import REPOSITORY

TINY = ("recommend", "--model", "llama-3.2-1b", "--tokens", "1B", "--seq-len", "2048", "--format", "json")


@pytest.fixture
def validators(gpufleet: Gpufleet) -> dict[str, Any]:
    schemas = {name: json.loads(gpufleet("schema", name)[1]) for name in NAMES}
    for schema in schemas.values():
        Draft202012Validator.check_schema(schema)
    return {name: Draft202012Validator(schema) for name, schema in schemas.items()}


@pytest.mark.parametrize("further", [(), ("--deadline", "1min", "--max-nodes", "1")])
def test_an_answer_and_its_plans_are_valid(
    gpufleet: Gpufleet, validators: dict[str, Any], further: tuple[str, ...]
) -> None:
    code, out, _ = gpufleet(*TINY, *further)
    answer = json.loads(out)
    validators["answer"].validate(answer)
    assert answer["plans"] or (code == 3 and answer["nearest"] and answer["rejected"])
    for plan in answer["plans"]:
        validators["plan"].validate(plan)
        for tuning, wrong in (({"method": "dpo"}, "'dpo' is not one of"), ({"lora_rank": 0}, "less than the minimum")):
            with pytest.raises(ValidationError, match=wrong):
                validators["plan"].validate(plan | {"job": plan["job"] | {"tuning": tuning}})
    with pytest.raises(ValidationError, match="'invented' was unexpected"):
        validators["answer"].validate(answer | {"invented": 1})


@pytest.mark.parametrize("path", sorted((REPOSITORY / "examples").rglob("request*.yaml")), ids=lambda path: path.name)
def test_a_request_is_valid_as_people_write_it(validators: dict[str, Any], path: Path) -> None:
    request = json.loads(json.dumps(YAML(typ="safe").load(path), default=str))
    validators["request"].validate(request)
    workload = {"tokens": "2,000M", "seq_len": 8192, "frozen": 4}
    limits = {"budget_usd": "5k", "deadline_hours": "3d", "max_nodes": 4}
    validators["request"].validate({**request, "workload": workload, "constraints": limits})
    wrongs: list[dict[str, Any]] = [{"budget": 5}, {"objective": "cheap"}]
    for wrong in (*wrongs, *({"workload": {"tokens": tokens}} for tokens in (["2B"], 10**16))):
        with pytest.raises(ValidationError):
            validators["request"].validate({**request, **wrong})


def test_a_row_of_estimate_is_valid(gpufleet: Gpufleet, validators: dict[str, Any], tmp_path: Path) -> None:
    runs = tmp_path / "runs.csv"
    runs.write_text(
        "model,seq_len,gpu,gpus,micro_batch,mine\nllama-3.1-8b,2048,h100-80gb,8,1,a\nllama-3.1-8b,2048,h100-80gb,x,1,b\n"
    )
    code, out, _ = gpufleet("estimate", "--batch", str(runs), "--format", "json")
    rows = json.loads(out)
    assert code == 0 and [bool(row["error"]) for row in rows] == [False, True]
    for row in rows:
        validators["report-row"].validate(row)
    assert validators["report-row"].schema["properties"].keys() >= Row.model_fields.keys()
    with pytest.raises(ValidationError):
        validators["report-row"].validate(rows[0] | {"fits": "perhaps"})
