"""Entry of the reference trainer: one process of ``torchrun -m bootstrap.trainer``."""

from __future__ import annotations

import logging
import os
import sys

from bootstrap.contract.report import EXIT_AT_FAULT
from bootstrap.trainer import oom
from bootstrap.trainer.config import parse_config
from bootstrap.trainer.optimize import DivergedError
from bootstrap.trainer.run import train
from bootstrap.training.errors import ConfigurationError
from bootstrap.training.leaving import end_process


def main() -> None:
    """Train; exits with 75 after a notice, 78 where another start would end in the same way."""
    rank = int(os.environ.get("RANK", "0"))
    logging.basicConfig(
        level=logging.INFO if rank == 0 else logging.WARNING, format=f"%(asctime)s rank {rank} %(message)s"
    )
    is_alone = False
    try:
        config = parse_config(sys.argv[1:], os.environ)
        is_alone = True  # one rank's samples or disk may be at fault
        train(config)
    except (ConfigurationError, DivergedError, oom.OutOfMemoryError) as error:
        if rank == 0 or is_alone:
            logging.getLogger(__name__).error("%s", error)
        # At once: the other ranks fail when this one's connections close, and torchrun starts them again.
        end_process(EXIT_AT_FAULT)
    end_process(0)


if __name__ == "__main__":
    main()
