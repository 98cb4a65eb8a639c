"""ModuleProfile: the counts of ``gpufleet profile``, as plain data without torch.

Every count is for one sample: an image, or a sequence of the length that the function chose. A part that does not grow
with the batch (16-bit copies of the weights, a mask) is "fixed".
"""

from __future__ import annotations

import datetime as dt
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

Count = Annotated[int, Field(ge=0)]
Amount = Annotated[float, Field(ge=0, allow_inf_nan=False)]
ArithmeticWidth = Literal["16-bit", "32-bit"]
ProfiledCheckpointing = Literal["none", "full"]


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class BatchLine(_Record):
    """Bytes of a batch of b samples: fixed_bytes + b x bytes_per_sample."""

    fixed_bytes: Amount
    bytes_per_sample: Amount

    def evaluate(self, samples: float) -> float:
        """Bytes of a batch of ``samples``."""
        return self.fixed_bytes + self.bytes_per_sample * samples


class OperatorFlops(_Record):
    """FLOPs of one sample, a multiply-add as two; attention is halved under a causal mask."""

    matmul: Amount = 0.0
    convolution: Amount = 0.0
    attention: Amount = 0.0

    @property
    def total(self) -> float:
        """Sum."""
        return self.matmul + self.convolution + self.attention


class ParameterCount(_Record):
    """Parameters of one data type."""

    dtype: str
    parameters: Count
    trainable: Count
    element_bytes: Annotated[int, Field(ge=1, le=16)]


class Blocks(_Record):
    """The repeated blocks: the units of activation checkpointing and of FSDP."""

    class_names: tuple[str, ...]
    count: Annotated[int, Field(ge=1)]
    largest_parameters: Count


class Pass(_Record):
    """A forward and a backward pass in one arithmetic, with or without activation checkpointing.

    Attributes:
        width: "16-bit" (autocast to bf16, or a module stored in 16 bits) or "32-bit".
        checkpointing: "none", or "full": each block keeps its input and is recomputed in the backward pass.
        saved: memory alive at the loss: inputs, tensors saved for the backward pass, the loss's own.
        peak: highest memory of all but parameters, buffers and gradients: the largest of these lines.
        traffic: bytes that operators other than products read and write, recomputation included.
        product_elements: elements that matrix products read and write, as a line in elements.
        flops: forward, backward and recomputed (a pass in 32 bits may have no fused attention).
    """

    width: ArithmeticWidth
    checkpointing: ProfiledCheckpointing
    saved: BatchLine
    peak: tuple[BatchLine, ...] = Field(min_length=1)
    traffic: BatchLine
    product_elements: BatchLine
    flops: OperatorFlops
    kernels: Annotated[int, Field(ge=1)]

    def peak_bytes(self, samples: float) -> float:
        """Bytes at the highest moment of a batch of ``samples``."""
        return max(line.evaluate(samples) for line in self.peak)


class ModuleProfile(_Record):
    """One module, as ``gpufleet profile --format json`` prints it and ``--model FILE.json`` reads it.

    Attributes:
        forward_flops, backward_flops: useful FLOPs: without recomputation, attention fused.
        idle_parameters: parameters of experts that a token does not pass through.
        convolution_outputs: elements of the convolutions' outputs.
        largest_unit_parameters: parameters of the largest part FSDP gathers at once: a block, or all outside blocks.
        uncounted_operators: operators without a FLOP formula, which the FLOPs lack.
    """

    schema_version: Literal[1] = 1
    kind: Literal["gpufleet module profile"] = "gpufleet module profile"
    name: str
    module_class: str
    parameters: tuple[ParameterCount, ...] = Field(min_length=1)
    idle_parameters: Count = 0
    buffer_bytes: Count
    forward_flops: OperatorFlops
    backward_flops: OperatorFlops
    convolution_outputs: Amount
    blocks: Blocks | None
    largest_unit_parameters: Annotated[int, Field(ge=1)]
    passes: tuple[Pass, ...] = Field(min_length=1)
    uncounted_operators: tuple[str, ...] = ()
    torch: str
    as_of: dt.date

    @property
    def total_parameters(self) -> int:
        """All parameters."""
        return sum(entry.parameters for entry in self.parameters)

    @property
    def trainable_parameters(self) -> int:
        """Parameters with a gradient."""
        return sum(entry.trainable for entry in self.parameters)

    @property
    def parameter_bytes(self) -> int:
        """Bytes of all parameters as stored."""
        return sum(entry.parameters * entry.element_bytes for entry in self.parameters)

    @property
    def trainable_bytes(self) -> int:
        """Bytes of parameters with a gradient."""
        return sum(entry.trainable * entry.element_bytes for entry in self.parameters)

    def passed(self, width: ArithmeticWidth, checkpointing: ProfiledCheckpointing) -> Pass | None:
        """Find the traced pass in that arithmetic and checkpointing."""
        wanted = width, checkpointing
        return next((traced for traced in self.passes if (traced.width, traced.checkpointing) == wanted), None)
