"""``gpufleet launch-config``: a plan in another training engine's own format, or as Kubernetes manifests."""

from __future__ import annotations

import io
from functools import partial
from pathlib import Path
from typing import Any

import click
from ruamel.yaml import YAML
from ruamel.yaml.scalarstring import walk_tree

from optimizer.commands.long_help import FurtherOption, LongCommand
from optimizer.commands.options import OutputFile, is_given, plan_arguments, read_plan_argument
from optimizer.commands.output import write_file, write_notes
from optimizer.contract.errors import InvalidInputError
from optimizer.contract.plan import FleetPlan
from optimizer.launch_config import ENGINES, launch_config
from optimizer.launch_config.kubernetes import ManifestOptions, hard_limit_s, manifests

KUBERNETES = "kubernetes"
_kubernetes_option = partial(click.option, cls=FurtherOption, default="")


@click.command(
    name="launch-config",
    cls=LongCommand,
    epilog="""\b
Example:
  gpufleet launch-config plans.json --engine torchtitan --out gpufleet_plan.py
  gpufleet launch-config plans.json --plan 2 --engine megatron-core > gpufleet_plan.sh
  gpufleet launch-config plans.json --engine kubernetes --checkpoints s3://my-bucket/run-1 \\
    --image 111122223333.dkr.ecr.us-east-1.amazonaws.com/train@sha256:... -- train.py --epochs 3 | kubectl apply -f -
""",
)
@plan_arguments
@click.argument("command_words", metavar="[-- COMMAND...]", nargs=-1)
@click.option("--engine", type=click.Choice([*ENGINES, KUBERNETES]), required=True, help="Training engine.")
@click.option("--out", type=OutputFile(), help="File to write.  [default: standard output]")
@_kubernetes_option("--image", help="Container image with your code, torch and gpufleet.")
@_kubernetes_option("--checkpoints", metavar="S3_URI", help="Folder that the training saves to and resumes from.")
@click.option(
    "--kind",
    cls=FurtherOption,
    type=click.Choice(["jobset", "job"]),
    default="jobset",
    show_default=True,
    help="JobSet, or an indexed Job with a headless Service where JobSet is not installed.",
)
@_kubernetes_option("--queue", metavar="NAME", help="Kueue's LocalQueue.")
@_kubernetes_option("--service-account", metavar="NAME", help="Account whose role may read and write --checkpoints.")
@_kubernetes_option(
    "--karpenter", metavar="CLUSTER", help="Also print an EC2NodeClass and a NodePool for this EKS cluster's Karpenter."
)
@_kubernetes_option("--kms-key", metavar="ARN", help="Key of the volumes of Karpenter's nodes.")
def command(
    plan: str,
    plan_number: int,
    command_words: tuple[str, ...],
    engine: str,
    out: Path | None,
    **options: Any,
) -> None:
    """Write PLAN as another training engine's configuration, or as manifests for a Kubernetes cluster that is there.

    PLAN is a plan that recommend wrote; - reads standard input. The configuration has the plan's layout, batch,
    activation checkpointing, precision, optimizer, steps and checkpoint interval. The lines that start the engine are
    comments in it, and go to standard error where the format has no comments. An engine that cannot carry out a part
    of the plan is refused, with the engines that can (docs/engines.md).

    --engine kubernetes writes what kubectl apply takes, and needs --image and --checkpoints. One training pod takes
    each node; COMMAND is a script or "-m module", which torchrun starts, or another program. Without it gpufleet's own
    trainer runs. The job ends at the latest when the plan's budget is spent at the nodes' dearest price.
    """
    chosen = read_plan_argument(plan, plan_number)
    if engine == KUBERNETES:
        text, lines = _write_manifests(chosen, command_words, **options)
    else:
        given = list(filter(is_given, options))
        if given or command_words:
            words = f"--{given[0].replace('_', '-')}" if given else " ".join(command_words)
            raise click.UsageError(f"{words} goes with --engine {KUBERNETES}")
        file_name = out.name if out else f"gpufleet_plan{ENGINES[engine].suffix}"
        text, lines = launch_config(chosen, engine, file_name)
        lines = [] if out is None and ENGINES[engine].comment else lines
    if out is None:
        click.echo(text, nl=False)
    else:
        write_file(out, text)
    write_notes(lines)


def _write_manifests(plan: FleetPlan, words: tuple[str, ...], **given: Any) -> tuple[str, list[str]]:
    """Return the manifests as YAML, and notes on what may cost money."""
    image, checkpoints = given["image"], given["checkpoints"]
    if not words:
        if plan.beyond_trainer:
            raise InvalidInputError(
                f"gpufleet's own trainer does not carry out the plan: {'; '.join(plan.beyond_trainer)}",
                next_step="name your own training after --, like -- train.py --epochs 3",
            )
        words = ("-m", "bootstrap.trainer")
    if not checkpoints.startswith("s3://") or not checkpoints.removeprefix("s3://").split("/")[0]:
        raise InvalidInputError(f"--checkpoints is {checkpoints or 'missing'}", limit="an s3://BUCKET/PREFIX URI")
    if not image.strip():
        raise InvalidInputError("--image is empty", limit="REPOSITORY@sha256:DIGEST, or REPOSITORY:TAG")
    if given["kms_key"] and not given["karpenter"]:
        raise InvalidInputError("--kms-key goes with --karpenter", why="nodes that are there have their volumes")
    documents = manifests(plan, ManifestOptions(command=words, **given))
    notes = []
    if "@sha256:" not in image:
        notes.append(
            f"{image} is a tag; nodes that come later may run another build. REPOSITORY@sha256:DIGEST pins it."
        )
    limit_s = hard_limit_s(plan)
    if limit_s is None:
        notes.append("the plan has no budget, so nothing ends a job that hangs: recommend --budget USD")
    elif limit_s < plan.hours.p95 * 3600:
        notes.append(
            f"the budget of {plan.job.budget_usd:,.2f} USD lasts {limit_s / 3600:,.1f} h at the dearest price "
            f"of the nodes, and the run takes up to {plan.hours.p95:,.1f} h (95th percentile)"
        )
    yaml, text = YAML(), io.StringIO()
    yaml.explicit_start = True
    yaml.width = 4096
    # kubectl reads no anchors, so what two objects share is written twice.
    yaml.representer.ignore_aliases = lambda _data: True
    for document in documents:
        # Scripts print as block text.
        walk_tree(document)
        yaml.dump(document, text)
    return text.getvalue(), notes
