"""Parts of a step in one process: loss, schedule, loss scale, resume in fp16, and the advice when memory runs out."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from bootstrap.trainer import kernels, loss, oom
from bootstrap.trainer.config import parse_config
from bootstrap.trainer.context_parallel import split_context
from bootstrap.trainer.loop import Stepper, fastest_split
from bootstrap.trainer.mesh import build_mesh
from bootstrap.trainer.models import build
from bootstrap.trainer.optimize import DivergedError, LossScale, gradient_norm, rate_share, scale_gradients
from bootstrap.trainer.parallelize import parallelize
from bootstrap.trainer.recompute import keeping
from bootstrap.trainer.run import assemble, open_samples, train
from bootstrap.training import Interrupted, SpotTolerantRun, Watcher
from bootstrap.training.errors import ConfigurationError
from bootstrap.training.notices import Notice
from bootstrap.training.stores import LocalStore
from optimizer.performance.frameworks import frameworks
from tests.unit.bootstrap.trainer.test_config import parse


def test_the_estimate_counts_the_turns_of_the_loss() -> None:
    assert frameworks()["gpufleet"].loss_turn_elements == loss.TURN_ELEMENTS


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # torch's own, in its compiler
@pytest.mark.usefixtures("traced")
@pytest.mark.parametrize("compiled", [False, True])
def test_cross_entropy_is_torchs_and_leaves_its_gradient_in_the_logits(
    monkeypatch: pytest.MonkeyPatch, compiled: bool
) -> None:
    """Over several turns, with ignored labels; the gradient is that of the weighted sum."""
    monkeypatch.setattr(loss, "TURN_ELEMENTS", 64)
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 5, 16, generator=generator) * 5
    labels = torch.randint(16, (2, 5), generator=generator)
    labels[0, 1] = labels[1, 4] = loss.IGNORED
    reference = logits.clone().requires_grad_()
    expected = torch.nn.functional.cross_entropy(reference.flatten(0, 1), labels.flatten(), reduction="sum")
    (0.25 * expected).backward()  # type: ignore[no-untyped-call]
    head = torch.nn.Linear(1, 1)  # not a leaf: the logits of a model are an output
    ours = (logits.clone().requires_grad_() * 1.0) + 0 * head.weight
    ours.retain_grad()
    found = loss.cross_entropy(ours, labels, weight=torch.tensor(0.25), compiled=compiled)
    found.backward()  # type: ignore[no-untyped-call]
    torch.testing.assert_close(found, expected.detach())
    torch.testing.assert_close(ours.grad, reference.grad)
    torch.testing.assert_close(ours.detach(), reference.grad)


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("constant", [0.5, 1.0, 1.0, 1.0, 1.0]),
        ("linear", [0.5, 1.0, 1.0, 0.55, 0.1]),
        ("cosine", [0.5, 1.0, 1.0, 0.55, 0.1]),
        ("wsd", [0.5, 1.0, 1.0, 1.0, 0.0]),
    ],
)
def test_schedules_warm_up_and_end(schedule: str, expected: list[float]) -> None:
    config = parse("--steps", "102", "--warmup-steps", "2", "--schedule", schedule)
    assert [rate_share(config, step) for step in (0, 1, 2, 52, 102)] == pytest.approx(expected)


def test_a_resume_follows_the_flags_of_its_own_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """After a loss that is not finite the trainer advises a lower rate, which the checkpoint's would replace."""
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    common = ["--out", str(tmp_path), "--precision", "fp32", "--log-every", "1", "--seq-len", "8"]
    common += ["--architecture", json.dumps(DECODER | {"model_type": "llama"}), "--clip-norm", "0"]
    train(parse_config([*common, "--steps", "2"], {}))
    # A decay of the whole weight in each step.
    changed = ["--steps", "4", "--learning-rate", "0.01", "--schedule", "linear", "--weight-decay", "100"]
    config = parse_config([*common, *changed], {})
    train(config)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    rates = {line["step"]: line["learning_rate"] for line in lines}
    assert [rates[3], rates[4]] == pytest.approx([0.01 * rate_share(config, step) for step in (2, 3)])
    weights = load_file(tmp_path / "checkpoints" / "weights" / "model.safetensors")
    assert float(weights["model.layers.0.mlp.up_proj.weight"].abs().mean()) < 0.011
    train(parse_config([*common, "--steps", "3"], {}))
    assert "has a checkpoint of step 4, and --steps is 3: nothing is left to train" in caplog.text


def test_a_resume_with_another_model_or_data_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The shapes of all tensors stay."""
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    data, moved = tmp_path / "data" / "train.bin", tmp_path / "moved" / "train.bin"
    for path in (data, moved):
        path.parent.mkdir()
        np.arange(4096, dtype="<u2").tofile(path)

    def start(steps: int, *flags: str, **fields: Any) -> None:
        architecture = DECODER | {"model_type": "llama", "vocab_size": 5000, "hidden_act": "silu"} | fields
        common = ["--out", str(tmp_path), "--precision", "fp32", "--seq-len", "8", "--steps", str(steps)]
        words = ["--architecture", json.dumps(architecture), "--train-data", str(data)]
        try:
            train(parse_config([*common, *words, "--method", "lora", "--weights", "random", *flags], {}))
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()

    start(1)
    changed: dict[str, tuple[list[str], dict[str, Any]]] = {
        "rope_parameters.rope_theta is 500.0, and was 10000.0": ([], {"rope_theta": 500.0}),
        "hidden_act is 'gelu', and was 'silu'": ([], {"hidden_act": "gelu"}),
        "lora_alpha is 7, and was": (["--lora-alpha", "7"], {}),
        "weights is '.*', and was ''": (["--weights", str(tmp_path / "checkpoints" / "weights")], {}),
    }
    for reason, (flags, fields) in changed.items():
        with pytest.raises(ConfigurationError, match=f"{reason}.*use a new store"):
            start(2, *flags, **fields)
    # The default said, another place of the data, other settings of the optimizer.
    start(2, "--train-data", str(moved), "--learning-rate", "0.01", rms_norm_eps=1e-6)
    np.arange(4096, dtype="<u2")[::-1].tofile(data)
    with pytest.raises(ConfigurationError, match=r"data is '.*', and was '.*use a new store"):
        start(3)


def test_fp16_scale_halves_on_infinity_and_survives_a_resume() -> None:
    scale = LossScale(enabled=True)
    assert not scale.takes_step(torch.tensor(torch.inf))
    assert scale.takes_step(torch.tensor(1.0))
    again = LossScale(enabled=True)
    again.load_state_dict(scale.state_dict())
    assert again.value == 2.0**15
    for _ in range(LossScale.GROWTH_INTERVAL - 1):
        again.takes_step(torch.tensor(1.0))
    assert again.value == 2.0**16


def test_fp16_without_a_finite_gradient_at_any_scale_ends() -> None:
    """Every further step would be left out: a month of them would train nothing."""
    scale = LossScale(enabled=True)
    for _ in range(16):
        assert not scale.takes_step(torch.tensor(torch.nan))
    with pytest.raises(DivergedError, match="norm is nan, and steps that were left out halved fp16's loss scale to 1"):
        scale.takes_step(torch.tensor(torch.nan))


class HostReads(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Collects operations that on a GPU would make the host wait: values read from a tensor, or copied into one."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: list[str] = []

    def __torch_dispatch__(self, operation: Any, types: Any, arguments: Any = (), settings: Any = None) -> Any:
        if operation in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.lift_fresh.default):
            self.found.append(str(operation))
        return operation(*arguments, **(settings or {}))


DECODER = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64, "pad_token_id": 0,
}  # fmt: skip


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize(
    "architecture",
    [
        {"model_type": "llama", **DECODER},
        {"model_type": "mistral", **DECODER, "sliding_window": 8},
        {"model_type": "gemma2", **DECODER, "sliding_window": 8},
        {"model_type": "gemma3_text", **DECODER, "sliding_window": 8},
        {"torchvision": "resnet18"},
    ],
    ids=lambda architecture: architecture.get("model_type", "resnet18"),
)
def test_forward_and_backward_pass_wait_for_no_gpu(architecture: dict[str, Any]) -> None:
    words = ("--seq-len", "1" if "torchvision" in architecture else "16", "--micro-batch", "2")
    parts = assemble(parse("--architecture", json.dumps(architecture), *words), torch.device("cpu"))
    data = open_samples(parts.config, image_size=32)
    raw = data.fetch(torch.arange(2), step=0, device=parts.device)
    parts.stepper.rehearse(data.finish(raw))  # constants are made once
    with HostReads() as reads:
        parts.stepper.rehearse(data.finish(raw))
    assert reads.found == []


def test_clipping_waits_for_no_gpu_and_multiplies_many_gradients_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU torch multiplies one gradient after another where the factor has another type."""
    parameters = [torch.nn.Parameter(torch.ones(2)) for _ in range(3)]
    for parameter in parameters:
        parameter.grad = torch.full((2,), 2.0)
    multiply, types = torch._foreach_mul_, set[torch.dtype]()

    def noted(gradients: list[torch.Tensor], factor: torch.Tensor) -> None:
        types.update(tensor.dtype for tensor in (*gradients, factor))
        multiply(gradients, factor)

    monkeypatch.setattr(torch, "_foreach_mul_", noted)
    with HostReads() as reads:
        scale_gradients(parameters, 1 / gradient_norm(parameters).double())
    assert reads.found == [] and types == {torch.float32}
    torch.testing.assert_close([parameter.grad for parameter in parameters], [torch.full((2,), 24**-0.5 * 2)] * 3)


@pytest.mark.parametrize("others", [True, False])
def test_tensor_ranks_compile_the_loss_together_or_not_at_all(monkeypatch: pytest.MonkeyPatch, others: bool) -> None:
    """The written-out loss exchanges parts once a turn, the compiled one once: ranks that differ would never meet."""
    asked: list[str] = []

    def all_reduce(votes: torch.Tensor, operation: Any, group: str) -> None:
        asked.append(group)
        votes.mul_(others)

    monkeypatch.setattr(kernels, "can_compile", lambda _: True)
    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    mesh = MagicMock()
    mesh.__getitem__.return_value.size.return_value = 2
    mesh.__getitem__.return_value.get_local_rank.return_value = 0
    mesh.get_group.return_value = "tensor ranks"
    config = parse("--architecture", json.dumps({"model_type": "llama", **DECODER}), "--global-batch", "8")
    config = dataclasses.replace(config, tensor_parallel=2)
    stepper = Stepper(config, mesh, torch.nn.Linear(1, 1), torch.device("cpu"))
    assert stepper._compiles_loss == others and asked == ["tensor ranks"]


STEPS, GLOBAL_BATCH = 8, 8


def train_in_half_precision(folder: Path, *, stop_at: int | None = None) -> tuple[dict[int, tuple[float, ...]], Any]:
    """Loss, norm, rate and, every other step, evaluation by step; the run's parameters and loss scale at its end."""
    config = parse("--architecture", '{"torchvision": "resnet18"}', "--precision", "fp16", "--global-batch",
                   str(GLOBAL_BATCH), "--micro-batch", "4", "--steps", str(STEPS), "--warmup-steps", "3",
                   "--schedule", "cosine", "--clip-norm", "1.0")  # fmt: skip
    config = dataclasses.replace(config, grad_accum=2)
    mesh = build_mesh(config, world_size=1, device_type="cpu")
    torch.manual_seed(5)
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 5))
    stepper = Stepper(config, mesh, model, torch.device("cpu"))
    scale = stepper.scale
    data = torch.randn(64, 6, generator=torch.Generator().manual_seed(1))

    def batches(indices: torch.Tensor, factor: float = 1.0) -> Iterator[dict[str, torch.Tensor]]:
        for part in torch.split(indices, config.micro_batch):
            yield {"images": data[part] * factor, "labels": part % 5}

    rows: dict[int, tuple[float, ...]] = {}
    watcher = Watcher(None, signals=False)
    with SpotTolerantRun(
        model, stepper.optimizer, mesh=mesh, scheduler=stepper.scheduler, scaler=scale, dataset_size=len(data),
        global_batch=GLOBAL_BATCH, store=str(folder), agree_every=1, watcher=watcher,
    ) as run:  # fmt: skip
        for step in run.steps(STEPS):
            if step == stop_at:
                watcher.stop_notice = Notice(source="a test", detail="", save_by=time.time() + 60)
            # Infinite in fp16: the step is skipped, and the scale halves.
            result = stepper.step(batches(run.sample_indices(step), 1e6 if step in (1, 4) else 1.0))
            evaluated = [float(stepper.evaluate(batches(torch.arange(8))))] if step % 2 else []
            rows[step] = (float(result.loss), float(result.gradient_norm), result.learning_rate, *evaluated)
    return rows, (scale.state_dict(), [parameter.detach().clone() for parameter in model.parameters()])


@pytest.mark.usefixtures("one_rank")
def test_fp16_with_skipped_steps_schedule_and_evaluation_resumes_bit_equal(tmp_path: Path) -> None:
    rows, (scale, parameters) = train_in_half_precision(tmp_path / "undisturbed")
    with pytest.raises(Interrupted):
        train_in_half_precision(tmp_path / "disturbed", stop_at=4)
    resumed, (scale_then, parameters_then) = train_in_half_precision(tmp_path / "disturbed")
    assert not math.isfinite(rows[1][1]) and math.isfinite(rows[2][1]) and scale["value"] == 2.0**14
    assert min(resumed) == 5 and repr(resumed) == repr({step: rows[step] for step in resumed})
    assert scale_then == scale
    assert all(torch.equal(one, other) for one, other in zip(parameters, parameters_then, strict=True))


@pytest.mark.usefixtures("one_rank")
def test_dropout_of_attention_is_the_same_when_recomputed_and_present_in_context_parallelism() -> None:
    """Llama's attention drops by a function: no module of its layers is a Dropout."""
    config = dataclasses.replace(
        parse(), precision="fp32", seq_len=16, architecture=dict(parse().architecture) | {"attention_dropout": 0.5}
    )
    tokens = torch.arange(16)[None]

    def run(checkpointing: str, seed: int = 1, *, splits: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        own = dataclasses.replace(config, activation_checkpointing=checkpointing)
        mesh = build_mesh(own, world_size=1, device_type="cpu")
        model: Any = parallelize(build(own), own, mesh, torch.device("cpu"))
        if splits:
            split_context(model, mesh.get_group("cp"))
        torch.manual_seed(seed)
        loss = model(tokens).logits.float().square().mean()
        loss.backward()
        return loss.detach(), torch.cat([parameter.grad.flatten() for parameter in model.parameters()])

    assert all(map(torch.equal, run("full"), run("none"))) and all(map(torch.equal, run("selective"), run("none")))
    assert run("none", splits=True)[0] != run("none", seed=2, splits=True)[0]


untyped_reference: Any = StorageWeakRef


class Memory(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Bytes of tensors made under it that are still held."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._made: dict[int, tuple[Any, int]] = {}

    def __torch_dispatch__(self, operation: Any, types: Any, arguments: Any = (), settings: Any = None) -> Any:
        result = operation(*arguments, **(settings or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                self._made[storage._cdata] = untyped_reference(storage), storage.nbytes()
        return result

    @property
    def held(self) -> int:
        return sum(size for storage, size in self._made.values() if not storage.expired())


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize(
    "kind", ["llama", "qwen3", "gpt2", "mistral", "llama --method lora --lora-rank 4 --weights random"]
)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_checkpointing_changes_no_bit_of_the_gradients_and_keeps_less(kind: str, precision: str) -> None:
    """Norms of heads, GPT-2's own projections, a window, whose mask attention sees, and adapters beside projections."""
    kind, *method = kind.split()
    fields = {"model_type": kind, "sliding_window": 8, "eos_token_id": 1, "bos_token_id": 1}
    grads, held = {}, {}
    for checkpointing in ("none", "selective", "full"):
        config = parse(
            "--architecture", json.dumps(DECODER | fields), "--seq-len", "32", "--micro-batch", "2", "--precision",
            precision, "--activation-checkpointing", checkpointing, *method,
        )  # fmt: skip
        parts = assemble(config, torch.device("cpu"))
        batch = open_samples(config).batch(torch.arange(2), parts.device)
        with Memory() as memory:
            loss, _ = parts.stepper._loss(batch, torch.ones(()))
        held[checkpointing] = memory.held
        loss.backward()  # type: ignore[no-untyped-call]
        grads[checkpointing] = torch.cat(
            [grad.flatten() for p in parts.model.parameters() if (grad := p.grad) is not None]
        )
    assert torch.equal(grads["selective"], grads["none"]) and torch.equal(grads["full"], grads["none"])
    assert held["full"] < held["selective"] < (0.8 if method else 0.7) * held["none"]


def test_an_output_that_is_kept_and_changed_in_place_is_an_error() -> None:
    weight = torch.eye(2, requires_grad=True)

    def layer(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(x, weight).relu_().square()

    output = checkpoint(layer, torch.ones(1, 2), use_reentrant=False, context_fn=partial(keeping, (0, 0)))
    with pytest.raises(RuntimeError, match="changed in place: use --activation-checkpointing full"):
        output.sum().backward()


@pytest.mark.parametrize(("micro_batch", "limit"), [(1, None), (2, b"2")])
def test_running_out_again_ends_with_what_to_change(micro_batch: int, limit: bytes | None, tmp_path: Path) -> None:
    config, store = dataclasses.replace(parse(), micro_batch=micro_batch), LocalStore(tmp_path)
    held = oom.MicroBatchLimit(config, store)
    if limit is not None:
        store.write(held._name, [limit])
        held = oom.MicroBatchLimit(config, store)
        assert oom.MicroBatchLimit(dataclasses.replace(config, sharding="zero1"), store).value is None
    with (
        pytest.raises(oom.OutOfMemoryError, match=r"Try --activation-checkpointing full, --sharding zero3"),
        held.halving(config),
    ):
        raise torch.OutOfMemoryError("CUDA out of memory")


@settings(max_examples=100, deadline=None)
@given(pass_s=st.lists(st.floats(0.01, 1), min_size=1, max_size=4), more=st.integers(0, 8))
def test_no_split_ends_earlier(pass_s: list[float], more: int) -> None:
    def step_s(passes: tuple[int, ...]) -> float:
        return max(map(math.prod, zip(pass_s, passes, strict=True)))

    total = len(pass_s) + more
    every = [split for split in itertools.product(range(1, more + 2), repeat=len(pass_s)) if sum(split) == total]
    split = tuple(fastest_split(pass_s, total))
    assert split in every
    assert step_s(split) == pytest.approx(min(map(step_s, every)))
