"""``Problem``: a request with its model, recipe, amount, catalog and calibration; ``Reach`` of its code; rejections."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache, cached_property, partial
from typing import Any, Literal, Self, get_args

from bootstrap.contract import trainer
from bootstrap.contract.node_plan import NodePlan
from bootstrap.contract.words import counted
from optimizer.catalog import Catalog
from optimizer.contract.errors import InvalidInputError
from optimizer.contract.hardware import HourlyPrice, InstanceType, Offer, is_named
from optimizer.contract.plan import QUOTE, Volumes, describe_undriven
from optimizer.contract.request import Axis, FleetRequest, Quote, Workload
from optimizer.economics.checkpoint import checkpoint_gib
from optimizer.economics.running_costs import RunningCosts, running_costs
from optimizer.economics.staging import NodeCopy, node_copy
from optimizer.performance.calibration import Calibration
from optimizer.performance.fine_tuning import trained_parameters
from optimizer.performance.frameworks import DEFAULT, TRAINER
from optimizer.performance.setups import USUAL_SEQ_LEN, build_recipe
from optimizer.performance.types import SHARDINGS, Recipe
from optimizer.search.global_batch import choose_global_batch
from optimizer.workload.model import ModelSpec
from optimizer.workload.resolve import resolve_model

# Mesh dimensions that a request can allow; all but data are splits.
AXES: tuple[str, ...] = get_args(Axis)
# Quantisation of checkpoints that were trained and released so (DeepSeek-V3, gpt-oss): there is no other to begin from.
RELEASED_QUANTISED = ("fp8", "mxfp4")


Binding = Literal[
    "memory",
    "data",
    "precision",
    "image",
    "global_batch",
    "sharding",
    "region",
    "price",
    "budget",
    "deadline",
    "interruptions",
    "capacity-block",
]


@dataclass(frozen=True)
class Rejection:
    """One entry of the answer's ``rejected``; ``value`` is the type's nearest to ``limit``, each a number or text."""

    instance_type: str
    reason: str
    binding_constraint: Binding
    value: Any
    limit: Any


@dataclass(frozen=True, kw_only=True)
class Amount:
    """The training to do.

    Attributes:
        global_batch: samples of one step, of every fleet: ranks that do not divide it make no plan.
    """

    samples: int
    global_batch: int

    @property
    def steps(self) -> int:
        """Optimizer steps; the last may be smaller."""
        return math.ceil(self.samples / self.global_batch)

    @classmethod
    def resolve(cls, work: Workload, model: ModelSpec, seq_len: int, *, owned: int = 1) -> Self:
        """Resolve a workload for its model, with ``seq_len`` tokens a sample (1 where samples count)."""
        if work.steps is not None:
            assert work.global_batch is not None  # checked by Workload
            samples = work.steps * work.global_batch
        elif work.samples is not None:
            samples = work.samples
        else:
            assert work.tokens is not None  # checked by Workload
            samples = math.ceil(work.tokens / seq_len)
        batch = work.global_batch
        if batch is None:
            fine_tunes = not work.tuning.trains_all
            batch = choose_global_batch(model, samples, seq_len, fine_tunes=fine_tunes, owned=owned)
        elif batch > samples:
            raise InvalidInputError(
                f"global_batch is {batch:,}, and the training has {counted(samples, 'sample')}",
                limit="at most the samples of the training",
                why="a step is priced whole, so the fleet would be paid for more training than was asked",
                next_step=f"--global-batch {samples}, or train on more",
            )
        return cls(samples=samples, global_batch=batch)


@dataclass(frozen=True, kw_only=True, slots=True)
class Reach:
    """Kinds of parallelism and shardings to search.

    Attributes:
        framework: profile that estimates use: the requested one, and torch for what the reference trainer cannot do.
        beyond_trainer: reasons why the reference trainer cannot train the model as requested, whatever the layout.
        only_trainers: the search leaves out what other training code could do, because nobody asked for more.
    """

    framework: str
    beyond_trainer: tuple[str, ...]
    axes: tuple[str, ...]
    shardings: tuple[str, ...]
    only_trainers: bool


def find_reach(request: FleetRequest, model: ModelSpec, seq_len: int) -> Reach:
    """Find what to search: the request's kinds, else the trainer's, else for code of the user's own all."""
    architecture, work, limits = model.build_config, request.workload, request.constraints
    beyond = trainer.unsupported(
        NodePlan(
            architecture=architecture or {},
            seq_len=seq_len,
            precision=work.precision,
            optimizer=work.optimizer,
            **asdict(work.tuning),
        ),
        gpus_per_node=1,
        framework=work.framework,
    )
    by_default = limits.parallelism is None and not beyond
    splits = trainer.splits(architecture, seq_len, work.optimizer, work.tuning)
    axes = limits.parallelism or (splits if by_default else AXES)
    shardings = trainer.shardings(work.optimizer, work.tuning) if by_default else SHARDINGS
    others_code = work.framework == TRAINER and (beyond or not set(axes) <= set(splits))
    return Reach(
        framework=DEFAULT if others_code else work.framework,
        beyond_trainer=tuple(beyond),
        axes=axes,
        shardings=limits.sharding or shardings,
        only_trainers=by_default,
    )


def _check_workload(work: Workload, model: ModelSpec) -> None:
    """Refuse a workload that the model cannot have; a plan needs the sequence length that the run will have."""
    if model.architecture == "module":
        _check_module(work, model)
    elif work.seq_len is None and not model.counts_samples:
        most = model.max_seq_len
        raise InvalidInputError(
            f"{model.name} is a transformer, and seq_len is missing",
            limit=f"the model has positions for {most:,}" if most else "",
            why="time and memory of a step depend on the sequence length",
            next_step=f"--seq-len {min(USUAL_SEQ_LEN, most or USUAL_SEQ_LEN)}, or the length of your samples",
        )
    if model.quantised not in ("", *RELEASED_QUANTISED) and work.method == "full":
        raise InvalidInputError(
            f"{model.name} is quantised ({model.quantised}), and method is full",
            limit="weights of 16 or 32 bits, which every parameter is trained in",
            why="a quantised checkpoint is made for inference: it has lost what training starts from",
            next_step="name the checkpoint that it was made from, or --method qlora for adapters over a 4-bit base",
        )


def _check_module(work: Workload, model: ModelSpec) -> None:
    for name, value in (("tokens", work.tokens), ("seq_len", work.seq_len)):
        if value is not None:
            raise InvalidInputError(
                f"{name} is {value}, and {model.name} is a module",
                limit="samples or steps: what its profile counts",
                why="the function that builds the module chose how long a sample is",
                next_step="--samples 1M",
            )
    if work.global_batch is None:
        raise InvalidInputError(
            f"{model.name} is a module of your own, and global_batch is missing",
            why="no published run says how large a batch it learns from",
            next_step="--global-batch 256, or what you train it with",
        )


@dataclass(frozen=True, kw_only=True)
class Problem:
    """A request, resolved; regions and instance types are the catalog's that the constraints allow."""

    request: FleetRequest
    model: ModelSpec
    reach: Reach
    recipe: Recipe
    amount: Amount
    catalog: Catalog
    calibration: Calibration
    regions: tuple[str, ...]
    instance_types: tuple[InstanceType, ...]

    @classmethod
    def resolve(
        cls,
        request: FleetRequest,
        catalog: Catalog,
        calibration: Calibration,
        *,
        model: ModelSpec | None = None,
    ) -> Self:
        """Resolve a request; InvalidInputError for an unknown name or a workload that the model cannot have.

        ``model`` is the request's where it is known already: reading a configuration may build it by transformers.
        """
        model = model or resolve_model(request.model)
        work, limits = request.workload, request.constraints
        _check_workload(work, model)
        reach = find_reach(request, model, work.seq_len or 1)
        recipe = build_recipe(
            model,
            seq_len=None if model.counts_samples else work.seq_len,
            framework=reach.framework,
            precision=work.precision,
            optimizer=work.optimizer,
            compiled=work.compiled,
            tuning=work.tuning,
            target_len=work.target_len,
            samples_per_vcpu_s=work.samples_per_vcpu_s,
        )
        catalog = _with_quotes(catalog, limits.quotes)
        regions = catalog.match("region", limits.regions)
        for owned in limits.existing_reservations:
            catalog.instance_type(owned.instance_type)
            catalog.check_region(owned.region)
        matched = catalog.match("instance type", limits.instance_types)
        gpus = catalog.gpu_keys(limits.gpus)
        types = [name for name in matched if gpus is None or catalog.instance_type(name).gpu.key in gpus]
        if not types:
            has = sorted({catalog.instance_type(name).gpu.name for name in matched})
            raise InvalidInputError(
                f"no type of instance_types {', '.join(limits.instance_types)} has a GPU of {', '.join(limits.gpus)}",
                limit=f"the GPUs of these types: {', '.join(has)}",
                next_step="leave out one of gpus and instance_types",
            )
        ranks = [owned.count * catalog.instance_type(owned.instance_type).ranks for owned in limits.usable_reservations]
        return cls(
            request=request,
            model=model,
            reach=reach,
            recipe=recipe,
            amount=Amount.resolve(work, model, recipe.seq_len, owned=max(ranks, default=1)),
            catalog=catalog,
            calibration=calibration,
            regions=tuple(regions),
            instance_types=tuple(catalog.instance_type(name) for name in types),
        )

    def revise(self, **changes: Any) -> Self:
        """Resolve the request anew with other keys of its workload and constraints."""
        work = {name: value for name, value in changes.items() if name in Workload.model_fields}
        limits = {name: value for name, value in changes.items() if name not in work}
        request = self.request.model_copy(
            update={
                "workload": self.request.workload.model_copy(update=work),
                "constraints": self.request.constraints.model_copy(update=limits),
            }
        )
        return type(self).resolve(request, self.catalog, self.calibration, model=self.model)

    @cached_property
    def undriven(self) -> dict[str, str]:
        """Types that a stack needs an image of the user's own for, with the reason; without those that are asked for.

        A type is asked for by a reservation of it, or by a pattern that matches no other kind: g6f does, g6* does not.
        """
        limits = self.request.constraints
        found = {
            instance.name: reason
            for instance in self.catalog.instance_types
            if (reason := describe_undriven(instance.gpu.name, instance.gpu_count))
        }
        if all(instance.name in found for instance in self.instance_types):
            return {}  # no other is considered
        driven = [instance.name for instance in self.catalog.instance_types if instance.name not in found]
        own = [asked for asked in limits.instance_types if not any(is_named(name, asked) for name in driven)]
        own += [owned.instance_type for owned in limits.existing_reservations]
        return {name: why for name, why in found.items() if not any(is_named(name, asked) for asked in own)}

    @cached_property
    def checkpoint_gib(self) -> float:
        """Size of one checkpoint, GiB."""
        recipe = self.recipe
        return checkpoint_gib(trained_parameters(self.model, recipe.tuning), recipe.optimizer, pure=recipe.pure)

    @cached_property
    def running_costs(self) -> Callable[[str], RunningCosts]:
        """``running_costs`` of a region, looked up once."""
        work = self.request.workload
        data: dict[str, Any] = {"data_gib": work.data_gib or 0.0, "lustre_gib": work.lustre_gib or 0}
        data |= {"data_region": work.data_region, "checkpoint_gib": self.checkpoint_gib}
        return cache(partial(running_costs, self.catalog, **data))

    def node_copy(self, name: str) -> NodeCopy | None:
        """Copy of the data to one node of a type; None without data, or with a file system for it."""
        work = self.request.workload
        if work.data_gib is None or work.lustre_gib is not None:
            return None
        machine = self.catalog.instance_type(name)
        return node_copy(name, machine, Volumes(), data_gib=work.data_gib, files=work.data_files)


def _with_quotes(catalog: Catalog, quotes: Sequence[Quote]) -> Catalog:
    """Lay quotes over the catalog's prices; InvalidInputError for a type or region that the catalog lacks."""
    if not quotes:
        return catalog
    offers = {(offer.instance.name, offer.region): offer for offer in catalog.offers}
    for quote in quotes:
        place = (quote.instance_type, quote.region)
        offer = catalog.offer(*place) and offers[place]
        price = HourlyPrice(usd_per_hour=quote.usd_per_hour, source=f"{QUOTE}{quote.source}", as_of=quote.as_of)
        offer = offer or Offer(instance=catalog.instance_type(quote.instance_type), region=quote.region)
        changes: dict[str, Any] = {
            {"on-demand": "on_demand", "reserved": "reserved_1yr", "spot": "spot"}[quote.option]: price
        }
        if quote.option == "spot":
            changes["dearer_spot"] = ()
        offers[place] = replace(offer, **changes)
    return replace(catalog, offers=tuple(offers[place] for place in sorted(offers)))
