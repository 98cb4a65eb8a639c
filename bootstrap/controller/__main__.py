"""``python -m bootstrap.controller``: one tick by hand, with the settings in GPUFLEET_CONTROL."""

from __future__ import annotations

from bootstrap.controller.handler import handler

if __name__ == "__main__":
    handler({}, None)
