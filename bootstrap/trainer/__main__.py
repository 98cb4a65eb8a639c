"""Entry of the reference trainer: one process of ``torchrun -m bootstrap.trainer``."""

from __future__ import annotations

import logging
import os
import sys

from bootstrap.contract.report import EXIT_AT_FAULT
from bootstrap.trainer import oom
from bootstrap.trainer.config import parse_config
from bootstrap.trainer.run import train
from bootstrap.training.errors import ConfigurationError
from bootstrap.training.leaving import end_process


def main() -> None:
    """Train; exits with 75 after a notice, 78 where the settings are at fault."""
    rank = int(os.environ.get("RANK", "0"))
    logging.basicConfig(
        level=logging.INFO if rank == 0 else logging.WARNING, format=f"%(asctime)s rank {rank} %(message)s"
    )
    try:
        config = parse_config(sys.argv[1:], os.environ)
        train(config)
    except (ConfigurationError, oom.OutOfMemoryError) as error:
        if rank == 0 or isinstance(error, oom.OutOfMemoryError):
            logging.getLogger(__name__).error("%s", error)
        sys.exit(EXIT_AT_FAULT)
    end_process(0)


if __name__ == "__main__":
    main()
