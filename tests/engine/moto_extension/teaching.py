"""How an action gets into moto: moto calls the method named after the action on the service's response class."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from moto.core.responses import ActionResult


def teach(service: type, *actions: Callable[[Any], ActionResult]) -> None:
    """Make each of ``actions`` a method of moto's response class ``service``, over its own of that name if any."""
    for action in actions:
        setattr(service, action.__name__, action)
