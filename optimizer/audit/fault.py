"""``Fault``: a number of a plan that disagrees with the others or with the catalog."""

from __future__ import annotations

from dataclasses import dataclass

AGAIN = "make the plan anew with `gpufleet recommend`, with what you want to change in its request"


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """One field of a plan with its value, the limit that it breaks, why there is one, and the next step."""

    field: str
    value: str
    limit: str
    why: str
    next_step: str

    def __str__(self) -> str:
        return f"{self.field} is {self.value}, limit {self.limit}: {self.why}"
