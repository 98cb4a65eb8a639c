"""States of an optimizer by parameter name, read and restored in place, without a copy and without a step.

``torch.distributed.checkpoint.state_dict`` gives the same names, but walks the module tree at each call (10 to 20 ms
for 400 parameters), and loads through ``Optimizer.load_state_dict``, which rounds states to the parameter's dtype.
"""

from __future__ import annotations

import copy
import logging
from collections import OrderedDict, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from bootstrap.training.errors import CheckpointError, ConfigurationError
from bootstrap.training.index import SavedTensor
from bootstrap.training.tensors import (
    Geometry,
    empty_like_part,
    geometry_of,
    put_together,
    refuse_uncopyable,
    refuse_unreadable,
    refuse_unsharded,
    take_apart,
)

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class StateForm:
    """Form that the optimizer gives a state tensor of a parameter."""

    geometry: Geometry
    device: torch.device
    is_sharded: bool


Forms = Mapping[str, StateForm]


class OptimizerStates:
    """State of an optimizer whose own state_dict is torch's.

    ``part``: its name in a checkpoint. ``names``: parameters that it may have, by name.

    ``probe`` learns the states that a first step would make, by a step of a copy on zeros, one parameter at a time, so
    that buffers are allocated, and unusable optimizers refused, before the first step.
    """

    def __init__(
        self, part: str, optimizer: torch.optim.Optimizer, names: Mapping[str, nn.Parameter], world_size: int
    ) -> None:
        self.prefix = f"{part}.state."
        self._optimizer = optimizer
        is_zero = is_zero_redundancy(optimizer)
        # Holds the states of the parameters that this rank owns.
        self._inner: torch.optim.Optimizer = optimizer.optim if is_zero else optimizer  # type: ignore[attr-defined]
        self.replicas = 1 if is_zero else world_size
        """Ranks that hold the same plain state."""
        self._name_of: dict[torch.Tensor, str] = {parameter: name for name, parameter in names.items()}
        self._forms: dict[str, Forms] = {}

    def unknown(self) -> list[tuple[int, ...]]:
        """Shapes of the optimizer's parameters that have no name."""
        parameters = (parameter for group in self._optimizer.param_groups for parameter in group["params"])
        return [tuple(parameter.shape) for parameter in parameters if parameter not in self._name_of]

    def group_names(self) -> list[list[str]]:
        """Names of each group's parameters, those apart that the model has no longer."""
        names = self._name_of
        return [[names[p] for p in group["params"] if p in names] for group in self._optimizer.param_groups]

    def tensors_and_values(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """Tensors by key, and everything else as plain values."""
        tensors: dict[str, torch.Tensor] = {}
        state = {
            self._name_of[parameter]: take_apart(
                value, f"{self.prefix}{self._name_of[parameter]}", tensors, scalars_only=True
            )
            for parameter, value in self._states().items()
            if value
        }
        everything: dict[Any, Any] = self._inner.state
        others = {key: value for key, value in everything.items() if not isinstance(key, torch.Tensor)}
        groups = [
            {**group, "params": names}
            for group, names in zip(self._optimizer.param_groups, self.group_names(), strict=True)
        ]
        return tensors, {
            "state": state,
            "param_groups": take_apart(groups, "param_groups", None),
            "others": take_apart(others, "others", None),
        }

    def _states(self) -> dict[torch.Tensor, Any]:
        """States of parameters; an optimizer may keep those of replaced ones, and others under a name."""
        everything: dict[Any, Any] = self._inner.state
        return {key: value for key, value in everything.items() if key in self._name_of}

    def probe(self) -> dict[str, Geometry]:
        """Geometry of the states, from the states themselves where a step was made; empty where a probe fails."""
        self._forms = {}
        if states := self._states():
            for parameter, value in states.items():
                self._forms[self._name_of[parameter]] = self._forms_of(parameter, value)
        else:
            has_cuda = torch.cuda.is_available() and torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
            # An optimizer may round at random.
            with torch.random.fork_rng([torch.cuda.current_device()] if has_cuda else []), torch.no_grad():
                self._probe_groups()
        return {
            f"{self.prefix}{name}.{state}": form.geometry
            for name, forms in self._forms.items()
            for state, form in forms.items()
            if form.device.type != "cpu" or form.is_sharded or form.geometry.shape
        }

    def _probe_groups(self) -> None:
        known: dict[Any, Forms] = {}
        for number, group in enumerate(self._inner.param_groups):
            for parameter in group["params"]:
                if not parameter.requires_grad or is_lazy(parameter) or parameter not in self._name_of:
                    continue
                name = self._name_of[parameter]
                layout = (parameter.device_mesh, parameter.placements) if isinstance(parameter, DTensor) else None
                signature = (number, tuple(parameter.shape), parameter.dtype, parameter.device, layout)
                if signature not in known:
                    try:
                        known[signature] = self._forms_of(parameter, self._states_after_a_step(group, parameter))
                    except ConfigurationError:
                        raise
                    except Exception as error:  # noqa: BLE001 - an optimizer may need more than zeros
                        if {} not in known.values():  # said once
                            logger.warning("states of %s are not known before the first step: %s", name, error)
                        known[signature] = {}
                self._forms[name] = known[signature]

    def _states_after_a_step(self, group: dict[str, Any], parameter: nn.Parameter) -> Any:
        stand_in = nn.Parameter(torch.zeros_like(parameter))
        stand_in.grad = torch.zeros_like(parameter)
        # copy.copy leaves a subclass's own attributes out. The twin frees nothing that it shares (DeepSpeedCPUAdam's).
        twin: Any = object.__new__(type("Twin", (type(self._inner),), {"__del__": lambda _: None}))
        for name, value in vars(self._inner).items():  # what a step may change in place is copied
            own = copy.copy(value) if isinstance(value, list | dict | set) else value
            vars(twin)[name] = value.clone() if isinstance(value, torch.Tensor) else own
        twin.state = defaultdict(dict)
        # Copied: an optimizer may count its steps in a tensor of the group.
        settings = copy.deepcopy({name: value for name, value in group.items() if name != "params"})
        twin.param_groups = [{**settings, "params": [stand_in]}]
        twin._optimizer_step_pre_hooks, twin._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
        # Through the class: a scheduler replaces the instance's step by one that counts.
        type(twin).step(twin)
        return twin.state[stand_in]

    def _forms_of(self, parameter: torch.Tensor, states: Any) -> Forms:
        tensors: dict[str, torch.Tensor] = {}
        forms = {}
        key = f"{self.prefix}{self._name_of[parameter]}"
        for state, value in states.items():
            if isinstance(value, torch.Tensor):
                refuse_unsharded(f"{key}.{state}", value, parameter)
                refuse_uncopyable(f"{key}.{state}", value)
                forms[state] = StateForm(
                    geometry=geometry_of(value, self.replicas), device=value.device,
                    is_sharded=isinstance(value, DTensor),
                )  # fmt: skip
            else:
                refuse_unreadable(f"{key}.{state}", take_apart(value, f"{key}.{state}", tensors))
        for name, tensor in tensors.items():
            refuse_unsharded(name, tensor, parameter)
        return forms

    def restore(
        self, values: Mapping[str, Any], saved: Mapping[str, SavedTensor], own: list[list[str]],
        born: list[list[str]] | None,
    ) -> dict[str, torch.Tensor]:  # fmt: skip
        """Restore plain values, and return new state tensors by key, which the caller fills.

        ``own``: names of each group's parameters at the start of this process; ``born``: of the checkpoint's run, where
        it changed them since.
        """
        in_place = dict[str, torch.Tensor]().__getitem__  # their tensors are inside
        groups = put_together(values["param_groups"], in_place)
        parameters = {name: parameter for parameter, name in self._name_of.items()}
        names = [group["params"] for group in groups]
        if own not in (born or names, names) or not parameters.keys() >= {name for group in names for name in group}:
            raise ConfigurationError(
                f"the optimizer has {len(own)} parameter groups of {[len(group) for group in own]} parameters, and the "
                f"checkpoint {[len(group) for group in born or names]}, or others: group them as before"
            )
        current = self._optimizer.param_groups
        for group, loaded in zip(current, groups, strict=False):
            group["params"] = [parameters[name] for name in loaded["params"]]
        del current[len(groups) :]
        for loaded in groups[len(current) :]:
            self._optimizer.add_param_group({**loaded, "params": [parameters[name] for name in loaded["params"]]})
        self._refuse_other_states(values["state"], groups)
        for group, loaded in zip(self._optimizer.param_groups, groups, strict=True):
            for name, value in loaded.items():
                if name != "params":
                    if isinstance(held := group.get(name), torch.Tensor) and isinstance(value, torch.Tensor):
                        value = value.to(held.device)
                    group[name] = value
        destinations: dict[str, torch.Tensor] = {}
        self._inner.state.clear()
        self._inner.state.update(put_together(values.get("others", {}), in_place))
        for parameter in (p for group in self._inner.param_groups for p in group["params"]):
            name = self._name_of[parameter]
            if name in values["state"]:
                self._inner.state[parameter] = self._restored(
                    parameter, name, values["state"][name], saved, destinations
                )
        return destinations

    def _refuse_other_states(self, states: Mapping[str, Mapping[str, Any]], groups: list[dict[str, Any]]) -> None:
        """Refuse another kind of optimizer: its first step would miss states, or go on without a word."""
        pairs = list(zip(self._optimizer.param_groups, groups, strict=True))
        for own_group, loaded in pairs:  # tells Adam from AdamW, whose states are alike
            ours, theirs = (group.get("decoupled_weight_decay") for group in (own_group, loaded))
            if ours is not None and theirs is not None and ours != theirs:
                raise ConfigurationError(
                    f"{type(self._inner).__name__}'s decoupled_weight_decay is {ours}, and the checkpoint's {theirs}: "
                    "take the optimizer of before, or use a new store"
                )
        new_settings = any(set(group) - set(loaded) for group, loaded in pairs)
        for name, saved in states.items():
            own = set(self._forms.get(name, {}))
            # An optimizer may make some states later than in its first step, and a version of torch add a setting.
            if own - set(saved) or (new_settings and set(saved) - own):
                raise ConfigurationError(
                    f"{type(self._inner).__name__} keeps {sorted(own) or 'nothing'} of {name}, and the checkpoint has "
                    f"{sorted(saved)}: take the optimizer with the settings of before, or use a new store"
                )

    def _restored(
        self, parameter: nn.Parameter, name: str, states: Mapping[str, Any], saved: Mapping[str, SavedTensor],
        destinations: dict[str, torch.Tensor],
    ) -> dict[str, Any]:  # fmt: skip
        forms = self._forms.get(name, {})

        def new(state: str, key: str) -> torch.Tensor:
            if key not in saved:
                raise CheckpointError(f"the checkpoint names {key} and does not hold it")
            shape, dtype = saved[key].shape, saved[key].dtype
            form = forms.get(state)
            is_plain = form is not None and form.geometry.shape == shape and not form.is_sharded
            if shape == tuple(parameter.shape) and not is_plain:
                destinations[key] = empty_like_part(parameter, dtype)
            else:
                destinations[key] = torch.empty(shape, dtype=dtype, device=(form or parameter).device)
            return destinations[key]

        restored = {}
        for state, skeleton in states.items():
            value = put_together(skeleton, partial(new, state))
            if isinstance(value, torch.Tensor) and state in forms and not forms[state].is_sharded:
                value = value.to(forms[state].device)
            restored[state] = value
        return restored


def is_zero_redundancy(optimizer: object) -> bool:
    """True for ZeroRedundancyOptimizer, whose import takes a second and which few runs use."""
    return any(base.__name__ == "ZeroRedundancyOptimizer" for base in type(optimizer).__mro__)
