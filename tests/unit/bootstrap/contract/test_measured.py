"""The measured row: read back as written, read from a newer writer, and refused with the place of the error."""

from __future__ import annotations

import json
from typing import Any

import pytest

from bootstrap.contract.codec import FormatError, to_json, to_text
from bootstrap.contract.measured import MeasuredRow, object_name, parse
from tests.unit.bootstrap.contract.rows import measured_row


def document(**changes: Any) -> str:
    return json.dumps({**to_json(measured_row()), **changes})


def test_a_row_survives_its_object_and_a_newer_writer() -> None:
    row = measured_row()
    assert parse(to_text(row), "here") == row
    assert parse(document(a_later_field=1), "here") == row
    assert object_name("0123456789ab", "w1") == "measured/0123456789ab-w1.json"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "here is not JSON"),
        (document(gpus="8"), r"here\.gpus is '8', and must be a whole number"),
        (document(measured={}), "measured lacks"),
        (document(tokens_per_second_per_gpu=0), "tokens_per_second_per_gpu is 0.*above 0"),
        (document(schema_version=2), "schema_version is '2', and must be 1"),
        (json.dumps({"schema_version": 1}), "here lacks activation_checkpointing"),
    ],
)
def test_what_is_no_row_is_refused(text: str, message: str) -> None:
    with pytest.raises(FormatError, match=message):
        parse(text, "here")


def test_a_rows_cells_name_stack_run_and_versions() -> None:
    cells = measured_row().columns()
    assert cells["row_id"] == "0123456789ab-20261122T120000Z"
    assert cells["suite"] == "dev"
    assert "stack dev, run 0123456789ab, p5.48xlarge, 2026-11-22" in cells["source"]
    assert "torch 2.11.0" in cells["source"]
    assert MeasuredRow.__dataclass_fields__.keys() >= cells.keys() - {"row_id", "suite", "memory_kind", "source"}
