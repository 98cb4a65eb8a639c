"""Adds actions to moto, which calls the method named after the action on the service's response class."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def teach(service: type, *actions: Callable[[Any], Any]) -> None:
    """Make each of ``actions`` a method of moto's response class ``service``, over its own of that name if any.

    An action answers with an ActionResult, or in moto's older services with the response's text.
    """
    for action in actions:
        setattr(service, action.__name__, action)
