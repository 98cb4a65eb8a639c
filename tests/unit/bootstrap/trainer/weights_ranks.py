"""One of four ranks that write a model split over data and tensor ranks, and read it in three other layouts."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from bootstrap.trainer import weights
from bootstrap.trainer.weights import load_weights, save_weights


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 20)
        self.down = nn.Linear(20, 6)
        self.norm = nn.LayerNorm(6)
        self.register_buffer("count", torch.tensor(3))


class Tied(nn.Module):
    """Two layers between an embedding and the same matrix; 7 rows do not divide over the ranks."""

    base_model_prefix = "layers"  # which published files may lack, as GPT-2's do

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 6)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.head = nn.Linear(6, 7, bias=False)
        self.head.weight = self.embed.weight


def build(seed: int) -> Tied:
    torch.manual_seed(seed)
    return Tied()


def split(model: Tied, mesh: DeviceMesh) -> Tied:
    for layer in model.layers:
        if mesh["tp"].size() > 1:
            parallelize_module(layer, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(layer, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    return model


def main(folder: Path) -> None:
    dist.init_process_group("gloo")
    expected = build(0).state_dict()
    weights.FILE_BYTES = 900
    save_weights(
        split(build(0), init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))),
        str(folder),
        architecture={"a": 1},
    )
    dist.barrier()
    for shape in ((4, 1), (1, 4), (2, 2)):
        model = split(build(1), init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp")))
        load_weights(model, str(folder))
        for name, tensor in model.state_dict().items():
            whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
            assert torch.equal(whole, expected[name]), f"{name} on {shape}"
    if dist.get_rank() == 0:
        bare = {name.removeprefix("layers."): tensor for name, tensor in expected.items() if "head" not in name}
        (folder / "bare").mkdir()
        save_file(bare, folder / "bare" / "model.safetensors")
    dist.barrier()
    for stored in (folder, folder / "bare"):
        wrapped = nn.parallel.DistributedDataParallel(build(2))
        load_weights(wrapped, str(stored))
        assert all(torch.equal(tensor, expected[name]) for name, tensor in wrapped.module.state_dict().items()), stored
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
