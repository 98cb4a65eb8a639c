"""Recipes and set-ups: a request, the flags of `estimate` and rows of a table get the same defaults and checks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from bootstrap.contract.fine_tuning import PURE, FineTuning
from optimizer.contract.errors import InvalidInputError
from optimizer.contract.hardware import Gpu, Precision
from optimizer.contract.spelling import near_names
from optimizer.performance.case import Case
from optimizer.performance.fine_tuning import check_fine_tuning
from optimizer.performance.frameworks import check_framework, framework_name
from optimizer.performance.legality import check_legal, check_precision
from optimizer.performance.types import Grid, Hardware, Recipe, RecipePrecision
from optimizer.workload.model import ModelSpec

USUAL_SEQ_LEN = 2048
USUAL_GPUS_PER_NODE = 8
# GiB that nvidia-smi shows of the GPU of an NVL72, the one Blackwell with more than 8 GPUs in a domain (189,471 MiB of
# a GB200 and 284,208 of a GB300), and its watts over those of the GPU of an HGX B200 or B300
# (https://verda.com/blog/gb300-nvl72-architecture). Power grows with the cube of the clock, and rates with the clock.
NVL72 = {"B200": (185.03, 1200 / 1000), "B300": (277.55, 1400 / 1100)}
# Images of ImageNet's size (500 x 375, 110 kB) that the trainer's loader prepares a second on one vCPU. Measured on a
# whole EPYC core: 390 (tests/benchmarks/results/images_202611.md); two vCPUs share a core. Users report 190 with Pillow
# and 250 with Pillow-SIMD for each of ten workers (https://github.com/huggingface/pytorch-image-models/issues/1491).
IMAGES_PER_VCPU_S = 250.0


def build_case(model: ModelSpec, recipe: Recipe, hardware: Hardware, grid: Grid) -> Case:
    """Build the case of one configuration, or refuse an illegal one."""
    check_legal(model, recipe, grid)
    return Case(model, recipe, hardware, grid)


def build_recipe(
    model: ModelSpec,
    *,
    seq_len: int | None,
    framework: str,
    gpu: Gpu | None = None,
    precision: RecipePrecision = "bf16",
    target_len: int | None = None,
    samples_per_vcpu_s: float | None = None,
    **settings: Any,
) -> Recipe:
    """Build the recipe of training ``model`` with these settings of a Recipe, or raise InvalidInputError.

    ``seq_len`` None is the usual one, ``samples_per_vcpu_s`` None that of images for a CNN; without ``gpu`` the
    precision is not checked (a search rejects GPU by GPU).
    """
    framework = framework_name(framework, cnn=model.convolutional)
    check_framework(framework, model)
    has_decoder, most = 0 < model.encoder_layers < model.layers, model.decoder_tokens
    if target_len is not None and (not has_decoder or 0 < most < target_len):
        raise InvalidInputError(
            f"target_len is {target_len}",
            limit=f"{f'at most {most}' if has_decoder else 'none'} for {model.name}",
            why="it has no more positions" if has_decoder else "it has no decoder beside an encoder",
            next_step=f"--target-len {most}" if has_decoder else "leave out --target-len",
        )
    products: Precision = "bf16" if precision == "pure-bf16" else precision
    if gpu is not None:
        check_precision(gpu, products)
    recipe = Recipe(
        seq_len=_resolve_seq_len(model, seq_len),
        precision=products,
        framework=framework,
        pure=precision == PURE,
        target_len=target_len or 0,
        samples_per_vcpu_s=IMAGES_PER_VCPU_S * model.takes_images if samples_per_vcpu_s is None else samples_per_vcpu_s,
        **settings,
    )
    check_fine_tuning(model, recipe)
    return recipe


def data_ranks(gpus: int, tensor: int, pipeline: int, context: int) -> int:
    """Data-parallel ranks; InvalidInputError if the splits do not divide ``gpus``."""
    if gpus % (tensor * pipeline * context):
        raise InvalidInputError(
            f"gpus is {gpus}",
            limit=f"a multiple of tensor {tensor} x pipeline {pipeline} x context {context}",
            why="every data-parallel rank has that many GPUs",
        )
    return gpus // (tensor * pipeline * context)


def build_hardware(gpu: Gpu, gpus_per_node: int, network_gbit_per_s: float | None) -> Hardware:
    """Build a node of ``gpu``s with their fastest link and, by default, the vendor's network."""
    if gpus_per_node > USUAL_GPUS_PER_NODE and gpu.name in NVL72:
        memory_gib, power = NVL72[gpu.name]
        peaks = {name: peak * power ** (1 / 3) for name, peak in gpu.peak_tflop_per_s.items()}
        gpu = replace(gpu, memory_gib=memory_gib, peak_tflop_per_s=peaks)
    return Hardware(
        gpu=gpu,
        gpus_per_node=gpus_per_node,
        interconnect="nvswitch" if gpu.nvlink_gb_per_s else "pcie",
        # The network of NVIDIA's reference system; EC2 types have less.
        network_gbit_per_s=network_gbit_per_s or gpus_per_node * gpu.network_gbit_per_s,
        efa=True,
        gpudirect=True,
    )


def find_gpu(name: str, gpus: Mapping[str, Gpu]) -> Gpu:
    """Find a GPU by its key ("a100-80gb"), or by its name ("H100") if unambiguous."""
    wanted = name.strip().lower().replace("_", "-").replace(" ", "-")
    if wanted in gpus:
        return gpus[wanted]
    sizes = [gpu for gpu in gpus.values() if gpu.name.lower().replace(" ", "-") == wanted]
    if len(sizes) == 1:
        return sizes[0]
    known = [gpu.key for gpu in sizes] or list(gpus)
    near = near_names(wanted, known)
    raise InvalidInputError(
        f"gpu is {name!r}",
        limit=f"one of {', '.join(known)}",
        next_step=f"did you mean {', '.join(near)}?" if near else "",
    )


def default_sharding(model: ModelSpec, ranks: int, pipeline: int, tuning: FineTuning) -> str:
    """Default sharding over ``ranks`` data and context ranks.

    ZeRO-2 and 3 communicate for each micro-batch of a pipeline, so DeepSpeed refuses them there
    (https://github.com/deepspeedai/DeepSpeed/issues/4164).
    """
    if tuning.four_bit or model.architecture != "decoder" or ranks == 1:
        return "ddp"
    return "zero1" if pipeline > 1 else "zero3"


def _resolve_seq_len(model: ModelSpec, given: int | None) -> int:
    """Tokens of one sequence: as given, else at most USUAL_SEQ_LEN; 1 for a CNN and a module."""
    if model.counts_samples:
        if given not in (None, 1):
            fixed = "images" if model.takes_images else "clips of one length"
            takes = "samples of the shape it was profiled with" if model.profile else fixed
            raise InvalidInputError(f"seq_len is {given}", limit=f"none: {model.name} takes {takes}")
        return 1
    seq_len = given or min(USUAL_SEQ_LEN, model.max_seq_len or USUAL_SEQ_LEN)
    if model.learned_positions and seq_len > model.learned_positions:
        raise InvalidInputError(
            f"seq_len is {seq_len}",
            limit=f"at most {model.learned_positions} for {model.name}",
            why="its position embedding has no more rows",
            next_step=f"--seq-len {model.learned_positions}",
        )
    return seq_len


def positions_note(model: ModelSpec, seq_len: int) -> str:
    """Note on sequences longer than the model was made for; empty where they are not."""
    if not 0 < model.max_seq_len < seq_len:
        return ""
    return (
        f"seq_len {seq_len:,} is beyond the {model.max_seq_len:,} positions that {model.name} was made for: its rotary "
        "positions must be scaled first"
    )
