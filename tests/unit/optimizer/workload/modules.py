"""Functions that ``gpufleet profile`` is pointed at: what a user might write, right and wrong."""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import nn


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))  # type: ignore[no-any-return]


def total(output: torch.Tensor) -> torch.Tensor:
    return output.sum()


def mlp(batch_size: int) -> Any:
    return nn.Sequential(nn.Linear(640, 2560), nn.ReLU(), nn.Linear(2560, 10)), torch.randn(batch_size, 640), total


def blocks(batch_size: int) -> Any:
    return nn.Sequential(nn.Linear(32, 256), *(Block(256) for _ in range(6))), torch.randn(batch_size, 64, 32), total


def depthwise(batch_size: int) -> Any:
    return nn.Conv2d(64, 64, 3, padding=1, groups=64, bias=False), torch.randn(batch_size, 64, 16, 16), total


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(32, 64, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lstm(x)[0]  # type: ignore[no-any-return]


def recurrent(batch_size: int) -> Any:
    return Recurrent(), torch.randn(batch_size, 20, 32), total


class Solved(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x).float()
        near = torch.cdist(F.normalize(y), x)  # of few rows, not by a product
        return torch.linalg.solve(y @ y.mT + torch.eye(8), x) + near  # type: ignore[no-any-return]


def solved(batch_size: int) -> Any:
    return Solved(), torch.randn(batch_size, 8, 8), total


MIXTURE = {
    "hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 256, "tie_word_embeddings": True, "num_experts": 8,
    "num_experts_per_tok": 2, "moe_intermediate_size": 32,
}  # fmt: skip


def mixture(batch_size: int) -> Any:
    from transformers import AttentionInterface, Qwen3MoeConfig, Qwen3MoeForCausalLM
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    AttentionInterface.register("causal", sdpa_attention_forward)
    settings: Any = Qwen3MoeConfig(**MIXTURE, use_cache=False)  # type: ignore[arg-type]
    settings._attn_implementation = "causal"
    tokens = torch.randint(256, (batch_size, 16))
    return Qwen3MoeForCausalLM(settings), {"input_ids": tokens, "labels": tokens}


def norms(batch_size: int) -> Any:
    module = nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(inplace=True), nn.Conv2d(16, 8, 3))
    return module, torch.randn(batch_size, 3, 32, 32), total


class Attention(nn.Module):
    def __init__(self, causal: bool) -> None:
        super().__init__()
        self.qkv, self.causal = nn.Linear(256, 768, bias=False), causal

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.unflatten(-1, (4, 64)).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1))
        return F.scaled_dot_product_attention(q, k, v, is_causal=self.causal, dropout_p=0.1)


def causal(batch_size: int) -> Any:
    return Attention(True), torch.randn(batch_size, 512, 256), total


def full(batch_size: int) -> Any:
    return Attention(False), torch.randn(batch_size, 512, 256), total


def adapter(batch_size: int) -> Any:
    module = nn.Sequential(nn.Linear(512, 512), nn.Linear(512, 16), nn.Linear(16, 512))
    module[0].requires_grad_(False)
    return module, torch.randn(batch_size, 512), total


def half(batch_size: int) -> Any:
    return nn.Linear(512, 512).bfloat16(), torch.randn(batch_size, 512).bfloat16(), total


def huge(batch_size: int) -> Any:
    """70 billion parameters: 260 GiB if they were allocated."""
    width = 32768
    return (
        nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(65))),
        torch.randn(batch_size, width),
        total,
    )


def talks(batch_size: int) -> Any:
    print("user code talks")
    return mlp(batch_size)


# --- what is wrong ----------------------------------------------------------------------------------------------------
not_a_function = 3


def raises(batch_size: int) -> Any:
    return batch_size / 0  # the line that is shown


def leaves(batch_size: int) -> Any:
    sys.exit(7)


def lonely(batch_size: int) -> Any:
    return nn.Linear(4, 4)


def no_parameters(batch_size: int) -> Any:
    return nn.ReLU(), torch.randn(batch_size, 4), total


def frozen(batch_size: int) -> Any:
    return nn.Linear(4, 4).requires_grad_(False), torch.randn(batch_size, 4), total


def other_batch(batch_size: int) -> Any:
    return nn.Linear(4, 4), torch.randn(3, 4), total


def misfit(batch_size: int) -> Any:
    return nn.Linear(4, 4), torch.randn(batch_size, 5), total


def no_loss(batch_size: int) -> Any:
    return nn.Linear(4, 4), torch.randn(batch_size, 4)


def loss_that_is_none(batch_size: int) -> Any:
    return nn.Linear(4, 4), torch.randn(batch_size, 4), 5


def detached(batch_size: int) -> Any:
    return nn.Linear(4, 4), torch.randn(batch_size, 4), lambda output: output.detach().sum()


def double(batch_size: int) -> Any:
    return nn.Linear(4, 4).double(), torch.randn(batch_size, 4).double(), total


def on_gpu(batch_size: int) -> Any:
    return nn.Linear(4, 4).cuda(), torch.randn(batch_size, 4).cuda(), total


class LooksAtValues(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x if x.sum() > 0 else super().forward(x)  # the value that no fake tensor has


def looks_at_values(batch_size: int) -> Any:
    return LooksAtValues(4), torch.randn(batch_size, 4), total


class Loops(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([super(Loops, self).forward(row) for row in x])


def loops(batch_size: int) -> Any:
    return Loops(4), torch.randn(batch_size, 4), total


def compares_samples(batch_size: int) -> Any:
    return nn.Linear(4, 4), torch.randn(batch_size, 4), lambda o: torch.cdist(o, o).repeat(64, 64).exp().sum()


def compares_wide_samples(batch_size: int) -> Any:
    return nn.Linear(4, 4096), torch.randn(batch_size, 4), lambda o: (o @ o.T).sum()


def custom_operator(batch_size: int) -> Any:
    library: Any = torch.library.Library("gpufleet_tests", "FRAGMENT")  # type: ignore[no-untyped-call]
    library.define("without_kernel(Tensor x) -> Tensor")
    module = nn.Linear(4, 4)
    loss = lambda output: torch.ops.gpufleet_tests.without_kernel(output).sum()  # noqa: E731
    loss.library = library  # type: ignore[attr-defined]
    return module, torch.randn(batch_size, 4), loss
