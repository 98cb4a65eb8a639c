"""Calibrate to a user's measured runs, and judge the result by runs left out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from bootstrap.contract.words import counted
from optimizer.contract.errors import InvalidInputError
from optimizer.performance.calibration import Calibration
from optimizer.performance.fit import adapt, left_out_errors, residuals
from optimizer.performance.measured_runs import MeasuredRun, Refused, log_errors, throughput_error
from optimizer.performance.types import Floats


@dataclass(frozen=True, kw_only=True)
class CalibrationReport:
    """A calibration to ``rows``, with relative errors of predicted throughput, above 0 where predicted too fast.

    ``errors`` has those of the shipped calibration (before), of the new one (after), and of one that never saw the
    row's model (left_out), or where all are of one the row itself.
    """

    calibration: Calibration
    rows: Sequence[MeasuredRun]
    refused: Sequence[Refused]
    errors: dict[str, Floats]
    left_out_by: str


def calibrate(
    rows: Sequence[MeasuredRun], refused: Sequence[Refused], base: Calibration, *, origin: str
) -> CalibrationReport:
    """Fit a calibration to ``rows`` of ``origin``, from ``base``."""
    if not rows:
        first = f"; line {refused[0].line}: {refused[0].reason.splitlines()[0]}" if refused else ""
        raise InvalidInputError(
            f"{origin} holds {counted(0, 'run')} that can be used and {len(refused)} that cannot{first}",
            limit="at least 1",
            next_step="gpufleet calibrate --template prints the columns and an example",
        )
    left_out = left_out_errors(rows, lambda train: adapt(train, base))
    update = {
        "residuals": residuals(rows, left_out, base),
        "rows": base.rows + len(rows),
        "source": f"your {counted(len(rows), 'measured run')} ({origin}), on top of {base.source}",
        "as_of": datetime.now(UTC).date(),
    }
    calibration = adapt(rows, base).model_copy(update=update)
    log_error = {"before": log_errors(rows, base), "after": log_errors(rows, calibration), "left_out": left_out}
    models = {(row.suite, row.setup.model.name) for row in rows}
    return CalibrationReport(
        calibration=calibration,
        rows=rows,
        refused=refused,
        errors={when: throughput_error(error) for when, error in log_error.items()},
        left_out_by="model" if len(models) > 1 else "run",
    )
