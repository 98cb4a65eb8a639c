"""From a model, a budget and a deadline to a FleetPlan: ``from optimizer import recommend`` (docs/quick-start.md)."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from optimizer.recommend import recommend as recommend
