"""Events between two runs of the engine: the controller's ticks, and the nodes' answers.

Nothing executes Lambda functions or boots nodes here, so the test calls the controller with the settings of the
deployed function, once as Lambda would (its own archive in a process of its own) and then in this process, where the
clock is the test's; and it completes lifecycle hooks as a node does.
"""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import zipfile
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from bootstrap.contract.state import ControllerState
from bootstrap.controller.clients import Clients
from bootstrap.controller.handler import tick as controller_tick
from infra.naming import Names
from tests.engine.deployment import REGION, Deployment
from tests.engine.facts import ACCOUNT, controller_settings

MINUTE = timedelta(minutes=1)


def names(deployed: Deployment) -> Names:
    """Physical names of the stack."""
    return Names(stack=deployed.stack.name, account_id=ACCOUNT, region=REGION, partition="aws")


def function(deployed: Deployment) -> dict[str, Any]:
    """The controller's function as Lambda describes it."""
    name = names(deployed).controller
    configuration: dict[str, Any] = deployed.aws("lambda").get_function_configuration(FunctionName=name)
    return configuration


def tick(deployed: Deployment, now: datetime) -> ControllerState:
    """Run one tick at ``now``."""
    services = ("autoscaling", "ec2", "s3", "sqs", "cloudwatch")
    clients = Clients(**{service: deployed.aws(service) for service in services}, launching=deployed.aws("autoscaling"))
    return controller_tick(clients, controller_settings(deployed), now)


def invoke(deployed: Deployment, scratch: Path) -> dict[str, Any]:
    """Run one tick as Lambda does: the uploaded archive's handler, alone, with the function's variables."""
    described, code = function(deployed), scratch / "function"
    (archive,) = [
        item["Key"]
        for item in deployed.aws("s3").list_objects_v2(Bucket=deployed.stack.outputs()["bucket"])["Contents"]
        if "/controller-" in item["Key"]
    ]
    body = deployed.aws("s3").get_object(Bucket=deployed.stack.outputs()["bucket"], Key=archive)["Body"].read()
    with zipfile.ZipFile(io.BytesIO(body)) as content:
        content.extractall(code)
    module, _, name = described["Handler"].rpartition(".")
    program = f"import json; from {module} import {name}; print(json.dumps({name}({{}}, None)))"
    settings = {key: value for key, value in deployed.stack.env.items() if key.startswith("AWS_")}
    settings["AWS_ACCESS_KEY_ID"] = "controller"  # the deployer's calls are recorded
    done = subprocess.run(
        # Without the repository's modules: Lambda has only the archive's.
        [sys.executable, "-c", program],
        cwd=code,
        env={"PATH": os.environ["PATH"], **settings, **described["Environment"]["Variables"]},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def states(deployed: Deployment) -> dict[str, str]:
    """Lifecycle state of each instance of the stack's groups."""
    return {item["InstanceId"]: item["LifecycleState"] for group in groups(deployed) for item in group["Instances"]}


def groups(deployed: Deployment) -> list[dict[str, Any]]:
    """The stack's groups as AWS describes them."""
    names_ = list(names(deployed).groups)
    described = deployed.aws("autoscaling").describe_auto_scaling_groups(AutoScalingGroupNames=names_)
    found: list[dict[str, Any]] = described["AutoScalingGroups"]
    return found


def complete(deployed: Deployment, waiting: str) -> list[str]:
    """Let the instances that are ``waiting`` ("Pending:Wait", "Terminating:Wait") go on, as their nodes do."""
    known = names(deployed)
    hook = {"Pending:Wait": known.launch_hook, "Terminating:Wait": known.terminate_hook}[waiting]
    held = {
        item["InstanceId"]: group["AutoScalingGroupName"]
        for group in groups(deployed)
        for item in group["Instances"]
        if item["LifecycleState"] == waiting
    }
    for instance, group in held.items():
        deployed.aws("autoscaling").complete_lifecycle_action(
            AutoScalingGroupName=group,
            LifecycleHookName=hook,
            InstanceId=instance,
            LifecycleActionResult="CONTINUE",
        )
    return list(held)
