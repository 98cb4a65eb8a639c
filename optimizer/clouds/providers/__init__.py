"""The clouds that are compared with AWS: one file each, which defines ``CLOUD``; a new file is a new cloud."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

from optimizer.clouds.cloud import Cloud


def _load_clouds() -> dict[str, Cloud]:
    modules = [import_module(f"{__name__}.{path.stem}") for path in Path(__file__).parent.glob("[!_]*.py")]
    return {cloud.name: cloud for cloud in sorted((module.CLOUD for module in modules), key=lambda cloud: cloud.place)}


# By name, in the order of their places.
CLOUDS: dict[str, Cloud] = _load_clouds()
