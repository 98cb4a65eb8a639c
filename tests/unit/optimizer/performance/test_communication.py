"""Collectives against what NCCL was measured to do and what their definitions say, and each group of ranks' own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bootstrap.contract.fine_tuning import FineTuning
from optimizer.catalog import load
from optimizer.catalog.snapshot import SHIPPED
from optimizer.contract.hardware import Precision
from optimizer.performance.calibration import Coefficients
from optimizer.performance.case import Case, Rates
from optimizer.performance.collectives import Collective, Kind, collectives
from optimizer.performance.kernels import FUSED_EXCHANGE
from optimizer.performance.rates import NVLINK_EFFICIENCY, NVLINK_LATENCY_S, network_rate
from optimizer.performance.types import DDP, SHARDINGS, ZERO1, ZERO2, ZERO3, Hardware, Recipe
from optimizer.workload.resolve import resolve_model
from tests.unit.optimizer.performance.fixtures import (
    GPT2_XL,
    LLAMA_8B,
    RESNET,
    case_of,
    coefficients_of,
    node,
    of,
    sent_s,
)

MIXTRAL = resolve_model("mixtral-8x7b")
MIB = 2**20
LINK_BYTE_PER_S = 450e9 * NVLINK_EFFICIENCY


def wires(link: float, link_latency_s: float, network: float, network_latency_s: float) -> Rates:
    """Links and network of an H100 node."""
    rates = case().rates
    rates.link, rates.link_latency_s, rates.network, rates.network_latency_s = (
        link, link_latency_s, network, network_latency_s,
    )  # fmt: skip
    return rates


def seconds_of(
    kind: Kind, ranks: int, sent: float, *, calls: int = 1, members: int | None = None, network_byte_per_s: float = 1e9
) -> float:
    """Seconds of a collective of ``ranks`` H200s, ``members`` on a node; the links are NVLink 4."""
    members = members or ranks
    rates = wires(LINK_BYTE_PER_S, NVLINK_LATENCY_S, network_byte_per_s * members, 50e-6)
    row = Collective(axis="context", kind=kind, ranks=float(ranks), sent=sent, calls=float(calls))
    return float(row.seconds(rates, float(members), Coefficients()))


def case(model: Any = LLAMA_8B, *, recipe: Recipe | None = None, **grid: Any) -> Case:
    return case_of(model, recipe or Recipe(seq_len=4096, framework="megatron-core"), **grid)


@pytest.mark.parametrize(
    ("ranks", "mib", "gb_per_s"),
    [(2, 1, 38.3), (2, 8, 169.5), (2, 64, 258.1), (2, 256, 296.7), (2, 1024, 322.7), (4, 8, 160.0), (4, 1024, 351.0)],
)
def test_an_all_reduce_on_h200_is_near_what_was_measured(ranks: int, mib: int, gb_per_s: float) -> None:
    """Bus bandwidth, NVLink multicast off, torch 2.11, 2026-11-21 (smoke_2xh200_202611.md; four GPUs by nccl-tests)."""
    seconds = seconds_of("all-reduce", ranks, mib * MIB)
    bus = 2 * (ranks - 1) / ranks * mib * MIB / seconds / 1e9
    assert bus == pytest.approx(gb_per_s, rel=0.15)


def test_two_nodes_reduce_by_a_tree_and_four_take_twice_as_long() -> None:
    """Two p4d.24xlarge reduced 1 GiB in 35 ms, four in 70 (https://github.com/NVIDIA/nccl/issues/527, 2022-07-25)."""
    two, four = (
        seconds_of("all-reduce", 8 * nodes, 1024 * MIB, members=8, network_byte_per_s=50e9 * 0.6 / 8)
        for nodes in (2, 4)
    )
    assert two == pytest.approx(35.2e-3, rel=0.1)
    assert four == pytest.approx(70.2e-3, rel=0.1)


def test_an_all_to_all_takes_the_network_for_what_leaves_the_node() -> None:
    """Half of it between two nodes; 19.8 GB/s of 23.4 measured (https://github.com/NVIDIA/nccl/issues/1138)."""
    per_rank = 12.5e9
    between = seconds_of("all-to-all", 16, 1024 * MIB, members=8, network_byte_per_s=per_rank)
    assert between == pytest.approx(0.5 * 1024 * MIB / per_rank, rel=0.01)
    inside = seconds_of("all-to-all", 8, 1024 * MIB)
    assert inside == pytest.approx(7 / 8 * 1024 * MIB / LINK_BYTE_PER_S, rel=0.1)


@given(
    ranks=st.sampled_from([2, 4, 8]),
    first=st.integers(1, 2**34),
    more=st.integers(0, 2**34),
    calls=st.integers(1, 100),
    kind=st.sampled_from(["all-reduce", "ring", "tree", "sends", "all-to-all"]),
)
@settings(max_examples=60, deadline=None)
def test_more_bytes_and_more_calls_never_take_less(ranks: int, first: int, more: int, calls: int, kind: Kind) -> None:
    least = seconds_of(kind, ranks, first)
    assert least <= seconds_of(kind, ranks, first + more)
    assert least <= seconds_of(kind, ranks, first, calls=calls)
    assert least >= first * (1 - 1 / ranks) / LINK_BYTE_PER_S


def test_one_rank_of_each_kind_sends_nothing() -> None:
    for sharding in range(len(SHARDINGS)):
        x = case(data=1, sharding=sharding)
        assert {row.axis for _, row in collectives(x)} == {"data"}
        assert sent_s(x, "data") == (0, 0)


@pytest.mark.parametrize(
    ("grid", "sends"),
    [
        ({"data": 4, "tensor": 2}, "tensor"),
        ({"data": 4, "context": 2}, "context"),
        ({"data": 8, "expert": 4}, "expert"),
        ({"data": 4, "pipeline": 2, "grad_accum": 4}, "pipeline"),
    ],
)
def test_each_kind_of_parallelism_has_its_own_collectives(grid: dict[str, Any], sends: str) -> None:
    x = case(MIXTRAL, sharding=ZERO1, **grid)
    for name in ("tensor", "context", "expert", "pipeline"):
        assert (sent_s(x, name)[0] > 0) == (name == sends)


def test_experts_send_their_tokens_out_and_back_forward_and_backward() -> None:
    """Four exchanges of 2 bytes for a token's two experts, 1.25 of it on the fullest rank; six where recomputed.

    A part of them shows.
    """
    x = case(MIXTRAL, data=8, expert=8, sharding=ZERO1, micro_batch=16)
    sent = 1.25 * 4 * MIXTRAL.layers * 2 * 16 * 4096 * MIXTRAL.hidden_size * 2
    on_wire = sent * 7 / 8 / x.rates.link
    assert sent_s(x, "expert")[0] == pytest.approx(FUSED_EXCHANGE * on_wire, rel=0.1)
    again = case(MIXTRAL, data=8, expert=8, sharding=ZERO1, micro_batch=16, checkpointing=2)
    assert sent_s(again, "expert")[0] == pytest.approx(1.5 * sent_s(x, "expert")[0])


def test_megatron_reduces_all_adapters_in_few_buckets_and_whole_models_by_layers() -> None:
    def calls(**recipe: Any) -> float:
        of_model = case(recipe=Recipe(seq_len=8192, framework="nemo", **recipe), data=64, nodes=8, sharding=ZERO1)
        return float(dict(collectives(of_model))["reduce-scatter"].calls)

    # 13.6 million parameters of adapters, in buckets of at least 40 million.
    assert calls(tuning=FineTuning(method="lora", lora_targets="attention")) == 1
    assert calls() == 33


def test_nvidias_exchange_sends_a_token_once_a_node() -> None:
    """A token's eight copies reach 1.99 of two nodes, half of them in its own."""
    rates = wires(1e12, 0.0, 8e9, 0.0)
    row = Collective(axis="expert", kind="all-to-all", ranks=16.0, sent=8e9, calls=1.0)
    each, once = (float(replace(row, copies=copies).seconds(rates, 8.0, Coefficients())) for copies in (1.0, 8.0))
    assert each == pytest.approx(4.0)
    assert once / each == pytest.approx(2 * (1 - 0.5**8) / 8)


def test_experts_reduce_their_gradients_among_fewer_ranks() -> None:
    """Eight ranks that share eight experts have no gradient of an expert in common."""
    recipe = Recipe(seq_len=4096, framework="megatron")
    whole, spread = (sent_s(case(MIXTRAL, recipe=recipe, sharding=DDP, expert=expert), "data")[1] for expert in (1, 8))
    others = MIXTRAL.parameters - MIXTRAL.layers * MIXTRAL.experts * MIXTRAL.expert_matrix_parameters
    share = others / MIXTRAL.parameters
    assert spread == pytest.approx(share * whole, rel=0.1)
    # Ranks of both axes share Megatron's experts before each tensor rank has whole ones.
    both = [case(MIXTRAL, recipe=recipe, data=1, context=ranks, tensor=2, expert=2).rank_experts for ranks in (2, 1)]
    assert both[0] == both[1] / 2


def test_a_ring_of_contexts_hides_behind_attention_on_long_sequences_only() -> None:
    recipe = Recipe(seq_len=131_072, framework="megatron-core")
    long = of(LLAMA_8B, data=1, context=8, sharding=ZERO1, recipe=recipe).time_s["context_communication"]
    short = of(LLAMA_8B, data=1, context=8, sharding=ZERO1, recipe=replace(recipe, seq_len=512)).time_s
    assert long == 0
    assert short["context_communication"] > 0


def test_the_bubble_of_megatron_sc21() -> None:
    """Narayanan et al., arXiv:2104.04473, section 2.2: (p - 1) / m of the ideal time, divided by v chunks."""
    recipe = Recipe(seq_len=2048, framework="megatron")
    deep = replace(LLAMA_8B, layers=64, parameters=2 * LLAMA_8B.parameters)
    for stages, chunks, batches in ((4, 1, 16), (8, 1, 64), (8, 4, 64)):
        seconds = of(
            deep, data=1, pipeline=stages, virtual_stages=chunks, grad_accum=batches, sharding=DDP, recipe=recipe
        ).time_s
        ideal = sum(float(seconds[part]) for part in ("matmul", "attention", "elementwise", "throttling"))
        assert float(seconds["bubble"]) == pytest.approx((stages - 1) / (batches * chunks) * ideal, rel=0.1)


def test_a_network_slower_than_the_stages_holds_up_a_pipeline() -> None:
    """Eight one-GPU nodes: a stage sends 8192 x 4096 residuals of 4 bytes forward and as much backward, 0.27 GB."""
    slow = node("l40s-48gb", gpus_per_node=1, network_gbit_per_s=2.5, efa=False)
    sent_bytes = 2 * 8192 * 4096 * 4
    seconds = sent_bytes / network_rate(slow)[0]
    recipe = Recipe(seq_len=8192)
    staged: dict[str, Any] = {"data": 1, "nodes": 8, "pipeline": 8, "grad_accum": 64, "sharding": DDP, "recipe": recipe}
    estimates = of(LLAMA_8B, hardware=slow, **staged)
    computed = sum(float(estimates.time_s[part]) for part in ("matmul", "attention", "elementwise", "head")) / 64
    assert seconds > 2 * computed
    assert float(estimates.step_time_s) == pytest.approx(64 * seconds, rel=0.15)
    # A fast network adds the first sends alone.
    fast = of(LLAMA_8B, hardware=replace(slow, network_gbit_per_s=400, efa=True, gpudirect=True), **staged)
    assert float(fast.step_time_s) < 0.4 * float(estimates.step_time_s)


def test_two_stages_send_one_way_each() -> None:
    slow = node("l40s-48gb", gpus_per_node=1, network_gbit_per_s=1, efa=False)
    staged: dict[str, Any] = {"data": 1, "grad_accum": 64, "sharding": DDP, "recipe": Recipe(seq_len=8192)}
    two, four = (of(LLAMA_8B, nodes=p, pipeline=p, hardware=slow, **staged) for p in (2, 4))
    assert float(four.step_time_s) == pytest.approx(2 * float(two.step_time_s), rel=0.05)


def test_keys_and_values_cross_nodes_over_one_ranks_share_and_a_hop_at_a_time() -> None:
    """Sixteen context ranks on two nodes: 15 sends a pass, each of 512 tokens' keys and values over 1/8 of a node."""
    recipe = Recipe(seq_len=8192, framework="megatron-core")
    bandwidth, latency_s = network_rate(node())
    x = case(recipe=recipe, nodes=2, data=1, context=16, sharding=ZERO1)
    a_send = 512 * 2 * 1024 * 2 / (bandwidth * float(coefficients_of(x).network_efficiency) / 8) + latency_s
    assert sent_s(x, "context")[0] == pytest.approx(3 * 32 * 15 * a_send)


@pytest.mark.parametrize(
    ("name", "gb_per_s"),
    [
        ("p4d.24xlarge", 29.5),  # https://github.com/NVIDIA/nccl/issues/527: 29.6 on 4 nodes
        ("p3dn.24xlarge", 7.0),  # https://github.com/NVIDIA/nccl/issues/235: 6 to 8 on 8 to 32 nodes
        ("g6e.48xlarge", 3.0),  # https://github.com/aws/aws-ofi-nccl/issues/547: at most 3
        ("g5.8xlarge", 1.75),
        ("g7e.48xlarge", 118.0),  # GPUDirect RDMA as the P types, measured by nobody
    ],
)
def test_efa_without_gpudirect_passes_through_host_memory(name: str, gb_per_s: float) -> None:
    hardware = Hardware.from_instance_type(load(SHIPPED).instance_type(name))
    assert network_rate(hardware)[0] / 1e9 == pytest.approx(gb_per_s, rel=0.01)


@pytest.mark.parametrize(("framework", "layers"), [("megatron", 7), ("nemo", 6)])
def test_uneven_stages_take_as_long_as_the_fullest(framework: str, layers: int) -> None:
    """32 layers over 5 stages: two of 7 layers; NeMo counts embedding and loss too, and the last of 6 sets the pace."""
    recipe = Recipe(seq_len=2048, framework=framework)
    five, whole = (of(LLAMA_8B, data=1, pipeline=p, grad_accum=16, sharding=DDP, recipe=recipe) for p in (5, 1))
    assert float(five.time_s["matmul"]) == pytest.approx(float(whole.time_s["matmul"]) * layers / 32)


layouts = st.fixed_dictionaries(
    {
        "data": st.sampled_from([1, 2, 4, 8, 16]),
        "context": st.sampled_from([1, 2, 4]),
        "tensor": st.sampled_from([1, 2, 4, 8]),
        "pipeline": st.sampled_from([1, 2, 4, 8]),
        "sharding": st.integers(0, 3),
        "micro_batch": st.sampled_from([1, 2]),
    }
)


@given(layout=layouts, expert=st.sampled_from([1, 2, 4, 8]), model=st.sampled_from([LLAMA_8B, MIXTRAL, GPT2_XL]))
@settings(max_examples=80, deadline=None)
def test_states_of_all_ranks_sum_to_the_whole(layout: dict[str, Any], expert: int, model: Any) -> None:
    """Sharded states exist once over all ranks; unsharded ones once a data-parallel replica, experts once a group."""
    expert = expert if model is MIXTRAL and layout["data"] % expert == 0 else 1
    x = case(model, expert=expert, grad_accum=8, **layout)
    stages, tensor = layout["pipeline"], layout["tensor"]
    replicas = layout["data"] * layout["context"]
    # The fullest rank's updates times all ranks count the first stage's table on every stage.
    of_layers = float(x.updated_parameters) * tensor * stages * replicas
    tables = model.embedding_parameters if stages == 1 else float(model.vocab_size * model.hidden_size)
    if stages > 1:
        tables = model.embedding_parameters - (0 if model.tied_embeddings else tables)
    copies = 1 if layout["sharding"] >= ZERO1 else replicas
    experts = model.layers * model.experts * model.expert_matrix_parameters
    layers = model.parameters - model.embedding_parameters
    expected = copies * (layers - experts + experts / (expert if copies > 1 else 1) + stages * tables)
    if model.layers % stages == 0:
        assert of_layers == pytest.approx(expected)
    else:
        assert of_layers >= expected


def test_nemo_reduces_16_bits_and_gathers_8_in_8_bit_training() -> None:
    """Bytes a parameter of ZeRO-1: 4 reduced and 2 gathered by Megatron, 2 and 2 by NeMo, 2 and 1 in fp8."""
    sent = {}
    runs: tuple[tuple[str, Precision], ...] = (
        ("megatron-core", "bf16"),
        ("nemo", "bf16"),
        ("nemo", "fp8"),
        ("nemo-fp32", "fp8"),
    )
    for name, precision in runs:
        recipe = Recipe(seq_len=4096, framework=name, precision=precision)
        sent[name, precision] = sum(
            float(row.sent * row.a_step)
            for _, row in collectives(case(recipe=recipe, nodes=8, data=64, sharding=ZERO1))
        )
    a_byte = (sent["megatron-core", "bf16"] - sent["nemo", "bf16"]) / 2
    assert sent["nemo", "bf16"] - sent["nemo", "fp8"] == pytest.approx(a_byte)
    assert sent["nemo-fp32", "fp8"] - sent["nemo", "fp8"] == pytest.approx(2 * a_byte)
    assert a_byte > 0.2 * sent["nemo", "bf16"]


def test_fsdp2s_first_zero_stage_reduces_shards_and_gathers_16_bits() -> None:
    """4 bytes reduced and 2 gathered a parameter; DDP's all-reduces 4, twice as much sent, and sends 4 after it."""
    trainer, wrapped = (
        sent_s(case(recipe=Recipe(seq_len=4096, framework=name), sharding=ZERO1), "data")
        for name in ("gpufleet", "torch")
    )
    assert trainer[0] == wrapped[0] == 0
    assert trainer[1] / wrapped[1] == pytest.approx((4 + 2) / (8 + 4), rel=0.2)


def test_the_trainer_gathers_zero2s_parameters_once_a_step_and_plain_fsdp_in_each_micro_batch() -> None:
    """Both reduce in each micro-batch (bootstrap/trainer/loop.py, _reducing; torch.distributed.fsdp, SHARD_GRAD_OP)."""
    layout: dict[str, Any] = {"sharding": ZERO2, "grad_accum": 8}
    trainer, plain = (
        sent_s(case(recipe=Recipe(seq_len=4096, framework=name), **layout), "data") for name in ("gpufleet", "torch")
    )
    assert plain[1] == 0
    assert trainer[0] + trainer[1] == pytest.approx(plain[0])
    assert trainer[1] / trainer[0] == pytest.approx(2 / 4, rel=0.1)


def test_fsdp2_gathers_a_cnns_parameters_in_32_bits() -> None:
    """A CNN stays under autocast (bootstrap/trainer/parallelize.py, _policy): a gather is as long as a reduction."""
    recipe = Recipe(seq_len=1, framework="torchvision")
    zero2, zero3 = (sent_s(case(RESNET, recipe=recipe, sharding=kind), "data")[0] for kind in (ZERO2, ZERO3))
    assert zero3 / zero2 == pytest.approx(1.5)
