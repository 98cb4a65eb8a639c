"""A stack of the repository's program, or of a test's, in an emulated AWS of its own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import yaml
from click.testing import CliRunner

from bootstrap.contract.requirements import read_pins
from infra.images import WITH_TORCH, WITHOUT_TORCH
from infra.wheels import TORCH_LIST, TRAINER_LIST
from optimizer.cli import cli
from optimizer.contract.plan import FleetPlan
from tests.engine import pulumi_cli
from tests.engine.emulated_aws import dlami_name, emulated_aws
from tests.engine.inventory import Client, clients
from tests.engine.pulumi_cli import REPOSITORY, Stack
from tests.infra.deployed import NEXT_WITH_LUSTRE_CLIENT

REGION = "us-east-1"
IMAGES = {
    **{dlami_name(one.parameter): one.architecture for one in (*WITH_TORCH.values(), *WITHOUT_TORCH.values())},
    NEXT_WITH_LUSTRE_CLIENT: "x86_64",
}
"""Machine images that are published: CPU architecture by name."""


@dataclass(frozen=True, kw_only=True)
class Tools:
    """Folder of the Pulumi CLI, and terraform-provider-aws."""

    pulumi: Path
    aws_provider: Path


# Scenarios run in threads, and a patch and CliRunner's streams are of the whole process.
_ALONE = threading.Lock()


@dataclass(frozen=True, kw_only=True)
class Deployment:
    """A stack and the emulated AWS it is deployed to."""

    stack: Stack
    aws: Client

    def set_plan(self, plan: FleetPlan) -> None:
        """Run ``gpufleet stack set PLAN --stack NAME``."""
        file = self.stack.project / "plan.json"
        file.write_text(plan.to_json(), encoding="utf-8")
        arguments = ["stack", "set", str(file), "--stack", self.stack.name, "--accept-stale-prices"]
        arguments += ["--directory", str(self.stack.project)]
        endpoint = {"AWS_ENDPOINT_URL": self.stack.env["AWS_ENDPOINT_URL"]}
        with _ALONE, patch.dict(os.environ, endpoint):
            result = CliRunner().invoke(cli, arguments, catch_exceptions=False)
        assert result.exit_code == 0, result.output

    def gpufleet(self, *arguments: str) -> str:
        """Run ``gpufleet ARGUMENTS`` as its user does, in the project's folder; return its standard output."""
        done = subprocess.run(
            [sys.executable, "-c", "from optimizer.start import main; main()", *arguments],
            cwd=self.stack.project,
            env=dict(self.stack.env),
            capture_output=True,
            text=True,
            timeout=pulumi_cli.TIME_LIMIT_S,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def set_config(self, values: Mapping[str, Any]) -> None:
        """Edit keys ``gpufleet:KEY`` of the stack's configuration file."""
        file = self.stack.project / f"Pulumi.{self.stack.name}.yaml"
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
        content["config"] |= {f"gpufleet:{key}": value for key, value in values.items()}
        file.write_text(yaml.safe_dump(content), encoding="utf-8")


@contextmanager
def deployment(
    tools: Tools, scratch: Path, name: str, *, attached: bool = True, packages: Path | None = None
) -> Iterator[Deployment]:
    """Start an emulated AWS and create the stack ``name`` of the project in ``scratch/project``.

    Args:
        tools: the engine and the provider.
        scratch: a folder of its own; what is in ``project`` there is the program.
        name: of the stack.
        attached: whether one plugin serves all runs; else each run starts its own from PATH, as a user's does.
        packages: folder of the program's packages; by default the project's.
    """
    plugins = scratch / "plugins"
    plugins.mkdir()
    pulumi_cli.write_plugin(plugins, tools.aws_provider)
    with emulated_aws(scratch, IMAGES) as endpoint:
        env = pulumi_cli.environment(
            pulumi=tools.pulumi, plugins=plugins, scratch=scratch, endpoint=endpoint, region=REGION
        )
        served: AbstractContextManager[dict[str, str]] = (
            pulumi_cli.attached_plugin(env) if attached else nullcontext({})
        )
        with served as plugin:
            # These packages come before the checkout's.
            env = env | plugin | {"PYTHONPATH": str(packages or scratch / "project")}
            stack = Stack(project=scratch / "project", name=name, env=env)
            stack.init()
            yield Deployment(stack=stack, aws=clients(endpoint, REGION))


PROGRAM = ("infra", "optimizer", "bootstrap")
"""Packages of the program: its own, the plan's, and the nodes'."""


def write_project(scratch: Path, name: str) -> None:
    """Make ``scratch/project``: the repository's program, and settings of the stack ``name`` beside the plan.

    All of it is copied: Pulumi writes a stack's configuration next to its project, and an edit of bootstrap/ while the
    test runs would be a change that an unchanged second up must find.
    """
    project, wheels = scratch / "project", scratch / "wheels.tar"
    project.mkdir(parents=True)
    for package in PROGRAM:
        shutil.copytree(REPOSITORY / package, project / package, ignore=shutil.ignore_patterns("__pycache__"))
    # Only the upload is tested; no node installs it.
    with tarfile.open(wheels, "w") as archive:
        for pin in read_pins(TRAINER_LIST.read_text(encoding="utf-8") + TORCH_LIST.read_text(encoding="utf-8")):
            archive.addfile(tarfile.TarInfo(f"{pin.name.replace('-', '_')}-{pin.version}-py3-none-any.whl"))
    text = (REPOSITORY / "Pulumi.yaml").read_text(encoding="utf-8")
    assert "virtualenv: .venv" in text
    # Read by newer language hosts than the pinned one, which takes python3 from PATH.
    text = text.replace("virtualenv: .venv", f"virtualenv: {sys.prefix}")
    (project / "Pulumi.yaml").write_text(text, encoding="utf-8")
    (project / f"Pulumi.{name}.yaml").write_text(
        "config:\n"
        "  gpufleet:forceDestroy: true\n"
        "  gpufleet:alarmEmail: ops@example.com\n"
        f"  gpufleet:wheels: {wheels}\n"
        "  gpufleet:tags: {team: research}\n",
        encoding="utf-8",
    )
