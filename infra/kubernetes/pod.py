"""The training pod of platform eks: it takes a whole node, and runs the node's agent with the variables of node.env."""

from __future__ import annotations

from bootstrap.contract.report import EXIT_AT_FAULT
from infra.kubernetes.cluster_facts import ClusterFacts
from infra.kubernetes.constants import SERVICE_ACCOUNT
from infra.kubernetes.objects import MANAGED_BY, Manifest, gpu_toleration
from optimizer.contract.plan import FleetPlan, Node

JOB = "train"
# Holds the agent's notes, the node's drain request and its instance id; gpufleet-node.service keeps it on the host.
RUN_DIR = "/run/gpufleet"
CODE_DIR = "/opt/gpufleet"
SCRATCH_DIR = "/mnt/nvme"
# EFA's driver reserves these huge pages of each node, for the programs that use EFA:
# https://docs.aws.amazon.com/eks/latest/userguide/node-efa.html
HUGEPAGES = "5120Mi"
# Share of a node's processors and memory that the training pod requests; kubelet and daemons have the rest.
POD_SHARE = 0.8
# Exit statuses of the agent: the node is leaving (SIGTERM's), and the command is at fault.
LEFT, GAVE_UP = 143, EXIT_AT_FAULT

# Program of the init container: fetches bundle and training code, and checks their digests. The image has boto3 for the
# checkpoints, and may lack the AWS CLI.
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


def build_pod(
    plan: FleetPlan, facts: ClusterFacts, image: str, *, container: str, index_label: str, peers: str
) -> Manifest:
    """Template of the training pod; ``index_label`` holds the node rank, ``peers`` is a host name with %d for it."""
    node = plan.node
    environment = _environment(plan, facts, peers)
    rank = {"name": "GPUFLEET_NODE_RANK", "valueFrom": {"fieldRef": {"fieldPath": f"metadata.labels['{index_label}']"}}}
    code = {"name": "code", "mountPath": CODE_DIR}
    mounts = [
        # Writable, as the command starts in the folder of the training code.
        code,
        {"name": "run", "mountPath": RUN_DIR},
        {"name": "shared-memory", "mountPath": "/dev/shm"},  # noqa: S108 (where NCCL looks)
    ]
    volumes: list[Manifest] = [
        {"name": "code", "emptyDir": {}},
        {"name": "run", "hostPath": {"path": RUN_DIR, "type": "DirectoryOrCreate"}},
        # NCCL and data loaders fail with Docker's default of 64 MiB.
        {"name": "shared-memory", "emptyDir": {"medium": "Memory", "sizeLimit": f"{_share(node.memory_gib) // 2}Gi"}},
    ]
    if node.nvme_gb:
        # kubelet's folder lies on the instance-store disks (infra.kubernetes.node_config).
        mounts.append({"name": "scratch", "mountPath": SCRATCH_DIR})
        volumes.append({"name": "scratch", "emptyDir": {}})
    security = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    # libfabric pins the memory that the EFA cards read and write.
    pinning = {"capabilities": {"drop": ["ALL"], "add": ["IPC_LOCK"]}} if node.efa_cards else {}
    spec = {
        "serviceAccountName": SERVICE_ACCOUNT,
        "nodeSelector": facts.node_selector,
        "tolerations": [gpu_toleration()],
        "securityContext": {"seccompProfile": {"type": "RuntimeDefault"}},
        # The terminate hook's time, in which torchrun's workers save.
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
        ],
        "containers": [
            {
                "name": container,
                "image": image,
                "command": ["python3", f"{CODE_DIR}/bootstrap/agent"],
                "env": [*environment, rank],
                "resources": _resources(node),
                "securityContext": security | pinning,
                "volumeMounts": mounts,
            }
        ],
        "volumes": volumes,
    }
    return {"metadata": {"labels": {"app.kubernetes.io/name": JOB} | MANAGED_BY}, "spec": spec}


def _environment(plan: FleetPlan, facts: ClusterFacts, peers: str) -> list[Manifest]:
    """Variables of node.env, with those that differ in a pod."""
    variables = {
        **facts.environment,
        # gpufleet-node.service on the node does this work. Without a group the agent ends with the training.
        "GPUFLEET_ASG_NAME": "",
        "GPUFLEET_LAUNCH_HOOK": "",
        "GPUFLEET_TERMINATE_HOOK": "",
        "GPUFLEET_RUN_DIR": RUN_DIR,
        "GPUFLEET_PROGRESS_FILE": f"{RUN_DIR}/progress.json",
        "GPUFLEET_LEFT_STATUS": str(LEFT),
        # Seconds after SIGTERM, within the pod's grace period.
        "GPUFLEET_DRAIN_LIMIT_S": str(plan.save_limit_s),
        # The metadata service answers the node alone (one hop).
        "AWS_EC2_METADATA_DISABLED": "true",
        "GPUFLEET_BUNDLE_KEY": facts.bundle_key,
        "GPUFLEET_BUNDLE_SHA256": facts.bundle_sha256,
    }
    if plan.node_count > 1:
        variables["GPUFLEET_PEERS"] = peers
        # A pod that ended would count as failed; the controller gives an incomplete fleet back.
        variables["GPUFLEET_JOIN_LIMIT_S"] = str(7 * 24 * 3600)
    if facts.environment.get("GPUFLEET_TRAIN_ARCHIVE"):
        variables["GPUFLEET_TRAIN_DIR"] = f"{CODE_DIR}/train"
    if plan.node.nvme_gb:
        variables["GPUFLEET_SCRATCH_DIR"] = SCRATCH_DIR
    # Kubernetes expands $(NAME) in a value, and reduces $$ to $:
    # https://kubernetes.io/docs/reference/kubernetes-api/workload-resources/pod-v1/#environment-variables
    return [{"name": name, "value": value.replace("$", "$$")} for name, value in variables.items()]


def _resources(node: Node) -> Manifest:
    devices = {"nvidia.com/gpu": str(node.ranks)}
    if node.efa_cards:
        devices |= {"vpc.amazonaws.com/efa": str(node.efa_cards), "hugepages-2Mi": HUGEPAGES}
    return {
        "requests": {"cpu": str(_share(node.vcpus)), "memory": f"{_share(node.memory_gib)}Gi", **devices},
        "limits": devices,
    }


def _share(amount: float) -> int:
    return max(1, int(POD_SHARE * amount))
