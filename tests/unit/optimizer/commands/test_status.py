from __future__ import annotations

import csv
import io
import json
import re
import shlex
import time
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any
from unittest.mock import Mock

import boto3
import pytest
from botocore.exceptions import ClientError
from botocore.stub import Stubber

from bootstrap.contract.codec import to_text
from bootstrap.contract.measured import object_name
from bootstrap.contract.state import read_state
from optimizer.aws import actuals, clients
from optimizer.aws.log_group import read_copies
from optimizer.aws.training import TrainingProgress
from optimizer.commands.stack_file import POLICY_KEY, follow_policy, write_stack_file
from optimizer.commands.status.forecast import forecast
from optimizer.commands.status.live import print_events
from optimizer.commands.status.measures import compare, headline
from optimizer.commands.status.reading import Reading, read
from tests.plans import sample_plan
from tests.unit.bootstrap.contract.rows import measured_row
from tests.unit.optimizer.commands.conftest import Gpufleet
from tests.unit.optimizer.deployed import DeployedStack, ago, controller_state


def write_ledger(
    deployed: DeployedStack,
    *,
    steps_per_s: float = 0.1,
    done: int = 1000,
    hours_ago: float = 0,
    loss: float | None = 2.43213,
    slower: float = 0.04,
) -> None:
    """Two minutes of a ledger that ends now."""
    now = time.time() - hours_ago * 3600
    first = int(done - steps_per_s * 120)
    events: list[dict[str, Any]] = [
        {"event": "start", "t": now - 180},
        {"event": "train", "t": now - 120, "step": first},
        {"event": "commit", "t": now - 60, "step": first},
        {"event": "progress", "t": now, "step": done, "loss_step": done - 1, "loss": loss},
    ]
    slowest = {"rank": 11, "host": "i-0a", "slower": slower, "part": "compute"}
    events.append({"event": "progress", "t": now, "step": done, "slowest": slowest})
    lines = "".join(json.dumps({"writer": "w", **event}) + "\n" for event in events)
    deployed.put("checkpoints/ledger/w-000001.jsonl", lines)


def measures(out: str) -> dict[str, dict[str, Any]]:
    return {row["measure"]: row for row in json.loads(out)["measures"]}


def test_a_running_stack_is_shown_against_its_plan(deployed: DeployedStack, gpufleet: Gpufleet) -> None:
    deployed.write_state()
    write_ledger(deployed)
    first, second = (node.instance_id for node in deployed.group.nodes)
    busy = "gpu, 0, {}, {}, 81559, 600, 60, 1980, 0x0, 0, 0"
    write_gpus(deployed, (first, 5, busy.format(93, 1024)), (second, 5, busy.format(90, 2048)))
    code, out, err = gpufleet("status", *deployed.arguments, "--format", "json")
    assert (code, err) == (0, "")
    answer = json.loads(out)
    assert answer["unread"] == {}
    assert answer["state"]["phase"] == "running" and answer["state"]["spent_usd"] == 44
    assert [node["lifecycle_state"] for node in answer["group"]["nodes"]] == ["InService"] * 2
    assert all(node["protected"] and node["launched_at"] for node in answer["group"]["nodes"])
    plan, rows = sample_plan(), measures(out)
    assert (rows["steps"]["predicted"], rows["steps"]["actual"]) == (2000, 1000)
    # 0.1 steps/s of 128 sequences of 2048 tokens.
    assert rows["speed"]["actual"] == pytest.approx(0.1 * 128 * 2048, rel=0.01)
    assert rows["speed"]["predicted"] == plan.tokens_per_second
    assert (rows["GPU utilization"]["actual"], rows["GPU memory"]["actual"]) == (91.5, 2.0)
    assert rows["hours"]["actual"] == pytest.approx(2, abs=0.01)
    # 1000 steps left at 0.1 a second, and 22.50 USD an hour while they take.
    assert rows["hours left"]["actual"] == pytest.approx(1000 / 0.1 / 3600, rel=0.01)
    assert rows["cost at the end"]["actual"] == pytest.approx(44 + 22.5 * 1000 / 0.1 / 3600, rel=0.01)
    assert rows["cost per hour"]["predicted"] == pytest.approx(100 / 4.5)
    assert rows["interruptions"]["actual"] == 1


def test_a_node_that_ec2_does_not_know_yet_hides_no_other(
    deployed: DeployedStack, gpufleet: Gpufleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """EC2's answers lag behind a launch: https://docs.aws.amazon.com/ec2/latest/devguide/eventual-consistency.html"""
    deployed.write_state()
    group = deployed.group
    newest = replace(group.nodes[0], instance_id="i-00000000000000000", lifecycle_state="Pending", protected=False)
    monkeypatch.setattr(actuals, "read_group", lambda *_: replace(group, nodes=(newest, *group.nodes)))
    answer = json.loads(gpufleet("status", *deployed.arguments, "--format", "json")[1])
    assert answer["unread"] == {}
    assert [bool(node["launched_at"]) for node in answer["group"]["nodes"]] == [False, True, True]


def test_the_table_says_phase_money_nodes_limits_and_silence(deployed: DeployedStack, gpufleet: Gpufleet) -> None:
    failure = "We currently do not have sufficient p4d.24xlarge capacity"
    deployed.write_state(last_failure=failure, updated_at=ago(minutes=20))
    write_ledger(deployed)
    deployed.put("control/request.json", json.dumps({"schema_version": 1, "want": "stop", "at": ago(), "by": "ada"}))
    code, out, _ = gpufleet("status", *deployed.arguments)
    assert code == 0
    assert "running since" in out and "both nodes are in service" in out
    assert "2 of 2 wanted nodes in service" in out
    assert failure in out
    assert "last tick was 20 minutes ago" in out and "gpufleet stop" in out
    assert "ceiling 3,000.00, p95 of the plan 120.00" in out
    assert "asked to stop at" in out and "by ada" in out
    assert out.count("InService") == 2


def test_the_table_draws_loss_and_speed(deployed: DeployedStack, gpufleet: Gpufleet) -> None:
    now = time.time()
    marks = [(60, 100, 4.0), (40, 102, 3.0), (20, 104, None), (0, 108, 2.0)]
    events: list[dict[str, Any]] = [{"event": "start", "t": now - 70}]
    events += [
        {"event": "progress", "t": now - ago_s, "step": step, "loss_step": step, "loss": loss}
        for ago_s, step, loss in marks
    ]
    lines = "".join(json.dumps({"writer": "w", **event}) + "\n" for event in events)
    deployed.put("checkpoints/ledger/w-000001.jsonl", lines)
    deployed.write_state()
    drawn = {line.split()[0]: line.split() for line in gpufleet("status", *deployed.arguments)[1].splitlines() if line}
    assert "█▄▁" in drawn["loss"] and drawn["speed"] == ["speed", "▁▁█", "26,214", "to", "52,429"]


def test_a_node_that_left_the_group_is_told(deployed: DeployedStack, gpufleet: Gpufleet) -> None:
    """The controller meters it, and may not end it."""
    node, gone = "i-0123456789abcdef0", "i-0123456789abcdef1"
    meter = {"instance_type": "p4d.24xlarge", "lifecycle": "spot", "usd_per_hour": 10.0, "spent_usd": 20.0}
    meter |= {"launched_at": ago(hours=2), "metered_until": ago(seconds=30)}
    instances = dict.fromkeys((node, *deployed.held("InService")), meter) | {gone: {**meter, "ended_at": ago(hours=1)}}
    deployed.write_state(instances=instances)
    out = gpufleet("status", *deployed.arguments)[1]
    assert f"terminate-instances --region us-east-1 --instance-ids {node} measure" in " ".join(out.split())
    # A controller that is silent does not say what lives.
    deployed.write_state(instances=instances, updated_at=ago(minutes=20))
    assert "terminate-instances" not in gpufleet("status", *deployed.arguments)[1]


def test_a_run_slower_than_its_p95_gets_a_notice_with_dollars_and_date(
    deployed: DeployedStack, gpufleet: Gpufleet
) -> None:
    plan = sample_plan()
    deployed.write_state(ceiling_usd=100.0)
    write_ledger(deployed, steps_per_s=0.05)  # 20 s a step, 7.2 planned
    row = measured_row(at=datetime.now(UTC).replace(microsecond=0), run_id="0123456789ab")
    deployed.put(f"checkpoints/{object_name(row.run_id, 'w')}", to_text(row))
    deployed.put("checkpoints/measured/ffffffffffff-w.json", to_text(measured_row(run_id="ffffffffffff")))
    _, out, err = gpufleet("status", *deployed.arguments, "--format", "json")
    answer, rows = json.loads(out), measures(out)
    assert err == "" and answer["measured_run"]["run"] == "0123456789ab"
    assert (rows["step time"]["predicted"], rows["step time"]["actual"]) == (7.2, 2.2)
    assert f"p95 of the plan {plan.step_time_p95_s:.3g}; median of 40 steps" in rows["step time"]["note"]
    assert (rows["peak memory"]["predicted"], rows["peak memory"]["actual"]) == (30.0, 62.0)
    ahead = answer["forecast"]
    assert ahead["slow"] and not ahead["late"]  # 5.6 of 48 h
    assert ahead["step_time_s"] == pytest.approx(20, rel=0.01)
    cost = 44 + 22.5 * 1000 * 20 / 3600
    assert ahead["cost_usd"] == pytest.approx(cost, rel=0.01)
    _, out, _ = gpufleet("status", *deployed.arguments)
    assert "SLOW: a step takes 20 s" in out
    assert f"it will cost {cost:,.2f} USD, planned for 100.00, ABOVE its ceiling of 100.00" in out
    assert "h before its deadline" in out and "gpufleet calibrate --from-stack" in out
    # The second reading may be in the next minute.
    ends_at = datetime.fromisoformat(ahead["ends_at"])
    ends = (ends_at, ends_at + timedelta(minutes=1))
    assert any(f"training ends at {end:%Y-%m-%d %H:%M}" in out for end in ends)


@pytest.mark.parametrize("on_demand", [False, True])
def test_an_adaptive_gang_is_forecast_at_the_price_of_its_policy_not_of_its_present_nodes(on_demand: bool) -> None:
    """On demand now, with 478 h left for 20 hours of work: it goes back to spot."""
    job = {"steps": 20_000, "samples": 2_560_000, "tokens": 5_242_880_000, "deadline_hours": 480}
    longer = {"job": job, "hours": {"expected": 45.0, "p50": 44.0, "p95": 52.0}}
    plan, at = sample_plan(purchase={"fallback": "on-demand", "on_demand_base": 0}, **longer), datetime.now(UTC)
    present = 45.0 if on_demand else 21.1
    told = controller_state() | {"complete_since": ago(hours=1.9), "on_demand": on_demand, "usd_per_hour": present}
    progress = TrainingProgress(
        step=10_000, saved_step=None, at=at, steps_per_second=1 / 7.2, measured_s=600, finished=False
    )
    reading = Reading(at=at, state=read_state(json.dumps(told), "state", lenient=True), progress=progress)
    for policy in ("fallback", "adaptive"):
        own = follow_policy(plan, {POLICY_KEY: policy})
        ahead = forecast(own, reading)
        assert ahead is not None and ahead.cost_usd is not None
        usd = (ahead.cost_usd - 44) / ahead.hours_left
        if policy == "fallback":
            assert usd == pytest.approx(present) and ahead.hours_left == pytest.approx(20.0)
            continue
        # Two spot nodes, and what lies beside the nodes.
        assert usd == pytest.approx(2 * 10 + 5 / 45, rel=0.1)
        assert own.spot_policy and headline(own, reading)
        (end,) = [row for row in compare(own, reading, ahead) if row["measure"] == "cost at the end"]
        assert end["predicted"] == own.spot_policy.cost_usd.expected


def test_without_a_ledgers_speed_the_first_steps_say_when_it_ends(deployed: DeployedStack, gpufleet: Gpufleet) -> None:
    deployed.write_state(run_started_at=ago(hours=47))
    write_ledger(deployed, steps_per_s=0.0)
    slow = measured_row(measured=replace(measured_row().measured, step_time_s=14.4))
    deployed.put(f"checkpoints/{object_name(slow.run_id, 'w')}", to_text(slow))
    deployed.put("checkpoints/measured/0123456789ab-torn.json", "{")
    _, out, err = gpufleet("status", *deployed.arguments, "--format", "json")
    answer = json.loads(out)
    # Half the steps at twice the time: all of the plan's 4.5 h.
    assert answer["forecast"]["hours_left"] == pytest.approx(4.5)
    assert answer["forecast"]["slow"] and answer["forecast"]["late"]
    assert any("AFTER its deadline" in line for line in answer["notices"])
    assert measures(out)["speed"]["actual"] == slow.measured.tokens_per_second
    assert "0123456789ab-torn.json is not JSON" in err


def write_gpus(deployed: DeployedStack, *lines: tuple[str, float, str]) -> None:
    """Lines of the nodes' streams: node, seconds ago, the line."""
    logs, group = boto3.client("logs", region_name="us-east-1"), deployed.names.log_group
    logs.create_log_group(logGroupName=group)
    for node in dict.fromkeys(node for node, _, _ in lines):
        logs.create_log_stream(logGroupName=group, logStreamName=f"gpus/{node}")
    for node, ago_s, text in lines:
        at_ms = int((time.time() - ago_s) * 1000)
        logs.put_log_events(
            logGroupName=group, logStreamName=f"gpus/{node}", logEvents=[{"timestamp": at_ms, "message": text}]
        )


def test_nodes_whose_gpus_waste_what_they_cost_get_a_notice(deployed: DeployedStack, gpufleet: Gpufleet) -> None:
    deployed.write_state()
    first, second = (node.instance_id for node in deployed.group.nodes)
    # As an H100 answers; 0x40 is a thermal slowdown of the hardware, 0x80 the power brake.
    hot = [
        f"gpu, 0, {busy}, 62720, 81559, 650.5, 91, 900, 0x000000000000004{bit}, 0, 0"
        for busy, bit in ((96, 0), (96, 1))
    ]
    cool = ["gpu, 0, 96, 61000, 81559, 649.5, 90, 900, 0x0000000000000001, [N/A], [N/A]"] * 2
    briefly = [f"gpu, 1, 98, 61440, 81559, 600, 60, 1980, 0x{bits}, 0, 2" for bits in ("80", "0", "0", "0")]
    idle = "gpu, 0, 0, 3072, 81559, 70, 30, 345, 0x1, 0, 0"
    rows = [*zip([first] * 4, (50, 35, 20, 5), [*hot, *cool], strict=True)]
    rows += [*zip([first] * 4, (50, 35, 20, 5), briefly, strict=True)]
    rows += [(first, 5, "xid, 94, 3"), (first, 5, "efa, 6000000000, 500")]
    rows += [(first, 5, "gpu, 2, [GPU is lost], [GPU is lost]"), (first, 5, "Unable to determine the device handle")]
    rows += [(second, ago_s, idle) for ago_s in (185, 125, 65)]
    rows += [(second, 360, "gpu, 0, 90, 1, 1, 1, 1, 1, 0x0, 0, 0"), ("i-gone", 120, idle)]
    write_gpus(deployed, *rows)
    _, out, err = gpufleet("status", *deployed.arguments, "--format", "json")
    answer = json.loads(out)
    newest = answer["gpus"][first]
    assert err == "" and list(newest["gpus"]) == ["0", "1"]
    assert newest["gpus"]["0"] == {
        "busy_percent": 96, "memory_used_gib": 61.2, "power_w": 650.0,
        "temperature_celsius": 91, "sm_clock_mhz": 900, "throttled": {"hardware thermal": 0.5},
        "ecc_uncorrected": 0,
    }  # fmt: skip
    throttled, errors, waste = answer["notices"]
    assert throttled.startswith(f"THROTTLED: {first} GPU 0 by hardware thermal 50% of the time (91 °C, 650 W, 900 MHz)")
    assert "GPU 1" not in throttled
    assert errors.startswith(f"GPU ERRORS: {first} Xid 94 x 3, 2 uncorrected ECC on GPU 1")
    assert waste.startswith(f"IDLE: the GPUs of {second} were below 5% for 3 minutes")
    _, out, _ = gpufleet("status", *deployed.arguments)
    row = next(line for line in out.splitlines() if line.startswith(first))
    assert "97" in row and "61.2" in row and "Xid 94 x 3" in row
    assert re.search(r"GPU utilization +% +- +48.5 +least busy node 0%", out)
    # Before training and after it, nobody wants the GPUs busy.
    deployed.write_state(phase="starting")
    _, out, _ = gpufleet("status", *deployed.arguments, "--format", "json")
    assert not any("IDLE" in line for line in json.loads(out)["notices"])


def test_csv_is_predicted_against_actual(deployed: DeployedStack, gpufleet: Gpufleet) -> None:
    deployed.write_state()
    code, out, _ = gpufleet("status", *deployed.arguments, "--format", "csv")
    rows = list(csv.DictReader(io.StringIO(out)))
    assert code == 0 and list(rows[0]) == ["measure", "unit", "predicted", "actual", "note"]
    assert {row["measure"]: row["actual"] for row in rows}["cost so far"] == "44.0"


def test_a_ledger_of_an_earlier_run_is_not_this_runs_progress(deployed: DeployedStack, gpufleet: Gpufleet) -> None:
    deployed.write_state(run_started_at=ago(minutes=10))
    write_ledger(deployed, hours_ago=1)
    _, out, _ = gpufleet("status", *deployed.arguments, "--format", "json")
    assert json.loads(out)["progress"] is None and measures(out)["steps"]["actual"] is None


def test_hours_of_an_ended_run_stop_with_it(deployed: DeployedStack, gpufleet: Gpufleet) -> None:
    deployed.write_state(phase="done", since=ago(hours=1), run_started_at=ago(hours=4))
    _, out, _ = gpufleet("status", *deployed.arguments, "--format", "json")
    assert measures(out)["hours"]["actual"] == pytest.approx(3, abs=0.01)


def test_what_cannot_be_read_says_why_and_the_rest_is_shown(
    deployed: DeployedStack, gpufleet: Gpufleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    deployed.put("control/state.json", "{torn")

    def refuse(*_: Any) -> None:
        raise ClientError({"Error": {"Code": "AccessDenied", "Message": "not for you"}}, "FilterLogEvents")

    monkeypatch.setattr("optimizer.commands.status.reading.read_gpus", refuse)
    code, out, err = gpufleet("status", *deployed.arguments)
    assert code == 0
    assert "2 of 2 wanted nodes in service" in out and "phase unknown" in out
    assert "note: GPUs cannot be read: the credentials may not do this (AccessDenied): not for you" in err
    assert "note: state cannot be read: s3://" in err


def test_failed_launches_are_shown_in_awss_words(
    deployed: DeployedStack, gpufleet: Gpufleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """moto's group never fails to launch."""
    deployed.write_state()
    client = boto3.client("autoscaling", region_name="us-east-1")
    (own,) = deployed.autoscaling.describe_auto_scaling_groups(AutoScalingGroupNames=[deployed.names.group])[
        "AutoScalingGroups"
    ]
    # An alternate's place is a group of its own.
    groups = {"AutoScalingGroups": [own, {**own, "AutoScalingGroupName": deployed.names.groups[1], "Instances": []}]}
    message = "We currently do not have sufficient p4d.24xlarge capacity in the Availability Zone you requested."
    failed = {
        "ActivityId": "a",
        "AutoScalingGroupName": deployed.names.group,
        "Cause": "c",
        "StartTime": datetime.now(UTC),
        "StatusCode": "Failed",
        "StatusMessage": message,
    }
    old = {**failed, "StartTime": datetime(2026, 1, 1, tzinfo=UTC), "StatusMessage": "months ago"}
    fine = {**failed, "StatusCode": "Successful", "StatusMessage": "fine"}
    with Stubber(client) as stubber:
        stubber.add_response("describe_auto_scaling_groups", groups)
        stubber.add_response("describe_auto_scaling_groups", groups)
        stubber.add_response("describe_scaling_activities", {"Activities": [fine]})
        stubber.add_response("describe_scaling_activities", {"Activities": [fine, failed, failed, old]})
        monkeypatch.setattr(clients, "autoscaling", lambda region: client)
        code, out, _ = gpufleet("status", *deployed.arguments)
    assert code == 0
    assert " ".join(out.split()).count(message) == 1 and "fine" not in out and "months ago" not in out


def test_a_stack_that_is_not_deployed_ends_with_4(deployed: DeployedStack, gpufleet: Gpufleet) -> None:
    deployed.autoscaling.delete_auto_scaling_group(AutoScalingGroupName=deployed.names.group, ForceDelete=True)
    code, out, err = gpufleet("status", *deployed.arguments)
    assert (code, out) == (4, "")
    assert f"has no Auto Scaling group {deployed.names.group}" in err and "pulumi up" in err


def test_a_destroyed_fleet_whose_bucket_stays_shows_what_it_cost(deployed: DeployedStack, gpufleet: Gpufleet) -> None:
    deployed.write_state(phase="stopped")
    deployed.autoscaling.delete_auto_scaling_group(AutoScalingGroupName=deployed.names.group, ForceDelete=True)
    code, out, _ = gpufleet("status", *deployed.arguments)
    assert code == 0 and "there is no Auto Scaling group: no node runs" in out and "44" in out


def test_a_folder_of_several_stacks_is_a_table_with_a_row_each(
    deployed: DeployedStack, gpufleet: Gpufleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    deployed.write_state(ceiling_usd=100.0)
    write_ledger(deployed, steps_per_s=0.05, slower=0.23)
    write_stack_file(deployed.directory / "Pulumi.z-absent.yaml", sample_plan())
    (deployed.directory / "Pulumi.z-broken.yaml").write_text("[")
    monkeypatch.setenv("COLUMNS", "200")
    everywhere = ("--directory", str(deployed.directory))
    code, out, err = gpufleet("status", *everywhere)
    assert (code, err) == (0, "")
    _, own, *_ = deployed.arguments
    (line,) = [line for line in out.splitlines() if line.startswith(own)]
    assert re.search(r"running +2 of 2 +1,000 of 2,000 +44 +100 +5\.\d+ +above its ceiling; SLOW; STRAGGLER", line)
    assert re.search(r"z-absent .*has no Auto Scaling group", out) and "Pulumi.z-broken.yaml" in out
    code, out, err = gpufleet("status", *everywhere, "--format", "json")
    first, second, third = json.loads(out)
    assert (code, err, first["stack"], first["state"]["phase"]) == (0, "", own, "running")
    slow = "STRAGGLER: rank 11 on i-0a is 23% slower than the median rank in its forward pass"
    assert first["notices"][-1].startswith(slow)
    assert (second["error"]["code"], third["error"]["code"]) == (4, 2)
    rows = list(csv.DictReader(io.StringIO(gpufleet("status", *everywhere, "--format", "csv")[1])))
    assert [row["stack"] for row in rows] == [own, "z-absent", "z-broken"] and rows[0]["spent_usd"] == "44.0"
    # The command ends as for the first stack if none can be read, and each has its row.
    (deployed.directory / f"Pulumi.{own}.yaml").unlink()
    code, out, err = gpufleet("status", *everywhere)
    assert code == 4 and "z-absent has no Auto Scaling group" in err and "Pulumi.z-broken.yaml" in out
    # A command of one stack names itself with one.
    again = f"next: gpufleet stop {shlex.join(everywhere)} --dry-run --stack NAME\n"
    assert gpufleet("stop", *everywhere, "--dry-run")[2].endswith(again)


@pytest.mark.parametrize(("stack", "says"), [("nobody", "Pulumi.nobody.yaml is missing"), ("a b", "stack name")])
def test_an_unknown_stack_ends_with_2(deployed: DeployedStack, gpufleet: Gpufleet, stack: str, says: str) -> None:
    if stack == "a b":
        (deployed.directory / f"Pulumi.{deployed.names.stack}.yaml").rename(deployed.directory / "Pulumi.a b.yaml")
    code, _, err = gpufleet("status", "--stack", stack, "--directory", str(deployed.directory))
    assert code == 2 and says in err


def interrupt_after(deployed: DeployedStack, monkeypatch: pytest.MonkeyPatch, times: int) -> list[float]:
    """Let the run drain once the command waits, and press Ctrl-C in the last of so many waits; returns the waits."""
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        deployed.write_state(phase="draining", reason="asked to stop", since="2026-11-23T04:00:00Z")
        if len(slept) == times:
            raise KeyboardInterrupt

    monkeypatch.setattr("time.sleep", sleep)
    return slept


@pytest.mark.parametrize("form", ["table", "csv"])
def test_watch_without_a_terminal_tells_events_or_repeats_csv(
    deployed: DeployedStack, gpufleet: Gpufleet, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    deployed.write_state()
    write_ledger(deployed)
    slept = interrupt_after(deployed, monkeypatch, 3)
    assert gpufleet("status", *deployed.arguments, "--watch", "1e300")[0] == 2
    code, out, _ = gpufleet("status", *deployed.arguments, "--watch", "60", "--format", form)
    assert code == 0 and slept == [60, 60, 60]
    if form == "csv":
        assert out.count("measure,unit,") == 3
        return
    assert [out.count(words) for words in (": both nodes are in service", ": asked to stop")] == [1, 1]
    steps = next(line for line in out.splitlines() if "Z step " in line)
    assert "1,000 of 2,000, saved up to 988" in steps and "loss 2.432" in steps and "cost so far 44 USD" in steps


def test_a_loss_that_is_not_finite_is_seen_while_the_run_is_watched(
    deployed: DeployedStack, capsys: pytest.CaptureFixture[str]
) -> None:
    deployed.write_state()
    write_ledger(deployed, loss=None)
    print_events(sample_plan(), None, read(deployed.names, datetime.now(UTC)))
    assert "loss NOT FINITE at step 999" in capsys.readouterr().out


def test_changes_between_two_readings_are_events(deployed: DeployedStack, capsys: pytest.CaptureFixture[str]) -> None:
    deployed.write_state()
    before = read(deployed.names, datetime.now(UTC))
    print_events(sample_plan(), before, before)
    assert capsys.readouterr().out == ""
    deployed.write_state(phase="starting", reason="a node was taken back")
    assert before.group is not None
    after = read(deployed.names, datetime.now(UTC))
    after.group = replace(before.group, nodes=before.group.nodes[:1])
    print_events(sample_plan(), before, after)
    phase, nodes = capsys.readouterr().out.splitlines()
    assert phase.endswith(": a node was taken back") and "1 of 2 wanted nodes in service, 1 instance" in nodes


def test_a_terminal_is_redrawn_until_ctrl_c(
    deployed: DeployedStack, gpufleet: Gpufleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    deployed.write_state()
    slept = interrupt_after(deployed, monkeypatch, 2)
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    cleared = Mock()
    monkeypatch.setattr("click.clear", cleared)
    code, out, _ = gpufleet("status", *deployed.arguments, "--watch", "5")
    assert code == 0 and slept == [5, 5] and cleared.call_count == 2
    assert out.count("measure") == 2 and "draining" in out.rpartition("measure")[0].rpartition("measure")[2]


def test_events_say_that_the_controller_is_silent_or_never_spoke(
    deployed: DeployedStack, capsys: pytest.CaptureFixture[str]
) -> None:
    at = datetime.now(UTC)
    print_events(sample_plan(), None, Reading(at=at))
    deployed.write_state(updated_at=ago(minutes=20))
    print_events(sample_plan(), Reading(at=at), read(deployed.names, at))
    out = capsys.readouterr().out
    assert "no word from the controller yet" in out and "last tick was 20 minutes ago" in out


def test_copies_of_the_data_are_told_by_the_slowest_node(
    deployed: DeployedStack, capsys: pytest.CaptureFixture[str]
) -> None:
    now = datetime.now(UTC)
    logs, group = clients.logs(deployed.names.region), deployed.names.log_group
    assert read_copies(logs, group, now) == {}, "no group yet"
    logs.create_log_group(logGroupName=group)
    lines = {
        "i-1": [(300, "data: 9.00 of 90.00 GiB, 1 of 9 files copied, 900 MiB/s, 0:01:00 left")],
        "i-2": [(20, "data: 20.00 of 90.00 GiB, 2 of 9 files copied, 900 MiB/s, 0:01:19 left"), (15, "loss 2.5")],
        "i-3": [
            (30, "data: 1.00 of 90.00 GiB, 0 of 9 files copied, 100 MiB/s, 0:15:00 left"),
            (10, "data: 2.00 of 90.00 GiB, 0 of 9 files copied, 100 MiB/s, 0:14:40 left"),
        ],
    }
    for node, told in lines.items():
        logs.create_log_stream(logGroupName=group, logStreamName=f"train/{node}")
        events = [{"timestamp": int((now.timestamp() - ago_s) * 1000), "message": line} for ago_s, line in told]
        logs.put_log_events(logGroupName=group, logStreamName=f"train/{node}", logEvents=events)
    copies = read_copies(logs, group, now)
    assert copies == {"i-2": lines["i-2"][0][1], "i-3": lines["i-3"][1][1]}
    reading = Reading(at=now, copies=copies)
    print_events(sample_plan(), None, reading)
    words = "2.00 of 90.00 GiB, 0 of 9 files copied, 100 MiB/s, 0:14:40 left, the slowest of 2 nodes"
    assert f"copying data: {words}" in capsys.readouterr().out
    assert f"copying data: {words}" in headline(sample_plan(), reading)
    assert headline(sample_plan(), Reading(at=now))[-1].startswith("there is no")


def test_copies_are_read_while_a_node_is_set_up(deployed: DeployedStack, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def copies(client: Any, group: str, now: datetime) -> dict[str, str]:
        asked.append(group)
        return {}

    monkeypatch.setattr("optimizer.commands.status.reading.read_copies", copies)
    read(deployed.names, datetime.now(UTC))
    assert asked == []
    read_group = actuals.read_group

    def one_pending(client: Any, name: str) -> Any:
        group = read_group(client, name)
        assert group is not None
        first, *others = group.nodes
        return replace(group, nodes=(replace(first, lifecycle_state="Pending:Wait"), *others))

    monkeypatch.setattr(actuals, "read_group", one_pending)
    read(deployed.names, datetime.now(UTC))
    assert asked == [deployed.names.log_group]
