"""``gpufleet logs trace`` on a deployed stack in an emulated AWS, answered as the training does."""

from __future__ import annotations

from pathlib import Path

import pytest

from bootstrap.contract.trace import REQUEST, TraceRequest, read_trace_request
from tests.unit.optimizer.commands.conftest import Gpufleet
from tests.unit.optimizer.deployed import DeployedStack


@pytest.fixture
def answer(deployed: DeployedStack, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Put an object each time the command waits; the list names attributes of the request with the object's key."""
    objects: list[str] = []

    def sleep(_: float) -> None:
        if objects:
            deployed.put(f"checkpoints/{getattr(asked(deployed), objects.pop())}", "what the training wrote\n")

    monkeypatch.setattr("time.sleep", sleep)
    return objects


def asked(deployed: DeployedStack) -> TraceRequest:
    body = deployed.s3.get_object(Bucket=deployed.names.bucket, Key=f"checkpoints/{REQUEST}")["Body"]
    return read_trace_request(body.read().decode(), REQUEST)


def test_the_trace_is_asked_for_and_downloaded(
    deployed: DeployedStack, gpufleet: Gpufleet, answer: list[str], tmp_path: Path
) -> None:
    answer.append("trace")
    out = tmp_path / "traces"
    code, said, err = gpufleet("logs", "trace", *deployed.arguments, "--rank", "15", "--steps", "2", "--out", str(out))
    assert code == 0 and "perfetto" in err
    request = asked(deployed)
    assert (request.rank, request.steps) == (15, 2) and request.by.startswith("arn:aws:")
    assert Path(said.strip()).read_text() == "what the training wrote\n"
    assert Path(said.strip()).parent == out and request.id in said


def test_a_rank_that_took_none_says_why(deployed: DeployedStack, gpufleet: Gpufleet, answer: list[str]) -> None:
    answer.append("failure")
    code, _, err = gpufleet("logs", "trace", *deployed.arguments)
    assert code == 1 and "rank 0 took no trace: what the training wrote" in err


def test_a_training_that_does_not_answer_is_not_waited_for(
    deployed: DeployedStack, gpufleet: Gpufleet, answer: list[str]
) -> None:
    code, _, err = gpufleet("logs", "trace", *deployed.arguments, "--timeout", "0.001min")
    assert code == 1 and "SpotTolerantRun.steps" in err and "stands for 60 minutes" in err
    assert f"aws s3 cp s3://{deployed.names.bucket}/checkpoints/{asked(deployed).trace} ." in err


@pytest.mark.parametrize(
    ("arguments", "says"), [(("--rank", "16"), "0 to 15"), (("--timeout", "soon"), "soon"), (("--steps", "0"), "1<=x")]
)
def test_wrong_use(deployed: DeployedStack, gpufleet: Gpufleet, arguments: tuple[str, ...], says: str) -> None:
    code, _, err = gpufleet("logs", "trace", *deployed.arguments, *arguments)
    assert code == 2 and says in err
