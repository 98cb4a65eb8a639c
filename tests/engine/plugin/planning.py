"""Terraform core's part of a plan: the proposed new state it hands to a provider.

Follows ProposedNew of Terraform (internal/plans/objchange/objchange.go): what the configuration says, and for what the
provider computes and the configuration leaves out, the value from before (null on create; the provider itself marks
what it will compute as unknown).
"""

from __future__ import annotations

from tests.engine.plugin.schema import Block, NestedBlock, Nesting
from tests.engine.plugin.values import TerraformObject, is_unknown


def proposed_new_state(block: Block, config: TerraformObject, prior: TerraformObject | None) -> TerraformObject:
    """The state to propose for ``config`` where ``prior`` is the state so far (None on create)."""
    proposed = dict(config)
    for name, attribute in block.attributes.items():
        if attribute.computed and config[name] is None:
            proposed[name] = (prior or {}).get(name)
    for name, nested in block.blocks.items():
        value, before = config[name], (prior or {}).get(name)
        if is_unknown(value) or value is None:
            continue
        if nested.nesting is Nesting.LIST:
            old_items = before or []
            proposed[name] = [
                _proposed_item(nested, item, old_items[index] if index < len(old_items) else None)
                for index, item in enumerate(value)
            ]
        elif nested.nesting is Nesting.SET:
            proposed[name] = _proposed_set(nested, value, list(before or []))
        else:
            proposed[name] = proposed_new_state(nested.block, value, before)
    return proposed


def _proposed_item(nested: NestedBlock, item: TerraformObject, before: TerraformObject | None) -> TerraformObject:
    return item if is_unknown(item) else proposed_new_state(nested.block, item, before)


def _proposed_set(
    nested: NestedBlock, items: list[TerraformObject], unused: list[TerraformObject]
) -> list[TerraformObject]:
    """Each item takes its computed values from the first unused item that the configuration could have produced."""
    proposed = []
    for item in items:
        before = next(
            (old for old in unused if not is_unknown(item) and _could_come_from(nested.block, old, item)), None
        )
        if before is not None:
            unused.remove(before)
        proposed.append(_proposed_item(nested, item, before))
    return proposed


def _could_come_from(block: Block, state: TerraformObject, config: TerraformObject) -> bool:
    return all(
        config[name] == state.get(name) or (attribute.computed and config[name] is None)
        for name, attribute in block.attributes.items()
    )
