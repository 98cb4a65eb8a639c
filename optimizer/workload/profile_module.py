"""Profile a torch module without a GPU and without memory: build it from fake tensors, train it for a step, and count.

The only module of optimizer, with profile_trace.py, that imports torch; ``gpufleet profile`` and ``--model
MODULE:FUNCTION`` import it when they are asked to. docs/profile.md says what the user's function returns.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import functools
import gc
import importlib
import importlib.util
import inspect
import sys
import sysconfig
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch._subclasses import fake_tensor
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from optimizer.errors import GpufleetError, InvalidInputError
from optimizer.workload.profile import (
    ArithmeticWidth,
    Blocks,
    Line,
    ModuleProfile,
    OperatorFlops,
    ParameterCount,
    Pass,
    ProfiledCheckpointing,
)
from optimizer.workload.profile_trace import Trace, as_on_cuda, fake_tensors

# Batches traced: two give a line for every operator, the third checks that it is one.
SMALLEST_BATCH = 2
# How far the third batch may be from the lines: kernels pad some outputs (log-sum-exp to 32 rows).
LINEAR_WITHIN = 0.01
# Batches up to which the lines are kept apart.
LARGEST_BATCH = 1 << 20

CONTRACT = "a function of a batch size that returns (module, inputs) or (module, inputs, loss)"
_NEXT = "see docs/profile.md, with examples/profile_me.py to copy from"


@dataclass(frozen=True, kw_only=True)
class _Built:
    """What the user's function returned, checked."""

    module: torch.nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    loss: Callable[[Any], Any] | None


@dataclass(frozen=True, kw_only=True)
class _Counts:
    """One pass at one batch size; fields as in Trace, ``saved_at`` the operator at which the backward pass begins."""

    alive_bytes: Sequence[int]
    saved_at: int
    flops: Mapping[str, Counter[str]]
    traffic_bytes: int
    product_elements: int
    convolution_outputs: int
    kernels: int
    uncounted: frozenset[str]


_Key = tuple[ArithmeticWidth, ProfiledCheckpointing]


@dataclass(frozen=True, kw_only=True)
class _Run:
    """The module built for one batch size, and its passes."""

    module: torch.nn.Module
    inputs: tuple[str, ...]
    blocks: Sequence[torch.nn.Module]
    passes: Mapping[_Key, _Counts]


def profile_module(
    target: str, *, batch_size: int = SMALLEST_BATCH, progress: Callable[[str], None] = lambda _: None
) -> ModuleProfile:
    """Profile the module that ``target`` builds.

    Args:
        target: "package.module:function"; the working directory is on the import path, as with ``python -m``.
        batch_size: smallest batch to trace; twice and four times as much are traced as well.
        progress: told what is being traced.

    Returns:
        The profile, in 32-bit arithmetic (unless the module is stored in 16 bits) and under 16-bit autocast, each
        without activation checkpointing and, where the module has repeated blocks, with it.

    Raises:
        InvalidInputError: there is no such function, it or the module fails, or it returns something else than the
            contract's; the message has the place in the user's file.
    """
    function = _find(target)
    with contextlib.redirect_stdout(sys.stderr), warnings.catch_warnings(), as_on_cuda():  # user code prints no result
        # Copying a fake tensor asks where its data is (nn.TransformerEncoder copies its layer).
        warnings.filterwarnings("ignore", message="Accessing the data pointer of FakeTensor")
        runs = {}
        for size in (batch_size, 2 * batch_size, 4 * batch_size):
            progress(f"batch of {size}: building and tracing")
            runs[size] = _run(target, function, size, only_plain=size == 4 * batch_size)
    return _profile(target, runs)


def _find(target: str) -> Callable[[int], Any]:
    """Import the user's function.

    Raises:
        InvalidInputError: no such module or function, or the module fails when it is imported.
    """
    module_name, _, name = target.partition(":")
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        with contextlib.redirect_stdout(sys.stderr):
            module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is not None and (module_name == error.name or module_name.startswith(error.name + ".")):
            raise InvalidInputError(
                f"there is no Python module {error.name!r} (for {target})",
                limit=f"a module that `python -m {module_name}` would find from {Path.cwd()}",
                next_step="run gpufleet in the folder that holds it, or install it beside gpufleet",
            ) from error
        raise _user_error(f"{module_name} cannot be imported", error) from error
    except (Exception, SystemExit) as error:
        raise _user_error(f"{module_name} cannot be imported", error) from error
    function = getattr(module, name, None)
    if not callable(function):
        functions = [key for key, value in vars(module).items() if inspect.isfunction(value) and key[0] != "_"]
        raise InvalidInputError(
            f"{module_name} has no function {name!r}" if function is None else f"{target} is not a function",
            limit=CONTRACT,
            next_step=f"functions there: {', '.join(functions)}" if functions else _NEXT,
        )
    return function  # type: ignore[no-any-return]


def _run(target: str, function: Callable[[int], Any], size: int, *, only_plain: bool) -> _Run:
    """Build the module for one batch size and trace every pass, or only the first."""
    trace = Trace()
    with fake_tensors(), trace:
        with _blaming(f"{target}({size}) failed"):
            returned = function(size)
        built = _check(returned, target, size)
        module = built.module.train()
        for tensor in [*module.parameters(), *module.buffers()]:
            trace.leave_out(tensor)
        for parameter in module.parameters():
            if parameter.requires_grad:
                hooked: Any = parameter
                hooked.register_post_accumulate_grad_hook(lambda p: trace.leave_out(p.grad))
        blocks = _blocks(module)
        widths = _widths(module, target)
        passes: dict[_Key, _Counts] = {}
        for width in widths[:1] if only_plain else widths:
            passes[width, "none"] = _counts(built, trace, width, target)
        if blocks and not only_plain:
            _checkpoint(blocks)
            for width in widths:
                passes[width, "full"] = _counts(built, trace, width, target)
    return _Run(module=module, inputs=_inputs(built, size), blocks=blocks, passes=passes)


def _check(returned: Any, target: str, size: int) -> _Built:
    """What the function returned, against the contract.

    Raises:
        InvalidInputError: naming what was returned.
    """
    parts = returned if isinstance(returned, tuple) else (returned,)
    if len(parts) not in (2, 3) or not isinstance(parts[0], torch.nn.Module):
        shown = ", ".join(type(part).__name__ for part in parts)
        raise InvalidInputError(
            f"{target}({size}) returned {f'({shown})' if isinstance(returned, tuple) else shown}",
            limit="(module, inputs) or (module, inputs, loss), with module a torch.nn.Module",
            next_step=_NEXT,
        )
    module, inputs = parts[:2]
    loss = parts[2] if len(parts) == 3 else None
    if loss is not None and not callable(loss):
        raise InvalidInputError(
            f"the loss {target}({size}) returned is a {type(loss).__name__}",
            limit="a function of the module's output that returns a scalar tensor",
            next_step=_NEXT,
        )
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = {}
    if isinstance(inputs, Mapping):
        kwargs = dict(inputs)
    elif isinstance(inputs, tuple | list):
        args = tuple(inputs)
    else:
        args = (inputs,)
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    if not tensors or all(not tensor.dim() or tensor.shape[0] != size for tensor in tensors):
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in tensors) or "no tensor"
        raise InvalidInputError(
            f"the inputs of {target}({size}) hold {shapes}",
            limit=f"a tensor, a tuple or a dictionary of tensors, with a first dimension of {size}, the batch size",
            why="costs are worked out for one sample, by what changes with the batch",
            next_step=_NEXT,
        )
    if not any(True for _ in module.parameters()):
        raise InvalidInputError(
            f"{type(module).__name__} has no parameters", limit="a module that can be trained", next_step=_NEXT
        )
    devices = {tensor.device.type for tensor in [*module.parameters(), *module.buffers(), *tensors]}
    if devices != {"cpu"}:
        raise InvalidInputError(
            f"{target}({size}) puts tensors on {' and '.join(sorted(devices))}",
            limit="the module and its inputs on the CPU, where they take no memory",
            why="without a GPU, torch runs no backward pass on one; what differs there is counted as on a GPU",
            next_step="leave out .cuda() and .to(device)",
        )
    if not any(parameter.requires_grad for parameter in module.parameters()):
        raise InvalidInputError(
            f"no parameter of {type(module).__name__} requires a gradient",
            limit="at least one trainable parameter",
            next_step="leave requires_grad on for what is trained",
        )
    return _Built(module=module, args=args, kwargs=kwargs, loss=loss)


def _widths(module: torch.nn.Module, target: str) -> tuple[ArithmeticWidth, ...]:
    """The arithmetic the module can be trained in: both, or 16-bit alone where its weights are 16-bit."""
    floating = {parameter.dtype for parameter in module.parameters() if parameter.is_floating_point()}
    known = {torch.float32, torch.float16, torch.bfloat16}
    if unknown := {p.dtype for p in module.parameters() if p.requires_grad} - known:
        raise InvalidInputError(
            f"{target} has trainable parameters of {', '.join(sorted(map(str, unknown)))}",
            limit="float32, bfloat16 or float16",
            why="the GPU table has no peak of another type",
        )
    return ("16-bit",) if floating & {torch.float16, torch.bfloat16} else ("16-bit", "32-bit")


def _inputs(built: _Built, size: int) -> tuple[str, ...]:
    """The input tensors as text: "float32[b, 3, 224, 224]"."""

    def shown(tensor: torch.Tensor) -> str:
        shape = [str(length) for length in tensor.shape]
        if shape and tensor.shape[0] == size:
            shape[0] = "b"
        return f"{str(tensor.dtype).removeprefix('torch.')}[{', '.join(shape)}]"

    named = list(built.kwargs.items()) if built.kwargs else [("", value) for value in built.args]
    return tuple(
        (f"{name} " if name else "") + shown(leaf)
        for name, value in named
        for leaf in tree_leaves(value)
        if isinstance(leaf, torch.Tensor)
    )


def _blocks(module: torch.nn.Module) -> list[torch.nn.Module]:
    """The repeated blocks: children of one class, with parts of their own, that a container holds several of.

    Containers of containers are looked into, blocks are not: what is in a block is computed again with it.
    """
    plain = (torch.nn.Sequential, torch.nn.ModuleList, torch.nn.ModuleDict)
    found: list[torch.nn.Module] = []

    def look(parent: torch.nn.Module) -> None:
        children = [child for child in parent.children() if any(True for _ in child.parameters())]
        classes = [type(child) for child in children]
        for child in children:
            made_of_parts = type(child) not in plain and any(True for _ in child.children())
            if isinstance(parent, plain) and made_of_parts and classes.count(type(child)) > 1:
                found.append(child)
            else:
                look(child)

    look(module)
    return found


def _checkpoint(blocks: Sequence[torch.nn.Module]) -> None:
    """Have each block keep its inputs alone, and compute the rest again in the backward pass."""

    def again(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if "past_key_values" in kwargs:  # transformers: a cache would be appended to twice; it switches it off as well
            kwargs["past_key_values"] = None
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)

    for block in blocks:
        block.forward = functools.partial(again, block.forward)


def _counts(built: _Built, trace: Trace, width: ArithmeticWidth, target: str) -> _Counts:
    """One forward and backward pass.

    Raises:
        InvalidInputError: the module or the loss fails, or the loss is no scalar that depends on a parameter.
    """
    built.module.zero_grad(set_to_none=True)
    gc.collect()
    gc.disable()  # a collection in one pass and not in the other would move the peak
    try:
        trace.start()
        # fp16 is as wide as bf16: one pass stands for both. A module stored in 16 bits needs no autocast.
        casts = width == "16-bit" and any(p.dtype == torch.float32 for p in built.module.parameters())
        with torch.autocast("cpu", torch.bfloat16, enabled=casts):
            with _blaming(f"the module of {target} fails on its inputs"):
                output = built.module(*built.args, **built.kwargs)
            with _blaming(f"the loss of {target} fails"):
                loss = _loss(output, built.loss, target)
        del output  # `loss = model(batch).loss` keeps no logits
        saved_at = trace.mark()
        trace.phase = "backward"
        with _blaming(f"the backward pass of {target} fails"):
            torch.autograd.backward(loss)
        del loss
    finally:
        gc.enable()
    return _Counts(
        alive_bytes=trace.alive_bytes,
        saved_at=saved_at,
        flops=trace.flops,
        traffic_bytes=trace.traffic_bytes,
        product_elements=trace.product_elements,
        convolution_outputs=trace.convolution_outputs,
        kernels=trace.kernels,
        uncounted=frozenset(trace.uncounted),
    )


def _loss(output: Any, loss: Callable[[Any], Any] | None, target: str) -> torch.Tensor:
    """The scalar to train on: what ``loss`` makes of the output, the output's own ``loss``, or the output."""
    value = output
    if loss is not None:
        value = loss(output)
    elif isinstance(output, Mapping) and "loss" in output:
        value = output["loss"]
    elif hasattr(output, "loss"):
        value = output.loss
    if not isinstance(value, torch.Tensor) or value.numel() != 1:
        shown = f"a tensor of {tuple(value.shape)}" if isinstance(value, torch.Tensor) else f"a {type(value).__name__}"
        raise InvalidInputError(
            f"the loss of {target} is {shown}",
            limit="a scalar tensor: what the returned loss makes of the output, else output.loss, else the output",
            next_step="return (module, inputs, loss) with loss = lambda output: F.cross_entropy(output, labels)",
        )
    if not value.requires_grad:
        raise InvalidInputError(
            f"the loss of {target} depends on no trainable parameter",
            limit="a loss that can be differentiated",
            next_step="look for torch.no_grad, detach or requires_grad_(False) in the module",
        )
    return value


@contextlib.contextmanager
def _blaming(what: str) -> Iterator[None]:
    """Turn what user code raises into an error that says where."""
    try:
        yield
    except GpufleetError:
        raise
    except (Exception, SystemExit) as error:
        raise _user_error(what, error) from error


# What fake tensors cannot follow, and what to do about it.
_VALUES = "the code looks at a tensor's values, and a profile has shapes only"
_USE_CONFIG = "profile a form without it (a fixed shape instead of a mask, no routing), or give the model's config.json"


def _user_error(what: str, error: BaseException) -> InvalidInputError:
    """An error of user code: its place in the user's file, its class and the first line of its message."""
    kind, message = type(error).__name__, (str(error).strip().splitlines() or [""])[0]
    why, next_step = "", "run the function and a step on a small batch yourself; " + _NEXT
    if isinstance(error, fake_tensor.DataDependentOutputException | fake_tensor.DynamicOutputShapeException):
        why, next_step = f"{_VALUES} ({error.func})", _USE_CONFIG
    elif isinstance(error, fake_tensor.UnsupportedOperatorException | NotImplementedError):
        why = "fake tensors need every operator to have a meta kernel; a custom CUDA operator often has none"
        next_step = "register one with torch.library.register_fake, or profile a form in plain PyTorch"
    return InvalidInputError(
        f"{what}: {kind}: {message}{_place(error)}",
        limit="code that trains for a step on fake tensors (shapes without values)" if why else "",
        why=why,
        next_step=next_step,
    )


def _place(error: BaseException) -> str:
    """The last line of the user's own code in the traceback, else of a library's that is not torch; "" without one."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"\n  at {error.filename}:{error.lineno}"
    ours, torchs = Path(__file__).parent.parent, Path(torch.__file__).parent
    standard = Path(importlib.__file__).parent.parent
    installed = [Path(sysconfig.get_path(name)) for name in ("purelib", "platlib")]

    def lies_in(frame: traceback.FrameSummary, folders: Sequence[Path]) -> bool:
        return any(folder in Path(frame.filename).parents for folder in folders)

    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename).is_file()]
    frames = [frame for frame in frames if not lies_in(frame, [ours, torchs])]
    own = [frame for frame in frames if not lies_in(frame, [standard, *installed])]
    libraries = [frame for frame in frames if lies_in(frame, installed)]
    for frame in (own or libraries)[-1:]:
        return f"\n  at {frame.filename}:{frame.lineno} in {frame.name}: {frame.line}"
    return ""


def _profile(target: str, runs: Mapping[int, _Run]) -> ModuleProfile:
    """Draw the lines through the first two batches, check them against the third, and put the profile together."""
    small, large, check = runs
    first = runs[small]
    module, blocks = first.module, first.blocks
    passes = [
        _pass(key, ((small, counts), (large, runs[large].passes[key])), target) for key, counts in first.passes.items()
    ]
    for traced in passes:
        if (counts := runs[check].passes.get((traced.width, traced.checkpointing))) is not None:
            _check_linear(traced, counts, check, target)
    # Every module has this pass, and in 16 bits attention is fused, so that a causal mask halves its count.
    plain = first.passes["16-bit", "none"]
    sizes = [_size(block) for block in blocks]
    in_blocks = {id(parameter) for block in blocks for parameter in block.parameters()}
    rest = sum(p.numel() for p in module.parameters() if id(p) not in in_blocks)
    return ModuleProfile(
        name=target,
        module_class=type(module).__name__,
        inputs=first.inputs,
        parameters=_parameters(module),
        buffer_bytes=sum(buffer.numel() * buffer.itemsize for buffer in module.buffers()),
        forward_flops=_per_sample(plain.flops["forward"], small),
        backward_flops=_per_sample(plain.flops["backward"], small),
        convolution_outputs=plain.convolution_outputs / small,
        blocks=Blocks(
            class_names=tuple(dict.fromkeys(type(block).__name__ for block in blocks)),
            count=len(blocks),
            largest_parameters=max(sizes),
        )
        if blocks
        else None,
        largest_unit_parameters=max([rest, *sizes]),
        passes=tuple(passes),
        uncounted_operators=tuple(sorted(plain.uncounted)),
        torch=torch.__version__,
        as_of=dt.datetime.now(dt.UTC).date(),
    )


def _pass(
    key: _Key,
    runs: tuple[tuple[int, _Counts], tuple[int, _Counts]],
    target: str,
) -> Pass:
    """One pass as lines over the batch size."""
    (b1, first), (b2, second) = runs
    if len(first.alive_bytes) != len(second.alive_bytes):
        raise InvalidInputError(
            f"{target} runs {len(first.alive_bytes)} operators on a batch of {b1}, {len(second.alive_bytes)} on {b2}",
            limit="the same operators whatever the batch",
            why="costs of a sample are drawn from two batches",
            next_step="leave out a loop over samples, or give the model's architecture fields",
        )
    alive = np.array([first.alive_bytes, second.alive_bytes], dtype=np.float64)
    slopes = (alive[1] - alive[0]) / (b2 - b1)
    fixed = alive[0] - slopes * b1
    width, checkpointing = key
    return Pass(
        width=width,
        checkpointing=checkpointing,
        saved=_line(fixed[first.saved_at], slopes[first.saved_at]),
        peak=_highest(fixed, slopes),
        traffic=_line_through(b1, first.traffic_bytes, b2, second.traffic_bytes),
        product_elements=_line_through(b1, first.product_elements, b2, second.product_elements),
        flops=_per_sample(first.flops["forward"] + first.flops["backward"], b1),
        kernels=first.kernels,
    )


def _per_sample(flops: Mapping[str, int], size: int) -> OperatorFlops:
    return OperatorFlops(**{kind: value / size for kind, value in flops.items()})


def _line(fixed: float, slope: float) -> Line:
    return Line(fixed_bytes=max(0.0, float(fixed)), bytes_per_sample=max(0.0, float(slope)))


def _line_through(b1: int, at_b1: float, b2: int, at_b2: float) -> Line:
    slope = (at_b2 - at_b1) / (b2 - b1)
    return _line(at_b1 - slope * b1, slope)


def _highest(fixed: Any, slopes: Any) -> tuple[Line, ...]:
    """The lines that are highest at some batch from 1 to LARGEST_BATCH: their upper envelope, flattest first."""
    found: list[Line] = []
    batch = 1.0
    while batch < LARGEST_BATCH:
        values = fixed + slopes * batch
        at = int(np.lexsort((slopes, values))[-1])
        found.append(_line(fixed[at], slopes[at]))
        steeper = slopes > slopes[at] * (1 + 1e-9) + 1e-9
        if not steeper.any():
            break
        # Where the next steeper line crosses this one.
        crossings = (fixed[at] - fixed[steeper]) / (slopes[steeper] - slopes[at])
        batch = max(batch * (1 + 1e-9), float(crossings.min()))
    return tuple(found)


def _check_linear(traced: Pass, counts: _Counts, size: int, target: str) -> None:
    """Refuse what grows otherwise than with the batch.

    Raises:
        InvalidInputError: the third batch is not on the lines.
    """
    for what, expected, got in (
        ("memory", traced.peak_bytes(size), max(counts.alive_bytes)),
        ("traffic", traced.traffic.fixed_bytes + size * traced.traffic.bytes_per_sample, counts.traffic_bytes),
    ):
        if abs(got - expected) > LINEAR_WITHIN * max(got, expected):
            raise InvalidInputError(
                f"the {what} of {target} is {got / 1e6:,.1f} MB for a batch of {size}",
                limit=f"{expected / 1e6:,.1f} MB, as half and a quarter of it give",
                why="costs are worked out for one sample, and here they do not grow with the batch alone",
                next_step="a loss that compares all samples of a batch with each other cannot be profiled",
            )


def _parameters(module: torch.nn.Module) -> tuple[ParameterCount, ...]:
    by_type: dict[torch.dtype, list[torch.nn.Parameter]] = {}
    for parameter in module.parameters():
        by_type.setdefault(parameter.dtype, []).append(parameter)
    return tuple(
        ParameterCount(
            dtype=str(dtype).removeprefix("torch."),
            parameters=sum(parameter.numel() for parameter in group),
            trainable=sum(parameter.numel() for parameter in group if parameter.requires_grad),
            element_bytes=dtype.itemsize,
        )
        for dtype, group in by_type.items()
    )


def _size(module: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
