from __future__ import annotations

import functools
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch", reason="a profile needs torch: pip install 'gpufleet[torch]'")

from optimizer.contract.errors import InvalidInputError  # noqa: E402
from optimizer.workload.presets import presets  # noqa: E402
from optimizer.workload.profile import cuda_dispatch  # noqa: E402
from optimizer.workload.profile.measure import profile_module  # noqa: E402
from optimizer.workload.profile.passes import trace_batch  # noqa: E402
from optimizer.workload.profile.records import ModuleProfile, Pass  # noqa: E402
from optimizer.workload.resolve import model_from_profile, resolve_model  # noqa: E402
from tests.unit.optimizer.workload import modules  # noqa: E402

MODULES = "tests.unit.optimizer.workload.modules"


@functools.cache
def of(name: str) -> ModuleProfile:
    return profile_module(f"{MODULES}:{name}")


def passed(profile: ModuleProfile, width: Any = "32-bit", checkpointing: Any = "none") -> Pass:
    found = profile.passed(width, checkpointing)
    assert found is not None
    return found


def test_an_mlp_is_what_a_count_by_hand_gives() -> None:
    profile = of("mlp")
    assert profile.total_parameters == profile.trainable_parameters == 640 * 2560 + 2560 + 2560 * 10 + 10
    first, second = 2 * 640 * 2560, 2 * 2560 * 10
    assert profile.forward_flops.matmul == first + second
    # Backward: the gradient of both weights, and of the second layer's input; nobody wants the data's.
    assert profile.backward_flops.matmul == first + 2 * second
    # Alive at the loss: the input and the activation, which both layers' weights need, in 32 bits.
    assert passed(profile).saved.bytes_per_sample == 4 * (640 + 2560)
    # Under autocast: the input in 32 and 16 bits (the first layer reads the second), the activation in 16.
    assert passed(profile, "16-bit").saved.bytes_per_sample == 4 * 640 + 2 * 640 + 2 * 2560
    # And a 16-bit copy of the weight that a gradient passes through, whatever the batch.
    assert passed(profile, "16-bit").saved.fixed_bytes == pytest.approx(2 * 2560 * 10, rel=0.01)


@pytest.mark.parametrize("name", ["norms", "blocks"])
def test_memory_at_the_loss_is_what_autograd_saves_when_the_module_really_runs(name: str) -> None:
    module, inputs, loss = getattr(modules, name)(8)
    owned = {tensor.data_ptr() for tensor in [*module.parameters(), *module.buffers()]}
    kept: dict[int, int] = {inputs.untyped_storage().data_ptr(): inputs.untyped_storage().nbytes()}

    def keep(tensor: Any) -> Any:
        if tensor.data_ptr() not in owned:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss(module(inputs))
    found = passed(of(name)).saved
    assert found.fixed_bytes + 8 * found.bytes_per_sample == pytest.approx(sum(kept.values()), rel=0.01)


def test_flops_are_those_of_torchs_own_counter() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    module, inputs, loss = modules.norms(4)
    with FlopCounterMode(display=False) as forward:
        value = loss(module(inputs))
    with FlopCounterMode(display=False) as backward:
        value.backward()
    profile = of("norms")
    assert 4 * profile.forward_flops.total == forward.get_total_flops()
    assert 4 * profile.backward_flops.total == backward.get_total_flops()


def test_the_backward_pass_of_a_depthwise_convolution_is_two_forward_passes() -> None:
    profile = of("depthwise")
    once = 2 * 64 * 3 * 3 * 16 * 16
    assert profile.forward_flops.convolution == once
    # Gradient of the weight alone: the data needs none. torch's counter says 64 times as much.
    assert profile.backward_flops.convolution == once
    assert profile.convolution_outputs == 64 * 16 * 16


def test_an_lstm_has_the_products_of_every_step_and_keeps_the_gates() -> None:
    profile = of("recurrent")
    of_input, of_state = 2 * 20 * 4 * 64 * 32, 2 * 20 * 4 * 64 * 64
    assert profile.forward_flops.matmul == of_input + of_state
    # Backward: the gradient of both weights and of every state but the first; nobody wants the data's.
    assert profile.backward_flops.matmul == of_input + 2 * of_state - of_state // 20
    assert passed(profile).saved.bytes_per_sample > 4 * 20 * (32 + 4 * 64 + 64)
    assert torch.backends.mkldnn.enabled


def test_solvers_and_distances_that_are_not_counted_are_named() -> None:
    names = of("solved").uncounted_operators
    assert names == (
        "aten._cdist_backward",
        "aten._cdist_forward",
        "aten._linalg_solve_ex",
        "aten.linalg_lu_solve",
    )


def test_attention_is_fused_on_a_gpu_and_half_of_it_under_a_causal_mask() -> None:
    scores = 4 * 4 * 512 * 512 * 64
    full, causal = of("full"), of("causal")
    assert (full.forward_flops.attention, full.backward_flops.attention) == (scores, 2 * scores)
    assert causal.forward_flops.attention == scores / 2
    # No scores of 512 x 512 are kept: queries, keys and values, the output, and a log-sum a query.
    kept = 2 * (4 * 256 * 512) + 2 * 256 * 512 + 4 * 256 * 512 + 4 * 4 * 512
    assert passed(causal, "16-bit").saved.bytes_per_sample == pytest.approx(kept, rel=0.01)


def test_checkpointing_keeps_the_inputs_of_blocks_and_repeats_their_forward_pass() -> None:
    profile = of("blocks")
    assert profile.blocks is not None
    assert (profile.blocks.class_names, profile.blocks.count) == (("Block",), 6)
    block = 256 * 1024 + 1024 + 1024 * 256 + 256
    assert profile.blocks.largest_parameters == profile.largest_unit_parameters == block
    none, full = passed(profile), passed(profile, checkpointing="full")
    assert none.flops.total == profile.forward_flops.total + profile.backward_flops.total
    # The last product's output is needed by nothing in the backward pass, so it is not computed again.
    again = 6 * 2 * 64 * (256 * 1024)
    assert full.flops.total - none.flops.total in (pytest.approx(again), pytest.approx(2 * again))
    # The data, and the input of each block; without checkpointing 4 times as much and more for each.
    assert full.saved.bytes_per_sample == pytest.approx(4 * 64 * (32 + 6 * 256), rel=0.02)
    assert none.saved.bytes_per_sample > 4 * full.saved.bytes_per_sample
    assert full.peak_bytes(64) < none.peak_bytes(64) / 2


def test_peak_is_the_highest_moment_at_every_batch() -> None:
    """The lines of two small batches give the peak of a batch that was never traced."""
    profile = of("blocks")
    with cuda_dispatch.as_on_cuda():
        run = trace_batch("blocks", modules.blocks, 96, only_plain=False)
    for key, counts in run.passes.items():
        assert passed(profile, *key).peak_bytes(96) == pytest.approx(max(counts.alive_bytes), rel=1e-6)


def test_what_is_frozen_has_no_gradient_and_16_bit_weights_are_counted_as_stored() -> None:
    adapter = of("adapter")
    assert adapter.total_parameters - adapter.trainable_parameters == 512 * 512 + 512
    half = of("half")
    assert [(p.dtype, p.element_bytes) for p in half.parameters] == [("bfloat16", 2)]
    assert {one.width for one in half.passes} == {"16-bit"}


def test_nothing_is_allocated() -> None:
    profile = of("huge")
    assert profile.total_parameters == 65 * 32768 * 32768
    assert passed(profile).saved.bytes_per_sample >= 65 * 4 * 32768


def test_what_user_code_prints_is_no_result(capsys: pytest.CaptureFixture[str]) -> None:
    of("talks")
    out, err = capsys.readouterr()
    assert out == ""
    assert "user code talks" in err


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("raises", "return batch_size / 0  # the line that is shown"),
        ("leaves", "SystemExit: 7"),
        ("lonely", "returned Linear"),
        ("no_parameters", "ReLU has no parameters"),
        ("frozen", "requires a gradient"),
        ("other_batch", "first dimension of 2"),
        ("misfit", "fails on its inputs"),
        ("no_loss", r"is a tensor of \(2, 4\)"),
        ("loss_that_is_none", "is a int"),
        ("detached", "depends on no trainable parameter"),
        ("double", "torch.float64"),
        ("on_gpu", "leave out .cuda"),
        ("looks_at_values", "the value that no fake tensor has"),
        ("loops", "operators on a batch of 2"),
        ("compares_samples", "do not grow with the batch alone"),
        ("compares_wide_samples", "the arithmetic of .* MFLOP"),
        ("custom_operator", "register_fake"),
        ("not_a_function", "is not a function"),
        ("absent", "functions there: .*mlp"),
    ],
)
def test_what_is_wrong_is_said_with_its_place(name: str, says: str) -> None:
    with pytest.raises(InvalidInputError, match=says) as error:
        of(name)
    assert error.value.exit_code == 2


def test_a_module_that_is_not_there_or_does_not_import(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "broken_module_of_mine.py").write_text("import nothing_of_that_name\n", encoding="utf-8")
    (tmp_path / "misspelt_module_of_mine.py").write_text("def f(:\n", encoding="utf-8")
    with pytest.raises(InvalidInputError, match="no Python module 'absent_module_of_mine'"):
        profile_module("absent_module_of_mine.models:build")
    with pytest.raises(InvalidInputError, match=r"nothing_of_that_name[\s\S]*broken_module_of_mine\.py:1"):
        profile_module("broken_module_of_mine:build")
    with pytest.raises(InvalidInputError, match=r"misspelt_module_of_mine\.py:1"):
        profile_module("misspelt_module_of_mine:build")


# --- as on CUDA -------------------------------------------------------------------------------------------------------


def _kernels(key: str) -> set[str]:
    names = [name for name in torch._C._dispatch_get_all_op_names() if name.startswith("aten::")]
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    return {name.removeprefix("aten::") for name in names if has(name, key)}


# Operators outside the fp32 ones that autocast casts on CUDA and not on the CPU: lower precision, or the widest.
OTHERWISE = {
    "_convolution", "_cudnn_rnn", "_scaled_dot_product_flash_attention", "_thnn_fused_gru_cell",
    "_thnn_fused_lstm_cell", "addcdiv", "addcmul", "addmv", "addr", "atan2", "bilinear", "chain_matmul",
    "convolution", "cross", "cudnn_convolution", "cudnn_convolution_transpose", "dot", "einsum", "gru_cell",
    "index_put", "linalg_multi_dot", "lstm_cell", "mv", "rnn_relu_cell", "rnn_tanh_cell", "scatter_add",
    "tensordot", "vdot",
}  # fmt: skip


def test_every_operator_that_autocast_treats_otherwise_on_cuda_is_known() -> None:
    listed = {*cuda_dispatch.FP32_ON_CUDA, *cuda_dispatch.FP32_UNLESS_GIVEN}
    only_cuda = {name for name in _kernels("AutocastCUDA") - _kernels("AutocastCPU") if "imname" not in name}
    assert only_cuda - OTHERWISE - {"norm.names_ScalarOpt_dim", "sum.dim_DimnameList"} == listed


def test_autocast_and_dropout_are_put_back() -> None:
    norm, x = torch.nn.LayerNorm(8), torch.randn(2, 8, dtype=torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        before = norm(x).dtype, torch.nn.functional.cross_entropy(x, torch.zeros(2, dtype=torch.long)).dtype
        with cuda_dispatch.as_on_cuda():
            assert norm(x).dtype == torch.float32
        assert (norm(x).dtype, torch.nn.functional.cross_entropy(x, torch.zeros(2, dtype=torch.long)).dtype) == before
    assert before[0] == torch.bfloat16
    q = torch.randn(1, 2, 8, 16)
    assert torch.nn.functional.scaled_dot_product_attention(q, q, q).isfinite().all()


# --- real models ------------------------------------------------------------------------------------------------------


def test_resnet_50_is_what_torchvision_and_the_literature_publish() -> None:
    pytest.importorskip("torchvision", reason="the example profiles torchvision's ResNet-50")
    profile = profile_module("examples.profile_me:resnet50")
    preset = presets()["resnet50"]
    assert profile.total_parameters == preset.parameters == 25_557_032
    assert profile.forward_flops.total == pytest.approx(preset.flops_per_sample, rel=0.001)
    assert profile.convolution_outputs == pytest.approx(preset.activations_per_sample, rel=0.001)
    assert profile.blocks is not None
    assert (profile.blocks.class_names, profile.blocks.count) == (("Bottleneck",), 16)
    # Measured at batch 256 (H200, torch 2.11, 2026-11-21): 11.007 GiB in bf16, with 8 bytes a parameter of states.
    states = 8 * preset.parameters
    found = passed(profile, "16-bit").peak_bytes(256) + states
    assert found / 2**30 == pytest.approx(11.007, rel=0.01)


def test_a_transformers_llama_is_what_its_configuration_says() -> None:
    transformers = pytest.importorskip("transformers", reason="profiles a transformers Llama")
    from optimizer.workload.huggingface import model_from_config

    config = transformers.LlamaConfig(
        num_hidden_layers=2, hidden_size=512, intermediate_size=1408, num_attention_heads=8, num_key_value_heads=2,
        vocab_size=8000, max_position_embeddings=1024, tie_word_embeddings=False,
    )  # fmt: skip

    def build(batch_size: int) -> Any:
        tokens = torch.randint(8000, (batch_size, 1024))
        return transformers.LlamaForCausalLM(config), {"input_ids": tokens, "labels": tokens}

    modules.llama = build  # type: ignore[attr-defined]
    profile = of("llama")
    spec = model_from_config(config.to_dict() | {"model_type": "llama"}, name="llama", origin="here")
    assert profile.total_parameters == spec.parameters
    products = 2 * 1024 * (2 * spec.active_layer_matrix_parameters + 512 * 8000)
    scores = 2 * 4 * 1024 * 1024 * 512 / 2
    assert profile.forward_flops.matmul == pytest.approx(products, rel=0.001)
    assert profile.forward_flops.attention == scores
    assert profile.backward_flops.total == pytest.approx(2 * (products + scores), rel=0.001)
    assert profile.blocks is not None
    assert profile.blocks.count == 2
    assert passed(profile, "16-bit", "full").peak_bytes(8) < passed(profile, "16-bit").peak_bytes(8)


def test_a_mixture_counts_the_products_and_parameters_that_a_token_passes_through() -> None:
    profile = profile_module("tests.unit.optimizer.workload.modules:mixture")
    config = resolve_model({**modules.MIXTURE, "model_type": "qwen3_moe"})
    assert profile.total_parameters == config.parameters
    assert model_from_profile(profile).active_parameters == config.active_parameters
    projected = config.layers * config.active_layer_matrix_parameters + config.vocab_size * config.hidden_size
    assert profile.forward_flops.matmul == 2 * 16 * projected
    assert profile.backward_flops.matmul == 2 * profile.forward_flops.matmul
    assert profile.uncounted_operators == ()
