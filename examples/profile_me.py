"""Functions for ``gpufleet profile``; each builds a module and a batch.

    gpufleet profile examples.profile_me:tiny_gpt
    gpufleet profile examples.profile_me:resnet50 --out resnet50.json

torch runs them on fake tensors, without computing, memory or a GPU. docs/models.md has the rules.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name


def tiny_gpt(batch_size: int) -> Any:
    """Build the GPT of the training example, its inputs, and a loss of its output."""
    from examples.tiny_gpt import SEQUENCE, VOCABULARY, TinyGpt

    tokens = torch.randint(VOCABULARY, (batch_size, SEQUENCE))
    targets = torch.randint(VOCABULARY, (batch_size, SEQUENCE))
    return TinyGpt(), tokens, lambda logits: F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def resnet50(batch_size: int) -> Any:
    """Build torchvision's ResNet-50, images of 224 x 224, and a loss of its output."""
    from torchvision.models import resnet50  # type: ignore[import-untyped,unused-ignore]

    images = torch.randn(batch_size, 3, 224, 224)
    labels = torch.randint(1000, (batch_size,))
    return resnet50(), images, lambda output: F.cross_entropy(output, labels)


def llama_1b(batch_size: int, seq_len: int = 4096) -> Any:
    """Build a transformers Llama of 1.2 billion parameters, whose output has the loss."""
    from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    # transformers reads the tokens' positions before it omits the mask, and fake tensors have no values.
    AttentionInterface.register("causal", sdpa_attention_forward)
    config = LlamaConfig(
        num_hidden_layers=16, hidden_size=2048, intermediate_size=8192, num_attention_heads=32, num_key_value_heads=8,
        vocab_size=128256, max_position_embeddings=seq_len, tie_word_embeddings=True, use_cache=False,
    )  # fmt: skip
    config._attn_implementation = "causal"
    tokens = torch.randint(config.vocab_size, (batch_size, seq_len))
    return LlamaForCausalLM(config), {"input_ids": tokens, "labels": tokens}


def bert_large(batch_size: int, seq_len: int = 512) -> Any:
    """Build a transformers BERT-large for masked-language modelling."""
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096)
    tokens = torch.randint(config.vocab_size, (batch_size, seq_len))
    return BertForMaskedLM(config), {"input_ids": tokens, "labels": tokens}
