"""Fine-tuning: parameters that train, and methods that have an estimate; ``kernels.py`` has the costs.

Costs are counted from peft 0.21 (tuners/lora/layer.py, Linear.forward) and bitsandbytes 0.50 (nn/modules.py,
functional.py, optim/optimizer.py), LoRA (arXiv:2106.09685) and QLoRA (arXiv:2305.14314). 25 runs on one H200 judge them
(tests/benchmarks/results/finetuning_h200_202611.md).
"""

from __future__ import annotations

from collections.abc import Iterator

from bootstrap.contract.fine_tuning import FULL_TRAINING, FineTuning
from optimizer.contract.errors import InvalidInputError
from optimizer.performance.frameworks import DEFAULT, TRAINER
from optimizer.performance.types import Recipe
from optimizer.workload.model import ModelSpec

# Training code with adapters; the last ones have no 4-bit base and no pure 16 bits.
ADAPTING = (DEFAULT, TRAINER, "nemo", "nemo-fp32")


def trained_parameters(model: ModelSpec, tuning: FineTuning) -> int:
    """Parameters that have gradients."""
    if tuning.adapts:  # an adapter of a matrix from n to m: rank x (n + m)
        inputs, outputs, _ = adapted_sides(model, tuning)
        return model.layers * tuning.lora_rank * round(inputs + outputs)
    if tuning.frozen == "none":
        return model.parameters
    tables = (model.vocab_size + model.learned_positions) * model.hidden_size
    return max(1, round(model.parameters - tables - tuning.frozen_layers * model.layer_parameters))


def check_fine_tuning(model: ModelSpec, recipe: Recipe) -> None:
    """Refuse a method that the estimate has no equations for."""
    for is_refused, got, limit, why, next_step in _refusals(model, recipe):
        if is_refused:
            raise InvalidInputError(got, limit=limit, why=why, next_step=next_step)


def _refusals(model: ModelSpec, recipe: Recipe) -> Iterator[tuple[bool, str, str, str, str]]:
    """List what is refused: if it is, the value, the limit, the reason, and the next step."""
    tuning = recipe.tuning
    for name in ("lora_rank", "lora_alpha", "lora_targets"):
        value = getattr(tuning, name)
        yield (
            not tuning.adapts and value != getattr(FULL_TRAINING, name),
            f"{name} is {value}, and method full", "method lora or qlora", "only they train adapters",
            f"--method lora, or leave out --{name.replace('_', '-')}",
        )  # fmt: skip
    if tuning.trains_all and not recipe.pure:
        return
    words = tuning.in_words or "precision pure-bf16"
    # transformers keeps experts as grouped tensors (5.23, integrations/moe.py), which bitsandbytes 0.50 leaves in 16
    # bits, and peft 0.21 adds its product to whole: a second copy of them, and an error on shards.
    has_like = bool(model.layers) and (tuning.trains_all or model.has_like_layers)
    can_adapt = bool(model.experts) and not model.latent_attention
    is_adapted_mixture = can_adapt and tuning.method == "lora" and tuning.lora_targets == "attention"
    why = "only its projections and layers are known one by one"
    if can_adapt and tuning.adapts:
        share = model.mixture_layers * model.experts * model.expert_matrix_parameters / model.parameters
        lacks = (
            "bitsandbytes packs none of them (https://github.com/bitsandbytes-foundation/bitsandbytes/issues/1849)"
            if tuning.four_bit
            else "peft adapts none that are sharded (https://github.com/huggingface/peft/issues/3080)"
        )
        why = f"its experts, {share:.0%} of the weights, are grouped tensors, and {lacks}"
    kind = "a mixture of experts" if model.experts else "no stack of like layers" if model.layers else "no transformer"
    yield (
        not has_like or (bool(model.experts) and not is_adapted_mixture),
        f"{words}, and {model.name} is {kind}",
        "a dense decoder or encoder of tokens, or lora on attention's projections of a mixture",
        why,
        "--method lora --lora-targets attention" if can_adapt else "leave out --method, --frozen and pure-bf16",
    )
    allowed = ADAPTING if tuning.adapts and not (tuning.four_bit or recipe.pure) else ADAPTING[:2]
    yield (
        recipe.framework not in allowed,
        f"{words}, and framework {recipe.framework}", f"framework {' or '.join(allowed)}",
        "the costs are those of Hugging Face's modules with peft and bitsandbytes, and of NeMo's adapters",
        "leave out --framework",
    )  # fmt: skip
    yield (
        tuning.frozen_layers >= model.layers,
        f"frozen is {tuning.frozen}", f"at most {model.layers - 1}: {model.name} has {model.layers} layers",
        "the last layer at least must train", f"--frozen {model.layers - 1}, or fewer layers",
    )  # fmt: skip
    yield (
        tuning.adapts and tuning.frozen != "none",
        f"frozen is {tuning.frozen}, and method {tuning.method}", "frozen none",
        "adapters train over a base that is frozen as a whole", "leave out --frozen",
    )  # fmt: skip
    yield (
        tuning.four_bit and recipe.precision != "bf16",
        f"method is qlora, and precision {recipe.precision}", "bf16 or pure-bf16",
        "4-bit weights are widened to bf16 for each product", "--precision bf16",
    )  # fmt: skip


def adapted_sides(model: ModelSpec, tuning: FineTuning) -> tuple[float, float, float]:
    """Sum of the inputs and of the outputs of one layer's adapted matrices, and their number."""
    hidden, ffn, matrices = model.hidden_size, model.ffn_size, model.matrices_per_ffn
    query, kv = model.attention_heads * model.head_dim, model.kv_heads * model.head_dim
    inputs, outputs, count = 3 * hidden + query, query + 2 * kv + hidden, 4
    if tuning.lora_targets == "all":
        inputs += (matrices - 1) * hidden + ffn
        outputs += (matrices - 1) * ffn + hidden
        count += matrices
    return float(inputs), float(outputs), float(count)
