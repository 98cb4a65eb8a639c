"""Names and texts of the declared resources against the lengths and patterns of AWS's own API models (botocore's).

The AWS provider checks some of them, the emulator hardly any: AWS would refuse the rest in the middle of `pulumi up`.
"""

from __future__ import annotations

import json
import re
from functools import cache
from typing import Any

import botocore.session
import pytest
from botocore.model import ServiceModel

from infra.offline.preview import Resource, resources
from tests.infra.deployed import ALARM, FULL, VARIANTS, variant
from tests.plans import sample_plan

# Argument of a resource, and where the API's model has it.
ARGUMENTS = {
    ("Alias", "name"): ("kms", "CreateAlias", "AliasName"),
    ("Budget", "name"): ("budgets", "CreateBudget", "Budget.BudgetName"),
    ("EventRule", "description"): ("events", "PutRule", "Description"),
    ("EventRule", "eventPattern"): ("events", "PutRule", "EventPattern"),
    ("EventRule", "name"): ("events", "PutRule", "Name"),
    ("Function", "description"): ("lambda", "CreateFunction", "Description"),
    ("Function", "name"): ("lambda", "CreateFunction", "FunctionName"),
    ("Group", "name"): ("autoscaling", "CreateAutoScalingGroup", "AutoScalingGroupName"),
    ("Key", "description"): ("kms", "CreateKey", "Description"),
    ("LaunchTemplate", "description"): ("ec2", "CreateLaunchTemplate", "VersionDescription"),
    ("LifecycleHook", "name"): ("autoscaling", "PutLifecycleHook", "LifecycleHookName"),
    ("LogGroup", "name"): ("logs", "CreateLogGroup", "logGroupName"),
    ("MetricAlarm", "alarmDescription"): ("cloudwatch", "PutMetricAlarm", "AlarmDescription"),
    ("Role", "description"): ("iam", "CreateRole", "Description"),
    ("Role", "name"): ("iam", "CreateRole", "RoleName"),
    ("Schedule", "scheduledActionName"): ("autoscaling", "PutScheduledUpdateGroupAction", "ScheduledActionName"),
    ("ServiceLinkedRole", "customSuffix"): ("iam", "CreateServiceLinkedRole", "CustomSuffix"),
    ("ServiceLinkedRole", "description"): ("iam", "CreateServiceLinkedRole", "Description"),
}
# Limit that EC2's model lacks: https://docs.aws.amazon.com/AWSEC2/latest/APIReference/API_CreateSecurityGroup.html
# https://docs.aws.amazon.com/AWSEC2/latest/APIReference/API_SecurityGroupRuleRequest.html
RULE_TEXT = re.compile(r"[a-zA-Z0-9 ._\-:/()#,@\[\]+=&;{}!$*]{0,255}")
RULES = ("SecurityGroup", "SecurityGroupIngressRule", "SecurityGroupEgressRule")
# Characters of a policy without white space, and what is not counted so in bytes.
# https://docs.aws.amazon.com/IAM/latest/UserGuide/reference_iam-quotas.html
# https://docs.aws.amazon.com/kms/latest/developerguide/resource-limits.html
# https://docs.aws.amazon.com/vpc/latest/privatelink/vpc-limits-endpoints.html
# https://docs.aws.amazon.com/AmazonS3/latest/userguide/bucket-policies.html
POLICY_SIZES = {"RolePolicy": 10_240, "Key": 32_768, "VpcEndpoint": 20_480, "BucketPolicy": 20_480}
TRUST_SIZE = 2_048
# https://docs.aws.amazon.com/lambda/latest/dg/gettingstarted-limits.html
VARIABLES_BYTES = 4_096

LONG: dict[str, Any] = {"job": {"model": "an/organisation/" + 30 * "long-model-name-"}}
# The longest name Pulumi allows, with every kind of character.
STACK = "Team_A.Llama-" + 87 * "x"


@cache
def declared() -> list[Resource]:
    everything = [resource for name in VARIANTS for resource in variant(name)]
    for config in (FULL, ALARM):
        everything += resources(sample_plan(**LONG), stack=STACK, config=config)
    return [resource for resource in everything if resource.type.startswith("aws:")]


@cache
def model(service: str) -> ServiceModel:
    return botocore.session.get_session().get_service_model(service)


def problem(value: str, service: str, operation: str, path: str) -> str | None:
    shape: Any = model(service).operation_model(operation).input_shape
    for part in path.split("."):
        shape = shape.members[part]
    limits = shape.metadata
    if not limits.get("min", 0) <= len(value) <= limits.get("max", len(value)):
        return f"has {len(value)} characters, AWS takes {limits}"
    # Java's regular expressions differ: a flag in the middle, and surrogate pairs.
    pattern = (
        limits.get("pattern", "").replace("(?i)", "").replace(r"\uD800\uDC00-\uDBFF\uDFFF", r"\U00010000-\U0010ffff")
    )
    return f"does not match {pattern}" if pattern and not re.fullmatch(pattern, value) else None


@pytest.mark.parametrize(("kind", "argument"), ARGUMENTS)
def test_aws_takes_names_and_texts(kind: str, argument: str) -> None:
    resources_of_kind = [resource.inputs for resource in declared() if resource.kind == kind]
    values = {given[argument] for given in resources_of_kind if argument in given}
    assert values
    assert {value: problem(value, *ARGUMENTS[kind, argument]) for value in values} == dict.fromkeys(values)


def test_ec2_takes_the_descriptions_of_security_groups() -> None:
    texts = {resource.inputs["description"] for resource in declared() if resource.kind in RULES}
    assert len(texts) > 8
    assert [text for text in texts if not RULE_TEXT.fullmatch(text)] == []
    assert not RULE_TEXT.fullmatch("The cluster's API")


def test_policies_and_variables_have_room() -> None:
    for resource in declared():
        kind, given = resource.kind, resource.inputs
        if kind in POLICY_SIZES:
            assert len(re.sub(r"\s", "", given["policy"])) <= POLICY_SIZES[kind] / 2, resource.name
        if kind == "Role":
            assert len(given["assumeRolePolicy"]) <= TRUST_SIZE / 2, resource.name
        if kind == "Function":
            assert len(json.dumps(given["environment"]["variables"])) <= VARIABLES_BYTES / 2


def test_cloudwatch_takes_each_alarm() -> None:
    """At most a day of periods; with metric math exactly one result, and ids that begin with a lower-case letter.

    https://docs.aws.amazon.com/AmazonCloudWatch/latest/APIReference/API_PutMetricAlarm.html
    """
    alarms = [resource.inputs for resource in declared() if resource.kind == "MetricAlarm"]
    assert alarms
    for alarm in alarms:
        queries = alarm.get("metricQueries", [])
        (period,) = {query["metric"]["period"] for query in queries if "metric" in query} or {alarm["period"]}
        assert 60 <= period * alarm["evaluationPeriods"] <= 86_400
        assert alarm.get("datapointsToAlarm", 1) <= alarm["evaluationPeriods"]
        assert [query.get("returnData", False) for query in queries].count(True) == (1 if queries else 0)
        assert all(query["id"][0].islower() and query["id"].isalnum() for query in queries)
        assert len(queries) <= 10
