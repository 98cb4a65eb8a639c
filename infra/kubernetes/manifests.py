"""A plan as Kubernetes manifests for platform eks: device plugins, and one gang of training pods, one a node."""

from __future__ import annotations

from typing import Literal

from infra.kubernetes.cluster_facts import ClusterFacts
from infra.kubernetes.constants import NAMESPACE, SERVICE_ACCOUNT
from infra.kubernetes.device_plugins import efa_plugin, nvidia_plugin
from infra.kubernetes.objects import Manifest, build_object
from infra.kubernetes.pod import GAVE_UP, JOB, LEFT, build_pod
from optimizer.contract.plan import FleetPlan

Kind = Literal["jobset", "pytorchjob"]

# A person installs the controllers (docs/kubernetes.md): https://github.com/kubernetes-sigs/jobset/releases/tag/v0.12.0
# (2026-05-08), https://github.com/kubeflow/trainer/releases/tag/v1.9.3
JOBSET_API = "jobset.x-k8s.io/v1alpha2"
PYTORCHJOB_API = "kubeflow.org/v1"
# Unexpected failures of pods before the job starts anew, and the number of such starts.
POD_FAILURES, RESTARTS = 6, 3


def manifests(plan: FleetPlan, facts: ClusterFacts, *, image: str, kind: Kind = "jobset") -> list[Manifest]:
    """Objects to apply to the cluster, in order; ``image`` is the training container's."""
    objects = [
        build_object(
            "v1",
            "Namespace",
            NAMESPACE,
            # For the pod's hostPath volume:
            # https://kubernetes.io/docs/concepts/security/pod-security-standards/
            labels={"pod-security.kubernetes.io/enforce": "privileged"},
        ),
        {**build_object("v1", "ServiceAccount", SERVICE_ACCOUNT, NAMESPACE), "automountServiceAccountToken": False},
        nvidia_plugin(facts.registry, facts.node_selector),
    ]
    if plan.node.efa_cards:
        objects.append(efa_plugin(plan.region, facts.node_selector))
    job = _jobset if kind == "jobset" else _pytorchjob
    return [*objects, job(plan, facts, image)]


def _jobset(plan: FleetPlan, facts: ClusterFacts, image: str) -> Manifest:
    count, nodes = plan.node_count, "nodes"
    pod = build_pod(
        plan,
        facts,
        image,
        container="train",
        index_label="batch.kubernetes.io/job-completion-index",
        # <JobSet>-<replicated job>-<job>-<pod>.<subdomain>; the subdomain is the JobSet's name.
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
                # The loss of a node is no failure of the command.
                {"action": "Ignore", "onExitCodes": {"containerName": "train", "operator": "In", "values": [LEFT]}},
                {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
            ]
        },
        "template": pod,
    }
    return {
        **build_object(JOBSET_API, "JobSet", JOB, NAMESPACE),
        "spec": {
            "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
            "failurePolicy": {
                "maxRestarts": RESTARTS,
                "rules": [{"name": "gaveUp", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}],
            },
            "replicatedJobs": [{"name": nodes, "replicas": 1, "template": {"spec": job}}],
        },
    }


def _pytorchjob(plan: FleetPlan, facts: ClusterFacts, image: str) -> Manifest:
    pod = build_pod(
        plan,
        facts,
        image,
        # The operator requires a container of this name.
        container="pytorch",
        index_label="training.kubeflow.org/replica-index",
        peers=f"{JOB}-worker-%d",
    )
    return {
        **build_object(PYTORCHJOB_API, "PyTorchJob", JOB, NAMESPACE),
        "spec": {
            "runPolicy": {"cleanPodPolicy": "None", "backoffLimit": POD_FAILURES * RESTARTS},
            "pytorchReplicaSpecs": {
                "Worker": {
                    "replicas": plan.node_count,
                    # Exit statuses of 128 and above are retried, lower ones are final:
                    # https://www.kubeflow.org/docs/components/trainer/legacy-v1/reference/architecture/
                    "restartPolicy": "ExitCode",
                    "template": pod,
                }
            },
        },
    }
