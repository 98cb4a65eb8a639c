"""Compression of DDP's gradients on the wire, by torch's communication hooks.

https://docs.pytorch.org/docs/stable/ddp_comm_hooks.html
"""

from __future__ import annotations

from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from bootstrap.contract.trainer import powersgd_rank

# Steps that are reduced whole before PowerSGD: early gradients change too fast for it (arXiv:1905.13727).
POWERSGD_FIRST_STEP = 10


def compress(model: DistributedDataParallel, compression: str) -> None:
    """Register the hook of ``none``, ``bf16``, ``fp16`` or ``powersgd-RANK``."""
    if rank := powersgd_rank(compression):
        state = PowerSGDState(
            process_group=None, matrix_approximation_rank=rank, start_powerSGD_iter=POWERSGD_FIRST_STEP
        )
        model.register_comm_hook(state, powerSGD_hook)
    elif compression != "none":
        hooks = {"bf16": default_hooks.bf16_compress_hook, "fp16": default_hooks.fp16_compress_hook}
        model.register_comm_hook(None, hooks[compression])
