"""The wheel of this checkout, unpacked as pip would install it."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from collections.abc import Mapping
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]


def install_wheel(folder: Path) -> Path:
    """Build the wheel and unpack it into ``folder``; return the folder of its packages.

    The environment already has its dependencies; an installation of them takes a minute or two.
    """
    build = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(folder / "dist")]
    subprocess.run(build, cwd=REPOSITORY, check=True, capture_output=True, text=True, timeout=600)
    (wheel,) = (folder / "dist").iterdir()
    site = folder / "site-packages"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    return site


def run_shell(
    script: str, *, site: Path, folder: Path, environment: Mapping[str, str] | None = None, timeout_s: float = 600
) -> str:
    """Run a shell script of ``gpufleet`` commands in ``folder`` with the unpacked wheel; return its output."""
    python = f'gpufleet() {{ "{sys.executable}" -c "from optimizer.start import main; main()" "$@"; }}\n'
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", python + script],
        cwd=folder,
        # The wheel's packages come before the checkout's.
        env=os.environ | {"PYTHONPATH": str(site), "PYTHONSAFEPATH": "1", **(environment or {})},
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )
    assert done.returncode == 0, f"{script}\n{done.stdout}\n{done.stderr}"
    return done.stdout
