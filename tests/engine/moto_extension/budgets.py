"""AWS Budgets: changes, first tags, and who is told; moto 5.2 keeps the subscribers and answers nothing about them.

https://docs.aws.amazon.com/aws-cost-management/latest/APIReference/API_Operations_AWS_Budgets.html
"""

from __future__ import annotations

import json
from typing import Any

from moto.budgets.exceptions import NotFoundException
from moto.budgets.models import Budget, Notification
from moto.budgets.responses import BudgetsResponse

from tests.engine.moto_extension.teaching import teach

_create = BudgetsResponse.create_budget


def install() -> None:
    """Put the actions into moto's Budgets."""
    teach(BudgetsResponse, create_budget, update_budget, describe_subscribers_for_notification, list_tags_for_resource)


def create_budget(self: BudgetsResponse) -> str:
    """CreateBudget with ResourceTags."""
    answer = _create(self)
    budget: Any = _find(self, self._get_param("Budget")["BudgetName"])
    budget.tags = _by_key(self._get_param("ResourceTags"))
    return answer


def update_budget(self: BudgetsResponse) -> str:
    """UpdateBudget: the new budget in place of the old one; notifications and tags stay."""
    new = self._get_param("NewBudget")
    budget = _find(self, new["BudgetName"])
    budget.budget = {**Budget(new, []).budget, "TimePeriod": new.get("TimePeriod") or budget.budget["TimePeriod"]}
    return json.dumps({})


def describe_subscribers_for_notification(self: BudgetsResponse) -> str:
    """DescribeSubscribersForNotification."""
    budget, wanted = _find(self, self._get_param("BudgetName")), self._get_param("Notification")
    notification = next((item for item in budget.notifications if _is_a(item, wanted)), None)
    if notification is None:
        raise NotFoundException("Unable to get subscribers - the notification doesn't exist.")
    return json.dumps({"Subscribers": notification.subscribers, "NextToken": None})


def _is_a(notification: Notification, wanted: dict[str, Any]) -> bool:
    # ThresholdType is optional, and a percentage by default.
    default = {"ThresholdType": "PERCENTAGE"}
    keys = ("NotificationType", "ComparisonOperator", "Threshold", "ThresholdType")
    return all({**default, **notification.details}.get(key) == {**default, **wanted}.get(key) for key in keys)


def list_tags_for_resource(self: BudgetsResponse) -> str:
    """ListTagsForResource."""
    # arn:aws:budgets::ACCOUNT:budget/NAME
    budget: Any = _find(self, self._get_param("ResourceARN").partition(":budget/")[2])
    return json.dumps({"ResourceTags": [{"Key": key, "Value": value} for key, value in budget.tags.items()]})


def _by_key(tags: list[dict[str, str]] | None) -> dict[str, str]:
    return {tag["Key"]: tag["Value"] for tag in tags or []}


def _find(response: BudgetsResponse, name: str) -> Budget:
    account = response._get_param("AccountId") or response.current_account
    budgets = response.backend.budgets[account]
    if name not in budgets:
        raise NotFoundException(f"Unable to get budget: {name} - the budget doesn't exist.")
    return budgets[name]
