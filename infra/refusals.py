"""Rules that refuse a stack before anything is created: a wrong plan or configuration, nodes that would fail or idle.

A rule is a condition and its sentence: the value, the limit or reason, the next step.
"""

from __future__ import annotations

import re
import tarfile
from collections.abc import Iterator
from datetime import UTC, datetime

from bootstrap.contract.ecr import read_ecr_image
from bootstrap.contract.launcher import command_faults, split_command
from bootstrap.contract.words import counted
from infra.bundle import files_of
from infra.images import brings_torch
from infra.naming import Names, read_s3_prefix, slug, tags
from infra.places import node_prices
from infra.settings import TRAINER_COMMAND, WITH_LUSTRE_CLIENT, ConfigError, ScalingSettings, StackSettings
from infra.user_data import NodeFacts, user_data
from infra.wheels import Wanted, wheel_names, wheels_needed
from optimizer.contract.plan import FleetPlan, usable_hours

# The archive travels inside the stack's state, which Pulumi reads and writes whole.
TRAIN_DIR_LIMIT_MIB = 10
_CALLED = r"(?:password|passwd|secret|api[_-]?key|access[_-]?key|auth[_-]?token)[\w-]*"
# A value that is another variable, an ARN or a path points to a secret and is none.
_VALUE = r"['\"]?(?!\$|arn:|s3:|/|<|-)[^\s'\"$]{6,}"
_SECRETS = re.compile(
    # Prefixes of well-known tokens ...
    r"(?<![A-Za-z0-9_])(?:(?:AKIA|ASIA)[A-Z0-9]{16}|gh[pousr]_\w{20,}|github_pat_\w{20,}|hf_[A-Za-z0-9]{30,}"
    r"|nvapi-[\w-]{20,}|sk-[\w-]{20,}|xox[abeprs]-[\w-]{10,})"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY"
    # ... values of names like NAME_PASSWORD=value, "apiKey": value, --auth-token value.
    rf"|(?i:(?<![a-z:]){_CALLED}['\"]?\s*[=:]\s*{_VALUE}|--{_CALLED}\s+{_VALUE})"
    # ... tokens longer than a model's (eos_token=</s>) ...
    r"|(?i:token['\"]?\s*[=:]\s*['\"]?(?!\$|arn:|s3:|/|<|-)[\w.-]{20,})"
    # ... and passwords in addresses, as package indexes ask for.
    r"|https?://[^\s/:@$]+:[^\s/@$]+@"
)


def plan_refusals(plan: FleetPlan) -> Iterator[str]:
    """Parts of ``plan`` that this version cannot carry out."""
    node, purchase = plan.node, plan.purchase
    if not plan.digest:
        yield (
            "the plan has no digest, and the meter and the alarms take its numbers as they are: make it anew with "
            "`gpufleet recommend`, with what you want to change in its request"
        )
    if blocks := purchase.blocks:
        if not purchase.capacity_reservation_id:
            yield (
                "purchase.capacity_reservation_id is not set, and option capacity-block runs in a block that is bought "
                "already (`gpufleet blocks buy`): its id belongs into the request's existing_reservations"
            )
        hours = usable_hours(blocks, blocks[0].start, plan.reserve_s)
        named = "the Capacity Block" if len(blocks) == 1 else f"the row of {len(blocks)} blocks"
        if plan.hours.p95 > hours and purchase.fallback == "none":
            yield (
                f"hours.p95 is {plan.hours.p95:g} h and {named} from "
                f"{blocks[0].start:%Y-%m-%d %H:%M} to {blocks[-1].end:%Y-%m-%d %H:%M} UTC has "
                f"{hours:.1f} h to train in: AWS ends its instances from 30 minutes before the end on, "
                "and the last checkpoint is saved before; buy a longer block or the next one, or choose a faster plan "
                "with --plan N"
            )
    if node.efa_cards and node.network_cards - node.efa_cards not in (0, 1):
        yield (
            f"node.efa_cards is {node.efa_cards} of {node.network_cards} network cards: which cards have EFA is known "
            "only when all have it, or all but the first"
        )


def refusals(settings: StackSettings, *, region: str) -> Iterator[str]:
    """Every problem that stops the stack from being deployed; ``region`` is aws:region."""
    yield from plan_refusals(settings.plan)
    if region != settings.plan.region:
        yield (
            f"aws:region is {region or 'not set'} and the plan is for {settings.plan.region}: prices and zones differ "
            f"by region; `gpufleet stack set PLAN --stack {settings.stack}` writes both"
        )
    yield from _network_refusals(settings)
    if settings.image:
        yield from _container_refusals(settings)
    yield from _configuration_refusals(settings)
    yield from _file_refusals(settings)
    names = Names(stack=settings.stack, account_id="0" * 12, region=settings.plan.region, partition="aws")
    try:  # now, and not once the network is paid for
        node_prices(settings.plan)
        user_data(settings, names, NodeFacts.longest())
    except ValueError as error:
        yield str(error)
    if settings.spot_policy == "adaptive":
        yield from _adaptive_refusals(settings)
    if settings.mode == "workers":
        yield from _worker_refusals(settings)
    if settings.plan.lustre:
        yield from _lustre_refusals(settings)


def start_refusals(settings: StackSettings) -> Iterator[str]:
    """Settings that make started nodes fail, wait or idle at full price; no harm to a stack that is only looked at."""
    reservation, zones = settings.plan.purchase.capacity_reservation_id, settings.plan.wanted_zone_ids
    blocks, now = settings.plan.purchase.blocks, datetime.now(UTC)
    is_over = blocks and not usable_hours(blocks, now, settings.plan.reserve_s)
    # Before its checkpoints can be deleted, the stack of an ended block is updated once more.
    if is_over and settings.plan.purchase.fallback == "none" and not settings.force_destroy:
        yield (
            f"the Capacity Block ends at {blocks[-1].end:%Y-%m-%d %H:%M} UTC, and it is {now:%Y-%m-%d %H:%M}: no node "
            "starts in a block that has ended, and none has time to save just before. Buy the next one (`gpufleet "
            f"blocks find PLAN`), plan with it, and `gpufleet stack set PLAN --stack {settings.stack}`"
        )
    image_torch = brings_torch(settings)
    # The packages of a user's own image are known to its nodes only; those that amiName names are AWS's.
    covered = settings.wheels or settings.vpc_id or settings.nat or (settings.ami_id and not settings.requirements)
    if not covered and wheels_needed(settings, image_torch=image_torch):
        lacks = "the trainer's libraries" if image_torch else "torch"
        lacks = "the packages of gpufleet:requirements" if settings.requirements else lacks
        yield (
            f"gpufleet:wheels is not set: the nodes' image lacks {lacks} and the private subnets reach no package "
            "index, so every node would fail its set-up, be paid for and be replaced. Pack them: "
            f"`gpufleet stack wheels --stack {settings.stack}`, name an image that has them in gpufleet:amiId, or let "
            "the nodes reach an index: `pulumi config set gpufleet:nat true`"
        )
    if settings.command == TRAINER_COMMAND and not (settings.plan.job.tuning.trains_all or settings.base_weights):
        yield (
            f"gpufleet:baseWeights is not set, and {settings.plan.job.tuning.in_words} would train over random values: "
            "`pulumi config set gpufleet:baseWeights s3://BUCKET/BASE`"
        )
    if reservation and not settings.zone_id and not settings.subnet_ids and len(zones) != 1:
        yield (
            f"gpufleet:zoneId is not set: reservation {reservation} is in one zone, the plan has "
            f"{', '.join(zones) or 'none'}, and nodes in another never start while it is paid for. `aws ec2 "
            f"describe-capacity-reservations --capacity-reservation-ids {reservation}` names the zone "
            "(AvailabilityZoneId); then `pulumi config set gpufleet:zoneId ZONE`"
        )
    if not settings.command and settings.ceiling_usd is None:
        beyond = "; ".join(() if settings.train_command else settings.plan.beyond_trainer)
        beyond = beyond and f", gpufleet's own trainer does not carry out the plan ({beyond})"
        yield (
            f"gpufleet:trainCommand is {settings.train_command or 'empty'}{beyond} and nothing limits the spend: the "
            "nodes would idle at full price until somebody stops them. `pulumi config set gpufleet:trainCommand "
            "train.py`, or set a limit: `pulumi config set gpufleet:ceilingUsd 100`"
        )


def _configuration_refusals(settings: StackSettings) -> Iterator[str]:
    if settings.ami_id and settings.ami_name:
        yield "gpufleet:amiId and gpufleet:amiName are both set: keep one"
    words = split_command(settings.train_command)
    if words is None:
        yield "gpufleet:trainCommand has unbalanced quotes"
    for fault in command_faults(words or [], is_gang=settings.gang):
        yield f"gpufleet:trainCommand: {fault} (docs/engines.md)"
    for secret in secrets_in(settings.train_command):
        yield (
            f"gpufleet:trainCommand has what looks like a secret, {secret}, and becomes user data, which whoever may "
            f"describe instances can read: put it into an SSM parameter below /gpufleet/{slug(settings.stack)}/ as a "
            "SecureString, and read it in the training code (docs/security.md)"
        )
    if settings.scaling and settings.mode == "training":
        yield "gpufleet:scaling is for gpufleet:mode workers only: the controller starts a training gang whole"
    # IAM refuses two keys that differ in case alone: https://docs.aws.amazon.com/IAM/latest/UserGuide/id_tags.html
    keys = [key.lower() for key in tags("", "", dict(settings.tags))]
    if len(set(keys)) < len(keys) or any(key.startswith("aws:") for key in keys):
        yield "gpufleet:tags has a key that begins with aws:, or that differs from another in case alone"
    for key, uri in (("data", settings.data), ("baseWeights", settings.base_weights)):
        # It becomes a resource of the nodes' policy, and no wildcard may widen it.
        if uri and not re.fullmatch(r"/[\w./=+-]*", uri) and not read_s3_prefix(uri):
            yield (
                f"gpufleet:{key} is {uri!r}: name an S3 prefix like s3://my-bucket/name (letters, digits and ._=+- "
                "between slashes), or a folder of the nodes like /mnt/nvme/name"
            )


def secrets_in(text: str) -> list[str]:
    """First characters of each text in ``text`` that looks like a secret; the rest must not be printed."""
    return [f"{match.group()[:8]}..." for match in _SECRETS.finditer(text)]


def _adaptive_refusals(settings: StackSettings) -> Iterator[str]:
    plan = settings.plan
    buys = f"{plan.purchase.option} with fallback {plan.purchase.fallback}"
    if settings.mode != "training" or buys != "spot with fallback on-demand" or plan.job.deadline_hours is None:
        yield (
            "gpufleet:spotPolicy adaptive moves a training gang between spot and on-demand nodes by its deadline, and "
            f"this stack of mode {settings.mode} buys {buys}, deadline {plan.job.deadline_hours or 'none'}: make the "
            "plan with `gpufleet recommend --purchase spot --spot-fallback on-demand --deadline 72h`, or "
            "`pulumi config rm gpufleet:spotPolicy`"
        )


def _container_refusals(settings: StackSettings) -> Iterator[str]:
    image = read_ecr_image(settings.image)
    if image is None:
        yield (
            f"gpufleet:image {settings.image!r} is no image of a private ECR registry by digest, like "
            f"111122223333.dkr.ecr.{settings.plan.region}.amazonaws.com/train@sha256:..., which docker push prints"
        )
    elif image.region != settings.plan.region:
        yield (
            f"gpufleet:image is in {image.region} and the plan for {settings.plan.region}, whose nodes reach their own "
            f"region's registry alone: push or replicate it there"
        )
    if settings.requirements:
        yield "gpufleet:image and gpufleet:requirements are both set: install the packages into the image, and drop one"


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
    copies_from = plan.staging.data_region if plan.staging and settings.stages_data else None
    if copies_from and not (settings.nat or settings.vpc_id):
        yield (
            f"gpufleet:nat is false, and the plan's data in {copies_from}: S3's endpoint reaches no bucket there "
            "(docs/economics.md), so no node could copy it: `pulumi config set gpufleet:nat true`"
        )
    if settings.nat and settings.vpc_id:
        yield "gpufleet:nat is true and gpufleet:vpcId set: an existing VPC keeps its own routes; drop one"


def _worker_refusals(settings: StackSettings) -> Iterator[str]:
    scaling, plan, split = settings.scaling or ScalingSettings(), settings.plan, settings.plan.parallelism
    nodes = plan.node_count
    model_ranks = split.tensor * split.pipeline * split.context
    is_whole = plan.node.ranks % model_ranks == 0 and (split.data // nodes) % split.expert == 0
    # A worker trains alone, so the plan's layout must not span several nodes.
    if nodes > 1 and not (split.sharding == "ddp" and is_whole):
        yield (
            f"gpufleet:mode workers runs the whole model on each node, and the plan spreads it over {nodes} "
            f"({split.in_short}, {split.sharding}), so its memory is not that of one node: take a plan whose sharding "
            "is ddp (`gpufleet recommend --sharding ddp --parallelism data`), or one for one node (--max-nodes 1)"
        )
    purchase = plan.purchase
    for name, is_set in (
        ("fallback on-demand", purchase.fallback == "on-demand"),
        ("on_demand_top_up", purchase.on_demand_top_up),
        ("next_blocks", purchase.next_blocks),
    ):
        if is_set:
            yield (
                f"purchase.{name} does not go with gpufleet:mode workers, which is one group in one market or block: "
                "use a plan without it"
            )
    if scaling.min_nodes > nodes:
        yield (
            f"gpufleet:scaling minNodes {scaling.min_nodes} is above the plan's "
            f"{counted(nodes, 'node')}, the most there can be: "
            "set a plan of more nodes"
        )
    if scaling.gpu_utilization_percent is not None and not scaling.min_nodes:
        yield (
            "gpufleet:scaling gpuUtilizationPercent with minNodes 0: a group without nodes has no utilisation to "
            "grow by; set minNodes 1"
        )


def _file_refusals(settings: StackSettings) -> Iterator[str]:
    """Problems of the local files that are uploaded for the nodes."""
    file, folder, torch = settings.wheels, settings.train_dir, brings_torch(settings)
    wanted = Wanted(image_torch=torch, cpu_architecture=settings.plan.node.cpu_architecture, own=settings.requirements)
    try:
        missing = wanted.missing_from(wheel_names(file) if file else ())
    except ConfigError as error:
        yield str(error)
    except (OSError, tarfile.TarError) as error:
        yield f"gpufleet:wheels {file} is no uncompressed tar: {error}; pack it with `gpufleet stack wheels`"
    else:
        if file and missing:
            more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
            yield (
                f"gpufleet:wheels {file} has no wheel of {', '.join(missing[:3])}{more} for {wanted.machine}, "
                "which the plan's nodes need: pack it again with `gpufleet stack wheels`"
            )
    if folder is None:
        return
    mib, problem = 0.0, ""
    try:
        problem = "" if folder.is_dir() else "is not a folder"
        mib = sum(path.stat().st_size for path in files_of(folder)) / 2**20
    except OSError as error:
        problem = f"cannot be read ({error.strerror})"
    if problem:
        yield f"gpufleet:trainDir {folder} {problem}: name the one with your training code"
    elif not 0 < mib <= TRAIN_DIR_LIMIT_MIB:
        yield (
            f"gpufleet:trainDir {folder} has {mib:.1f} MiB of files, the limit is above 0 and at most "
            f"{TRAIN_DIR_LIMIT_MIB}: it is for code; data belongs into a bucket the nodes may read"
        )


def _lustre_refusals(settings: StackSettings) -> Iterator[str]:
    """Settings that leave the nodes without the file system, its data, or a kernel that can mount it."""
    gib = settings.plan.lustre.storage_gib if settings.plan.lustre else 0
    file_system = f"the plan has an FSx for Lustre file system of {gib} GiB (workload.lustre_gib)"
    without = "or make the plan without workload.lustre_gib: each node copies the data"
    if read_s3_prefix(settings.data) is None:
        yield (
            f"{file_system}, and gpufleet:data is {settings.data or 'not set'}: it would be paid for and empty; "
            f"`pulumi config set gpufleet:data s3://BUCKET/PREFIX`, {without}"
        )
    # It brings the EFA plugin with which gangs hang (bootstrap/known-bad.csv).
    is_known = not (settings.gang and settings.plan.node.efa_cards)
    if not settings.ami_id and settings.ami_name in ("", *([] if is_known else [WITH_LUSTRE_CLIENT])):
        # The client is a module of one kernel release. Newer releases boot kernel 7.0, for which no notes list one:
        # https://docs.aws.amazon.com/dlami/latest/devguide/aws-deep-learning-ami-gpubaseoss-ul2404-2026-09-16.html
        known = f'for x86_64 `pulumi config set gpufleet:amiName "{WITH_LUSTRE_CLIENT}"`, ' if is_known else ""
        yield (
            f"{file_system}, and gpufleet:amiName is {settings.ami_name or 'not set'}: a Deep Learning AMI may have no "
            "Lustre client for its kernel, or one with an EFA plugin that hangs: name a release whose notes list "
            f"lustre-client-modules of its kernel_version, {known}your own image with the client in gpufleet:amiId, "
            f"{without}"
        )
