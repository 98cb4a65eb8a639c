"""``QuotaRoom``: the vCPUs that an account's quotas leave free in a region."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True, slots=True)
class QuotaRoom:
    """A quota of an account in a region, and what is in use under it, vCPUs.

    Attributes:
        increase: command that asks AWS for a value.
    """

    region: str
    name: str
    code: str
    value: float
    used: float
    increase: Callable[[float], str]

    @property
    def free(self) -> float:
        """vCPUs that further instances may have."""
        return max(0.0, self.value - self.used)


# By region, market and instance type; None where AWS names no quota. A region that is missing was not read.
Rooms = Mapping[tuple[str, Literal["on-demand", "spot"], str], QuotaRoom | None]
