from __future__ import annotations

import hashlib
import json
import tarfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import yaml

from infra import images
from infra.configuration import load as load_configuration
from infra.offline.preview import Answers, resources, stand_in
from infra.project import project_file
from infra.refusals import secrets_in
from infra.settings import ConfigError, StackSettings
from infra.wheels import Wanted
from optimizer.contract.plan import CANONICAL, FleetPlan
from tests.infra.deployed import (
    CONTAINER,
    EXISTING_VPC,
    LONE_NODE,
    WORKERS,
    block_row,
    capacity_block,
    deploy,
    on_demand,
    reserved,
    topped_up,
    workers,
)
from tests.plans import SPOT_P4D, sample_plan


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"aws:region": "eu-west-1"}, "aws:region is eu-west-1 and the plan is for us-east-1"),
        ({"aws:region": ""}, "aws:region is not set"),
        ({"gpufleet:vpcId": "vpc-1"}, "go together"),
        ({"gpufleet:subnetIds": '["subnet-1"]'}, "go together"),
        ({**EXISTING_VPC, "gpufleet:subnetIds": '["subnet-1", "subnet-2"]'}, "one zone.*keep one"),
        ({"gpufleet:subnetIds": '"subnet-1"'}, r"subnetIds: a list is needed \(got 'subnet-1'\)"),
        ({"gpufleet:vpcCidr": "10.0.0.0/8"}, r"vpcCidr is no key .*pulumi config rm 'gpufleet:vpcCidr'"),
        ({"gpufleet:amiId": "ami-0123456789abcdef0", "gpufleet:amiName": "x"}, "both set"),
        ({"gpufleet:amiId": "latest"}, r"amiId: must match .* \(got 'latest'\)"),
        ({"gpufleet:image": "train:1"}, "'train:1' is no image of a private ECR registry by digest.*docker push"),
        ({"gpufleet:image": CONTAINER.replace("us-east-1", "eu-west-1")}, "is in eu-west-1 and the plan for us-east-1"),
        ({"gpufleet:image": CONTAINER, "gpufleet:requirements": "r.txt"}, "install the packages into the image"),
        ({"gpufleet:trainCommand": "a\nb"}, "line break"),
        ({"gpufleet:trainCommand": "x" * 17000}, "the limit of EC2 is 16384: gpufleet:trainCommand has 17000"),
        ({"gpufleet:trainCommand": "train.py --name 'a"}, "unbalanced quotes"),
        ({"gpufleet:trainCommand": "accelerate launch train.py"}, r"accelerate has no option with \$\{MASTER_ADDR\}"),
        ({"gpufleet:data": "s3://corpus/*"}, "name an S3 prefix"),
        ({"gpufleet:permissionsBoundary": "limits"}, r"permissionsBoundary: must match .* \(got 'limits'\)"),
        ({"gpufleet:undoDays": "400"}, r"undoDays: must be at most 365 \(got 400\)"),
        ({"gpufleet:alarmEmail": "nobody"}, "alarmEmail: must match"),
        ({"gpufleet:tags": '["a"]'}, r"tags: a mapping is needed \(got \['a'\]\)"),
        ({"gpufleet:tags": '{"aws:x": "1"}'}, "begins with aws:"),
        ({"gpufleet:tags": '{"project": "x"}'}, "differs from another in case alone"),
        ({"gpufleet:tags": '{"team": "a&b"}'}, "tags.team: must match"),
        ({"gpufleet:tags": json.dumps({str(n): "x" for n in range(7)})}, "tags: must have at most 6 entries"),
        ({"gpufleet:sharedCeiling": "s3://team/budget.json"}, "sharedCeiling: must match"),
        ({"gpufleet:sharedCeiling": "s3://team/*@500"}, "sharedCeiling: must match"),
        ({"gpufleet:ceilingUSD": "500"}, r"gpufleet:ceilingUSD is no key .*\(did you mean gpufleet:ceilingUsd\?\)"),
        ({"gpufleet:subnetIds[0]": "subnet"}, r"gpufleet:subnetIds\[0\] is no key.*pulumi config set --path"),
        ({"gpufleet:spotPolicy": "greedy"}, r"spotPolicy: must be 'fallback' or 'adaptive' \(got 'greedy'\)"),
        ({"gpufleet:plan": '{"schema_version": 1}'}, "instance_type: missing"),
        ({"gpufleet:plan": json.dumps({**SPOT_P4D, "node_count": 3})}, "parallelism covers"),
    ],
)
def test_a_wrong_configuration_is_refused_with_its_value(settings: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=f"(?s){message}"):
        deploy(config=settings)


def test_an_ended_block_starts_nothing_but_the_deletion_of_its_checkpoints() -> None:
    over = capacity_block(start="2026-06-01T09:00:00Z", end="2026-06-02T09:00:00Z")
    image = {"gpufleet:amiId": "ami-0123456789abcdef0"}
    with pytest.raises(ConfigError, match=r"Block ends at 2026-06-02 09:00 UTC, and it is .*gpufleet blocks find PLAN"):
        load(image, **over)
    assert load({**image, "gpufleet:forceDestroy": "true"}, **over).force_destroy
    on_demand_after = block_row(1)
    blocks = on_demand_after["purchase"]["capacity_block"] | {
        "start": "2026-06-01T09:00:00Z",
        "end": "2026-06-02T09:00:00Z",
    }
    load(image, **on_demand_after | {"purchase": on_demand_after["purchase"] | {"capacity_block": blocks}})


UTILIZATION = {"minNodes": 1, "gpuUtilizationPercent": 60}
FALLBACK = {"purchase": {"fallback": "on-demand"}}
ADAPTIVE = {"gpufleet:spotPolicy": "adaptive"}


@pytest.mark.parametrize(
    ("plan", "settings", "message"),
    [
        (
            {**capacity_block(), "hours": {"expected": 20, "p50": 20, "p95": 23.5}},
            {},
            "p95 is 23.5 h and the Capacity Block from 2099-06-01 09:00 to 2099-06-02 09:00 UTC has 23.4 h",
        ),
        (capacity_block(end="2099-06-01T09:10:00Z"), {}, "has 0.0 h to train in"),
        (
            {"purchase": capacity_block()["purchase"] | {"capacity_reservation_id": None}},
            {},
            "capacity_reservation_id is not set.*gpufleet blocks buy",
        ),
        ({"node": {"network_cards": 32, "efa_cards": 8}}, {}, "efa_cards is 8 of 32"),
        ({"node": {"gpu": "V100"}}, {}, "V100 GPUs.*starts with Turing.*amiId"),
        ({"node": {"gpu_count": 0.5}, "parallelism": {"data": 2, "grad_accum": 16}}, {}, "0.5 of a GPU.*vGPU.*amiId"),
        ({}, ADAPTIVE, "buys spot with fallback none, .*--spot-fallback on-demand"),
        (on_demand(), ADAPTIVE, "buys on-demand with fallback none"),
        (FALLBACK, ADAPTIVE | workers(), "moves a training gang .* of mode workers buys"),
        ({**FALLBACK, "job": {"deadline_hours": None}}, ADAPTIVE, "deadline none: make the plan"),
        ({}, {"gpufleet:gangWindowMinutes": "5"}, "gangWindowMinutes: must be at least 15"),
        ({}, {"gpufleet:scaling": json.dumps(UTILIZATION)}, "gpufleet:scaling is for gpufleet:mode workers only"),
        ({}, {"gpufleet:nat": "true", **EXISTING_VPC}, "keeps its own routes"),
        (on_demand(), workers(), r"runs the whole model on each node.*\(DP16, zero3\).*--parallelism data"),
        (
            {**WORKERS, "parallelism": {"sharding": "ddp", "data": 1, "tensor": 16, "grad_accum": 32}},
            workers(),
            "runs the whole model on each node",
        ),
        (WORKERS | FALLBACK, workers(), "fallback on-demand does not go with gpufleet:mode workers"),
        (
            topped_up() | WORKERS | {"purchase": topped_up()["purchase"]},
            workers(),
            "on_demand_top_up does not go with gpufleet:mode workers",
        ),
        (block_row(2), workers(), "next_blocks does not go with gpufleet:mode workers"),
        (WORKERS, workers(scaling={"minNodes": 3}), "minNodes 3 is above the plan's 2 nodes"),
        (WORKERS, workers(scaling={"gpuUtilizationPercent": 60}), "a group without nodes has no utilisation"),
        (WORKERS, workers(scaling={"gpuUtilizationPercent": 100}), "gpuUtilizationPercent: must be below 100"),
    ],
)
def test_a_plan_that_cannot_be_carried_out_is_refused(
    plan: dict[str, Any], settings: dict[str, str], message: str
) -> None:
    with pytest.raises(ConfigError, match=f"(?s){message}"):
        deploy(plan, settings)


def test_all_problems_are_told_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        deploy(config={"aws:region": "eu-west-1", "gpufleet:data": "corpus", "gpufleet:vpcId": "vpc-1"})
    assert str(caught.value).count("\n  ") == 3


def test_a_stack_without_a_plan_is_told_how_to_get_one() -> None:
    with pytest.raises(ConfigError, match="gpufleet stack set PLAN --stack dev"):
        deploy(config={"gpufleet:plan": "null"})


def load(settings: dict[str, str], **changes: Any) -> StackSettings:
    stand_in(sample_plan(**changes), stack="dev", config=settings)
    return load_configuration(starts_nodes=True)


def test_a_thread_without_an_event_loop_of_its_own_loads_a_configuration() -> None:
    """Python 3.14 makes none for the first thread either."""
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(load, EXISTING_VPC).result().plan == sample_plan()


@pytest.mark.parametrize("option", [reserved("cr-0123456789abcdef0"), capacity_block()], ids=["reserved", "block"])
def test_nodes_do_not_wait_in_another_zone_than_their_reservations(option: dict[str, Any]) -> None:
    elsewhere = {**option, "zone_ids": ["use1-az2", "use1-az6"]}
    image = {"gpufleet:amiId": "ami-0123456789abcdef0"}
    with pytest.raises(
        ConfigError, match=r"gpufleet:zoneId is not set: reservation cr-0123456789abcdef0 is in one zone"
    ):
        load(image, **elsewhere)
    for way_out in ({"gpufleet:zoneId": "use1-az6", **image}, EXISTING_VPC):
        assert load(way_out, **elsewhere).one_zone
    assert load(image, **option).one_zone
    # A preview starts nothing.
    assert deploy(elsewhere).all("Group")


LLAMA = {"model_type": "llama", "num_attention_heads": 32, "intermediate_size": 11008}


def test_a_fleet_whose_nodes_would_lack_packages_is_refused_before_it_costs_money(tmp_path: Path) -> None:
    trained = {"job": {"architecture": LLAMA}, "node": {"efa_cards": 0}}
    with pytest.raises(
        ConfigError, match=r"image lacks the trainer's libraries .* `gpufleet stack wheels --stack dev`"
    ):
        load({}, **trained)
    torch = "Deep Learning OSS Nvidia Driver AMI GPU PyTorch 2.11 (Ubuntu 24.04) 20260517"
    with pytest.raises(ConfigError, match="image lacks the trainer's libraries"):
        load({"gpufleet:amiName": torch}, **trained)
    assert load({"gpufleet:amiName": torch, "gpufleet:trainCommand": "train.py"}).ami_name == torch
    # No release note of an image with torch names the type.
    with pytest.raises(ConfigError, match="image lacks torch"):
        load({}, instance_type="g7e.48xlarge")
    (tmp_path / "own.txt").write_text(f"numpy==2.5.5 --hash=sha256:{'0' * 64}\n")
    with pytest.raises(ConfigError, match=r"image lacks the packages of gpufleet:requirements"):
        load({"gpufleet:requirements": str(tmp_path / "own.txt")})
    with tarfile.open(tmp_path / "wheels.tar", "w") as archive:
        for name in Wanted(image_torch=True, cpu_architecture="x86_64", own=None).missing_from(()):
            archive.addfile(tarfile.TarInfo(f"{name.replace('-', '_').replace('==', '-')}-py3-none-any.whl"))
    for way_out in (
        {"gpufleet:wheels": str(tmp_path / "wheels.tar")},
        {"gpufleet:trainCommand": "train.py"},
        {"gpufleet:nat": "true"},
        {"gpufleet:amiId": "ami-0123456789abcdef0"},
        EXISTING_VPC,
    ):
        assert load(way_out, **trained).stack == "dev"


def test_files_are_searched_from_the_folder_of_pulumi_yaml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From a program's folder below it too, as in this repository."""
    (tmp_path / "Pulumi.yaml").touch()
    (tmp_path / "program").mkdir()
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "train.py").write_text("pass")
    for folder in (tmp_path, tmp_path / "program"):
        monkeypatch.chdir(folder)
        config = {**EXISTING_VPC, "gpufleet:trainDir": "code", "gpufleet:trainCommand": "train.py"}
        assert load(config).train_dir == tmp_path / "code"


def test_nodes_that_would_idle_without_a_limit_are_refused() -> None:
    unlimited = {"job": {"budget_usd": None}}
    with pytest.raises(ConfigError, match=r"trainer does not carry out the plan .* and nothing limits the spend"):
        load(EXISTING_VPC, **unlimited)
    trained = {"job": {**unlimited["job"], "architecture": LLAMA}}
    assert load(EXISTING_VPC, **trained).command == "-m bootstrap.trainer"
    with pytest.raises(ConfigError, match="trainCommand is none and nothing limits the spend"):
        load({**EXISTING_VPC, "gpufleet:trainCommand": "none"}, **trained)
    for way_out in ({"gpufleet:trainCommand": "train.py"}, {"gpufleet:ceilingUsd": "100"}):
        assert load({**EXISTING_VPC, **way_out}, **unlimited).stack == "dev"


def test_nodes_that_would_end_at_once_are_refused() -> None:
    wheels = {"gpufleet:amiId": "ami-0123456789abcdef0"}
    adapters = {"job": {"architecture": LLAMA, "tuning": {"method": "lora"}}}
    with pytest.raises(ConfigError, match=r"baseWeights is not set, and lora of rank 16 .* would train over"):
        load(wheels, **adapters)
    own = {"gpufleet:trainCommand": "-m bootstrap.trainer --weights random"}
    for way_out in ({"gpufleet:baseWeights": "s3://corpus/base"}, own):
        assert load({**wheels, **way_out}, **adapters).stack == "dev"
    copies: dict[str, Any] = dict.fromkeys(("node_hours", "gib_per_s", "hours", "compute_usd", "storage_usd"), 1.0)
    far = {"staging": {**copies, "data_gib": 300.0, "bound": "nvme", "source": "x", "data_region": "eu-west-1"}}
    data = {**wheels, "gpufleet:data": "s3://corpus/tokens"}
    with pytest.raises(ConfigError, match="gpufleet:nat is false, and the plan's data in eu-west-1"):
        load(data, **far)
    for way_out in ({"gpufleet:nat": "true"}, {"gpufleet:data": ""}, EXISTING_VPC):
        assert load({**data, **way_out}, **far).stack == "dev"


def test_pulumi_yaml_has_the_keys_of_the_settings(repository: Path) -> None:
    text = (repository / "Pulumi.yaml").read_text()
    assert project_file(program="infra/", virtualenv=".venv") == text
    # Pulumi refuses a project with any other type, and has none for a number with a fraction.
    types = {None, "string", "integer", "boolean", "array", "object"}
    entries = yaml.safe_load(text)["config"]
    assert {entry.get("type") for entry in entries.values()} <= types
    # The CLI hands a program the defaults as if a user had set them.
    defaults = {
        key: entry["default"] if isinstance(entry["default"], str) else json.dumps(entry["default"])
        for key, entry in entries.items()
        if "default" in entry
    }
    assert entries.keys() - defaults.keys() == {"gpufleet:plan"}
    assert load({**defaults, **EXISTING_VPC}) == load(EXISTING_VPC)


@pytest.mark.parametrize(
    ("instance_type", "architecture", "torch"),
    [
        ("p4d.24xlarge", "x86_64", True),
        ("g5g.16xlarge", "arm64", True),
        ("p6-b300.48xlarge", "x86_64", False),
        ("p6e-gb200.36xlarge", "arm64", False),
    ],
)
def test_the_image_has_torch_where_aws_supports_the_type_on_it(
    instance_type: str, architecture: str, torch: bool
) -> None:
    plan = sample_plan(
        instance_type=instance_type,
        node={"cpu_architecture": architecture, "efa_cards": 0},
    )
    image = images.dlami_of(plan)
    assert image.torch is torch
    assert image.parameter.startswith(f"/aws/service/deeplearning/ami/{architecture}/")
    assert ("-pytorch-2.11-" in image.parameter) is torch


def test_a_gang_over_efa_boots_no_image_with_a_plugin_that_hangs() -> None:
    versions = ("1.17.1", "1.18.0", "1.19.2", "1.20.0", "1.21.1")
    assert [images.has_fault("aws-ofi-nccl", version) for version in versions] == [False, True, True, False, False]
    assert not images.has_fault("aws-ofi-nccl", images.dlami_of(sample_plan()).ofi_nccl)


class _Image(Answers):
    """An image whose facts a test chooses."""

    def __init__(self, plan: FleetPlan, changes: dict[str, Any]) -> None:
        super().__init__(plan)
        self._changes = changes
        self.asked: dict[str, Any] = {}

    def _answer(self, token: str, given: dict[str, Any]) -> dict[str, Any]:
        if token.endswith("getAmi"):
            self.asked = given
        return {**super()._answer(token, given), **self._changes}


def look_up(changes: dict[str, Any], settings: dict[str, str]) -> tuple[images.Image, dict[str, Any]]:
    plan = sample_plan(**LONE_NODE)
    answers = _Image(plan, changes)
    stand_in(plan, stack="dev", config=settings, answers=answers)
    return images.look_up(load_configuration(starts_nodes=False)), answers.asked


PARAMETER = "/aws/service/deeplearning/ami/x86_64/oss-nvidia-driver-gpu-pytorch-2.11-ubuntu-24.04/latest/ami-id"


def dlami(**changes: str) -> dict[str, str]:
    pinned = {"id": "ami-0123456789abcdef0", "parameter": PARAMETER, "region": "us-east-1", **changes}
    return {"gpufleet:dlami": json.dumps(pinned)}


def test_the_pinned_image_is_asked_for_by_id_else_the_newest_of_its_parameter() -> None:
    image, asked = look_up({}, dlami())
    assert (asked["owners"], image.id, image.kind) == (["amazon"], "ami-0123456789abcdef0", "dlami")
    assert look_up({}, {})[0].id == "ami-00000000000000000", "as the parameter says at this up"


@pytest.mark.parametrize("changes", [{"region": "eu-west-1"}, {"parameter": PARAMETER.replace("2.11", "2.9")}])
def test_an_image_pinned_for_another_plan_is_refused(changes: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match=r"gpufleet:dlami is ami-.* `gpufleet stack set PLAN --stack dev`"):
        look_up({}, dlami(**changes))


def test_an_image_named_by_the_user_is_asked_for_by_exact_name_from_amazon_and_never_the_newest() -> None:
    image, asked = look_up({}, {"gpufleet:amiName": "Deep Learning Some image (Ubuntu 22.04) 20260101", **dlami()})
    assert asked["owners"] == ["amazon"]
    assert asked["filters"] == [{"name": "name", "values": ["Deep Learning Some image (Ubuntu 22.04) 20260101"]}]
    assert not asked.get("mostRecent")
    assert image.kind == "dlami"


@pytest.mark.parametrize(
    ("facts", "settings"),
    [
        (
            {"name": "Deep Learning OSS Nvidia Driver AMI GPU PyTorch 2.11 (Amazon Linux 2023) 20260815"},
            {"gpufleet:amiName": "Deep Learning OSS Nvidia Driver AMI GPU PyTorch 2.11 (Amazon Linux 2023) 20260815"},
        ),
        ({"imageOwnerAlias": "amazon", "name": "al2023-ami-2023.9"}, {"gpufleet:amiName": "al2023-ami-2023.9"}),
        (
            {"ownerId": CANONICAL, "name": "ubuntu/images/hvm-ssd-gp3/ubuntu-noble-24.04-amd64-server-20261001"},
            {"gpufleet:amiId": "ami-0123456789abcdef0"},
        ),
    ],
)
def test_a_stock_image_on_which_no_step_would_run_is_refused(facts: dict[str, str], settings: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match=r"is no Deep Learning AMI for Ubuntu"):
        look_up(facts, settings)


def test_an_own_image_is_asked_for_by_id() -> None:
    image, asked = look_up({"name": "ours", "imageOwnerAlias": ""}, {"gpufleet:amiId": "ami-0123456789abcdef0"})
    assert asked["filters"] == [{"name": "image-id", "values": ["ami-0123456789abcdef0"]}]
    assert "owners" not in asked
    assert (image.id, image.kind) == ("ami-0123456789abcdef0", "custom")


def test_an_image_of_another_architecture_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"is for arm64, and p4d\.24xlarge is x86_64"):
        look_up({"architecture": "arm64"}, {})


def test_an_image_larger_than_the_plans_volume_is_refused() -> None:
    root = {"deviceName": "/dev/sda1", "ebs": {"volume_size": "201"}, "noDevice": "", "virtualName": ""}
    with pytest.raises(ConfigError, match=r"201 GiB.*root_gib 200"):
        look_up({"blockDeviceMappings": [root]}, {})
    fits = {**root, "ebs": {"volume_size": "200"}}
    more = {"deviceName": "/dev/sdb", "ebs": {"volume_size": "500"}}
    disk = {"deviceName": "/dev/sdc", "ebs": {}, "virtualName": "ephemeral0"}
    plan, changes = sample_plan(**LONE_NODE), {"blockDeviceMappings": [fits, more, disk]}
    found = resources(plan, stack="dev", answers=_Image(plan, changes))
    root, further = next(it.inputs["blockDeviceMappings"] for it in found if it.kind == "LaunchTemplate")
    assert (root["deviceName"], root["ebs"]["volumeSize"]) == ("/dev/sda1", 200)
    own = {"encrypted": "true", "kmsKeyId": "arn:aws:kms:::gpufleet-dev-key", "deleteOnTermination": "true"}
    assert further == {"deviceName": "/dev/sdb", "ebs": own}, "under the stack's key, and gone with the node"


# Made up here, so that no scanner takes this file for a leak.
AWS_KEY = "AKIA" + "Q3EGRMKV5XYZ2345"


@pytest.mark.parametrize(
    "text",
    [
        f"export AWS_ACCESS_KEY_ID={AWS_KEY}",
        "DB_PASSWORD=correct-horse",
        '{"apiKey": "correct-horse"}',
        "train.py --auth-token correct-horse",
        "WANDB_API_KEY=" + hashlib.sha1(b"x", usedforsecurity=False).hexdigest(),
        "train.py --token hf_" + "aB" * 17,
        "git clone https://ghp_" + "a1B2" * 9 + "@github.com/x/y",
        "pip install --index-url https://ann:correct-horse@pypi.example.com/simple x",
        "OPENAI=sk-" + "proj-" + "a1" * 12,
        "-----BEGIN OPENSSH " + "PRIVATE KEY-----",
    ],
)
def test_a_secret_is_seen_and_not_printed(text: str) -> None:
    (found,) = secrets_in(text)
    assert len(found) == len("12345678...")


@pytest.mark.parametrize(
    "text",
    [
        "GPUFLEET_KMS_KEY_ARN=arn:aws:kms:us-east-1:000000000000:key/8f3c1a52-9a51-4c7e-8e0f-0f5a2b7c9d11",
        "e960e6f58bcef97b16f9fdc200d8d97da66bba9e4425d8fb07b5d1a96c8a1c96",
        'API_KEY="$(aws ssm get-parameter --name /gpufleet/dev/key --with-decryption)"',
        "SECRET_ARN=arn:aws:secretsmanager:us-east-1:000000000000:secret:x",
        "train.py --token-file /run/secrets/token --tokenizer meta-llama/Llama-2-7b-hf",
        "train.py --eos_token=</s> token=$TOKEN tokens=100000000000000000000 pad_token=[PAD]",
        "pip install --index-url https://pypi.example.com:8443/simple/@x/y https://$USER:$PASS@pypi.example.com x",
        "train.py --task-classification-on-imagenet-with-resnet50 --password-file /run/x",
        "python -m pkg.train_hf_conversion_of_checkpoints_and_everything_else",
        "GPUFLEET_LOG_GROUP=/gpufleet/a-very-long-sta-4ba579",
        "torchrun --config configs/Llama3_8B_FSDP2_Float8_SelectiveCheckpointing.toml",
        "s3://gpufleet-dev-000000000000-us-east-1/bootstrap/train-e960e6f58bcef97b16f9fdc200d8d97d.tar.gz",
    ],
)
def test_what_is_no_secret_is_left_alone(text: str) -> None:
    assert secrets_in(text) == []
