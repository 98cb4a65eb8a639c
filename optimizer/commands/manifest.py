"""``gpufleet manifest``: a plan as Kubernetes manifests, for its stack on platform eks."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from optimizer.commands.options import plan_arguments, read_plan_argument
from optimizer.commands.output import say
from optimizer.contract.errors import GpufleetError, InvalidInputError

if TYPE_CHECKING:
    from infra.kubernetes.cluster_facts import ClusterFacts
    from infra.kubernetes.manifests import Kind


@click.command(
    epilog="""\b
Example:
  gpufleet manifest plans.json --stack dev | kubectl apply -f -
  gpufleet manifest plans.json --stack dev --image 111122223333.dkr.ecr.us-east-1.amazonaws.com/train@sha256:...
  pulumi stack output --json --stack dev > outputs.json && gpufleet manifest plans.json --outputs outputs.json
"""
)
@plan_arguments
@click.option("--stack", metavar="NAME", help="Stack on platform eks, whose outputs `pulumi stack output` reads.")
@click.option(
    "--outputs",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Output of `pulumi stack output --json`, in place of asking Pulumi.",
)
@click.option("--image", help="Image of the training container.  [default: AWS's, torch 2.11 for CUDA 13.0, x86_64]")
@click.option(
    "--kind",
    type=click.Choice(["jobset", "pytorchjob"]),
    default="jobset",
    show_default=True,
    help="Controller that runs the pods; install it once (docs/kubernetes.md).",
)
def command(
    plan: str, plan_number: int, stack: str | None, outputs: Path | None, image: str | None, kind: Kind
) -> None:
    """Print PLAN as Kubernetes manifests, for kubectl apply.

    PLAN is the plan that the stack carries out; - reads standard input. Prints device plugins, then one training pod a
    node, with the stack's training code and command and the variables of a node on platform ec2.
    """
    chosen = read_plan_argument(plan, plan_number)
    facts = _parse_facts(_outputs(stack, outputs))

    from infra.kubernetes.cluster_facts import plan_digest
    from infra.kubernetes.container_images import default_image
    from infra.kubernetes.manifests import manifests

    if plan_digest(chosen) != facts.plan_sha256:
        raise InvalidInputError(
            "PLAN is not the plan that the stack carries out",
            why="pods of another size than the fleet would wait for each other, and nodes are paid meanwhile",
            next_step="deploy it first: gpufleet stack set PLAN --stack NAME && pulumi up",
        )
    if not facts.environment["GPUFLEET_TRAIN_COMMAND"].strip():
        raise InvalidInputError(
            "gpufleet:trainCommand is empty",
            why="the pods would end at once, and count as done",
            next_step='pulumi config set gpufleet:trainCommand "train.py --epochs 3" && pulumi up',
        )
    image = image or default_image(chosen)
    if image is None:
        raise InvalidInputError(
            f"AWS has no training image for {chosen.node.cpu_architecture} in {chosen.region}",
            next_step="name your own, with bash, torch 2.11 and boto3: --image REPOSITORY@sha256:DIGEST",
        )
    if "@sha256:" not in image:
        say(
            f"note: {image} is a tag, which AWS moves when it patches the image; nodes that come later may run another "
            "build. --image REPOSITORY@sha256:DIGEST pins it.",
            err=True,
        )
    _write(manifests(chosen, facts, image=image, kind=kind))


def _outputs(stack: str | None, file: Path | None) -> Any:
    if (stack is None) == (file is None):
        raise InvalidInputError(
            "--stack and --outputs are " + ("both missing" if stack is None else "both given"),
            next_step="give one: --stack NAME asks Pulumi, --outputs FILE has its answer",
        )
    if file is not None:
        try:
            return json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise InvalidInputError(
                f"{file} cannot be read as JSON: {error}", next_step="pulumi stack output --json > FILE"
            ) from error
    arguments = ["pulumi", "stack", "output", "--json", "--stack", str(stack)]
    try:
        answer = subprocess.run(arguments, capture_output=True, text=True, check=False)
    except OSError as error:
        raise GpufleetError(
            f"pulumi cannot be started: {error}",
            why="the stack's outputs have the bucket, the training code and the cluster",
            next_step="install it, or give its answer from elsewhere with --outputs FILE",
        ) from error
    if answer.returncode != 0:
        raise GpufleetError(
            f"`{' '.join(arguments)}` ended with {answer.returncode}: {answer.stderr.strip()}",
            next_step="run it by itself in the folder of Pulumi.yaml",
        )
    return json.loads(answer.stdout)


def _parse_facts(outputs: Any) -> ClusterFacts:
    from pydantic import ValidationError

    from infra.kubernetes.cluster_facts import ClusterFacts

    facts = outputs.get("kubernetes") if isinstance(outputs, dict) else None
    if facts is None:
        raise InvalidInputError(
            "the stack has no output named kubernetes",
            why="only a stack that is deployed on platform eks has a cluster",
            next_step="pulumi config set gpufleet:platform eks && pulumi up",
        )
    try:
        return ClusterFacts.model_validate(facts)
    except ValidationError as error:
        wrong = "; ".join(f"{'.'.join(map(str, item['loc']))}: {item['msg']}" for item in error.errors())
        raise InvalidInputError(
            f"the stack's output kubernetes is not this version's: {wrong}", next_step="pulumi up, then again"
        ) from error


def _write(documents: list[dict[str, Any]]) -> None:
    from ruamel.yaml import YAML
    from ruamel.yaml.scalarstring import walk_tree

    yaml = YAML()
    yaml.explicit_start = True
    yaml.width = 4096
    # kubectl reads no anchors, so a list under two containers is written twice.
    yaml.representer.ignore_aliases = lambda _data: True
    for document in documents:
        # Scripts print as block text.
        walk_tree(document)
        yaml.dump(document, sys.stdout)
