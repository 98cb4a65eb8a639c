"""Behaviour of AWS that moto lacks or invents and the program's resources need; see README.md."""

from __future__ import annotations

import importlib
import pkgutil


def install() -> None:
    """Extend the moto of this process, which serves nothing else, by each module that has an ``install``."""
    for found in pkgutil.iter_modules(__path__):
        module = importlib.import_module(f"{__name__}.{found.name}")
        if hasattr(module, "install"):
            module.install()
