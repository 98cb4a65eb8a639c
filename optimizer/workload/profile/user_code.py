"""The user's function: import it, check the module, inputs and loss it returns, and say where its errors are."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch._subclasses import fake_tensor
from torch.utils._pytree import tree_leaves

from optimizer.contract.errors import GpufleetError, InvalidInputError

CONTRACT = "a function of a batch size that returns (module, inputs) or (module, inputs, loss)"
_NEXT = "see docs/models.md, with examples/profile_me.py to copy from"


@dataclass(frozen=True, kw_only=True)
class TrainingStep:
    """The checked return value of the user's function."""

    module: torch.nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    loss: Callable[[Any], Any] | None


def import_function(target: str) -> Callable[[int], Any]:
    """Import the user's function; InvalidInputError where there is none, or the import fails."""
    module_name, _, name = target.partition(":")
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        with contextlib.redirect_stdout(sys.stderr):
            module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing is not None and f"{module_name}.".startswith(f"{missing}."):
            raise InvalidInputError(
                f"there is no Python module {missing!r} (for {target})",
                limit=f"a module that `python -m {module_name}` would find from {Path.cwd()}",
                next_step="run gpufleet in the folder that holds it, or install it beside gpufleet",
            ) from error
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


def _wrong(got: str, limit: str, next_step: str = _NEXT, why: str = "") -> InvalidInputError:
    return InvalidInputError(got, limit=limit, why=why, next_step=next_step)


def check_step(returned: Any, target: str, size: int) -> TrainingStep:
    """Check the function's return value; InvalidInputError where it breaks the contract."""
    parts = returned if isinstance(returned, tuple) else (returned,)
    if len(parts) not in (2, 3) or not isinstance(parts[0], torch.nn.Module):
        shown = ", ".join(type(part).__name__ for part in parts)
        raise _wrong(
            f"{target}({size}) returned {f'({shown})' if isinstance(returned, tuple) else shown}",
            "(module, inputs) or (module, inputs, loss), with module a torch.nn.Module",
        )
    module, inputs, loss = (*parts, None)[:3]
    if loss is not None and not callable(loss):
        raise _wrong(
            f"the loss {target}({size}) returned is a {type(loss).__name__}",
            "a function of the module's output that returns a scalar tensor",
        )
    kwargs = dict(inputs) if isinstance(inputs, Mapping) else {}
    args = () if kwargs else tuple(inputs) if isinstance(inputs, tuple | list) else (inputs,)
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    parameters, name = list(module.parameters()), type(module).__name__
    if not tensors or all(not tensor.dim() or tensor.shape[0] != size for tensor in tensors):
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in tensors) or "no tensor"
        raise _wrong(
            f"the inputs of {target}({size}) hold {shapes}",
            f"a tensor, a tuple or a dictionary of tensors, with a first dimension of {size}, the batch size",
            why="costs of one sample are the difference between batches",
        )
    if not parameters:
        raise _wrong(f"{name} has no parameters", "a module that can be trained")
    devices = {tensor.device.type for tensor in [*parameters, *module.buffers(), *tensors]}
    if devices != {"cpu"}:
        raise _wrong(
            f"{target}({size}) puts tensors on {' and '.join(sorted(devices))}",
            "the module and its inputs on the CPU, where they take no memory",
            "leave out .cuda() and .to(device)",
            "without a GPU, torch runs no backward pass there; operators are counted as on a GPU all the same",
        )
    if not any(parameter.requires_grad for parameter in parameters):
        raise _wrong(
            f"no parameter of {name} requires a gradient",
            "at least one trainable parameter",
            "leave requires_grad on for trained parameters",
        )
    return TrainingStep(module=module, args=args, kwargs=kwargs, loss=loss)


def find_loss(output: Any, loss: Callable[[Any], Any] | None, target: str) -> torch.Tensor:
    """The scalar to train on: ``loss`` of the output, the output's own ``loss``, or the output."""
    value = output
    if loss is not None:
        value = loss(output)
    elif isinstance(output, Mapping) and "loss" in output:
        value = output["loss"]
    elif hasattr(output, "loss"):
        value = output.loss
    if not isinstance(value, torch.Tensor) or value.numel() != 1:
        shown = f"a tensor of {tuple(value.shape)}" if isinstance(value, torch.Tensor) else f"a {type(value).__name__}"
        raise _wrong(
            f"the loss of {target} is {shown}",
            "a scalar tensor: the returned loss of the output, else output.loss, else the output",
            "return (module, inputs, loss) with loss = lambda output: F.cross_entropy(output, labels)",
        )
    if not value.requires_grad:
        raise _wrong(
            f"the loss of {target} depends on no trainable parameter",
            "a loss that can be differentiated",
            "look for torch.no_grad, detach or requires_grad_(False) in the module",
        )
    return value


@contextlib.contextmanager
def blame_user_code(what: str) -> Iterator[None]:
    """Turn errors of user code into an InvalidInputError with their place."""
    try:
        yield
    except GpufleetError:
        raise
    except (Exception, SystemExit) as error:
        raise _user_error(what, error) from error


_VALUES = "the code reads a tensor's values, and a profile has shapes only"
_USE_CONFIG = "profile a form without it (a fixed shape instead of a mask, no routing), or give the model's config.json"


def _user_error(what: str, error: BaseException) -> InvalidInputError:
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
    """The last line of the user's own code in the traceback, else of a library other than torch."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"\n  at {error.filename}:{error.lineno}"
    ours, torch_folder = Path(__file__).parents[2], Path(torch.__file__).parent
    standard = Path(importlib.__file__).parent.parent
    installed = [Path(sysconfig.get_path(name)) for name in ("purelib", "platlib")]

    def lies_in(frame: traceback.FrameSummary, folders: Sequence[Path]) -> bool:
        return any(folder in Path(frame.filename).parents for folder in folders)

    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename).is_file()]
    frames = [frame for frame in frames if not lies_in(frame, [ours, torch_folder])]
    own = [frame for frame in frames if not lies_in(frame, [standard, *installed])]
    libraries = [frame for frame in frames if lies_in(frame, installed)]
    for frame in (own or libraries)[-1:]:
        return f"\n  at {frame.filename}:{frame.lineno} in {frame.name}: {frame.line}"
    return ""
