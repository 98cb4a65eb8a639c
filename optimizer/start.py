"""Entry of the ``gpufleet`` console script: Ctrl-C while the command line is imported ends without a traceback."""

import sys


def main() -> None:
    """Import and run the command line."""
    try:
        from optimizer.cli import main as run

        run()
    except KeyboardInterrupt:
        sys.exit("error: interrupted")
