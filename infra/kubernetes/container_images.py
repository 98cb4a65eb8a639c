"""Container images of platform eks, and the AWS accounts that serve them."""

from __future__ import annotations

from optimizer.contract.plan import FleetPlan

# https://github.com/NVIDIA/k8s-device-plugin/releases/tag/v0.20.0 (2026-08-19)
NVIDIA_PLUGIN = "nvidia/k8s-device-plugin:v0.20.0"
NVIDIA_REGISTRY = "nvcr.io"
# https://github.com/aws/eks-charts/tree/master/stable/aws-efa-k8s-device-plugin (chart v0.5.30, 2026-08-03)
EFA_PLUGIN = "eks/aws-efa-k8s-device-plugin:v0.5.20"
# torch 2.11 for CUDA 13.0 (as bootstrap/requirements-node.txt), EFA, NCCL plugin, boto3:
# https://github.com/aws/deep-learning-containers/blob/main/docs/pytorch/changelog/index.md, read 2026-11-21
TRAINING_IMAGE = "pytorch:2.11.0-cu130-amzn2023"

# Accounts of EKS's images: the default, and those of other regions.
# https://docs.aws.amazon.com/eks/latest/userguide/add-ons-images.html, read 2026-11-26. That page names the host of
# ap-east-1 for ap-east-2's account; EKS's own machine image takes ap-east-2's:
# https://github.com/awslabs/amazon-eks-ami/blob/28af74fd195b78a3ba8d946c72c46fa0152d6dcd/templates/al2/runtime/get-ecr-uri.sh
_EKS_ACCOUNT = "602401143452"
_EKS_ACCOUNTS = {
    "af-south-1": "877085696533",
    "ap-east-1": "800184023465",
    "ap-east-2": "533267051163",
    "ap-south-2": "900889452093",
    "ap-southeast-3": "296578399912",
    "ap-southeast-4": "491585149902",
    "ap-southeast-5": "151610086707",
    "ap-southeast-6": "333609536671",
    "ap-southeast-7": "121268973566",
    "ca-west-1": "761377655185",
    "eu-central-2": "900612956339",
    "eu-south-1": "590381155156",
    "eu-south-2": "455263428931",
    "il-central-1": "066635153087",
    "me-central-1": "759879836304",
    "me-south-1": "558608220178",
    "mx-central-1": "730335286997",
    "us-gov-east-1": "151742754352",
    "us-gov-west-1": "013241004608",
}
# Accounts of the Deep Learning Containers, likewise:
# https://github.com/aws/deep-learning-containers/blob/main/docs/reference/region_availability.md, read 2026-11-21
_DLC_ACCOUNT = "763104351884"
_DLC_ACCOUNTS = {
    "af-south-1": "626614931356",
    "ap-east-1": "871362719292",
    "ap-east-2": "975050140332",
    "ap-northeast-3": "364406365360",
    "ap-south-2": "772153158452",
    "ap-southeast-3": "907027046896",
    "ap-southeast-4": "457447274322",
    "ap-southeast-5": "550225433462",
    "ap-southeast-6": "633930458069",
    "ap-southeast-7": "590183813437",
    "ca-west-1": "204538143572",
    "eu-central-2": "380420809688",
    "eu-south-1": "692866216735",
    "eu-south-2": "503227376785",
    "il-central-1": "780543022126",
    "me-central-1": "914824155844",
    "me-south-1": "217643126080",
    "mx-central-1": "637423239942",
}


def default_image(plan: FleetPlan) -> str | None:
    """AWS's training image for the plan; None where AWS has none for its CPU architecture or region."""
    if plan.node.cpu_architecture != "x86_64" or plan.region.startswith("us-gov-"):
        return None
    return _ecr(_DLC_ACCOUNTS.get(plan.region, _DLC_ACCOUNT), plan.region, TRAINING_IMAGE)


def nvidia_plugin_image(registry: str) -> str:
    """NVIDIA's device plugin, from its public registry or a mirror."""
    return f"{registry or NVIDIA_REGISTRY}/{NVIDIA_PLUGIN}"


def efa_plugin_image(region: str) -> str:
    """AWS's EFA device plugin, from EKS's registry of the region."""
    return _ecr(_EKS_ACCOUNTS.get(region, _EKS_ACCOUNT), region, EFA_PLUGIN)


def _ecr(account: str, region: str, image: str) -> str:
    return f"{account}.dkr.ecr.{region}.amazonaws.com/{image}"
