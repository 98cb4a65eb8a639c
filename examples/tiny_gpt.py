"""Small GPT, trained with FSDP2 or DDP in an ordinary loop that survives interruptions.

    GPUFLEET_CHECKPOINT_URI=/tmp/tiny torchrun --standalone --nproc-per-node 2 -m examples.tiny_gpt --steps 60

Each sample is a sequence that grows by its own stride, modulo the vocabulary. Dropout is on, so that a random generator
that is not restored shows in the parameters. Runs on CPUs (gloo) and GPUs (NCCL).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy

from bootstrap.training import SpotTolerantRun
from bootstrap.training.leaving import end_process

VOCABULARY = 64
SEQUENCE = 32
SAMPLES = 1_000
GLOBAL_BATCH = 16
SEED = 7
WIDTH, LAYERS = 64, 2


class TinyGpt(nn.Module):
    """Decoder, by default of about 0.1 M parameters."""

    def __init__(self, width: int = WIDTH, heads: int = 4, layers: int = LAYERS, dropout: float = 0.1) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Embedding(SEQUENCE, width)
        block = nn.TransformerEncoderLayer(width, heads, 4 * width, dropout, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(block, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, VOCABULARY)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(SEQUENCE), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits (batch, sequence, vocabulary) of tokens (batch, sequence)."""
        hidden = self.tokens(tokens) + self.positions.weight
        logits: torch.Tensor = self.head(self.blocks(hidden, mask=self.mask, is_causal=True))
        return logits


def make_batch(indices: torch.Tensor, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets, both (batch, sequence), of the samples with these indices."""
    first, stride = indices % VOCABULARY, 1 + indices % 7
    sequence = (first[:, None] + stride[:, None] * torch.arange(SEQUENCE + 1)) % VOCABULARY
    return sequence[:, :-1].to(device), sequence[:, 1:].to(device)


def wrap(model: TinyGpt, sharding: str) -> nn.Module:
    """Replicated by DDP, or with parameters, gradients and optimizer states sharded over all ranks by FSDP2."""
    if sharding == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    from torch.distributed.fsdp import fully_shard

    for layer in model.blocks.layers:
        fully_shard(layer)
    fully_shard(model)
    return model


def digest(model: nn.Module) -> str:
    """SHA-256 of every parameter and buffer, in order; all ranks call it."""
    sha256 = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        sha256.update(name.encode() + whole.detach().cpu().contiguous().numpy().tobytes())
    return sha256.hexdigest()


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--width", type=int, default=WIDTH, help="of the model; 2048 with 20 layers: 1e9 parameters")
    parser.add_argument("--layers", type=int, default=LAYERS)
    parser.add_argument("--sharding", choices=("fsdp2", "ddp"), default="fsdp2")
    parser.add_argument("--out", type=Path, default=Path("tiny_gpt_out"), help="folder of losses.jsonl and result.json")
    parser.add_argument("--checkpoint-every", type=int, default=None, help="steps; seconds by default")
    parser.add_argument("--step-delay-s", type=float, default=0.0, help="sleep in each step")
    parser.add_argument("--pace", type=Path, help="pipe of which each step takes a byte")
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format=f"%(asctime)s rank {os.environ.get('RANK', '0')} %(message)s")
    logging.info("imported")

    use_cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if use_cuda else torch.device("cpu")
    if use_cuda:
        torch.cuda.set_device(device)
        # Bit-equal needs kernels that sum in one order: https://docs.pytorch.org/docs/stable/notes/randomness.html
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        for other in (torch.backends.cuda.enable_flash_sdp, torch.backends.cuda.enable_mem_efficient_sdp):
            other(False)
        torch.backends.cuda.enable_cudnn_sdp(False)
    dist.init_process_group("nccl" if use_cuda else "gloo")
    rank = dist.get_rank()
    options.out.mkdir(parents=True, exist_ok=True)
    process_id = options.out / f"rank-{rank}.pid"
    process_id.with_suffix(".new").write_text(str(os.getpid()), encoding="ascii")
    process_id.with_suffix(".new").replace(process_id)  # a killed process leaves no empty file

    torch.manual_seed(SEED)
    with device:  # a CPU takes seconds to draw 1e9 parameters
        model = wrap(TinyGpt(options.width, layers=options.layers), options.sharding)
    torch.manual_seed(SEED + 1 + rank)  # each rank drops out other units
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3 * WIDTH / options.width)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=options.steps)

    def loss_of(indices: torch.Tensor) -> torch.Tensor:
        inputs, targets = make_batch(indices, device)
        return cross_entropy(model(inputs).flatten(0, 1), targets.flatten())

    pace = options.pace.open("rb", buffering=0) if options.pace and rank == 0 else None
    with SpotTolerantRun(
        model,
        optimizer,
        scheduler=scheduler,
        dataset_size=SAMPLES,
        global_batch=GLOBAL_BATCH,
        seed=SEED,
        checkpoint_every=options.checkpoint_every,
        agree_every=1 if options.pace else None,
        # DDP lays its gradient buckets out after its first pass.
        rehearsal=(lambda: loss_of(torch.arange(2)).backward()) if options.sharding == "ddp" else None,  # type: ignore[no-untyped-call]
    ) as run:
        for step in run.steps(options.steps):
            loss = loss_of(run.sample_indices(step))
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            scheduler.step()
            time.sleep(options.step_delay_s)
            if pace:
                pace.read(1)  # the other ranks wait for the first in all_reduce

            mean = loss.detach().clone()
            dist.all_reduce(mean)
            if rank == 0:
                run.report_loss(step + 1, mean.item() / dist.get_world_size())
                with (options.out / "losses.jsonl").open("a", encoding="ascii") as file:
                    file.write(json.dumps({"step": step, "loss": mean.item() / dist.get_world_size()}) + "\n")

    parameters_sha256 = digest(model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model)
    if rank == 0:
        result = {"steps": run.step, "parameters_sha256": parameters_sha256}
        (options.out / "result.json").write_text(json.dumps(result), encoding="ascii")
    end_process(0)  # the digest's exchanges go over gloo on a CPU


if __name__ == "__main__":
    main()
