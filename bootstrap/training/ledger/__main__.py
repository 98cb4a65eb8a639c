"""``python -m bootstrap.training.ledger PATH|s3://BUCKET/PREFIX [--format json]``: print a ledger's summary."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict

from bootstrap.training.errors import TrainingError
from bootstrap.training.ledger.summary import read_ledger, table


def main(arguments: list[str] | None = None) -> int:
    """Print the summary; 1 where there is none."""
    parser = argparse.ArgumentParser(
        prog="python -m bootstrap.training.ledger", description="Summary of a training run's seconds and dollars."
    )
    parser.add_argument("path", help="ledger file, checkpoint directory or s3://BUCKET/PREFIX of the checkpoints")
    parser.add_argument("--format", choices=("table", "json"), default="table")
    options = parser.parse_args(arguments)
    try:
        summary = read_ledger(options.path)
    except TrainingError as error:
        sys.stderr.write(f"ledger: {error}\n")
        return 1
    text = json.dumps(asdict(summary), indent=2) if options.format == "json" else table(summary)
    sys.stdout.write(text + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
