"""``gpufleet manifest``: a plan as manifests for an existing Kubernetes cluster."""

from __future__ import annotations

import sys

import click
from ruamel.yaml import YAML
from ruamel.yaml.scalarstring import walk_tree

from optimizer.commands.options import plan_arguments, read_plan_argument
from optimizer.commands.output import say
from optimizer.contract.errors import InvalidInputError
from optimizer.launch_config.kubernetes import Kind, ManifestOptions, hard_limit_s, manifests


@click.command(
    epilog="""\b
Example:
  gpufleet manifest plans.json --image 111122223333.dkr.ecr.us-east-1.amazonaws.com/train@sha256:... \\
    --checkpoints s3://my-bucket/run-1 -- train.py --epochs 3 | kubectl apply -f -
  gpufleet manifest plans.json --image ... --checkpoints s3://my-bucket/run-1 --queue gpus --karpenter my-cluster
"""
)
@plan_arguments
@click.argument("command_words", metavar="[-- COMMAND...]", nargs=-1)
@click.option("--image", required=True, help="Container image with your code, torch and gpufleet.")
@click.option(
    "--checkpoints", required=True, metavar="S3_URI", help="Folder that the training saves to and resumes from."
)
@click.option(
    "--kind",
    type=click.Choice(["jobset", "job"]),
    default="jobset",
    show_default=True,
    help="JobSet, or an indexed Job with a headless Service where JobSet is not installed.",
)
@click.option("--queue", default="", metavar="NAME", help="Kueue's LocalQueue.")
@click.option(
    "--service-account", default="", metavar="NAME", help="Account whose role may read and write --checkpoints."
)
@click.option(
    "--karpenter",
    default="",
    metavar="CLUSTER",
    help="Also print an EC2NodeClass and a NodePool for this EKS cluster's Karpenter.",
)
@click.option("--kms-key", default="", metavar="ARN", help="Key of the volumes of Karpenter's nodes.")
def command(
    plan: str,
    plan_number: int,
    command_words: tuple[str, ...],
    image: str,
    checkpoints: str,
    kind: Kind,
    queue: str,
    service_account: str,
    karpenter: str,
    kms_key: str,
) -> None:
    """Print PLAN as Kubernetes manifests for a cluster that is there, for kubectl apply.

    PLAN is a plan that recommend wrote; - reads standard input. One training pod takes each node; COMMAND is a script
    or "-m module", which torchrun starts, or another program. Without it gpufleet's own trainer runs. The job ends at
    the latest when the plan's budget is spent at the nodes' dearest price.
    """
    chosen = read_plan_argument(plan, plan_number)
    if not command_words:
        if chosen.beyond_trainer:
            raise InvalidInputError(
                f"gpufleet's own trainer does not carry out the plan: {'; '.join(chosen.beyond_trainer)}",
                next_step="name your own training after --, like -- train.py --epochs 3",
            )
        command_words = ("-m", "bootstrap.trainer")
    if not checkpoints.startswith("s3://") or len(checkpoints.split("/")) < 3 or not checkpoints.split("/")[2]:
        raise InvalidInputError(f"--checkpoints is {checkpoints!r}", limit="an s3://BUCKET/PREFIX URI")
    if not image.strip():
        raise InvalidInputError("--image is empty", limit="REPOSITORY@sha256:DIGEST, or REPOSITORY:TAG")
    if kms_key and not karpenter:
        raise InvalidInputError("--kms-key goes with --karpenter", why="nodes that are there have their volumes")
    options = ManifestOptions(
        image=image,
        command=command_words,
        checkpoints=checkpoints,
        kind=kind,
        queue=queue,
        service_account=service_account,
        karpenter=karpenter,
        kms_key=kms_key,
    )
    documents = manifests(chosen, options)
    if "@sha256:" not in image:
        say(
            f"note: {image} is a tag; nodes that come later may run another build. REPOSITORY@sha256:DIGEST pins it.",
            err=True,
        )
    limit_s = hard_limit_s(chosen)
    if limit_s is None:
        say("note: the plan has no budget, so nothing ends a job that hangs: recommend --budget USD", err=True)
    elif limit_s < chosen.hours.p95 * 3600:
        say(
            f"note: the budget of {chosen.job.budget_usd:,.2f} USD lasts {limit_s / 3600:,.1f} h at the dearest price "
            f"of the nodes, and the run takes up to {chosen.hours.p95:,.1f} h (95th percentile)",
            err=True,
        )

    yaml = YAML()
    yaml.explicit_start = True
    yaml.width = 4096
    # kubectl reads no anchors, so what two objects share is written twice.
    yaml.representer.ignore_aliases = lambda _data: True
    for document in documents:
        # Scripts print as block text.
        walk_tree(document)
        yaml.dump(document, sys.stdout)
