"""A plan as Kubernetes manifests for the cluster of platform eks: device plugins, and one gang of pods that trains.

Pure: a plan and what the stack exports go in, manifests come out. A pod takes a whole node and runs the same launch.sh
as a node of platform ec2, with the same variables. Nothing schedules the gang as one: the controller starts all nodes
of the group or none, and each has room for exactly one pod.
"""

from __future__ import annotations

import hashlib
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from infra.naming import slug
from optimizer.plan import FleetPlan, Node

Manifest = dict[str, Any]
Kind = Literal["jobset", "pytorchjob"]

NAMESPACE = "gpufleet"
SERVICE_ACCOUNT = "gpufleet-train"
JOB = "train"
# Nodes of the GPU group carry both; pods without GPUs stay away.
STACK_LABEL = "gpufleet/stack"
GPU_TAINT = ("nvidia.com/gpu", "present", "NoSchedule")

# https://github.com/NVIDIA/k8s-device-plugin/releases/tag/v0.20.0 (2026-08-19)
NVIDIA_PLUGIN = "nvidia/k8s-device-plugin:v0.20.0"
NVIDIA_REGISTRY = "nvcr.io"
# https://github.com/aws/eks-charts/tree/master/stable/aws-efa-k8s-device-plugin (chart v0.5.30, 2026-08-03)
EFA_PLUGIN = "eks/aws-efa-k8s-device-plugin:v0.5.20"
# Installed once by hand, with their controllers (docs/kubernetes.md):
# https://github.com/kubernetes-sigs/jobset/releases/tag/v0.12.0 (2026-05-08)
JOBSET_API = "jobset.x-k8s.io/v1alpha2"
# https://github.com/kubeflow/trainer/releases/tag/v1.9.3
PYTORCHJOB_API = "kubeflow.org/v1"
# torch 2.11 for CUDA 13.0, as bootstrap/requirements-node.txt has it, EFA and its NCCL plugin, boto3:
# https://github.com/aws/deep-learning-containers/blob/main/docs/pytorch/changelog/index.md, read 2026-11-21
TRAINING_IMAGE = "pytorch:2.11.0-cu130-amzn2023"

# EKS's images, by region; where none is named, the first account:
# https://docs.aws.amazon.com/eks/latest/userguide/add-ons-images.html, read 2026-11-21
_EKS_ACCOUNT = "602401143452"
_EKS_ACCOUNTS = {
    "af-south-1": "877085696533",
    "ap-east-1": "800184023465",
    "ap-south-2": "900889452093",
    "ap-southeast-3": "296578399912",
    "ap-southeast-4": "491585149902",
    "ca-west-1": "761377655185",
    "eu-central-2": "900612956339",
    "eu-south-1": "590381155156",
    "eu-south-2": "455263428931",
    "il-central-1": "066635153087",
    "me-central-1": "759879836304",
    "me-south-1": "558608220178",
    "us-gov-east-1": "151742754352",
    "us-gov-west-1": "013241004608",
}
# Deep Learning Containers, likewise:
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

# launch.sh's notes, the node's drain request and its instance id; gpufleet-node.service keeps the folder on the host.
RUN_DIR = "/run/gpufleet"
CODE_DIR = "/opt/gpufleet"
SCRATCH_DIR = "/mnt/nvme"
# What EFA's driver reserves of each node, and its programs take:
# https://docs.aws.amazon.com/eks/latest/userguide/node-efa.html
HUGEPAGES = "5120Mi"
# Share of a node's processors and memory that the training pod asks for; kubelet and daemons have the rest. No limit
# binds the pod: it is alone on its node.
POD_SHARE = 0.8
# launch.sh ends with these: the node is leaving (SIGTERM's own, and one that operators retry), and the command is at
# fault (EX_CONFIG of sysexits.h).
LEFT, GAVE_UP = 143, 78
# Failures of a pod that nobody foresaw before the job starts anew, and such starts.
POD_FAILURES, RESTARTS = 6, 3

# Fetches the bundle with launch.sh, and the training code, and believes neither before its digest. In Python, as the
# image must have boto3 for the checkpoints and need not have the AWS CLI.
FETCH = f"""\
import hashlib, io, os, tarfile
import boto3

s3 = boto3.client("s3", region_name=os.environ["GPUFLEET_REGION"])
wanted = [(os.environ["GPUFLEET_BUNDLE_KEY"], os.environ["GPUFLEET_BUNDLE_SHA256"])]
train = os.environ["GPUFLEET_TRAIN_ARCHIVE"]
if train:
    wanted.append((train, train.rpartition("/train-")[2].removesuffix(".tar.gz")))
for key, digest in wanted:
    data = s3.get_object(Bucket=os.environ["GPUFLEET_BUCKET"], Key=key)["Body"].read()
    if hashlib.sha256(data).hexdigest() != digest:
        raise SystemExit(key + " is not the archive its name says")
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        archive.extractall(os.environ.get("GPUFLEET_CODE_DIR", "{CODE_DIR}"), filter="data")
"""


class ClusterFacts(BaseModel):
    """What a plan's manifests need besides the plan: the stack's output ``kubernetes``."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    cluster: str
    environment: dict[str, str]
    bundle_key: str
    bundle_sha256: str
    registry: str
    plan_sha256: str


def plan_digest(plan: FleetPlan) -> str:
    """SHA-256 of a plan, hexadecimal: manifests are made of the plan that the stack carries out, or not at all."""
    return hashlib.sha256(plan.to_json().encode()).hexdigest()


def default_image(plan: FleetPlan) -> str | None:
    """AWS's training image in the plan's region; None where there is none for its processors or region."""
    if plan.node.cpu_architecture != "x86_64" or plan.region.startswith("us-gov-"):
        return None
    return _ecr(_DLC_ACCOUNTS.get(plan.region, _DLC_ACCOUNT), plan.region, TRAINING_IMAGE)


def manifests(plan: FleetPlan, facts: ClusterFacts, *, image: str, kind: Kind = "jobset") -> list[Manifest]:
    """Everything to apply to the cluster, in order.

    Args:
        plan: the plan the stack carries out.
        facts: what the stack exports.
        image: the training container's image; it has bash, Python with torch and boto3, and where the plan has EFA,
            libfabric and the NCCL plugin.
        kind: which controller runs the gang.
    """
    selector = {STACK_LABEL: slug(facts.environment["GPUFLEET_STACK"])}
    found = [
        _object(
            "v1",
            "Namespace",
            NAMESPACE,
            # The pod shares a folder with its host, which the stricter profiles forbid:
            # https://kubernetes.io/docs/concepts/security/pod-security-standards/
            labels={"pod-security.kubernetes.io/enforce": "privileged"},
        ),
        {**_object("v1", "ServiceAccount", SERVICE_ACCOUNT, NAMESPACE), "automountServiceAccountToken": False},
        _nvidia_plugin(facts.registry or NVIDIA_REGISTRY, selector),
    ]
    if plan.node.efa_cards:
        found.append(_efa_plugin(plan.region, selector))
    job = _jobset if kind == "jobset" else _pytorchjob
    found.append(job(plan, facts, image, selector))
    return found


def _jobset(plan: FleetPlan, facts: ClusterFacts, image: str, selector: dict[str, str]) -> Manifest:
    count, nodes = plan.node_count, "nodes"
    pod = _pod(
        plan,
        facts,
        image,
        selector,
        container="train",
        index="batch.kubernetes.io/job-completion-index",
        # <JobSet>-<replicated job>-<job>-<pod>.<subdomain>, which is the JobSet's name.
        peers=f"{JOB}-{nodes}-0-%d.{JOB}",
    )
    pod["spec"]["restartPolicy"] = "Never"
    job = {
        "completionMode": "Indexed",
        "completions": count,
        "parallelism": count,
        "backoffLimit": POD_FAILURES,
        # https://kubernetes.io/docs/concepts/workloads/controllers/job/#pod-failure-policy
        "podFailurePolicy": {
            "rules": [
                {"action": "FailJob", "onExitCodes": {"containerName": "train", "operator": "In", "values": [GAVE_UP]}},
                # A node that is taken away says nothing about the command, however often it happens.
                {"action": "Ignore", "onExitCodes": {"containerName": "train", "operator": "In", "values": [LEFT]}},
                {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
            ]
        },
        "template": pod,
    }
    return {
        **_object(JOBSET_API, "JobSet", JOB, NAMESPACE),
        "spec": {
            "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
            "failurePolicy": {
                "maxRestarts": RESTARTS,
                "rules": [
                    # The command gave up: the same command would again.
                    {"name": "gaveUp", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}
                ],
            },
            "replicatedJobs": [{"name": nodes, "replicas": 1, "template": {"spec": job}}],
        },
    }


def _pytorchjob(plan: FleetPlan, facts: ClusterFacts, image: str, selector: dict[str, str]) -> Manifest:
    pod = _pod(
        plan,
        facts,
        image,
        selector,
        # The operator looks for a container of this name.
        container="pytorch",
        index="training.kubeflow.org/replica-index",
        peers=f"{JOB}-worker-%d",
    )
    return {
        **_object(PYTORCHJOB_API, "PyTorchJob", JOB, NAMESPACE),
        "spec": {
            "runPolicy": {"cleanPodPolicy": "None", "backoffLimit": POD_FAILURES * RESTARTS},
            "pytorchReplicaSpecs": {
                "Worker": {
                    "replicas": plan.node_count,
                    # Exit codes of 128 and above are tried again, those below are the command's own:
                    # https://www.kubeflow.org/docs/components/trainer/legacy-v1/reference/architecture/
                    "restartPolicy": "ExitCode",
                    "template": pod,
                }
            },
        },
    }


def _pod(
    plan: FleetPlan,
    facts: ClusterFacts,
    image: str,
    selector: dict[str, str],
    *,
    container: str,
    index: str,
    peers: str,
) -> Manifest:
    node = plan.node
    environment = _environment(plan, facts, peers)
    rank = {"name": "GPUFLEET_NODE_RANK", "valueFrom": {"fieldRef": {"fieldPath": f"metadata.labels['{index}']"}}}
    code = {"name": "code", "mountPath": CODE_DIR}
    mounts = [
        # Writable, as the folder of the training code is where the command starts.
        code,
        {"name": "run", "mountPath": RUN_DIR},
        {"name": "shared-memory", "mountPath": "/dev/shm"},  # noqa: S108 (where NCCL looks)
    ]
    volumes: list[Manifest] = [
        {"name": "code", "emptyDir": {}},
        {"name": "run", "hostPath": {"path": RUN_DIR, "type": "DirectoryOrCreate"}},
        # NCCL and data loaders; Docker's default of 64 MiB ends them.
        {"name": "shared-memory", "emptyDir": {"medium": "Memory", "sizeLimit": f"{_share(node.memory_gib) // 2}Gi"}},
    ]
    if node.nvme_gb:
        # kubelet's own folder lies on the instance-store disks (infra.kubernetes.cluster.node_config).
        mounts.append({"name": "scratch", "mountPath": SCRATCH_DIR})
        volumes.append({"name": "scratch", "emptyDir": {}})
    security = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    train_security: Manifest = dict(security)
    if node.efa_cards:
        # libfabric pins the memory that the cards read and write.
        train_security = {**security, "capabilities": {"drop": ["ALL"], "add": ["IPC_LOCK"]}}
    spec = {
        "serviceAccountName": SERVICE_ACCOUNT,
        "nodeSelector": selector,
        "tolerations": [_toleration()],
        "securityContext": {"seccompProfile": {"type": "RuntimeDefault"}},
        # As long as the terminate hook holds the node: torchrun's workers save, then it ends.
        "terminationGracePeriodSeconds": plan.terminate_timeout_s,
        "initContainers": [
            {
                "name": "fetch",
                "image": image,
                "command": ["python3", "-c", FETCH],
                "env": environment,
                "resources": {"requests": {"cpu": "1", "memory": "1Gi"}},
                "securityContext": security,
                "volumeMounts": [code],
            },
            {
                # Beside the training until it ends, and no reason for it to: a node without metrics goes on.
                "name": "metrics",
                "image": image,
                "restartPolicy": "Always",
                "command": ["python3", "-m", "bootstrap.metrics"],
                "workingDir": CODE_DIR,
                # All GPUs to look at, and none of its own.
                "env": [
                    *environment,
                    {"name": "NVIDIA_VISIBLE_DEVICES", "value": "all"},
                    {"name": "NVIDIA_DRIVER_CAPABILITIES", "value": "utility"},
                ],
                "resources": {"requests": {"cpu": "100m", "memory": "256Mi"}, "limits": {"memory": "512Mi"}},
                "securityContext": security,
                "volumeMounts": [{**code, "readOnly": True}, {"name": "run", "mountPath": RUN_DIR, "readOnly": True}],
            },
        ],
        "containers": [
            {
                "name": container,
                "image": image,
                "command": ["bash", f"{CODE_DIR}/bootstrap/launch.sh"],
                "env": [*environment, rank],
                "resources": _resources(node),
                "securityContext": train_security,
                "volumeMounts": mounts,
            }
        ],
        "volumes": volumes,
    }
    return {"metadata": {"labels": dict(_LABELS)}, "spec": spec}


def _environment(plan: FleetPlan, facts: ClusterFacts, peers: str) -> list[Manifest]:
    """node.env's variables, and what differs in a pod."""
    variables = {
        **facts.environment,
        # Of the node, whose gpufleet-node.service answers the hooks, tells the controller and watches the GPUs; without
        # a group launch.sh ends with the training.
        "GPUFLEET_ASG_NAME": "",
        "GPUFLEET_LAUNCH_HOOK": "",
        "GPUFLEET_TERMINATE_HOOK": "",
        "GPUFLEET_RUN_DIR": RUN_DIR,
        "GPUFLEET_PROGRESS_FILE": f"{RUN_DIR}/progress.json",
        "GPUFLEET_LEFT_STATUS": str(LEFT),
        # After SIGTERM; no systemd ends a pod sooner than its grace period.
        "GPUFLEET_DRAIN_LIMIT_S": str(plan.save_limit_s),
        # The metadata service answers over one hop, to the node alone, which passes its notices on in the drain file.
        "AWS_EC2_METADATA_DISABLED": "true",
        "GPUFLEET_BUNDLE_KEY": facts.bundle_key,
        "GPUFLEET_BUNDLE_SHA256": facts.bundle_sha256,
    }
    if plan.node_count > 1:
        variables["GPUFLEET_PEERS"] = peers
        # The controller gives an incomplete fleet back; until then a pod waits, as one that ended would be counted.
        variables["GPUFLEET_JOIN_LIMIT_S"] = str(7 * 24 * 3600)
    if facts.environment.get("GPUFLEET_TRAIN_ARCHIVE"):
        variables["GPUFLEET_TRAIN_DIR"] = f"{CODE_DIR}/train"
    if plan.node.nvme_gb:
        variables["GPUFLEET_SCRATCH_DIR"] = SCRATCH_DIR
    return [{"name": name, "value": value} for name, value in variables.items()]


def _resources(node: Node) -> Manifest:
    devices = {"nvidia.com/gpu": str(node.ranks)}
    if node.efa_cards:
        devices |= {"vpc.amazonaws.com/efa": str(node.efa_cards), "hugepages-2Mi": HUGEPAGES}
    return {
        "requests": {"cpu": str(_share(node.vcpus)), "memory": f"{_share(node.memory_gib)}Gi", **devices},
        "limits": devices,
    }


def _nvidia_plugin(registry: str, selector: dict[str, str]) -> Manifest:
    container = {
        "name": "nvidia-device-plugin",
        "image": f"{registry}/{NVIDIA_PLUGIN}",
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
        "volumeMounts": [{"name": "device-plugins", "mountPath": _DEVICE_PLUGINS}],
    }
    return _daemon("nvidia-device-plugin", container, [_host_path("device-plugins", _DEVICE_PLUGINS)], selector)


def _efa_plugin(region: str, selector: dict[str, str]) -> Manifest:
    container = {
        "name": "aws-efa-k8s-device-plugin",
        "image": _ecr(_EKS_ACCOUNTS.get(region, _EKS_ACCOUNT), region, EFA_PLUGIN),
        # AWS's own chart: it looks at the host's InfiniBand devices.
        "securityContext": {"privileged": True, "runAsUser": 0},
        "resources": {"requests": {"cpu": "10m", "memory": "20Mi"}},
        "volumeMounts": [
            {"name": "device-plugins", "mountPath": _DEVICE_PLUGINS},
            {"name": "infiniband", "mountPath": "/dev/infiniband"},
        ],
    }
    volumes = [_host_path("device-plugins", _DEVICE_PLUGINS), _host_path("infiniband", "/dev/infiniband")]
    found = _daemon("aws-efa-k8s-device-plugin", container, volumes, selector)
    found["spec"]["template"]["spec"]["hostNetwork"] = True
    return found


_DEVICE_PLUGINS = "/var/lib/kubelet/device-plugins"
_LABELS = {"app.kubernetes.io/name": JOB, "app.kubernetes.io/managed-by": "gpufleet"}


def _daemon(name: str, container: Manifest, volumes: list[Manifest], selector: dict[str, str]) -> Manifest:
    labels = {"app.kubernetes.io/name": name}
    return {
        **_object("apps/v1", "DaemonSet", name, "kube-system"),
        "spec": {
            "selector": {"matchLabels": labels},
            "template": {
                "metadata": {"labels": labels},
                "spec": {
                    "priorityClassName": "system-node-critical",
                    "automountServiceAccountToken": False,
                    "nodeSelector": selector,
                    "tolerations": [_toleration()],
                    "containers": [container],
                    "volumes": volumes,
                },
            },
        },
    }


def _object(api: str, kind: str, name: str, namespace: str = "", *, labels: dict[str, str] | None = None) -> Manifest:
    metadata: Manifest = {"name": name}
    if namespace:
        metadata["namespace"] = namespace
    metadata["labels"] = {"app.kubernetes.io/managed-by": "gpufleet", **(labels or {})}
    return {"apiVersion": api, "kind": kind, "metadata": metadata}


def _toleration() -> Manifest:
    key, _, effect = GPU_TAINT
    return {"key": key, "operator": "Exists", "effect": effect}


def _host_path(name: str, path: str) -> Manifest:
    return {"name": name, "hostPath": {"path": path, "type": "Directory"}}


def _share(amount: float) -> int:
    return max(1, int(POD_SHARE * amount))


def _ecr(account: str, region: str, image: str) -> str:
    return f"{account}.dkr.ecr.{region}.amazonaws.com/{image}"
