"""Refusals of a plan and configuration together, and of nodes that would only fail or idle once they start."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

from bootstrap.contract.ecr import read_ecr_image
from bootstrap.contract.launcher import gang_faults, split_command
from bootstrap.contract.timings import SAVE_GIB_PER_S
from bootstrap.contract.trainer import data_problem
from bootstrap.contract.words import counted
from infra import clock
from infra.control_settings import node_prices
from infra.images import brings_torch
from infra.naming import slug
from infra.refusals.files import prefix_refusals, train_dir_refusals, wheels_refusals
from infra.refusals.lustre import file_system_refusals, lustre_refusals
from infra.refusals.plan import plan_refusals
from infra.refusals.scaling import scaling_refusals
from infra.refusals.tags import tag_refusals
from infra.secret_text import secrets_in
from infra.settings import TRAINER_COMMAND, ConfigError, StackSettings
from infra.wheels import Wanted, wheels_needed


def refusals(settings: StackSettings, *, region: str) -> Iterator[str]:
    """Every problem that stops the stack from being deployed; ``region`` is aws:region."""
    plan, block = settings.plan, settings.plan.purchase.capacity_block
    yield from plan_refusals(plan)
    if region != plan.region:
        yield (
            f"aws:region is {region or 'not set'} and the plan is for {plan.region}: prices and zones differ by "
            f"region; `gpufleet stack set PLAN --stack {settings.stack}` writes both"
        )
    yield from _network_refusals(settings)
    if settings.ami_id and settings.ami_name:
        yield "gpufleet:amiId and gpufleet:amiName are both set: keep one"
    if settings.ami_id and not re.fullmatch(r"ami-[0-9a-f]{8,17}", settings.ami_id):
        yield f"gpufleet:amiId {settings.ami_id!r} is not an AMI id (ami- and 8 to 17 hex digits)"
    if settings.image:
        yield from _container_refusals(settings)
    if not settings.train_command.isprintable():
        yield "gpufleet:trainCommand has a line break or control character: put several steps into a script"
    words = split_command(settings.train_command)
    if words is None:
        yield "gpufleet:trainCommand has unbalanced quotes"
    if settings.gang:
        for fault in gang_faults(words or []):
            yield f"gpufleet:trainCommand: {fault} (docs/engines.md)"
    for secret in secrets_in(settings.train_command):
        yield (
            f"gpufleet:trainCommand has what looks like a secret, {secret}, and becomes user data, which whoever may "
            f"describe instances can read: put it into an SSM parameter below /gpufleet/{slug(settings.stack)}/ as a "
            "SecureString, and read it in the training code (docs/security.md)"
        )
    needed = math.ceil(SAVE_GIB_PER_S * 2**30 * 8 / 1e6)
    if 0 < settings.upload_mbit_per_s < needed:
        yield (
            f"gpufleet:uploadMbitPerS is {settings.upload_mbit_per_s}: the plan counts on {needed} Mbit/s of each node "
            "for the last checkpoint before a node ends; set at least that, or "
            "`pulumi config rm gpufleet:uploadMbitPerS`"
        )
    yield from prefix_refusals("data", settings.data)
    if settings.data and settings.command == TRAINER_COMMAND and (problem := data_problem(plan.job.architecture)):
        yield (
            f"gpufleet:data is {settings.data}, and {problem}, so every node would end at its start: unset it to "
            "try the plan (`pulumi config rm gpufleet:data`), or train with your own code (gpufleet:trainDir, "
            "gpufleet:trainCommand, docs/training.md)"
        )
    yield from prefix_refusals("baseWeights", settings.base_weights)
    if settings.alarm_email and not re.fullmatch(r"[^@\s]+@[^@\s]+\.[^@\s]+", settings.alarm_email):
        yield f"gpufleet:alarmEmail {settings.alarm_email!r} is not an e-mail address"
    wanted = Wanted(
        image_torch=brings_torch(settings),
        cpu_architecture=plan.node.cpu_architecture,
        own=settings.requirements,
    )
    yield from wheels_refusals(settings.wheels, wanted)
    yield from train_dir_refusals(settings.train_dir)
    yield from tag_refusals(settings.tags)
    try:
        node_prices(plan)
    except ConfigError as error:
        yield str(error)
    # forceDestroy is how the checkpoints of a stack are deleted, also after its block.
    if block and clock.now() >= block.end and not settings.force_destroy:
        yield (
            f"the Capacity Block {plan.purchase.capacity_reservation_id} ended at {block.end:%Y-%m-%d %H:%M} UTC: its "
            "nodes cannot start; set a plan for another block, or `pulumi destroy` (it keeps the checkpoints)"
        )
    if settings.spot_policy == "adaptive":
        yield from _adaptive_refusals(settings)
    yield from scaling_refusals(settings)
    if plan.lustre:
        yield from lustre_refusals(settings)
    if settings.file_system:
        yield from file_system_refusals(settings)


def start_refusals(settings: StackSettings) -> Iterator[str]:
    """Settings that make started nodes fail, wait or idle at full price; no harm to a stack that is only looked at."""
    reservation, zones = settings.plan.purchase.capacity_reservation_id, settings.plan.zone_ids
    image_torch = brings_torch(settings)
    reaches_index = settings.vpc_id or settings.nat
    # The packages of a user's own image are known to its nodes only; those that amiName names are AWS's.
    covered = settings.wheels or reaches_index or (settings.ami_id and not settings.requirements)
    if not covered and wheels_needed(settings, image_torch=image_torch):
        lacks = "the trainer's libraries" if image_torch else "torch"
        lacks = "the packages of gpufleet:requirements" if settings.requirements else lacks
        yield (
            f"gpufleet:wheels is not set: the nodes' image lacks {lacks} and the private subnets reach no package "
            "index, so every node would fail its set-up, be paid for and be replaced. Pack them: "
            f"`gpufleet wheels --stack {settings.stack}`, name an image that has them in gpufleet:amiId, or let the "
            "nodes reach an index: `pulumi config set gpufleet:nat true`"
        )
    if reservation and not settings.zone_id and not settings.subnet_ids and len(zones) != 1:
        yield (
            f"gpufleet:zoneId is not set: reservation {reservation} is in one zone, the plan has "
            f"{', '.join(zones) or 'none'}, and nodes in another never start while it is paid for. `aws ec2 "
            f"describe-capacity-reservations --capacity-reservation-ids {reservation}` names the zone "
            "(AvailabilityZoneId); then `pulumi config set gpufleet:zoneId ZONE`"
        )
    if not settings.command and settings.ceiling_usd is None:
        yield (
            f"{_idle_reason(settings)} and nothing limits the spend: the nodes would idle at full price until somebody "
            "stops them. `pulumi config set gpufleet:trainCommand train.py`, or set a limit: "
            "`pulumi config set gpufleet:ceilingUsd 100`"
        )


def _idle_reason(settings: StackSettings) -> str:
    if settings.train_command or not settings.plan.beyond_trainer:
        return f"gpufleet:trainCommand is {settings.train_command or 'empty'}"
    beyond = "; ".join(settings.plan.beyond_trainer)
    return f"gpufleet:trainCommand is empty, gpufleet's own trainer does not carry out the plan ({beyond})"


def _adaptive_refusals(settings: StackSettings) -> Iterator[str]:
    plan, back = settings.plan, "`pulumi config rm gpufleet:spotPolicy` takes the default"
    if settings.mode != "training":
        yield f"gpufleet:spotPolicy adaptive is for a gang, and the stack has mode {settings.mode}: {back}"
    if plan.purchase.option != "spot" or plan.purchase.fallback != "on-demand":
        yield (
            f"gpufleet:spotPolicy adaptive moves between spot and on-demand nodes, and the plan buys "
            f"{plan.purchase.option} with fallback {plan.purchase.fallback}: make the plan with `gpufleet recommend "
            f"--purchase spot --spot-fallback on-demand`; {back}"
        )
    if plan.job.deadline_hours is None:
        yield (
            "gpufleet:spotPolicy adaptive keeps a deadline, and the plan has none: make it with `gpufleet recommend "
            f"--deadline 72h`; {back}"
        )


def _container_refusals(settings: StackSettings) -> Iterator[str]:
    image, pin = read_ecr_image(settings.image), f"`gpufleet stack set PLAN --stack {settings.stack} --image URI`"
    if image is None or not image.digest:
        yield (
            f"gpufleet:image {settings.image!r} is no image of a private ECR registry by digest, like "
            f"111122223333.dkr.ecr.{settings.plan.region}.amazonaws.com/train@sha256:...: {pin} resolves a tag"
        )
    elif image.region != settings.plan.region:
        yield (
            f"gpufleet:image is in {image.region} and the plan for {settings.plan.region}, whose nodes reach their own "
            f"region's registry alone: push or replicate it there, then {pin}"
        )
    if settings.requirements:
        yield "gpufleet:image and gpufleet:requirements are both set: install the packages into the image, and drop one"
    if settings.nsight:
        yield "gpufleet:nsight and gpufleet:image are both set: nsys traces no container's training; drop one"


def _network_refusals(settings: StackSettings) -> Iterator[str]:
    plan = settings.plan
    if bool(settings.vpc_id) != bool(settings.subnet_ids):
        yield "gpufleet:vpcId and gpufleet:subnetIds go together: set both to use an existing VPC, or neither"
    if settings.one_zone and len(settings.subnet_ids) > 1:
        yield (
            f"gpufleet:subnetIds has {counted(len(settings.subnet_ids), 'subnet')} and this fleet runs in one zone "
            f"({counted(plan.node_count, 'node')}, {plan.purchase.option}): traffic between zones is "
            "slow and billed, and EFA "
            "does not cross them; keep one"
        )
    if settings.zone_id and plan.zone_ids and settings.zone_id not in plan.zone_ids:
        yield (
            f"gpufleet:zoneId {settings.zone_id} does not offer {plan.instance_type}: the plan has "
            f"{', '.join(plan.zone_ids)}"
        )
    if settings.nat and settings.vpc_id:
        yield "gpufleet:nat is true and gpufleet:vpcId set: an existing VPC keeps its own routes; drop one"
