"""SpotTolerantRun in one process: exact resume, falling back, refusing what it cannot honour."""

from __future__ import annotations

import errno
import gc
import json
import os
import random
import signal
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy
import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.nn.functional import cross_entropy
from torch.testing._internal.two_tensor import TwoTensor

from bootstrap.training import Interrupted, SpotTolerantRun, Watcher, forms, tensors
from bootstrap.training.checkpoint import StoredCheckpoints
from bootstrap.training.errors import CheckpointError, ConfigurationError
from bootstrap.training.facts import is_same_fact
from bootstrap.training.ledger import read_ledger
from bootstrap.training.notices import Notice
from bootstrap.training.state import TrainingState, schedule_of
from bootstrap.training.stores import LocalStore, open_store
from tests.unit.bootstrap.training.conftest import BUCKET

STEPS = 30
# Final state and loss by step.
Outcome = tuple[dict[str, Any], dict[int, float]]


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("GPUFLEET_"):
            monkeypatch.delenv(name)


class FakeWatcher(Watcher):
    """A watcher without sources, whose notices the test gives."""

    def __init__(self) -> None:
        super().__init__(None, signals=False)

    def stop(self, *, save_by: float = float("inf")) -> None:
        self.stop_notice = Notice(source="test", detail="", save_by=save_by)

    def rebalance(self) -> None:
        self.save_notice = Notice(source="rebalance", detail="")


class Training:
    """A small training with everything that has a state: dropout, batch statistics, scheduler, scaler, averages."""

    def __init__(self, store: Any, **arguments: Any) -> None:
        torch.manual_seed(0)
        random.seed(0)
        numpy.random.seed(0)
        self.model = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.3), nn.Linear(32, 4))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, T_max=STEPS)
        self.scaler = torch.amp.grad_scaler.GradScaler("cpu", init_scale=8.0, growth_interval=4)
        self.average = torch.optim.swa_utils.AveragedModel(self.model)
        self.watcher = FakeWatcher()
        self.losses: dict[int, float] = {}
        self.seen: dict[int, list[int]] = {}
        generator = torch.Generator().manual_seed(1)
        self.inputs = torch.randn(200, 8, generator=generator)
        self.targets = torch.randint(0, 4, (200,), generator=generator)
        settings: dict[str, Any] = {
            "dataset_size": 200, "global_batch": 8, "checkpoint_every": 4, "watcher": self.watcher,
            "scheduler": self.scheduler, "scaler": self.scaler, "extra": {"average": self.average},
        }  # fmt: skip
        self.run = SpotTolerantRun(self.model, self.optimizer, store=store, **(settings | arguments))

    def train(self, steps: int = STEPS, at_step: Callable[[int], None] = lambda step: None) -> None:
        with self.run as run:
            torch.rand(run.step + 1)  # set-up that draws numbers must not shift the resumed sequence
            for step in run.steps(steps):
                at_step(step)
                indices = run.sample_indices(step)
                noise = 0.01 * random.random() + 0.01 * float(numpy.random.rand())  # noqa: S311
                loss = cross_entropy(self.model(self.inputs[indices] + noise), self.targets[indices])
                self.optimizer.zero_grad()
                self.scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
                self.scaler.step(self.optimizer)
                self.scaler.update()
                self.scheduler.step()
                self.average.update_parameters(self.model)
                self.losses[step], self.seen[step] = loss.item(), indices.tolist()

    def state(self) -> dict[str, Any]:
        return {
            "model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(), "scaler": self.scaler.state_dict(),
            "average": self.average.state_dict(), "torch": torch.get_rng_state(), "python": random.getstate(),
            "numpy": numpy.random.get_state(legacy=True)[1],  # type: ignore[index]
        }  # fmt: skip


def small_run(model: nn.Module, optimizer: Any, store: object, **arguments: Any) -> SpotTolerantRun:
    settings: dict[str, Any] = {"dataset_size": 8, "global_batch": 4, "watcher": FakeWatcher()}
    return SpotTolerantRun(model, optimizer, store=str(store), **(settings | arguments))


def assert_same(one: Any, other: Any, where: str = "state") -> None:
    if isinstance(one, torch.Tensor):
        assert torch.equal(one, other), where
    elif isinstance(one, numpy.ndarray):
        assert (one == other).all(), where
    elif isinstance(one, dict):
        assert one.keys() == other.keys(), where
        for key in one:
            assert_same(one[key], other[key], f"{where}.{key}")
    elif isinstance(one, list | tuple):
        assert len(one) == len(other), where
        for index, pair in enumerate(zip(one, other, strict=True)):
            assert_same(*pair, f"{where}[{index}]")
    else:
        assert one == other, where


class Killed(Exception):  # noqa: N818
    """Stands for a process that ends without notice."""


def wait_for_writer(step: int) -> None:
    """Have every due save of a training that calls this at each step: none is due while one is written."""
    for thread in threading.enumerate():
        if thread.name == "checkpoint-writer":
            thread.join(timeout=120)


def kill_at(step: int) -> Callable[[int], None]:
    """Raise Killed at a step, after every due checkpoint is written."""

    def at_step(now: int) -> None:
        wait_for_writer(now)
        if now == step:
            raise Killed

    return at_step


def stop_at(training: Training, step: int, save_by: float = float("inf")) -> Callable[[int], None]:
    return lambda now: training.watcher.stop(save_by=save_by) if now == step else None


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], dict[int, float]]:
    training = Training(str(tmp_path_factory.mktemp("undisturbed")))
    training.train()
    return training.state(), training.losses


@pytest.mark.parametrize("step", [0, 1, 4, 5, 6, 17, 28, 29])
def test_killed_run_ends_bit_equal(step: int, tmp_path: Path, undisturbed: Outcome) -> None:
    with pytest.raises(Killed):
        Training(str(tmp_path)).train(at_step=kill_at(step))
    again = Training(str(tmp_path))
    again.train()
    state, losses = undisturbed
    assert_same(again.state(), state)
    assert again.losses.items() <= losses.items()
    assert step < 17 or len(again.losses) < STEPS, "nothing was resumed"


@pytest.mark.parametrize("step", [0, 3, 4, 13, 28])
def test_stopped_run_loses_nothing(step: int, tmp_path: Path, undisturbed: Outcome) -> None:
    first = Training(str(tmp_path))
    with pytest.raises(Interrupted) as caught:
        first.train(at_step=stop_at(first, step))
    assert (caught.value.code, caught.value.step, caught.value.saved) == (75, step + 1, True)
    again = Training(str(tmp_path))
    again.train()
    assert_same(again.state(), undisturbed[0])
    assert first.losses | again.losses == undisturbed[1] and not first.losses.keys() & again.losses.keys()
    summary = read_ledger(str(tmp_path))
    assert (summary.lost_steps, summary.steps, summary.starts) == (0, STEPS, 2)


def slowly(at_step: Callable[[int], None]) -> Callable[[int], None]:
    """Steps long enough for a save over the network."""

    def sleep(step: int) -> None:
        time.sleep(0.1)
        at_step(step)

    return sleep


def test_resuming_on_s3_is_the_same(aws: str, undisturbed: Outcome, monkeypatch: pytest.MonkeyPatch) -> None:
    store = f"s3://{BUCKET}/run"
    monkeypatch.setenv("GPUFLEET_LEDGER_INTERVAL_S", "0.001")
    with pytest.raises(Killed):
        Training(store).train(at_step=slowly(kill_at(15)))
    again = Training(store)
    again.train()
    assert_same(again.state(), undisturbed[0])
    summary = read_ledger(store)
    assert summary.finished and summary.starts == 2 and 0 < summary.lost_steps < 15


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def test_all_damaged_refuses_to_start_over(tmp_path: Path) -> None:
    with pytest.raises(Killed):
        Training(str(tmp_path), keep=1).train(at_step=kill_at(17))
    for prefix in tmp_path.glob("step-*"):
        flip(prefix / "rank-00000.bin") if (prefix / "rank-00000.bin").exists() else None
    with pytest.raises(CheckpointError, match="Starting over would throw away"):
        Training(str(tmp_path)).train()


@pytest.mark.parametrize("total", [10, 12])
def test_a_finished_run_goes_on_to_a_longer_total_only(total: int, tmp_path: Path) -> None:
    Training(str(tmp_path)).train(10)
    again = Training(str(tmp_path))
    again.train(total)
    assert sorted(again.losses) == list(range(10, total)) and again.run.step == total


def test_steps_outside_the_context_are_refused(tmp_path: Path) -> None:
    """They would begin at step 0, whatever the store has."""
    training = Training(str(tmp_path))
    with pytest.raises(ConfigurationError, match=r"not entered.*with SpotTolerantRun"):
        next(training.run.steps(4))
    training.train(4)
    with pytest.raises(ConfigurationError, match="not entered"):
        next(training.run.steps(8))


def test_break_does_not_count_the_step_it_broke(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    training = Training(str(tmp_path), checkpoint_every=None)
    with training.run as run:
        for step in run.steps(10):
            if step == 5:
                break
    assert run.step == 5
    assert "left in step 5, with no step saved; to end early with a checkpoint: run.end_if" in caplog.text


def test_an_early_end_is_saved(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    training = Training(str(tmp_path), checkpoint_every=None)
    ended = {}

    def at_step(step: int) -> None:
        ended[step] = training.run.end_if(step == 5)

    training.train(at_step=at_step)
    assert ended == {step: step == 5 for step in range(6)}
    assert training.run.step == 6 and sorted(training.losses) == [0, 1, 2, 3, 4, 5]
    assert [one.manifest.step for one in StoredCheckpoints(open_store(str(tmp_path))).scan()[0]] == [6]
    assert read_ledger(str(tmp_path)).finished and not caplog.records
    again = Training(str(tmp_path))
    again.train(8)
    assert sorted(again.losses) == [6, 7]


@pytest.mark.parametrize("over", ["steps", "passes", "others", "swapped"])
def test_gradients_that_a_loop_keeps_over_steps_are_warned_of(
    over: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A resume would lose the first gradients of an accumulation, or the states of a new optimizer, silently."""
    model = nn.Linear(8, 8)
    optimizer = new = torch.optim.SGD(model.parameters(), lr=0.1)
    other = torch.optim.SGD(nn.Linear(2, 2).parameters())
    with small_run(model, optimizer, tmp_path, extra={"other": other}) as run:
        for step in run.steps(8):
            for rows in torch.eye(8)[run.sample_indices(step)].chunk(2):
                model(rows).square().mean().backward()
            if over == "others":  # of a model that is trained in turn
                other.step()
            if over == "swapped" and step == 3:
                new = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
            if over in ("passes", "swapped") or step % 4 == 3:
                new.step()
                optimizer.zero_grad()
    first = {"steps": 1, "swapped": 5}.get(over)
    assert [record.args for record in caplog.records] == ([(first,)] if first else [])


def test_rebalance_saves_now_and_goes_on(tmp_path: Path) -> None:
    training = Training(str(tmp_path), checkpoint_every=None)
    training.train(at_step=lambda step: training.watcher.rebalance() if step == 10 else None)
    assert len(training.losses) == STEPS
    assert [path.name.split("-")[1] for path in sorted(tmp_path.glob("step-*"))] == ["00000011", "00000030"]


def test_objects_of_the_first_step_are_walked_by_no_later_collection_of_garbage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    frozen: list[int] = []
    count, counts = gc.get_freeze_count, 0

    def counting() -> int:
        nonlocal counts
        counts += 1
        return count() + 375  # what Python 3.12 freezes as it starts

    monkeypatch.setattr(gc, "get_freeze_count", counting)  # 10 to 20 ms
    gc.unfreeze()
    try:
        Training(str(tmp_path)).train(3, at_step=lambda step: frozen.append(count()))
        assert frozen[0] == 0 and 1000 < frozen[2] <= frozen[1]
        assert count() == 0 and counts == 1
    finally:
        gc.freeze()  # as before, or each run of this module collects anew


def test_a_long_evaluation_in_a_step_is_no_hang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would end each start at the same step: the evaluation comes before the step's checkpoint."""
    exits: list[str] = []
    monkeypatch.setattr("bootstrap.training.leaving._exit_now", exits.append)

    def evaluate(step: int) -> None:
        for _ in range(12 if step == 5 else 0):
            time.sleep(0.25)
            assert training.run.goes_on()

    monkeypatch.setenv("GPUFLEET_HANG_TIMEOUT_S", "1.5")
    training = Training(str(tmp_path))
    training.train(at_step=evaluate)
    assert exits == []


def test_a_notice_cuts_an_evaluation_short(tmp_path: Path) -> None:
    """Its two minutes would pass in it, with every step since the last checkpoint."""
    asked: list[bool] = []

    def evaluate(step: int) -> None:
        if step == 5:
            asked.append(training.run.goes_on())
            training.watcher.stop()
            asked.append(training.run.goes_on())

    training = Training(str(tmp_path))
    with pytest.raises(Interrupted):
        training.train(at_step=evaluate)
    assert asked == [True, False] and training.run.step == 6


def test_interval_in_seconds(tmp_path: Path) -> None:
    training = Training(str(tmp_path), checkpoint_every=None, checkpoint_interval_s=0.2, keep=100)
    began = time.monotonic()
    training.train(20, at_step=lambda step: time.sleep(0.05))
    took = time.monotonic() - began
    assert 3 <= len(list(tmp_path.glob("step-*"))) <= took / 0.2 + 1


class SlowStore(LocalStore):
    """Takes its time for each shard, as a network store does."""

    def write(self, name: str, parts: Any) -> None:
        time.sleep(0.3)
        super().write(name, parts)


def test_state_saved_is_that_of_its_step_and_not_a_later_one(tmp_path: Path) -> None:
    """Training changes the parameters while a slow writer writes; the checkpoint must not see it."""
    for store in (LocalStore(tmp_path / "quick"), SlowStore(tmp_path / "slow")):
        training = Training(store, keep=100)
        with pytest.raises(Interrupted):
            training.train(at_step=slowly(stop_at(training, 12)))
    for step in (4, 13):
        paths = [next((tmp_path / name).glob(f"step-{step:08d}-*/rank-00000.bin")) for name in ("quick", "slow")]
        assert paths[0].read_bytes() == paths[1].read_bytes()


class StuckStore(LocalStore):
    """Does not come back from a write until the test lets it."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.writing, self.free = threading.Event(), threading.Event()

    def write(self, name: str, parts: Any) -> None:
        self.writing.set()
        self.free.wait(timeout=120)
        super().write(name, parts)


@pytest.mark.parametrize("save_by", [600.0, 1200.0])
def test_the_final_save_may_take_as_long_as_the_notice_says(
    save_by: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The save takes 900 s by this clock: the machine is gone before, or a hook holds it."""
    store = StuckStore(tmp_path)
    training = Training(store, checkpoint_every=100)

    def clock() -> float:
        if store.writing.is_set() and save_by > 900.0:
            store.free.set()
        return 1000.0 + 900.0 * store.writing.is_set()

    monkeypatch.setattr("bootstrap.training.saver.time.time", clock)
    try:
        with pytest.raises(Interrupted) as stopped:
            training.train(at_step=stop_at(training, 5, 1000.0 + save_by))
    finally:
        store.free.set()
    assert store.writing.is_set() and stopped.value.saved is (save_by > 900.0)
    assert bool(list(tmp_path.glob("step-*/manifest.json"))) is stopped.value.saved


def test_a_notice_during_the_last_save_bounds_it(tmp_path: Path) -> None:
    """A notice comes after the last step, while the last checkpoint is written."""
    store = StuckStore(tmp_path)
    training = Training(store, checkpoint_every=100)

    def interrupt() -> None:
        store.writing.wait(timeout=120)
        training.watcher.stop(save_by=time.time() + 0.5)

    helper = threading.Thread(target=interrupt)
    helper.start()
    try:
        training.train(steps=3)
        assert not list(tmp_path.glob("step-*/manifest.json"))
    finally:
        store.free.set()
        helper.join()


class FullStore(LocalStore):
    """Has space for ``files`` of the ranks' files."""

    files = 0

    def write(self, name: str, parts: Any) -> None:
        if name.endswith(".bin") and len(list(self.root.glob("*/*.bin"))) >= self.files:
            raise CheckpointError(f"cannot write {name}: {OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))}")
        super().write(name, parts)


def test_a_full_disk_loses_older_checkpoints_and_not_the_next(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It held ``keep`` checkpoints and had no room for one more: none was saved until the end of the run."""
    training = Training(store := FullStore(tmp_path), keep=3)
    store.files = 3
    training.train(at_step=wait_for_writer)
    assert f"{tmp_path} is full: deleted step-00000004-" in caplog.text
    assert [folder.name[:13] for folder in sorted(tmp_path.glob("step-*"))][-1] == f"step-{STEPS:08d}"


class OwnStore(LocalStore):
    """Folder of one node's own: the ranks' files are on another."""

    def write(self, name: str, parts: Any) -> None:
        if not name.endswith(".bin"):
            super().write(name, parts)


def test_a_folder_that_nodes_do_not_share_takes_no_checkpoint(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A manifest without its files would count, and every start would find it damaged."""
    Training(OwnStore(tmp_path)).train()
    assert "rank-00000.bin is not in" in caplog.text and "a folder that all nodes share" in caplog.text
    assert not list(tmp_path.glob("step-*"))


class BusyStore(LocalStore):
    """Loses its answer to the next ``failures`` writes of the ranks' files."""

    failures = 0

    def write(self, name: str, parts: Any) -> None:
        super().write(name, parts)
        if name.endswith(".bin") and self.failures:
            self.failures -= 1
            raise CheckpointError(f"cannot write {name}: answered 503")


def test_files_of_a_failed_save_are_deleted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Each attempt on a full disk would leave it fuller."""
    training = Training(store := BusyStore(tmp_path), checkpoint_every=100)
    store.failures = 100
    training.train()
    assert len(training.losses) == STEPS and "NOT saved" in caplog.text
    assert list(tmp_path.glob("step-*")) == []


@pytest.mark.parametrize("stop", [STEPS - 3, None])
def test_the_final_save_is_tried_again(stop: int | None, tmp_path: Path) -> None:
    """No later checkpoint replaces it: the steps since the one before would be lost."""
    training = Training(store := BusyStore(tmp_path), checkpoint_every=100)
    store.failures = 2
    try:
        training.train(at_step=lambda now: training.watcher.stop(save_by=time.time() + 60) if now == stop else None)
    except Interrupted as error:
        assert error.saved
    (manifest,) = tmp_path.glob("step-*/manifest.json")
    assert manifest.parent.name.startswith(f"step-{training.run.step:08d}-")


def test_told_before_the_start_trains_nothing(tmp_path: Path) -> None:
    training = Training(str(tmp_path))
    training.watcher.stop()
    with pytest.raises(Interrupted):
        training.train()
    assert training.losses == {} and not list(tmp_path.glob("step-*"))


@pytest.mark.parametrize(("name", "value"), [("global_batch", 16), ("dataset_size", 150), ("seed", 5)])
def test_another_sample_order_is_refused(name: str, value: int, tmp_path: Path) -> None:
    Training(str(tmp_path)).train(4)
    with pytest.raises(ConfigurationError, match=f"{name} is {value}"):
        Training(str(tmp_path), **{name: value}).train()


def test_a_checkpoint_of_other_facts_is_refused_and_one_without_them_is_not(tmp_path: Path) -> None:
    Training(str(tmp_path)).train(4)
    facts = {"rope_theta": 10_000.0, "layers": ("full", "full"), "data": "1f"}
    Training(str(tmp_path), facts=facts).train(8)  # the version before had none
    with pytest.raises(ConfigurationError, match=r"another run: rope_theta is 500.0, and was 10000.0\. .*new store"):
        Training(str(tmp_path), facts=facts | {"rope_theta": 500.0}).train()
    del facts["data"]
    Training(str(tmp_path), facts=facts | {"new_in_this_version": 1}).train(12)
    # A fact of the user's with the name of a number of the order hides no change of it.
    Training(other := str(tmp_path / "other"), facts={"seed": 1}).train(4)
    with pytest.raises(ConfigurationError, match="another run: seed is 5, and was 0"):
        Training(other, facts={"seed": 1}, seed=5).train()


@pytest.mark.parametrize("kind", ["tensor", "pipeline", "context", "expert"])
def test_a_plan_that_splits_the_model_is_refused(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUFLEET_PLAN", json.dumps({f"{kind}_parallel": 1}))
    Training(str(tmp_path)).train()
    monkeypatch.setenv("GPUFLEET_PLAN", json.dumps({f"{kind}_parallel": 2}))
    with pytest.raises(ConfigurationError, match=f"{kind}_parallel 2.*--parallelism data"):
        Training(str(tmp_path))


def test_ranks_that_are_all_on_one_node_of_several_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """mp.spawn on localhost sets no variable by which the agent sees how many ranks there are."""
    monkeypatch.setenv("GPUFLEET_NODE_COUNT", "2")
    with pytest.raises(ConfigurationError, match="all 1 ranks of this training run on one of 2 nodes"):
        Training(str(tmp_path))
    monkeypatch.setenv("GPUFLEET_GPUS_PER_NODE", "8")  # python train.py on each node
    with pytest.raises(ConfigurationError, match="all 1 ranks"):
        Training(str(tmp_path))


def test_ranks_that_would_train_alone_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "8")
    with pytest.raises(ConfigurationError, match=r"one of 8 ranks.*init_process_group"):
        Training(str(tmp_path))


def test_a_run_that_is_refused_leaves_nothing_that_ends_the_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its heartbeat ended test processes, and notebooks, half an hour after an error that was caught."""
    exits: list[str] = []
    monkeypatch.setattr("bootstrap.training.leaving._exit_now", exits.append)
    Training(str(tmp_path)).train(4)
    handlers = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    monkeypatch.setenv("GPUFLEET_HANG_TIMEOUT_S", "0.1")
    with pytest.raises(ConfigurationError, match="same scheduler"):
        Training(str(tmp_path), scheduler=None, watcher=Watcher(None)).train()
    time.sleep(1)
    assert exits == [] and [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == handlers


def test_another_model_is_an_error_and_not_a_damaged_checkpoint(tmp_path: Path) -> None:
    def run_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> SpotTolerantRun:
        return small_run(model, optimizer, tmp_path)

    model = nn.Linear(8, 4)
    with run_of(model, torch.optim.SGD(model.parameters())) as run:
        list(run.steps(2))
    for other, reason in ((nn.Linear(8, 5), "size mismatch"), (nn.Linear(8, 4, bias=False), "only one of")):
        with pytest.raises(ConfigurationError, match=reason), run_of(other, torch.optim.SGD(other.parameters())):
            raise AssertionError("it entered")
    unknown = torch.optim.SGD([*model.parameters(), nn.Parameter(torch.zeros(3))])
    with pytest.raises(ConfigurationError, match="the model has not"), run_of(model, unknown):
        raise AssertionError("it entered")
    two = [{"params": [parameter]} for parameter in model.parameters()]
    with pytest.raises(ConfigurationError, match="group them as before"), run_of(model, torch.optim.SGD(two, lr=0.1)):
        raise AssertionError("it entered")


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        (torch.optim.RMSprop, r"RMSprop keeps \['square_avg', 'step'\] of weight, and .*'exp_avg'"),
        (torch.optim.SGD, "SGD keeps nothing of weight"),
        (lambda parameters: torch.optim.AdamW(parameters, amsgrad=True), "max_exp_avg_sq"),
        # It would decay as AdamW does, by the setting in the checkpoint.
        (torch.optim.Adam, "decoupled_weight_decay is False, and the checkpoint's True"),
        (lambda parameters: torch.optim.AdamW(parameters, fused=True), ""),
    ],
)
def test_another_optimizer_is_refused_unless_its_states_are_the_same(other: Any, reason: str, tmp_path: Path) -> None:
    def train(make: Any, steps: int, dtype: torch.dtype = torch.float32) -> None:
        model = nn.Linear(8, 4, dtype=dtype)
        optimizer = make(model.parameters())
        with small_run(model, optimizer, tmp_path) as run:
            for _ in run.steps(steps):
                model(torch.ones(1, 8, dtype=dtype)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()

    train(torch.optim.AdamW, 2)
    if not reason:
        train(other, 4)
        return
    with pytest.raises(ConfigurationError, match=reason):
        train(other, 4)
    with pytest.raises(ConfigurationError, match=r"model.weight is torch.bfloat16, and the checkpoint's torch.float32"):
        train(torch.optim.AdamW, 4, torch.bfloat16)


def test_another_schedule_is_refused(tmp_path: Path) -> None:
    def train(make: Callable[[torch.optim.Optimizer], Any], steps: int) -> None:
        model = nn.Linear(8, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scheduler = make(optimizer)
        with small_run(model, optimizer, tmp_path, scheduler=scheduler) as run:
            for _ in run.steps(steps):
                optimizer.step()
                scheduler.step()

    schedulers = torch.optim.lr_scheduler
    warm = partial(schedulers.LinearLR, total_iters=3)

    def chained(then: Any) -> Callable[[torch.optim.Optimizer], Any]:
        return lambda optimizer: schedulers.SequentialLR(optimizer, [warm(optimizer), then(optimizer)], [3])

    cosine = partial(schedulers.CosineAnnealingLR, T_max=9)
    train(chained(cosine), 2)
    train(chained(partial(cosine, eta_min=0.01)), 4)  # the checkpoint's values count
    told = r"SequentialLR\(LinearLR\(\), StepLR\(\)\), and the checkpoint's .*, CosineAnnealingLR\(\)\)"
    with pytest.raises(ConfigurationError, match=told):
        train(chained(partial(schedulers.StepLR, step_size=1)), 6)
    with pytest.raises(ConfigurationError, match="scheduler is LambdaLR"):
        train(partial(schedulers.LambdaLR, lr_lambda=lambda step: 1.0), 6)


def test_a_schedule_whose_function_has_another_name_is_the_same() -> None:
    def schedule(function: Callable[[int], float]) -> str:
        optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
        return schedule_of(torch.optim.lr_scheduler.LambdaLR(optimizer, partial(function)))

    def warm(step: int) -> float:
        return min(1.0, step / 9)

    def rise(step: int) -> float:
        return min(1.0, step / 9)

    def fall(step: int) -> float:
        return min(1.0, step / 7)

    assert is_same_fact(schedule(warm), schedule(rise)) and not is_same_fact(schedule(warm), schedule(fall))
    earlier = "LambdaLR(warm)"  # a checkpoint of before the code counted, and one of another Python
    assert is_same_fact(schedule(warm), earlier) and is_same_fact(schedule(warm), "LambdaLR(warm#01234567)")
    assert not is_same_fact(schedule(rise), earlier) and not is_same_fact("a#1", "a#2")
    assert is_same_fact("MultiplicativeLR(fall#89abcdef)", "MultiplicativeLR(fall)")
    assert is_same_fact(
        "SequentialLR(Warmup(fall#89abcdef), StepLR())", "SequentialLR(Warmup(fall#01234567), StepLR())"
    )


def test_checkpoint_from_elsewhere_runs_no_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shards are read with weights_only: a pickle that would run something is refused."""

    class Evil:
        def __reduce__(self) -> Any:
            return (os.mkdir, (str(tmp_path / "owned"),))

    with monkeypatch.context() as unchecked:
        unchecked.setattr(tensors, "from_bytes", lambda data: None)
        Training(str(tmp_path / "store"), extra={"evil": _StatefulOf({"x": Evil()})}).train(4)
    with pytest.raises(CheckpointError, match=r"it holds \S+mkdir"):
        Training(str(tmp_path / "store"), extra={"evil": _StatefulOf({})}).train()
    assert not (tmp_path / "owned").exists()


def test_numpys_values_are_part_of_the_state(tmp_path: Path) -> None:
    """A schedule that computes with numpy leaves numpy's numbers in itself and in the optimizer."""

    def train(store: Path, at: Callable[[int], None] = lambda step: None) -> dict[str, Any]:
        history = _StatefulOf({"losses": numpy.zeros(3), "best": numpy.float32(0.1), "epochs": {1, 2}})
        training = Training(str(store), extra={"history": history}, checkpoint_every=2)
        training.optimizer.param_groups[0]["lr"] = numpy.float64(0.01)

        def at_step(step: int) -> None:
            history._state["losses"][step % 3] += step  # in place, while the checkpoint may still be written
            at(step)

        training.train(10, at_step)
        return {"optimizer": training.optimizer.state_dict(), "history": history._state}

    undisturbed = train(tmp_path / "a")
    with pytest.raises(Killed):
        train(tmp_path / "b", kill_at(7))
    assert max(one.manifest.step for one in StoredCheckpoints(open_store(str(tmp_path / "b"))).scan()[0]) == 6
    resumed = train(tmp_path / "b")
    assert_same(resumed, undisturbed)
    assert type(resumed["history"]["best"]) is numpy.float32


class Remembering(torch.optim.SGD):
    """Keeps an object in its states, as GaLore its projectors."""

    def step(self, closure: Any = None) -> Any:
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["recent"] = deque([1])


def test_values_that_no_resume_could_read_are_refused_before_the_first_step(tmp_path: Path) -> None:
    for value, reason in ((deque([1]), "collections.deque"), (lambda: 0, "lambda")):
        with pytest.raises(ConfigurationError, match=rf"state of extra\.seen .*{reason}"):
            Training(str(tmp_path), extra={"seen": _StatefulOf({"recent": value})}).train(4)
    large = torch.ones(90, 100)
    states: tuple[tuple[Any, str], ...] = (
        (large.to_sparse(), r"seen\.recent is a sparse"),
        (torch.quantize_per_tensor(large, 0.1, 3, torch.quint8), r"seen\.recent is a quantized"),
        (cast(Any, TwoTensor)(large, large), r"seen\.recent is a TwoTensor"),
        ({"a": {"b": large}, "a.b": large + 1}, r"two tensors have the key extra\.seen\.recent\.a\.b"),
    )
    for state, reason in states:
        with pytest.raises(ConfigurationError, match=reason):
            Training(str(tmp_path), extra={"seen": _StatefulOf({"recent": state})}).train(4)
    model = nn.Linear(2, 2)
    with pytest.raises(ConfigurationError, match=r"optimizer\.state\.weight\.recent .*deque"):
        small_run(model, Remembering(model.parameters()), tmp_path).__enter__()
    table = nn.Embedding(900, 9, sparse=True)
    sgd = torch.optim.SGD(table.parameters(), momentum=0.9)
    run = small_run(table, sgd, tmp_path / "sparse", checkpoint_every=1)
    with pytest.raises(ConfigurationError, match=r"weight\.momentum_buffer is a sparse"), run:
        for _ in run.steps(2):
            table(torch.tensor([1])).sum().backward()
            sgd.step()
    with pytest.raises(ConfigurationError, match=r"extra\.seen \(Random\) has no state_dict and load_state_dict"):
        Training(str(tmp_path), extra={"seen": random.Random()})  # noqa: S311


def test_a_forked_child_that_leaves_the_run_leaves_its_records_alone(tmp_path: Path) -> None:
    def fork(step: int) -> None:
        if step == 2 and not (child := os.fork()):
            try:
                training.run.__exit__(SystemExit, SystemExit(3), None)
            finally:
                os._exit(0)
        elif step == 2:
            assert os.waitpid(child, 0)[1] == 0

    training = Training(str(tmp_path))
    training.train(4, fork)
    assert '"failed"' not in (tmp_path / "ledger.jsonl").read_text() and read_ledger(str(tmp_path)).finished


def test_a_checkpoint_that_no_resume_could_read_does_not_count(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    seen = _StatefulOf({})

    def at_step(step: int) -> None:
        if step == 6:
            seen._state["recent"] = deque([1])

    Training(str(tmp_path), extra={"seen": seen}).train(10, at_step)
    assert [one.manifest.step for one in StoredCheckpoints(open_store(str(tmp_path))).scan()[0]] == [4]
    assert "NOT saved" in caplog.text and "it holds collections.deque" in caplog.text


class Counting(torch.optim.SGD):
    """Keeps a state beside those of the parameters."""

    def step(self, closure: Any = None) -> Any:
        self.state["steps"] = {"done": self.state["steps"].get("done", 0) + 1}  # type: ignore[index]
        return super().step(closure)


class Averaging(torch.optim.Optimizer):
    """Around another optimizer, with averages of its own, as Lookahead's code has them, without torch's constructor."""

    def __init__(self, parameters: Any, lr: float) -> None:
        self.optimizer = torch.optim.SGD(parameters, lr=lr, momentum=0.9)
        self.param_groups = self.optimizer.param_groups
        self.averages = [parameter.detach().clone() for parameter in self.param_groups[0]["params"]]

    def step(self, closure: Any = None) -> Any:
        self.optimizer.step()
        for parameter, average in zip(self.param_groups[0]["params"], self.averages, strict=True):
            average.lerp_(parameter.detach(), 0.5)
            parameter.data.copy_(average)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        return {"inner": self.optimizer.state_dict(), "averages": self.averages}

    def load_state_dict(self, state_dict: Any) -> None:
        self.optimizer.load_state_dict(state_dict["inner"])
        self.param_groups, self.averages = self.optimizer.param_groups, state_dict["averages"]


@pytest.mark.parametrize("kind", [Counting, Averaging, torch.optim.LBFGS])
def test_unusual_optimizers_go_on_exactly(kind: Any, tmp_path: Path) -> None:
    def train(store: Path, at_step: Callable[[int], None] = lambda step: None) -> dict[str, Any]:
        torch.manual_seed(0)
        model = nn.Linear(8, 200)
        optimizer = kind(model.parameters(), lr=0.1)
        inputs = torch.randn(8, 8)
        with small_run(model, optimizer, store, checkpoint_every=2) as run:
            for step in run.steps(8):
                at_step(step)
                batch = inputs[run.sample_indices(step)]

                def loss(batch: torch.Tensor = batch) -> torch.Tensor:
                    optimizer.zero_grad()
                    value: torch.Tensor = (model(batch) - 1).square().mean()
                    value.backward()  # type: ignore[no-untyped-call]
                    return value

                loss()
                optimizer.step(loss)
        return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}

    undisturbed = train(tmp_path / "a")
    with pytest.raises(Killed):
        train(tmp_path / "b", kill_at(5))
    assert_same(train(tmp_path / "b"), undisturbed)


def test_a_second_optimizer_and_a_model_beside_the_first_go_on_exactly(tmp_path: Path) -> None:
    """Muon for the matrices and AdamW for the rest; another model in ``extra`` with an optimizer of its own."""

    def train(store: Path, at_step: Callable[[int], None] = lambda step: None) -> list[Any]:
        torch.manual_seed(0)
        model, other = nn.Linear(8, 200), nn.Linear(200, 8)
        alpha = torch.nn.Parameter(torch.zeros(1))
        muon = torch.optim.Muon([model.weight], lr=0.1)
        parts: dict[str, Any] = {
            "rest": torch.optim.AdamW([model.bias], lr=0.1),
            "other": other,
            "others": torch.optim.AdamW(other.parameters(), lr=0.1),
            "alpha": torch.optim.AdamW([alpha]),
        }
        run = small_run(model, muon, store, checkpoint_every=2, extra=parts)
        assert set(run._state.optimizers) == {"optimizer", "extra.rest", "extra.others"}
        assert [len(one._optimizer_step_pre_hooks) for one in run._state.steppers] == [1] * 4  # on a GPU each one waits
        with run:
            for step in run.steps(8):
                at_step(step)
                (other(model(torch.eye(8)[run.sample_indices(step)])) - 1).square().mean().backward()
                for optimizer in (muon, *(part for part in parts.values() if isinstance(part, torch.optim.Optimizer))):
                    optimizer.step()
                    optimizer.zero_grad()
        return [muon.state_dict(), model.state_dict(), *(part.state_dict() for part in parts.values())]

    undisturbed = train(tmp_path / "a")
    with pytest.raises(Killed):
        train(tmp_path / "b", kill_at(5))
    assert_same(train(tmp_path / "b"), undisturbed)
    with (
        pytest.raises(ConfigurationError, match=r"extra.other cannot take its state.*\n.*size mismatch"),
        small_run(model := nn.Linear(8, 200), torch.optim.Muon([model.weight]), tmp_path / "b", extra={
            "other": (other := nn.Linear(200, 9)), "rest": torch.optim.AdamW([model.bias]),
            "others": torch.optim.AdamW(other.parameters()), "alpha": torch.optim.AdamW([nn.Parameter(torch.zeros(1))]),
        }),
    ):  # fmt: skip
        raise AssertionError("it entered")


class Lazy(nn.Module):
    """Makes and changes state in its forward passes, as published code does."""

    scale: torch.Tensor | None
    warm: torch.Tensor | None
    gain: nn.Parameter | None
    peak: torch.Tensor
    queue: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.backbone, self.head = nn.Linear(8, 8), nn.Sequential(nn.LazyLinear(8), nn.LazyBatchNorm1d())
        self.backbone.requires_grad_(False)
        self.register_buffer("scale", None)
        self.register_buffer("queue", torch.zeros(0, 8))
        self.register_buffer("warm", torch.ones(8))
        self.register_parameter("gain", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.scale is None:
            self.scale = x.detach().abs().mean(0)
        if not hasattr(self, "peak"):
            self.register_buffer("peak", x.detach().amax(0))
        self.queue = torch.cat([self.queue, x.detach()[:1]])
        if len(self.queue) == 3:
            self.warm = None
        if self.gain is None:
            self.gain = nn.Parameter(torch.full((8,), 0.5))
        y: torch.Tensor = self.head(self.backbone(x * self.scale + self.peak)) * self.gain
        return y + self.queue.mean() + (0 if self.warm is None else self.warm)


@pytest.mark.parametrize("stop", [2, 3, 4, 6, 9, 11])
@pytest.mark.parametrize("save_frozen", [True, False])
def test_state_that_a_run_makes_and_changes_is_made_again_by_a_resume(
    stop: int, save_frozen: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Buffers and parameters of forward passes, a backbone unfrozen and frozen, groups of an optimizer."""

    def train(store: Path, at_step: Callable[[int], None] = lambda step: None) -> list[Any]:
        torch.manual_seed(0)
        model, other = Lazy(), Lazy()
        optimizer = torch.optim.AdamW(model.head.parameters(), lr=0.1)
        options: dict[str, Any] = {"checkpoint_every": 1, "save_frozen": save_frozen, "extra": {"other": other}}
        with small_run(model, optimizer, store, **options) as run:
            for step in run.steps(12):
                at_step(step)
                if step == 3:
                    model.backbone.requires_grad_(True)
                    optimizer.add_param_group({"params": model.backbone.parameters(), "lr": 0.01})
                if step == 7:
                    model.backbone.requires_grad_(False)
                    other.backbone.requires_grad_(True)
                    assert model.gain is not None
                    optimizer.param_groups[0]["params"].append(model.gain)
                optimizer.zero_grad()
                batch = torch.eye(8)[run.sample_indices(step)]
                (model(batch) + other(batch)).square().mean().backward()
                optimizer.step()
        trains = [[p.requires_grad for p in module.parameters()] for module in (model, other)]
        return [model.state_dict(), other.state_dict(), optimizer.state_dict(), trains]

    undisturbed = train(tmp_path / "a")
    with pytest.raises(Killed):
        train(tmp_path / "b", kill_at(stop))
    assert StoredCheckpoints(open_store(str(tmp_path / "b"))).scan()[0][0].manifest.step >= stop - 2
    assert_same(train(tmp_path / "b"), undisturbed)
    assert "no new start" not in caplog.text


def test_a_parameter_that_deepspeed_gathers_has_not_grown() -> None:
    layer: Any = nn.Linear(8, 8)
    layer.weight.ds_shape, layer.weight.data = layer.weight.shape, torch.empty(0)
    known = forms.ModuleForms({"model": layer})
    layer.weight.data = torch.empty(8, 8)  # after a step, small ones stay whole
    assert not known.born()


def test_a_change_that_no_start_can_make_is_told_before_a_checkpoint_has_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forms, "LOOK_FACTOR", 0)

    def train(steps: int, wide: bool, at_step: Callable[[int, Any, Any], None]) -> None:
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 9 if wide else 8))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)  # states of replaced parameters stay
        with small_run(model, optimizer, tmp_path, checkpoint_every=2, keep=9) as run:
            for step in run.steps(steps):
                wait_for_writer(step)
                at_step(step, model, optimizer)
                model(torch.eye(8)[run.sample_indices(step)]).square().mean().backward()
                optimizer.step()

    def widen(step: int, model: Any, optimizer: Any) -> None:
        assert ("no new start of this script" in caplog.text) == (step > 4)
        if step == 4:
            model[1] = nn.Linear(8, 9)
            optimizer.param_groups[0]["params"][2:] = model[1].parameters()

    train(10, False, widen)
    assert caplog.text.count("size mismatch: model.1.weight has shape (8, 8), and the checkpoint (9, 8)") == 1
    with pytest.raises(ConfigurationError, match="size mismatch"):
        train(12, False, lambda *_: None)
    train(12, True, lambda *_: None)  # made before the run is entered
    train(16, True, lambda step, model, optimizer: model.pop(1) if step == 13 else None)
    assert "a parameter of shape (9, 8) that the model has no longer" in caplog.text


@pytest.mark.parametrize("stop", [2, 5, 8])
def test_ties_that_a_run_changes_are_changed_by_a_resume(
    stop: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def train(store: Path, at_step: Callable[[int], None] = lambda step: None) -> list[Any]:
        torch.manual_seed(0)
        models: list[Any] = [nn.Sequential(*(nn.Linear(8, 8) for _ in range(4))) for _ in range(2)]
        for model in models:
            model[3].weight = model[0].weight
            model.register_buffer("constant", torch.full((8,), 0.5), persistent=False)
        models[1].register_buffer("passing", torch.zeros(8), persistent=False)
        optimizer = torch.optim.AdamW([p for model in models for p in model.parameters()], lr=0.1)
        with small_run(models[0], optimizer, store, checkpoint_every=1, extra={"other": models[1]}) as run:
            for step in run.steps(10):
                at_step(step)
                batch = torch.eye(8)[run.sample_indices(step)]
                for model in models:
                    if step == 3:
                        model[2].weight, model[3].weight = model[1].weight, model[1].weight
                    if step == 6:
                        model[3].weight = nn.Parameter(model[0].weight.detach().clone())
                        optimizer.add_param_group({"params": [model[3].weight]})
                    batch = model(batch)
                optimizer.zero_grad()
                loss: torch.Tensor = batch.square().mean()
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                models[1].passing += 1
        return [[list(model.state_dict().values()), len(list(model.parameters()))] for model in models]

    undisturbed = train(tmp_path / "a")
    with pytest.raises(Killed):
        train(tmp_path / "b", kill_at(stop))
    assert_same(train(tmp_path / "b"), undisturbed)
    assert "other.passing is not persistent" in caplog.text and "constant" not in caplog.text


def test_an_expanded_buffer_and_one_of_inference_mode_are_restored(tmp_path: Path) -> None:
    def train(steps: int) -> torch.Tensor:
        model: Any = nn.Sequential(nn.Linear(2, 2))
        model[0].register_buffer("scale", torch.ones(1, 3).expand(4, 3))
        with torch.inference_mode():
            model[0].register_buffer("average", torch.zeros(4))
        with small_run(model, torch.optim.SGD(model.parameters()), tmp_path) as run:
            for _ in run.steps(steps):
                model[0].scale = model[0].scale + 1
                with torch.inference_mode():
                    model[0].average += 1
        assert torch.equal(model[0].average, torch.full((4,), float(steps)))
        scale: torch.Tensor = model[0].scale
        return scale

    assert torch.equal(train(2), torch.full((4, 3), 3.0)) and torch.equal(train(3), torch.full((4, 3), 4.0))


def test_an_optimizer_whose_state_dict_leaves_out_another_is_refused(tmp_path: Path) -> None:
    """SAM's published code is of this kind: its inner momentum would begin at zero after each resume."""

    class Around(torch.optim.SGD):
        def __init__(self, parameters: Any) -> None:
            super().__init__(parameters)
            self.base = torch.optim.SGD(self.param_groups, momentum=0.9)

    model = nn.Linear(2, 2)
    around = Around(model.parameters())
    with pytest.raises(ConfigurationError, match=r"Around\.base is an optimizer \(SGD\)"):
        small_run(model, around, tmp_path)
    small_run(model, around, tmp_path, extra={"base": around.base})


class _StatefulOf:
    def __init__(self, state: dict[str, Any]) -> None:
        self._state = state

    def state_dict(self) -> dict[str, Any]:
        return self._state

    def load_state_dict(self, state: Any) -> None:
        self._state = state


def test_a_model_over_several_gpus_of_one_process_is_refused() -> None:
    """Copies from the second would be written before they are over."""
    with FakeTensorMode():
        model = nn.Sequential(nn.Linear(2, 2, device="cuda:0"), nn.Linear(2, 2, device="cuda:1"))
        with pytest.raises(ConfigurationError, match="parameters are on cuda:0, cuda:1"):
            TrainingState(model, torch.optim.SGD(model.parameters()), {})


def test_parameters_without_a_norm_are_not_compared() -> None:
    model = nn.Linear(2, 2)
    model.register_parameter("eight", nn.Parameter(torch.ones(2).to(torch.float8_e4m3fn)))
    model.register_parameter("own", nn.Parameter(cast(Any, TwoTensor)(torch.ones(2), torch.ones(2))))
    assert TrainingState(model, torch.optim.SGD(model.parameters()), {}).norms().keys() == {"weight", "bias"}


def test_flat_parameters_are_refused(tmp_path: Path) -> None:
    class FullyShardedDataParallel(nn.Linear):
        pass

    model = nn.Sequential(FullyShardedDataParallel(2, 2))
    with pytest.raises(ConfigurationError, match=r"FSDP1.*fully_shard"):
        small_run(model, torch.optim.SGD(model.parameters()), tmp_path)


@pytest.mark.parametrize("arguments", [{"keep": 0}, {"agree_every": 0}, {"checkpoint_every": 0}])
def test_unusable_arguments(arguments: dict[str, int], tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="at least 1"):
        Training(str(tmp_path), **arguments)


@pytest.mark.parametrize("variable", ["GPUFLEET_CHECKPOINT_INTERVAL_S", "GPUFLEET_HANG_TIMEOUT_S"])
def test_unusable_environment(variable: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable, "soon")
    with pytest.raises(ConfigurationError, match=variable):
        Training(str(tmp_path))


def test_rehearsal_leaves_no_trace(tmp_path: Path, undisturbed: Outcome) -> None:
    training = Training(str(tmp_path / "a"))
    calls = []

    def rehearse() -> None:
        calls.append(1)
        training.model(training.inputs[:8]).sum().backward()  # moves batch statistics, draws dropout, leaves gradients

    training.run._rehearsal = rehearse
    training.train()
    assert calls == [1]
    assert_same(training.state(), undisturbed[0])
