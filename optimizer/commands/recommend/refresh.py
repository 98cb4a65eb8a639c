"""``recommend --refresh``: reads today's spot prices of the types in play."""

from __future__ import annotations

import os

from bootstrap.contract.words import counted
from optimizer.catalog import Catalog, load
from optimizer.catalog.refresh import enabled_regions, refresh
from optimizer.catalog.snapshot import DIRECTORY_VARIABLE
from optimizer.commands.output import say, write_notes
from optimizer.commands.progress import steps
from optimizer.contract.errors import InvalidInputError
from optimizer.recommend import Recommendation

# Binding constraints that another price could loosen.
_OF_PRICE = ("budget", "price")


def refresh_spot_prices(answer: Recommendation) -> Catalog:
    """Read today's spot prices for the request of an answer and return the catalog with them.

    Raises:
        InvalidInputError: the catalog is a fixed one, or the request takes no spot nodes.
        GpufleetError: no region answered.
    """
    problem = answer.problem
    if os.environ.get(DIRECTORY_VARIABLE):
        raise InvalidInputError(
            f"--refresh is set, and {DIRECTORY_VARIABLE} names {os.environ[DIRECTORY_VARIABLE]}",
            why="a refresh writes the user's catalog, which is not read then",
            next_step=f"unset {DIRECTORY_VARIABLE}",
        )
    options = problem.request.constraints.purchase_options
    if "spot" not in options:
        raise InvalidInputError(
            f"--refresh is set, and purchase_options are {', '.join(options)}",
            limit="a request that may take spot nodes",
            next_step="add --purchase spot, or leave --refresh out",
        )
    ruled_out = {entry.instance_type for entry in answer.rejected if entry.binding_constraint not in _OF_PRICE}
    types = {instance.name for instance in problem.instance_types} - ruled_out
    regions = sorted(set(problem.regions) & set(enabled_regions()))
    if not types or not regions:
        return problem.catalog
    with steps("spot prices of regions", len(regions)) as advance:
        result = refresh(regions, spot_types=types, progress=advance)
    for region in result.answers:
        write_notes((*region.skipped, *region.failures))
    write_notes(result.dropped)
    say(f"spot prices of {counted(len(types), 'type')} in {counted(len(regions), 'region')} are of today", err=True)
    return load()
