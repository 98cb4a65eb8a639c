"""Real engines, stopped by SIGTERM and started again, end with the parameters of an undisturbed run, bit by bit."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from bootstrap.training.errors import EXIT_INTERRUPTED, ConfigurationError, Interrupted
from bootstrap.training.integrations.engine_files import EngineFiles
from bootstrap.training.ledger.summary import read_ledger
from bootstrap.training.stores import open_store
from tests.training.engine_programs import ENGINES, STEPS, STOP_AFTER, parameters
from tests.warm import ROOT, TRAINER, Warm

pytestmark = [
    pytest.mark.training,
    # Names of the engines' options, not ours.
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"),
]


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("GPUFLEET_SCRATCH_DIR", str(tmp_path / "scratch"))
    yield


def steps(store: Path) -> list[int]:
    return [manifest.step for _, manifest in EngineFiles(open_store(str(store))).scan()[0]]


@pytest.mark.parametrize("engine", ENGINES)
def test_an_interrupted_run_goes_on_exactly(engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train = ENGINES[engine]
    undisturbed = parameters(train(tmp_path / "undisturbed"))
    folder = tmp_path / "interrupted"
    with pytest.raises(Interrupted) as stopped:
        train(folder, stop_after=STOP_AFTER)
    assert (stopped.value.code, stopped.value.step, stopped.value.saved) == (EXIT_INTERRUPTED, STOP_AFTER, True)
    assert steps(folder / "store") == [5, 4, 2]
    with pytest.raises(ConfigurationError, match="begins at step 0"):
        train(folder, resume=False)

    # The newest checkpoint has a flipped bit, and another node starts: the one before is used.
    monkeypatch.setenv("GPUFLEET_SCRATCH_DIR", str(tmp_path / "another node"))
    newest = max((folder / "store").glob("engine-*/files"))
    largest = max((path for path in newest.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
    data = bytearray(largest.read_bytes())
    data[len(data) // 2] ^= 1
    largest.write_bytes(data)
    assert parameters(train(folder)) == undisturbed
    assert steps(folder / "store") == [STEPS, 10, 8]
    account = read_ledger(str(folder / "store"))
    assert account.finished and account.steps == STEPS


EXAMPLES = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "engines.md").read_text(encoding="utf-8"), re.DOTALL)


@pytest.mark.parametrize("example", EXAMPLES, ids=["transformers", "lightning"])
def test_the_pages_examples_run_as_they_stand(example: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GPUFLEET_CHECKPOINT_URI", str(tmp_path / "store"))
    exec(compile(example, "engines.md", "exec"), {"__name__": "__main__"})  # noqa: S102
    assert steps(tmp_path / "store") == [20]


def test_two_ranks_stop_together_and_go_on_exactly(warm: Warm, tmp_path: Path) -> None:
    warm.torchrun(
        tmp_path,
        2,
        "tests.training.engine_programs",
        str(tmp_path),
        modules=(*TRAINER, "transformers.trainer", "lightning.pytorch"),
    )
    for rank in range(2):
        result = json.loads((tmp_path / f"result-{rank}.json").read_text(encoding="utf-8"))
        for engine in ENGINES:
            assert result[f"{engine} stopped"] == [STOP_AFTER, True]
            assert result[engine] is True, f"{engine} on rank {rank} is not bit-equal"
