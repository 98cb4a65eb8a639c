from __future__ import annotations

import dataclasses
import hashlib
import io
import json
import re
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import moto
import pytest

from infra import bundle
from infra.kubernetes.cluster_facts import ClusterFacts, plan_digest
from infra.kubernetes.constants import GPU_TAINT, NAMESPACE, SERVICE_ACCOUNT, STACK_LABEL
from infra.kubernetes.container_images import default_image, efa_plugin_image
from infra.kubernetes.manifests import Kind, manifests
from infra.kubernetes.pod import FETCH, GAVE_UP, LEFT
from infra.user_data import environment
from optimizer.contract.plan import FleetPlan
from tests.infra.deployed import LONE_NODE
from tests.infra.test_user_data import FACTS, NAMES, settings_of
from tests.plans import sample_plan

IMAGE = "111122223333.dkr.ecr.us-east-1.amazonaws.com/train@sha256:" + "0" * 64
KINDS: tuple[Kind, ...] = ("jobset", "pytorchjob")
# A quantity, as apimachinery's resource.ParseQuantity takes it, in the units used here.
QUANTITY = re.compile(r"[1-9][0-9]*(m|Mi|Gi)?")


def facts(plan: FleetPlan, **changes: Any) -> ClusterFacts:
    known = dataclasses.replace(FACTS, train_archive=f"bootstrap/train-{'a' * 64}.tar.gz")
    return ClusterFacts(
        **{
            "cluster": "gpufleet-dev",
            "environment": environment(settings_of(plan, platform="eks", trainCommand="train.py"), NAMES, known),
            "bundle_key": "bootstrap/bundle.tar.gz",
            "bundle_sha256": "b" * 64,
            "registry": "",
            "plan_sha256": plan_digest(plan),
            **changes,
        }
    )


def made(plan: FleetPlan | None = None, *, kind: Kind = "jobset", **changes: Any) -> list[dict[str, Any]]:
    plan = plan or sample_plan()
    return manifests(plan, facts(plan, **changes), image=IMAGE, kind=kind)


def job(documents: list[dict[str, Any]]) -> dict[str, Any]:
    (found,) = [document for document in documents if document["kind"] in ("JobSet", "PyTorchJob")]
    return found


def pod(documents: list[dict[str, Any]]) -> dict[str, Any]:
    spec = job(documents)["spec"]
    if "replicatedJobs" in spec:
        template = spec["replicatedJobs"][0]["template"]["spec"]["template"]
    else:
        template = spec["pytorchReplicaSpecs"]["Worker"]["template"]
    found: dict[str, Any] = template["spec"]
    return found


def variables(container: dict[str, Any]) -> dict[str, str]:
    return {entry["name"]: entry["value"] for entry in container["env"] if "value" in entry}


def strings(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        for inner in value.values():
            yield from strings(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from strings(inner)
    elif isinstance(value, str):
        yield value


@pytest.mark.parametrize("kind", KINDS)
def test_a_pod_takes_a_whole_node_and_all_its_cards(kind: Kind) -> None:
    (container,) = pod(made(kind=kind))["containers"]
    resources = container["resources"]
    assert resources["limits"] == {"nvidia.com/gpu": "8", "vpc.amazonaws.com/efa": "4", "hugepages-2Mi": "5120Mi"}
    # Extended resources and huge pages are never overcommitted: a request that differs from its limit is refused.
    assert {key: resources["requests"][key] for key in resources["limits"]} == resources["limits"]
    assert (resources["requests"]["cpu"], resources["requests"]["memory"]) == ("76", "921Gi")
    assert all(QUANTITY.fullmatch(value) for value in strings(resources))


@pytest.mark.parametrize("kind", KINDS)
def test_the_container_has_the_nodes_variables_without_the_hooks(kind: Kind) -> None:
    plan = sample_plan()
    container = pod(made(plan, kind=kind))["containers"][0]
    have, node = variables(container), facts(plan).environment
    assert {name for name in node if have[name] != node[name]} == {
        "GPUFLEET_ASG_NAME",
        "GPUFLEET_LAUNCH_HOOK",
        "GPUFLEET_TERMINATE_HOOK",
    }
    assert have["AWS_EC2_METADATA_DISABLED"] == "true"
    assert have["GPUFLEET_LEFT_STATUS"] == "143"
    assert have["GPUFLEET_TRAIN_DIR"] == "/opt/gpufleet/train"
    assert container["command"] == ["python3", "/opt/gpufleet/bootstrap/agent"]


def expanded(given: dict[str, str], name: str) -> str:
    """A variable's value as Kubernetes' third_party/forked/golang/expansion makes it."""
    return re.sub(
        r"\$(\$|\((\w+)\))", lambda found: "$" if found[1] == "$" else given.get(found[2], found[0]), given[name]
    )


def test_a_dollar_of_the_command_reaches_the_training_as_it_is() -> None:
    command = "train.py --password a$$b --text '$(GPUFLEET_BUCKET) $HOME ${GPUFLEET_RANKS} $' "
    documents = made(environment=facts(sample_plan()).environment | {"GPUFLEET_TRAIN_COMMAND": command})
    for container in (*pod(documents)["initContainers"], *pod(documents)["containers"]):
        assert expanded(variables(container), "GPUFLEET_TRAIN_COMMAND") == command


@pytest.mark.parametrize(("kind", "name"), [("jobset", "train-nodes-0-1.train"), ("pytorchjob", "train-worker-1")])
def test_pods_find_each_other_by_the_names_their_controller_gives(kind: Kind, name: str) -> None:
    container = pod(made(kind=kind))["containers"][0]
    assert variables(container)["GPUFLEET_PEERS"] % 1 == name
    (rank,) = [entry for entry in container["env"] if entry["name"] == "GPUFLEET_NODE_RANK"]
    label = {"jobset": "batch.kubernetes.io/job-completion-index", "pytorchjob": "training.kubeflow.org/replica-index"}
    assert rank["valueFrom"] == {"fieldRef": {"fieldPath": f"metadata.labels['{label[kind]}']"}}
    assert "GPUFLEET_PEERS" not in variables(pod(made(sample_plan(**LONE_NODE), kind=kind))["containers"][0])


def test_a_lost_node_is_no_failure_and_a_command_that_gave_up_is_final() -> None:
    spec = job(made())["spec"]
    work = spec["replicatedJobs"][0]["template"]["spec"]
    assert (work["completions"], work["parallelism"], work["completionMode"]) == (2, 2, "Indexed")
    codes = {rule["action"]: rule["onExitCodes"] for rule in work["podFailurePolicy"]["rules"] if "onExitCodes" in rule}
    assert codes["FailJob"]["values"] == [GAVE_UP] and codes["Ignore"]["values"] == [LEFT]
    names = {container["name"] for container in work["template"]["spec"]["containers"]}
    assert {rule["containerName"] for rule in codes.values()} <= names
    assert {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]} in (
        work["podFailurePolicy"]["rules"]
    )
    # Kubernetes refuses a podFailurePolicy with any other.
    assert work["template"]["spec"]["restartPolicy"] == "Never"
    (rule,) = spec["failurePolicy"]["rules"]
    assert (rule["action"], rule["onJobFailureReasons"]) == ("FailJobSet", ["PodFailurePolicy"])


def test_kubeflow_retries_a_lost_node_and_no_command_that_gave_up() -> None:
    worker = job(made(kind="pytorchjob"))["spec"]["pytorchReplicaSpecs"]["Worker"]
    assert (worker["replicas"], worker["restartPolicy"]) == (2, "ExitCode")
    # ExitCode: 1 to 127 are permanent, 128 to 255 are retried.
    assert GAVE_UP < 128 <= LEFT
    assert [container["name"] for container in worker["template"]["spec"]["containers"]] == ["pytorch"]


@pytest.mark.parametrize("kind", KINDS)
def test_pods_go_to_this_stacks_gpu_nodes_only(kind: Kind) -> None:
    documents = made(kind=kind)
    daemons = [document["spec"]["template"]["spec"] for document in documents if document["kind"] == "DaemonSet"]
    assert len(daemons) == 2
    for spec in (pod(documents), *daemons):
        assert spec["nodeSelector"] == {STACK_LABEL: "dev"}
        assert spec["tolerations"] == [{"key": GPU_TAINT[0], "operator": "Exists", "effect": GPU_TAINT[2]}]


def test_the_grace_period_is_that_of_the_terminate_hook() -> None:
    slow = sample_plan(job={"checkpoint_gib": 2000.0}, parallelism={"sharding": "ddp"})
    assert pod(made(slow))["terminationGracePeriodSeconds"] == slow.terminate_timeout_s > 300


def test_a_node_without_efa_or_disks_gets_neither() -> None:
    plan = sample_plan(node={"network_cards": 1, "efa_cards": 0, "nvme_gb": 0})
    documents = made(plan)
    assert [document["metadata"]["name"] for document in documents if document["kind"] == "DaemonSet"] == [
        "nvidia-device-plugin"
    ]
    spec = pod(documents)
    container = spec["containers"][0]
    assert container["resources"]["limits"] == {"nvidia.com/gpu": "8"}
    assert "add" not in container["securityContext"]["capabilities"]
    assert "scratch" not in {volume["name"] for volume in spec["volumes"]}
    assert "GPUFLEET_SCRATCH_DIR" not in variables(container)


@pytest.mark.parametrize("kind", KINDS)
def test_every_mount_has_its_volume_and_containers_few_rights(kind: Kind) -> None:
    documents = made(kind=kind)
    spec = pod(documents)
    volumes = {volume["name"] for volume in spec["volumes"]}
    for container in (*spec["initContainers"], *spec["containers"]):
        assert {mount["name"] for mount in container["volumeMounts"]} <= volumes
        security = container["securityContext"]
        assert security["allowPrivilegeEscalation"] is False and security["capabilities"]["drop"] == ["ALL"]
        assert "privileged" not in security
    assert spec["containers"][0]["securityContext"]["capabilities"]["add"] == ["IPC_LOCK"]
    hosts = [volume["hostPath"]["path"] for volume in spec["volumes"] if "hostPath" in volume]
    assert hosts == ["/run/gpufleet"]
    assert not spec.get("hostNetwork") and not spec.get("hostPID") and not spec.get("hostIPC")
    assert spec["serviceAccountName"] == SERVICE_ACCOUNT
    assert job(documents)["metadata"]["namespace"] == NAMESPACE
    (account,) = [document for document in documents if document["kind"] == "ServiceAccount"]
    assert account["metadata"]["namespace"] == NAMESPACE and account["automountServiceAccountToken"] is False


def test_a_mirror_takes_the_place_of_public_registries() -> None:
    mirror = "111122223333.dkr.ecr.us-east-1.amazonaws.com/mirror"
    images = {text for text in strings(made(registry=mirror)) if "/" in text and ":v" in text}
    assert images == {
        f"{mirror}/nvidia/k8s-device-plugin:v0.20.0",
        "602401143452.dkr.ecr.us-east-1.amazonaws.com/eks/aws-efa-k8s-device-plugin:v0.5.20",
    }
    assert "nvcr.io/nvidia/k8s-device-plugin:v0.20.0" in set(strings(made()))


def test_the_default_image_is_aws_own_in_the_plans_region() -> None:
    assert default_image(sample_plan()) == (
        "763104351884.dkr.ecr.us-east-1.amazonaws.com/pytorch:2.11.0-cu130-amzn2023"
    )
    osaka = sample_plan(region="ap-northeast-3", zone_ids=["apne3-az1"])
    assert str(default_image(osaka)).startswith("364406365360.dkr.ecr.ap-northeast-3.")
    assert default_image(sample_plan(node={"cpu_architecture": "arm64"})) is None
    assert default_image(sample_plan(region="us-gov-west-1", zone_ids=[])) is None


@pytest.mark.parametrize(
    ("region", "account"),
    [
        ("ap-east-2", "533267051163"),
        ("ap-southeast-5", "151610086707"),
        ("ap-southeast-6", "333609536671"),
        ("ap-southeast-7", "121268973566"),
        ("mx-central-1", "730335286997"),
        ("ap-northeast-3", "602401143452"),
    ],
)
def test_the_efa_plugin_is_eks_own_in_newer_regions_too(region: str, account: str) -> None:
    assert efa_plugin_image(region).startswith(f"{account}.dkr.ecr.{region}.amazonaws.com/eks/")


class TestFetch:
    """The init container's program, against an S3 in this process."""

    @pytest.fixture
    def run(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
        # moto replaces the real address, and not the tests' closed one.
        monkeypatch.delenv("AWS_ENDPOINT_URL", raising=False)
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            monkeypatch.setenv(name, "testing")
        code = tmp_path / "my_training"
        code.mkdir()
        (code / "train.py").write_text("print('trained')\n")
        made_bundle, train = bundle.build(), bundle.pack(code, "train")
        train_key = f"bootstrap/train-{train.sha256}.tar.gz"

        def fetch(**changes: str) -> Path:
            known = {
                "GPUFLEET_REGION": "us-east-1",
                "GPUFLEET_BUCKET": "demo",
                "GPUFLEET_BUNDLE_KEY": "bootstrap/b.tar.gz",
                "GPUFLEET_BUNDLE_SHA256": made_bundle.sha256,
                "GPUFLEET_TRAIN_ARCHIVE": train_key,
                "GPUFLEET_CODE_DIR": str(tmp_path / "code"),
            }
            for name, value in {**known, **changes}.items():
                monkeypatch.setenv(name, value)
            exec(compile(FETCH, "fetch", "exec"), {})  # noqa: S102 (the very program)
            return tmp_path / "code"

        with moto.mock_aws():
            s3 = boto3.client("s3", region_name="us-east-1")
            s3.create_bucket(Bucket="demo")
            s3.put_object(Bucket="demo", Key="bootstrap/b.tar.gz", Body=made_bundle.content)
            s3.put_object(Bucket="demo", Key=train_key, Body=train.content)
            yield fetch

    def test_the_bundle_and_the_training_code_are_unpacked(self, run: Any) -> None:
        folder = run()
        assert (folder / "bootstrap/agent/__main__.py").is_file()
        done = subprocess.run([sys.executable, folder / "train/train.py"], capture_output=True, text=True, check=True)
        assert done.stdout == "trained\n"

    def test_an_archive_with_another_digest_is_not_unpacked(self, run: Any, tmp_path: Path) -> None:
        with pytest.raises(SystemExit, match=re.escape("bootstrap/b.tar.gz is not the archive its name says")):
            run(GPUFLEET_BUNDLE_SHA256="0" * 64)
        assert not (tmp_path / "code/bootstrap").exists()

    def test_training_code_that_was_swapped_is_not_run(self, run: Any, tmp_path: Path) -> None:
        other = io.BytesIO()
        with tarfile.open(fileobj=other, mode="w:gz") as archive:
            archive.addfile(tarfile.TarInfo("train/train.py"))
        key = f"bootstrap/train-{hashlib.sha256(b'agreed').hexdigest()}.tar.gz"
        boto3.client("s3", region_name="us-east-1").put_object(Bucket="demo", Key=key, Body=other.getvalue())
        with pytest.raises(SystemExit, match="is not the archive its name says"):
            run(GPUFLEET_TRAIN_ARCHIVE=key)
        assert not (tmp_path / "code/train").exists()

    def test_without_training_code_the_bundle_alone_comes(self, run: Any) -> None:
        folder = run(GPUFLEET_TRAIN_ARCHIVE="")
        assert not (folder / "train").exists() and (folder / "bootstrap").is_dir()


def test_manifests_are_plain_data() -> None:
    """A tuple or an enum would print as something that kubectl cannot read."""
    documents = made()
    assert json.loads(json.dumps(documents)) == documents
