"""ModuleProfile: what ``gpufleet profile`` found out about a torch module. Plain data: nothing here imports torch.

Everything is counted for one sample, the thing the module's inputs hold a batch of: an image, a sequence of the length
the function chose. What does not grow with the batch (16-bit copies of the weights, a mask) is kept apart as "fixed".
"""

from __future__ import annotations

import datetime as dt
import importlib.util
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from optimizer.errors import DataMissingError, GpufleetError, InvalidInputError
from optimizer.workload.model import ModelSpec

SCHEMA_VERSION = 1
KIND = "gpufleet module profile"
INSTALL_TORCH = "pip install 'gpufleet[torch]'"

Count = Annotated[int, Field(ge=0)]
Amount = Annotated[float, Field(ge=0, allow_inf_nan=False)]
ArithmeticWidth = Literal["16-bit", "32-bit"]
ProfiledCheckpointing = Literal["none", "full"]


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Line(_Record):
    """Bytes of a batch of b samples: fixed_bytes + b x bytes_per_sample."""

    fixed_bytes: Amount
    bytes_per_sample: Amount


class OperatorFlops(_Record):
    """FLOPs of one sample by kind of operator, a multiply-add as two; attention counts what a causal mask leaves."""

    matmul: Amount = 0.0
    convolution: Amount = 0.0
    attention: Amount = 0.0

    @property
    def total(self) -> float:
        """FLOPs of all kinds."""
        return self.matmul + self.convolution + self.attention


class ParameterCount(_Record):
    """Parameters of one data type."""

    dtype: str
    parameters: Count
    trainable: Count
    element_bytes: Annotated[int, Field(ge=1, le=16)]


class Blocks(_Record):
    """The repeated blocks: the units of activation checkpointing and of FSDP.

    Attributes:
        class_names: classes of the blocks.
        count: blocks.
        largest_parameters: parameters of the largest one.
    """

    class_names: tuple[str, ...]
    count: Annotated[int, Field(ge=1)]
    largest_parameters: Count


class Pass(_Record):
    """A forward and a backward pass in one arithmetic, with or without activation checkpointing.

    Attributes:
        width: "16-bit" (autocast to bf16, or a module stored in 16 bits) or "32-bit".
        checkpointing: "none", or "full": each block keeps its input and is computed again in the backward pass.
        saved: memory alive at the loss: the inputs, what is saved for the backward pass, the loss's own tensors.
        peak: memory at its highest, of everything but parameters, buffers and their gradients: the largest of these
            lines (which moment is highest depends on the batch).
        traffic: bytes that operators other than products move: reads and writes, forward, backward, recomputation.
        product_elements: elements that matrix products read and write, as a Line in elements.
        flops: FLOPs of one sample, forward, backward and recomputed (a pass in 32 bits may have no fused attention).
        kernels: operators launched, forward and backward.
    """

    width: ArithmeticWidth
    checkpointing: ProfiledCheckpointing
    saved: Line
    peak: tuple[Line, ...] = Field(min_length=1)
    traffic: Line
    product_elements: Line
    flops: OperatorFlops
    kernels: Annotated[int, Field(ge=1)]

    def peak_bytes(self, samples: float) -> float:
        """Bytes at the highest moment of a batch of ``samples``."""
        return max(line.fixed_bytes + line.bytes_per_sample * samples for line in self.peak)


class ModuleProfile(_Record):
    """One module: what ``gpufleet profile --format json`` prints and ``--model FILE.json`` reads.

    Attributes:
        name: the function that built it ("examples.profile_me:resnet50").
        module_class: class of the module.
        inputs: shape and type of each input tensor of one sample ("float32[b, 3, 224, 224]").
        parameters: by data type.
        buffer_bytes: bytes of buffers.
        forward_flops, backward_flops: useful FLOPs of one sample: without recomputation, attention fused.
        convolution_outputs: elements that convolutions put out for one sample.
        blocks: the repeated blocks; None where there are none.
        largest_unit_parameters: parameters of the largest part FSDP gathers at once: a block, or all that is in none.
        passes: what was traced.
        uncounted_operators: custom operators without a FLOP formula; their arithmetic is not in the FLOPs.
        torch, as_of: version, and date of the profile.
    """

    schema_version: Literal[1] = 1
    kind: Literal["gpufleet module profile"] = "gpufleet module profile"
    name: str
    module_class: str
    inputs: tuple[str, ...]
    parameters: tuple[ParameterCount, ...] = Field(min_length=1)
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
        """Parameters, trainable or not."""
        return sum(entry.parameters for entry in self.parameters)

    @property
    def trainable_parameters(self) -> int:
        """Parameters that get a gradient."""
        return sum(entry.trainable for entry in self.parameters)

    @property
    def parameter_bytes(self) -> int:
        """Bytes of all parameters as the module stores them."""
        return sum(entry.parameters * entry.element_bytes for entry in self.parameters)

    @property
    def trainable_bytes(self) -> int:
        """Bytes of the parameters that get a gradient."""
        return sum(entry.trainable * entry.element_bytes for entry in self.parameters)

    def passed(self, width: ArithmeticWidth, checkpointing: ProfiledCheckpointing) -> Pass | None:
        """The pass in that arithmetic and checkpointing, or None where it was not traced."""
        for one in self.passes:
            if (one.width, one.checkpointing) == (width, checkpointing):
                return one
        return None

    def model(self) -> ModelSpec:
        """The profile as what the estimator and the search take."""
        return ModelSpec(
            name=self.name,
            architecture="module",
            parameters=self.total_parameters,
            active_parameters=self.total_parameters,
            profile=self,
            source=f"profile of {self.module_class} by torch {self.torch}, {self.as_of.isoformat()}",
        )


def is_function(text: str) -> bool:
    """Whether ``text`` names a Python function: "package.module:function"."""
    return re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*", text) is not None


def profile_function(
    target: str, *, batch_size: int | None = None, progress: Callable[[str], None] = lambda _: None
) -> ModuleProfile:
    """Profile the module that a function builds: ``profile_module`` where torch is installed.

    Raises:
        DataMissingError: torch is not installed, or broken.
        InvalidInputError: the function breaks its contract, or the module fails.
    """
    if importlib.util.find_spec("torch") is None:
        raise DataMissingError(
            f"{target} is a function that builds a torch module, and torch is not installed",
            limit="torch in the Python that runs gpufleet",
            why="its own operators count parameters, FLOPs and memory",
            next_step=INSTALL_TORCH,
        )
    try:
        from optimizer.workload.profile_module import SMALLEST_BATCH, profile_module
    except (ImportError, OSError) as error:  # OSError: a library of it is missing
        raise DataMissingError(
            f"{target} is a function that builds a torch module, and torch cannot be imported: {error}",
            limit="torch in the Python that runs gpufleet",
            why="its own operators count parameters, FLOPs and memory",
            next_step=f"{INSTALL_TORCH} in a fresh environment, or python -c 'import torch' to see the whole error",
        ) from error

    return profile_module(target, batch_size=batch_size or SMALLEST_BATCH, progress=progress)


def profile_from_dict(data: Any, *, origin: str) -> ModuleProfile:
    """Check ``data`` as a profile.

    Raises:
        InvalidInputError: every wrong field, with its place.
    """
    try:
        return ModuleProfile.model_validate(data)
    except ValidationError as error:
        places = [f"{'.'.join(str(part) for part in p['loc']) or 'profile'}: {p['msg']}" for p in error.errors()]
        raise InvalidInputError(
            f"{origin} is not a module profile:\n    " + "\n    ".join(places),
            limit=f"what gpufleet profile --format json prints (schema {SCHEMA_VERSION})",
            next_step="gpufleet profile MODULE:FUNCTION --out model.json",
        ) from error


def check_out(path: Path) -> None:
    """Check that ``write_profile`` can write to ``path``, before minutes of tracing.

    Raises:
        InvalidInputError: its name does not end in .json, or there is no such folder.
    """
    if path.suffix != ".json":
        raise InvalidInputError(
            f"--out is {path}",
            limit="a name that ends in .json",
            why="--model reads a profile by that",
            next_step=f"--out {path}.json",
        )
    if not path.absolute().parent.is_dir():
        raise InvalidInputError(f"--out is {path}", limit="a file in a folder that exists", next_step="make the folder")


def write_profile(path: Path, profile: ModuleProfile) -> None:
    """Write ``profile`` as JSON; ``--model PATH`` reads it.

    Raises:
        GpufleetError: the file cannot be written.
    """
    try:
        path.write_text(json.dumps(profile.model_dump(mode="json"), indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise GpufleetError(f"{path} cannot be written: {error}", next_step="give another --out") from error
