"""Refusals of platform eks."""

from __future__ import annotations

from collections.abc import Iterator

from bootstrap.contract.words import counted
from infra.settings import TRAINER_COMMAND, Settings

# Widest range that may reach the cluster's API: that of a large company.
SHORTEST_PUBLIC_PREFIX = 8


def eks_refusals(settings: Settings) -> Iterator[str]:
    """Problems of a plan and configuration as a Kubernetes cluster."""
    plan, eks = settings.plan, settings.eks
    if settings.mode != "training":
        yield (
            f"gpufleet:mode {settings.mode} does not go with gpufleet:platform eks: the cluster runs one job over all "
            "nodes of the plan; use platform ec2 for workers"
        )
    if plan.node.gpu_count < 1 or plan.node.gpu == "V100":
        yield (
            f"{plan.instance_type} has {plan.node.gpu_count:g} x {plan.node.gpu}: Kubernetes hands out whole GPUs, and "
            "CUDA 13 of the training images starts with Turing; use platform ec2"
        )
    if settings.data.startswith("s3://") and settings.command not in ("", TRAINER_COMMAND):
        yield (
            f"gpufleet:data is {settings.data} and gpufleet:trainCommand a command of your own: on platform eks only "
            "gpufleet's own trainer copies it; read S3 in your code (bootstrap.training.staging.stage does), or use "
            "platform ec2"
        )
    if not settings.isolate_training:
        yield (
            "gpufleet:isolateTraining false is for gpufleet:platform ec2: on eks the training container has a role of "
            "its own in any case; `pulumi config rm gpufleet:isolateTraining`"
        )
    if settings.nsight:
        yield "gpufleet:nsight is for gpufleet:platform ec2; `pulumi config rm gpufleet:nsight`"
    if settings.upload_mbit_per_s:
        yield (
            "gpufleet:uploadMbitPerS is for gpufleet:platform ec2, whose nodes set the bound themselves; "
            "`pulumi config rm gpufleet:uploadMbitPerS`"
        )
    if not eks.admin_arns:
        yield (
            "gpufleet:eks has no adminArns: nobody could use the cluster; list the IAM roles and users who may, like "
            "`pulumi config set --path 'gpufleet:eks.adminArns[0]' arn:aws:iam::111122223333:role/ml`"
        )
    for network in eks.public_access_cidrs:
        if network.prefixlen < SHORTEST_PUBLIC_PREFIX:
            yield (
                f"gpufleet:eks publicAccessCidrs has {network}: the cluster's API is open to "
                f"/{SHORTEST_PUBLIC_PREFIX} and narrower ranges at most; name the addresses of those who work with it"
            )
    if settings.vpc_id and len(eks.subnet_ids) < 2:
        yield (
            f"gpufleet:eks subnetIds has {counted(len(eks.subnet_ids), 'subnet')} of the existing "
            "VPC, and a control plane needs "
            "two, in different zones (https://docs.aws.amazon.com/eks/latest/userguide/network-reqs.html)"
        )
    if eks.subnet_ids and not settings.vpc_id:
        yield "gpufleet:eks subnetIds goes with gpufleet:vpcId: a VPC of the stack's own has its subnets"
    if not (settings.nat or eks.registry or settings.vpc_id):
        yield (
            "neither gpufleet:nat nor gpufleet:eks registry is set: NVIDIA's device plugin and the JobSet controller "
            "come from public registries, which private subnets do not reach; `pulumi config set gpufleet:nat true`, "
            "or mirror their images (docs/kubernetes.md, 'Images')"
        )
