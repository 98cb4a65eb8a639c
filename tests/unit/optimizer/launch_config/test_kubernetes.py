"""Manifests against the published schemas, and the parts that no schema knows."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from bootstrap.contract.report import EXIT_AT_FAULT
from bootstrap.training.notices import NoticeFiles
from optimizer.contract.errors import InvalidInputError
from optimizer.contract.plan import FleetPlan
from optimizer.launch_config import kubernetes
from optimizer.launch_config.kubernetes import Kind, ManifestOptions, hard_limit_s, manifests
from tests.infra.deployed import LONE_NODE, capacity_block, on_demand, reserved
from tests.plans import sample_plan

SCHEMAS = json.loads(Path(__file__).with_name("kubernetes_schemas.json").read_text(encoding="utf-8"))
KINDS: tuple[Kind, ...] = ("jobset", "job")
WITHOUT_EFA = {"node": {"network_cards": 1, "efa_cards": 0, "gpudirect": False, "nvme_gb": 0}}


def made(plan: FleetPlan | None = None, **options: Any) -> dict[str, dict[str, Any]]:
    """Objects by kind."""
    given = {"image": "train@sha256:1", "command": ["train.py"], "checkpoints": "s3://bucket/run/", **options}
    documents = manifests(plan or sample_plan(), ManifestOptions(**given))
    assert json.loads(json.dumps(documents)) == documents, "kubectl reads plain data alone"
    return {document["kind"]: document for document in documents}


def job_of(objects: dict[str, dict[str, Any]]) -> dict[str, Any]:
    if "Job" in objects:
        return dict(objects["Job"]["spec"])
    return dict(objects["JobSet"]["spec"]["replicatedJobs"][0]["template"]["spec"])


def pod_of(objects: dict[str, dict[str, Any]]) -> dict[str, Any]:
    return dict(job_of(objects)["template"]["spec"])


def container_of(objects: dict[str, dict[str, Any]]) -> dict[str, Any]:
    (container,) = pod_of(objects)["containers"]
    return dict(container)


def variables(objects: dict[str, dict[str, Any]]) -> dict[str, str]:
    return {entry["name"]: entry["value"] for entry in container_of(objects)["env"] if "value" in entry}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("changes", [{}, on_demand(), LONE_NODE, capacity_block(), reserved(), WITHOUT_EFA])
@pytest.mark.parametrize(
    "extra", [{}, {"queue": "gpus", "service_account": "train", "karpenter": "ml", "kms_key": "k"}]
)
def test_each_object_keeps_its_published_schema(kind: Kind, changes: dict[str, Any], extra: dict[str, str]) -> None:
    objects = made(sample_plan(**changes), kind=kind, **extra)
    karpenter = ["EC2NodeClass", "NodePool"] if extra else []
    assert list(objects) == [*karpenter, *(["JobSet"] if kind == "jobset" else ["Service", "Job"])]
    for name, document in objects.items():
        jsonschema.validate(document["spec"], SCHEMAS | SCHEMAS["specs"][name])
        assert re.fullmatch(r"[a-z0-9]([-a-z0-9]{0,40}[a-z0-9])?", document["metadata"]["name"])


@pytest.mark.parametrize("kind", KINDS)
def test_a_pod_takes_a_whole_node_and_all_its_cards(kind: Kind) -> None:
    resources = container_of(made(kind=kind))["resources"]
    assert resources["limits"] == {"nvidia.com/gpu": "8", "vpc.amazonaws.com/efa": "4", "hugepages-2Mi": "5120Mi"}
    assert {key: resources["requests"][key] for key in resources["limits"]} == resources["limits"]
    assert (resources["requests"]["cpu"], resources["requests"]["memory"]) == ("76", "921Gi")
    plain = made(sample_plan(**WITHOUT_EFA))
    assert container_of(plain)["resources"]["limits"] == {"nvidia.com/gpu": "8"}
    assert container_of(plain)["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert "NCCL_NET" not in variables(plain) and "GPUFLEET_SCRATCH_DIR" not in variables(plain)
    for objects in (made(kind=kind), plain):
        assert {mount["name"] for mount in container_of(objects)["volumeMounts"]} == {
            volume["name"] for volume in pod_of(objects)["volumes"]
        }


@pytest.mark.parametrize(("kind", "first"), [("jobset", "{0}-nodes-0-0.{0}"), ("job", "{0}-0.{0}")])
def test_pods_meet_at_the_first_by_the_name_that_its_controller_gives(kind: Kind, first: str) -> None:
    """JobSet: <JobSet>-<replicated job>-<job>-<index>.<JobSet>; Job: <Job>-<index>.<subdomain>."""
    objects, first = made(kind=kind), first.format("train-llama-2-7b")
    assert f"--rdzv-endpoint {first}:29400 " in container_of(objects)["command"][2]
    assert variables(objects)["MASTER_ADDR"] == first
    job = job_of(objects)
    assert (job["completions"], job["parallelism"], job["completionMode"]) == (2, 2, "Indexed")
    if kind == "job":
        assert objects["Service"]["spec"]["selector"] == {"batch.kubernetes.io/job-name": "train-llama-2-7b"}
        assert objects["Service"]["metadata"]["name"] == pod_of(objects)["subdomain"]


def expanded(text: str, given: dict[str, str]) -> str:
    """A value as Kubernetes' third_party/forked/golang/expansion makes it."""
    return re.sub(r"\$(\$|\((\w+)\))", lambda found: "$" if found[1] == "$" else given.get(found[2], found[0]), text)


def test_the_shell_runs_torchrun_with_the_command_as_it_is(tmp_path: Path) -> None:
    words = ["train.py", "--text", "$(GPUFLEET_REGION) $HOME $$ 'a b'", "--rate", "1e-3"]
    objects = made(command=words)
    python = tmp_path / "python3"
    python.write_text('#!/bin/sh\nfor word in "$@"; do echo "<$word>"; done\n')
    python.chmod(0o755)
    command = [expanded(word, variables(objects)) for word in container_of(objects)["command"]]
    for index, is_host in (("0", "1"), ("1", "0")):
        environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "JOB_COMPLETION_INDEX": index}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        lines = done.stdout.splitlines()
        assert lines[:2] == ["<-m>", "<bootstrap.training.torchrun>"] and f"is_host={is_host}>" in done.stdout
        assert lines[-len(words) :] == [f"<{word}>" for word in words]
    assert "--nnodes 2" in command[2] and "--nproc-per-node 8" in command[2]


def test_a_program_of_its_own_starts_on_every_pod() -> None:
    words = ["accelerate", "launch", "--main_process_ip", "x", "train.py"]
    objects = made(command=words)
    assert container_of(objects)["command"] == words
    (rank,) = [entry for entry in container_of(objects)["env"] if entry["name"] == "GPUFLEET_NODE_RANK"]
    assert "job-completion-index" in rank["valueFrom"]["fieldRef"]["fieldPath"]
    with pytest.raises(InvalidInputError, match="mpirun"):
        made(command=["mpirun", "train.py"])


def test_the_training_has_the_plans_variables_and_its_store() -> None:
    known = variables(made())
    assert known["GPUFLEET_CHECKPOINT_URI"] == "s3://bucket/run"
    plan = json.loads(known["GPUFLEET_PLAN"])
    assert (plan["micro_batch"], plan["sharding"]) == (4, "zero3")
    assert known["NCCL_NET"] == "AWS Libfabric" and known["GPUFLEET_SCRATCH_DIR"] == "/mnt/nvme"


@pytest.mark.parametrize("listens", [True, False])
def test_a_pod_that_leaves_saves_before_it_gets_sigterm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, listens: bool
) -> None:
    """The hook writes the notice that the training reads, and waits for its answer where one is promised."""
    files = NoticeFiles(tmp_path / "run/drain")
    monkeypatch.setattr(kubernetes, "DRAIN_FILE", str(files.path))
    plan = sample_plan(job={"checkpoint_gib": 2000.0}, parallelism={"sharding": "ddp"})
    objects = made(plan)
    assert pod_of(objects)["terminationGracePeriodSeconds"] == plan.terminate_timeout_s > plan.save_limit_s > 240
    if listens:
        files.path.parent.mkdir()
        files.listener.touch()
        threading.Timer(0.5, lambda: files.path.with_suffix(".saved").touch()).start()
    began = time.time()
    shell = shutil.which("sh")
    assert shell
    hook = container_of(objects)["lifecycle"]["preStop"]["exec"]["command"]
    subprocess.run([shell, *hook[1:]], check=True, timeout=30)
    assert files.saved.exists() is listens
    notice = files.read_stop()
    assert notice is not None and notice.source == "preStop"
    assert abs(notice.save_by - began - plan.save_limit_s) <= 5


def test_a_lost_node_is_no_failure_and_settings_at_fault_are_final() -> None:
    plan = sample_plan()
    job = job_of(made(plan))
    lost, fault = job["podFailurePolicy"]["rules"]
    assert lost == {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
    assert (fault["action"], fault["onExitCodes"]["values"]) == ("FailJob", [EXIT_AT_FAULT])
    # Kubernetes refuses a podFailurePolicy with any other.
    assert job["template"]["spec"]["restartPolicy"] == "Never"
    assert job["backoffLimit"] >= plan.node_count * 6
    # A JobSet that restarted its Job would begin the deadline anew.
    assert "failurePolicy" not in made(plan)["JobSet"]["spec"]


def test_the_job_ends_when_the_budget_is_spent_at_the_dearest_price() -> None:
    plan = sample_plan()
    dearest = max(plan.node_prices_usd_per_hour.values())
    volumes = plan.cost_usd.breakdown.volumes / plan.hours.expected
    limit_s = job_of(made(plan))["activeDeadlineSeconds"]
    assert limit_s == hard_limit_s(plan)
    spent = limit_s / 3600 * (plan.node_count * dearest + volumes)
    assert plan.job.budget_usd is not None and plan.job.budget_usd - 0.1 < spent <= plan.job.budget_usd
    queued = made(plan, queue="gpus")["JobSet"]["metadata"]["labels"]
    assert queued["kueue.x-k8s.io/queue-name"] == "gpus"
    assert queued["kueue.x-k8s.io/max-exec-time-seconds"] == str(limit_s)
    endless = made(sample_plan(job={"budget_usd": None}), queue="gpus")
    assert "activeDeadlineSeconds" not in job_of(endless)
    assert "kueue.x-k8s.io/max-exec-time-seconds" not in endless["JobSet"]["metadata"]["labels"]
    # Spot nodes without a fallback never cost what on-demand nodes do.
    spot = sample_plan(purchase={"option": "spot", "on_demand_base": 0})
    longer = hard_limit_s(spot)
    assert longer is not None and longer > limit_s


def requirements(objects: dict[str, dict[str, Any]]) -> dict[str, list[str]]:
    terms = objects["NodePool"]["spec"]["template"]["spec"]["requirements"]
    assert all(term["operator"] == "In" and term["values"] for term in terms)
    return {term["key"].rpartition("/")[2]: term["values"] for term in terms}


def test_karpenter_makes_the_plans_nodes_and_no_more() -> None:
    objects = made(karpenter="ml", kms_key="arn:aws:kms:us-east-1:111122223333:key/1")
    assert requirements(objects) == {
        "instance-type": ["p4d.24xlarge"],
        "capacity-type": ["spot", "on-demand"],
        "zone-id": list(sample_plan().wanted_zone_ids),
    }
    assert objects["NodePool"]["spec"]["limits"] == {"nvidia.com/gpu": "16"}
    node_class = objects["EC2NodeClass"]["spec"]
    (volume,) = node_class["blockDeviceMappings"]
    assert (volume["ebs"]["volumeSize"], volume["ebs"]["encrypted"]) == ("200Gi", True)
    assert volume["ebs"]["kmsKeyID"].endswith("key/1")
    assert node_class["subnetSelectorTerms"] == [{"tags": {"karpenter.sh/discovery": "ml"}}]
    (taint,) = objects["NodePool"]["spec"]["template"]["spec"]["taints"]
    (toleration,) = pod_of(objects)["tolerations"]
    assert (taint["key"], taint["effect"]) == (toleration["key"], toleration["effect"])
    terms = pod_of(objects)["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    (zone,) = [term for term in terms["nodeSelectorTerms"][0]["matchExpressions"] if "zone" in term["key"]]
    assert len(zone["values"]) == 1, "a gang is in one zone"


@pytest.mark.parametrize(
    ("changes", "kinds", "reservation"),
    [
        (on_demand(), ["on-demand"], None),
        (reserved(), ["on-demand"], None),
        (capacity_block(), ["reserved"], "cr-0123456789abcdef0"),
    ],
)
def test_karpenter_buys_as_the_plan_does(changes: dict[str, Any], kinds: list[str], reservation: str | None) -> None:
    objects = made(sample_plan(**changes), karpenter="ml")
    assert requirements(objects)["capacity-type"] == kinds
    terms = objects["EC2NodeClass"]["spec"].get("capacityReservationSelectorTerms", [])
    assert terms == ([{"id": reservation}] if reservation else [])


def test_a_part_of_a_gpu_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="whole GPUs"):
        made(sample_plan(node_count=1, node={"gpu_count": 0.5}, parallelism={"data": 1, "grad_accum": 32}))
