"""Forms of modules: which parameters and buffers there are, of which shape, and which parameters train.

A script's modules begin with the same forms at each start. A checkpoint tells what its run has changed since then (a
buffer made or grown by a forward pass, a backbone unfrozen), and a resume changes the new modules in the same way.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

AS_BEFORE = "build the same model as before, or use a new store"
# Kind, shape and dtype. The shape of a "buffer" may change in a run. A "parameter" or a sharded buffer may only get its
# shape late, or become tied. A "tie" has the key of its parameter in place of a dtype.
Form = tuple[str, tuple[int, ...], str]
Forms = Mapping[str, Form | None]
logger = logging.getLogger(__name__)
# Larger ones are masks, which do not change.
PASSING_BYTES = 2**20
# Time between two looks at the forms, over that of one.
LOOK_FACTOR = 200


def warn_of_untakeable(problem: str, before: str, rank: int) -> str:
    """Say once why no new start can take the form that a run has made, also where it grows on; returns ``problem``."""
    if problem and problem.partition("(")[0] != before.partition("(")[0] and rank == 0:
        logger.error(
            "no new start of this script can take a checkpoint from now on: %s. Make the change before the run is "
            "entered", problem,
        )  # fmt: skip
    return problem


def paced(look: Callable[[], object]) -> Callable[[], None]:
    """Return ``look`` as a function for each step, which takes no more than a part of the time."""
    due = 0.0

    def look_if_due() -> None:
        nonlocal due
        if (began := time.monotonic()) >= due:
            look()
            due = (LOOK_FACTOR + 1) * time.monotonic() - LOOK_FACTOR * began

    return look_if_due


@cache
def plain_name(name: str) -> str:
    """Name as in torch's state dicts, without the wrappers of torch.compile, activation checkpointing and FSDP1."""
    for wrapper in ("_checkpoint_wrapped_module.", "_orig_mod.", "_fsdp_wrapped_module."):
        name = name.replace(wrapper, "")
    return name


def form_of(kind: str, tensor: Any) -> Form:
    """Form of a tensor, or of anything with its shape and dtype; of a parameter that DeepSpeed divides, the whole's."""
    return kind, tuple(getattr(tensor, "ds_shape", tensor.shape)), str(tensor.dtype).removeprefix("torch.")


class ModuleForms:
    """Forms of modules by a name of each; keys are that name and the tensor's name, joined by a dot."""

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        self._modules = dict(modules)
        self._born = self.now()
        self._owners = dict(self._named_modules())
        self.kinds = {key: kind for key, kind, _, _ in self._slots()}
        self._trains = {key: parameter.requires_grad for key, parameter in self._parameters()}
        self._passing: dict[str, torch.Tensor] = {}
        self.frozen = frozenset(key for key, trains in self._trains.items() if not trains)
        self._note_passing()

    def rebase_parameters(self) -> None:
        """Take the parameters as they are now as those of the start: an engine has cast, sharded or flattened them."""
        self._note_passing()
        now = {key: form for key, form in self.now().items() if form and form[0] != "buffer"}
        self._born = {**now, **{key: form for key, form in self._born.items() if not form or form[0] == "buffer"}}

    def born(self, now: Forms | None = None) -> dict[str, Form | None]:
        """Forms at the start, of every key whose form differs in ``now`` (by default the present forms)."""
        now = self.now() if now is None else now
        return {key: self._born.get(key) for key in {**self._born, **now} if self._born.get(key) != now.get(key)}

    def changes(self, *, warns: bool) -> dict[str, Any]:
        """Changes since the start, as plain values: what each changed tensor was, and which parameters train now."""
        now, trained, passing = self.now(), self._trains, dict(self._passing_buffers() if self._passing else ())
        for key, was in self._passing.items():
            if warns and key in passing and not torch.equal(passing[key].detach().cpu(), was):
                logger.warning(
                    "%s is not persistent, and steps change it: no checkpoint holds it. Where the loss depends on its "
                    "value, register it with persistent=True", key,
                )  # fmt: skip
        self._passing = {}  # said with the first checkpoint, or never
        return {
            "ties": ties_of(now),
            "born": self.born(now),
            "trains": {
                key: p.requires_grad for key, p in self._parameters() if p.requires_grad != trained.get(key, True)
            },
        }

    def problem(
        self, saved: Forms | None, born: Forms, may_lack: frozenset[str] = frozenset(), *, part: str = ""
    ) -> str:
        """Say why new modules cannot take tensors of the forms ``saved``; empty where they can.

        Args:
            saved: None for the forms of now.
            born: forms at the start of the run, of what it changed.
            may_lack: keys that no checkpoint needs to hold.
            part: the module that ``saved`` is of; all by default.
        """
        saved = self.now() if saved is None else saved
        alone = []
        for key in dict.fromkeys([*(key for key in self._born if key.startswith(part)), *saved]):
            fresh, form = self._born.get(key), saved.get(key)
            if fresh == form or (form is None and key in may_lack):
                continue
            kinds = {side[0] for side in (fresh, form) if side}
            if key in born and fresh == born[key] and self._may_change(key, kinds):
                continue
            if fresh is None or form is None or "tie" in kinds:
                alone.append(key)
            elif fresh[1] != form[1]:
                return f"size mismatch: {key} has shape {fresh[1]}, and the checkpoint {form[1]}: {AS_BEFORE}"
            else:
                return f"{key} is torch.{fresh[2]}, and the checkpoint's torch.{form[2]}: {AS_BEFORE}"
        if not alone:
            return ""
        return f"{alone[0]} is in only one of the checkpoint and this model ({len(alone)} such tensors): {AS_BEFORE}"

    def take(self, saved: Forms, born: Forms, device: torch.device) -> bool:
        """Give the modules tensors of the forms ``saved``, not filled yet; True where parameters are new."""
        has_new, ties = False, ties_of(self.now())  # of now: a newer checkpoint may have been taken, and found damaged
        slots = {key: (registry, leaf) for key, _, registry, leaf in self._slots()}
        for key in saved:
            owner, _, leaf = key.rpartition(".")
            if key not in slots and owner in self._owners and not hasattr(self._owners[owner], leaf):
                slots[key] = self._owners[owner]._buffers, leaf
                slots[key][0][leaf] = None
        for key, (registry, leaf) in slots.items():
            tensor, form = registry[leaf], saved.get(key)
            if form is None:
                if key not in self._born:
                    del registry[leaf]
                elif key in born or self._born[key] is None:
                    registry[leaf] = None
            elif form[0] == "tie":
                source, name = slots.get(form[2], (registry, leaf))  # an earlier place, which has its tensor
                has_new |= tensor is not source[name]
                registry[leaf] = source[name]
            elif tensor is not None and is_lazy(tensor):
                tensor.materialize(form[1], device=device, dtype=getattr(torch, form[2]))
            elif tensor is not None and form[0] == "parameter" and not (key in born or key in ties):
                continue  # of another shape: the module's own load says so
            elif tensor is None or key in ties or form_of(form[0], tensor) != form:
                new = torch.empty(form[1], dtype=getattr(torch, form[2]), device=device)
                has_new |= form[0] == "parameter"
                registry[leaf] = nn.Parameter(new) if form[0] == "parameter" else new
        return has_new

    def train(self, trains: Mapping[str, bool]) -> bool:
        """Set which parameters train, as ``changes`` recorded; return True if a frozen parameter trains now."""
        begins = False
        for key, parameter in self._parameters():
            if (has_to := trains.get(key, self._trains.get(key, True))) != parameter.requires_grad:
                parameter.requires_grad_(has_to)
                begins |= has_to
        return begins

    def _may_change(self, key: str, kinds: set[str]) -> bool:
        if "buffer" in kinds:
            return key in self._born or key.rpartition(".")[0] in self._owners
        is_sharded = any(isinstance(parameter, DTensor) for _, parameter in self._parameters())
        return key in self._born and (self._born[key] is None or ("tie" in kinds and not is_sharded))

    def _named_modules(self) -> Iterator[tuple[str, nn.Module]]:
        for part, root in self._modules.items():
            for path, module in root.named_modules():
                yield plain_name(f"{part}.{path}." if path else f"{part}.").removesuffix("."), module

    def _note_passing(self) -> None:
        self._passing = {key: buffer.detach().to("cpu", copy=True) for key, buffer in self._passing_buffers()}

    def _passing_buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Small plain buffers that their modules leave out of their state."""
        for owner, module in self._named_modules():
            for leaf in module._non_persistent_buffers_set:
                buffer = module._buffers.get(leaf)
                if type(buffer) is not torch.Tensor or buffer.layout is not torch.strided or buffer.is_meta:
                    continue
                if buffer.nbytes <= PASSING_BYTES:
                    yield f"{owner}.{leaf}", buffer

    def _slots(self) -> Iterator[tuple[str, str, dict[str, Any], str]]:
        """Places of parameters and persistent buffers, those without a tensor too: key, kind, registry, name in it."""
        for owner, module in self._named_modules():
            for registry in (module._parameters, module._buffers):
                for leaf, tensor in list(registry.items()):
                    if leaf not in module._non_persistent_buffers_set:
                        is_buffer = registry is module._buffers and not isinstance(tensor, DTensor)
                        yield f"{owner}.{leaf}", "buffer" if is_buffer else "parameter", registry, leaf

    def now(self) -> dict[str, Form | None]:
        """Forms by key; None for a place without a tensor. A parameter at several places has its form at the first."""
        forms: dict[str, Form | None] = {}
        first: dict[int, str] = {}
        for key, kind, registry, leaf in self._slots():
            tensor = registry[leaf]
            if isinstance(tensor, nn.Parameter) and first.setdefault(id(tensor), key) != key:
                forms[key] = "tie", (), first[id(tensor)]
            else:
                forms[key] = None if tensor is None or is_lazy(tensor) else form_of(kind, tensor)
        return forms

    def _parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        seen: set[int] = set()
        for key, _, registry, leaf in self._slots():
            if isinstance(parameter := registry[leaf], nn.Parameter) and id(parameter) not in seen:
                seen.add(id(parameter))
                yield key, parameter


def ties_of(forms: Forms) -> dict[str, Form]:
    """Forms of the tied places."""
    return {key: form for key, form in forms.items() if form and form[0] == "tie"}
