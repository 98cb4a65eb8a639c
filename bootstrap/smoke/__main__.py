"""``python -m bootstrap.smoke``."""

from __future__ import annotations

import sys

from bootstrap.smoke.cli import main

if __name__ == "__main__":
    sys.exit(main())
