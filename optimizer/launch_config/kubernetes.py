"""A plan as manifests for an existing Kubernetes cluster: its training as a JobSet or a Job, its nodes for Karpenter.

Every node of the plan is a pod. The Job replaces a lost pod, and torchrun's c10d rendezvous starts the rest again. The
image has the training code, torch and gpufleet. docs/engines.md has the use.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from bootstrap.contract.launcher import BY_SSH, start_of, started_by
from bootstrap.contract.report import EXIT_AT_FAULT
from optimizer.contract.errors import InvalidInputError
from optimizer.contract.plan import FleetPlan
from optimizer.contract.plan_variables import plan_variables

Manifest = dict[str, Any]
Kind = Literal["jobset", "job"]

# https://github.com/kubernetes-sigs/jobset/releases/tag/v0.12.0 (2026-05-08)
JOBSET_API = "jobset.x-k8s.io/v1alpha2"
# https://karpenter.sh/docs/concepts/nodepools/ and nodeclasses/, v1.14, read 2026-11-28
NODE_POOL_API, NODE_CLASS_API = "karpenter.sh/v1", "karpenter.k8s.aws/v1"
# https://kueue.sigs.k8s.io/docs/concepts/workload/, v0.19, read 2026-11-28. Kueue counts the time over all admissions,
# and a Job that it resumes begins its own deadline anew.
QUEUE_LABEL, MAX_TIME_LABEL = "kueue.x-k8s.io/queue-name", "kueue.x-k8s.io/max-exec-time-seconds"
# Karpenter takes the variant for NVIDIA's GPUs of Amazon Linux 2023's image, here with driver 580.159.03:
# https://github.com/awslabs/amazon-eks-ami/releases/tag/v20260714
NODE_IMAGE = "al2023@v20260714"
# Tag of a cluster's subnets and security groups, and name of its nodes' role, as Karpenter's guide makes them:
# https://karpenter.sh/docs/getting-started/getting-started-with-karpenter/
DISCOVERY_TAG, NODE_ROLE = "karpenter.sh/discovery", "KarpenterNodeRole-{}"
GPU, EFA, GPU_TAINT = "nvidia.com/gpu", "vpc.amazonaws.com/efa", "nvidia.com/gpu"
INSTANCE_TYPE_LABEL, ZONE_ID_LABEL = "node.kubernetes.io/instance-type", "topology.k8s.aws/zone-id"
# EFA's driver reserves these huge pages of each node, for the programs that use EFA:
# https://docs.aws.amazon.com/eks/latest/userguide/node-efa.html
HUGEPAGES = "5120Mi"
# Share of a node's processors and memory that a pod requests; kubelet and daemons have the rest.
POD_SHARE = 0.8

PORT = 29400
DRAIN_FILE, SCRATCH_DIR = "/tmp/gpufleet/drain", "/mnt/nvme"  # noqa: S108 (of the pod alone)
# torchrun of the pod with index 0 holds the rendezvous. read_timeout: the pods' images come at different times.
# join_timeout: a replacement waits for a node, which activeDeadlineSeconds bounds.
TORCHRUN = (
    "exec python3 -m bootstrap.training.torchrun --max-restarts 10 --nproc-per-node {ranks} --nnodes {nodes} "
    "--rdzv-backend c10d --rdzv-id {name} --rdzv-endpoint {first}:{port} --rdzv-conf last_call_timeout=2,"
    "keep_alive_interval=1,keep_alive_max_attempt=10,read_timeout=300,join_timeout=86400,"
    'is_host=$((JOB_COMPLETION_INDEX == 0)) "$@"'
)
# Runs before SIGTERM, which torchrun's workers survive by 30 s: has the training save, and waits for it (the files are
# those of bootstrap/training/notices.py).
PRE_STOP = (
    'mkdir -p {folder} && echo "$(($(date +%s) + {save_s})) preStop" > {drain}; '
    "while [ -e {drain}.listener ] && [ ! -e {drain}.saved ]; do sleep 1; done"
)
# Failures of each pod, beside those that the plan's interruptions bring, before the Job fails.
POD_FAILURES = 6


@dataclass(frozen=True, kw_only=True)
class ManifestOptions:
    """The user's part of the manifests: the options of the command, and the words of the training's."""

    image: str
    command: Sequence[str]
    checkpoints: str
    kind: Kind = "jobset"
    queue: str = ""
    service_account: str = ""
    karpenter: str = ""
    kms_key: str = ""


def manifests(plan: FleetPlan, options: ManifestOptions) -> list[Manifest]:
    """Objects to apply, in order.

    Raises:
        InvalidInputError: pods cannot carry out the plan or the command.
    """
    if plan.node.gpu_count < 1:
        raise InvalidInputError(
            f"{plan.instance_type} has {plan.node.gpu_count:g} x {plan.node.gpu}",
            why="NVIDIA's device plugin hands out whole GPUs",
            next_step="gpufleet up PLAN runs it on EC2",
        )
    if start_of(options.command) == "program" and (found := BY_SSH & started_by(options.command)):
        raise InvalidInputError(
            f"the command is {min(found)}'s",
            why="it starts the ranks of all nodes itself, and pods answer no remote shell",
            next_step="give the script alone, which torchrun starts, or make an MPIJob of Kubeflow's",
        )
    # A label of DNS, with room for the pods' own suffixes.
    model = re.sub("[^a-z0-9]+", "-", plan.job.model.lower().rpartition("/")[2]).strip("-")[:32].strip("-")
    name = f"train-{model or 'model'}"
    objects = _karpenter(plan, options, name) if options.karpenter else []
    return [*objects, *_training(plan, options, name)]


def hard_limit_s(plan: FleetPlan) -> int | None:
    """Seconds in which all nodes at their dearest price spend the plan's budget; None without a budget or a price."""
    is_spot = plan.purchase.option == "spot" and not plan.purchase.needs_on_demand_price
    prices = plan.node_prices_usd_per_hour.items()
    dearest = max((usd for node, usd in prices if not is_spot or node.market == "spot"), default=0.0)
    usd_per_hour = plan.node_count * dearest + plan.cost_usd.breakdown.volumes / plan.hours.expected
    if plan.job.budget_usd is None or not usd_per_hour:
        return None
    return max(1, int(plan.job.budget_usd / usd_per_hour * 3600))


def _object(api: str, kind: str, name: str, spec: Manifest, labels: dict[str, str] | None = None) -> Manifest:
    metadata = {"name": name, "labels": {"app.kubernetes.io/managed-by": "gpufleet", **(labels or {})}}
    return {"apiVersion": api, "kind": kind, "metadata": metadata, "spec": spec}


def _training(plan: FleetPlan, options: ManifestOptions, name: str) -> list[Manifest]:
    limit_s = hard_limit_s(plan)
    labels = {QUEUE_LABEL: options.queue, **({MAX_TIME_LABEL: str(limit_s)} if limit_s else {})}
    labels = labels if options.queue else {}
    if options.kind == "jobset":
        # JobSet makes the headless service: https://jobset.sigs.k8s.io/docs/concepts/#dns-hostnames-for-pods
        job = _job_spec(plan, _pod(plan, options, name, first=f"{name}-nodes-0-0.{name}"))
        # Without a failurePolicy a failed Job fails the JobSet. A restarted one would begin the deadline anew.
        spec = {"replicatedJobs": [{"name": "nodes", "replicas": 1, "template": {"spec": job}}]}
        return [_object(JOBSET_API, "JobSet", name, spec, labels)]
    # https://kubernetes.io/docs/tasks/job/job-with-pod-to-pod-communication/
    service = {
        "clusterIP": "None",
        "selector": {"batch.kubernetes.io/job-name": name},
        # The first pod is ready when the others have met it.
        "publishNotReadyAddresses": True,
    }
    pod = _pod(plan, options, name, first=f"{name}-0.{name}")
    pod["spec"]["subdomain"] = name
    return [_object("v1", "Service", name, service), _object("batch/v1", "Job", name, _job_spec(plan, pod), labels)]


def _job_spec(plan: FleetPlan, pod: Manifest) -> Manifest:
    count, limit_s = plan.node_count, hard_limit_s(plan)
    interruptions = math.ceil(plan.interruption.expected_count)
    return {
        "completionMode": "Indexed",
        "completions": count,
        "parallelism": count,
        # The loss of the first pod fails torchrun in all the others.
        "backoffLimit": count * (POD_FAILURES + interruptions),
        **({"activeDeadlineSeconds": limit_s} if limit_s else {}),
        # https://kubernetes.io/docs/concepts/workloads/controllers/job/#pod-failure-policy
        "podFailurePolicy": {
            "rules": [
                # A node that leaves is no failure of the command.
                {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
                {
                    "action": "FailJob",
                    "onExitCodes": {"containerName": "train", "operator": "In", "values": [EXIT_AT_FAULT]},
                },
            ]
        },
        "template": pod,
    }


def _pod(plan: FleetPlan, options: ManifestOptions, name: str, *, first: str) -> Manifest:
    """Template of the training pod, which takes a whole node; ``first`` is the host name of the pod with index 0."""
    node = plan.node
    mounts = [{"name": "shared-memory", "mountPath": "/dev/shm"}]  # noqa: S108 (where NCCL looks)
    volumes: list[Manifest] = [
        # NCCL and data loaders fail with a container's default of 64 MiB.
        {"name": "shared-memory", "emptyDir": {"medium": "Memory", "sizeLimit": f"{_share(node.memory_gib) // 2}Gi"}}
    ]
    if node.nvme_gb:
        # On Karpenter's nodes kubelet's folder lies on these disks (instanceStorePolicy).
        mounts.append({"name": "scratch", "mountPath": SCRATCH_DIR})
        volumes.append({"name": "scratch", "emptyDir": {}})
    # Devices and huge pages are never overcommitted, so they are requests and limits.
    devices, pinning = {GPU: str(node.ranks)}, dict[str, list[str]]()
    if node.efa_cards:
        devices |= {EFA: str(node.efa_cards), "hugepages-2Mi": HUGEPAGES}
        # libfabric pins the memory that the EFA cards read and write.
        pinning = {"add": ["IPC_LOCK"]}
    share = {"cpu": str(_share(node.vcpus)), "memory": f"{_share(node.memory_gib)}Gi"}
    folder = DRAIN_FILE.rpartition("/")[0]
    hook = PRE_STOP.format(folder=folder, drain=DRAIN_FILE, save_s=plan.save_limit_s)
    container = {
        "name": "train",
        "image": options.image,
        "command": [word.replace("$", "$$") for word in _command(plan, options, name, first)],
        "env": [
            # Kubernetes expands $(NAME) in values and words, and reduces $$ to $:
            # https://kubernetes.io/docs/reference/kubernetes-api/workload-resources/pod-v1/#environment-variables
            *(
                {"name": key, "value": value.replace("$", "$$")}
                for key, value in _variables(plan, options, first).items()
            ),
            {
                "name": "GPUFLEET_NODE_RANK",
                "valueFrom": {"fieldRef": {"fieldPath": "metadata.labels['batch.kubernetes.io/job-completion-index']"}},
            },
        ],
        "resources": {"requests": {**share, **devices}, "limits": devices},
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"], **pinning}},
        "lifecycle": {"preStop": {"exec": {"command": ["sh", "-c", hook]}}},
        "volumeMounts": mounts,
    }
    zones = plan.wanted_zone_ids[: 1 if plan.node_count > 1 else None]
    terms = [_within(INSTANCE_TYPE_LABEL, plan.instance_type), *([_within(ZONE_ID_LABEL, *zones)] if zones else [])]
    spec: Manifest = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": plan.terminate_timeout_s,
        "affinity": {
            "nodeAffinity": {
                "requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [{"matchExpressions": terms}]}
            }
        },
        "tolerations": [{"key": GPU_TAINT, "operator": "Exists", "effect": "NoSchedule"}],
        "securityContext": {"seccompProfile": {"type": "RuntimeDefault"}},
        "containers": [container],
        "volumes": volumes,
    }
    if options.service_account:
        spec["serviceAccountName"] = options.service_account
    labels = {"app.kubernetes.io/name": name, "app.kubernetes.io/managed-by": "gpufleet"}
    # Karpenter would move a pod to tidy its nodes up.
    return {"metadata": {"labels": labels, "annotations": {"karpenter.sh/do-not-disrupt": "true"}}, "spec": spec}


def _command(plan: FleetPlan, options: ManifestOptions, name: str, first: str) -> list[str]:
    if start_of(options.command) != "torchrun":
        return list(options.command)
    script = TORCHRUN.format(ranks=plan.node.ranks, nodes=plan.node_count, name=name, first=first, port=PORT)
    return ["sh", "-c", script, "torchrun", *options.command]


def _variables(plan: FleetPlan, options: ManifestOptions, first: str) -> dict[str, str]:
    """Variables of the training: the plan's, and those that a node's agent adds (bootstrap/agent/torchrun.py)."""
    return {
        **{key: str(value) for key, value in plan_variables(plan).items()},
        "GPUFLEET_REGION": plan.region,
        "GPUFLEET_CHECKPOINT_URI": options.checkpoints.rstrip("/"),
        "GPUFLEET_DRAIN_FILE": DRAIN_FILE,
        "AWS_DEFAULT_REGION": plan.region,
        # For a program with a launcher of its own.
        "MASTER_ADDR": first,
        "MASTER_PORT": str(PORT),
        "PYTHONUNBUFFERED": "1",
        # The plan's memory estimate assumes it.
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        # NCCL falls back to TCP without a word (bootstrap/agent/efa.py).
        **({"FI_PROVIDER": "efa", "NCCL_NET": "AWS Libfabric"} if plan.node.needs_efa else {}),
        **({"GPUFLEET_SCRATCH_DIR": SCRATCH_DIR} if plan.node.nvme_gb else {}),
    }


def _share(amount: float) -> int:
    return max(1, int(POD_SHARE * amount))


def _within(key: str, *values: str) -> Manifest:
    return {"key": key, "operator": "In", "values": list(values)}


def _karpenter(plan: FleetPlan, options: ManifestOptions, name: str) -> list[Manifest]:
    """EC2NodeClass and NodePool of the plan's nodes: type, zones, purchase, volumes, and no node more."""
    purchase, volumes = plan.purchase, plan.volumes
    discovery = [{"tags": {DISCOVERY_TAG: options.karpenter}}]
    volume = {
        "volumeType": "gp3",
        "volumeSize": f"{volumes.root_gib}Gi",
        "iops": volumes.iops,
        "throughput": volumes.throughput_mib_per_s,
        "encrypted": True,
        "deleteOnTermination": True,
        **({"kmsKeyID": options.kms_key} if options.kms_key else {}),
    }
    node_class: Manifest = {
        "role": NODE_ROLE.format(options.karpenter),
        "amiSelectorTerms": [{"alias": NODE_IMAGE}],
        "subnetSelectorTerms": discovery,
        "securityGroupSelectorTerms": discovery,
        "blockDeviceMappings": [{"deviceName": "/dev/xvda", "rootVolume": True, "ebs": volume}],
        "metadataOptions": {"httpTokens": "required", "httpPutResponseHopLimit": 1},
        **({"instanceStorePolicy": "RAID0"} if plan.node.nvme_gb else {}),
    }
    if purchase.capacity_reservation_id:
        # https://karpenter.sh/docs/tasks/odcrs/
        node_class["capacityReservationSelectorTerms"] = [{"id": purchase.capacity_reservation_id}]
        kinds = ["reserved"]
    else:
        # A commitment without a reservation is billed on demand, and AWS applies it to the bill.
        kinds = ["spot" if purchase.option == "spot" else "on-demand"]
    if purchase.needs_on_demand_price and "on-demand" not in kinds:
        kinds.append("on-demand")
    zones = plan.wanted_zone_ids
    requirements = [
        _within(INSTANCE_TYPE_LABEL, plan.instance_type),
        _within("karpenter.sh/capacity-type", *kinds),
        *([_within(ZONE_ID_LABEL, *zones)] if zones else []),
    ]
    pool = {
        "template": {
            "spec": {
                "nodeClassRef": {"group": "karpenter.k8s.aws", "kind": "EC2NodeClass", "name": name},
                "requirements": requirements,
                "taints": [{"key": GPU_TAINT, "value": "present", "effect": "NoSchedule"}],
                # By default a node ends after 30 days.
                "expireAfter": "Never",
            }
        },
        "limits": {GPU: str(plan.gpus)},
        "disruption": {"consolidationPolicy": "WhenEmpty", "consolidateAfter": "1m"},
    }
    return [_object(NODE_CLASS_API, "EC2NodeClass", name, node_class), _object(NODE_POOL_API, "NodePool", name, pool)]
