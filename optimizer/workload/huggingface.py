"""Read a Hugging Face ``config.json`` as a ModelSpec, and keep of it what the nodes build the model from.

``data/config_defaults.json`` has the fields of transformers' classes (``python -m tools.config_defaults`` writes it): a
field that a configuration leaves out has the class's default, and a null that differs from it is carried by name.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from bootstrap.contract.trainer import AUTO, NULLS, class_fields, with_nulls
from optimizer.contract.errors import InvalidInputError, unreadable
from optimizer.workload.families import (
    FAMILIES,
    NEXT,
    STATE_SPACE,
    SWITCHES,
    TOWERS,
    USUAL,
    Config,
    Family,
    Values,
    explicit_sizes,
    windows,
)
from optimizer.workload.model import ModelSpec, build_model, check_shape

CONFIG_DEFAULTS = Path(__file__).parent / "data" / "config_defaults.json"
_REQUIRED = ("layers", "hidden_size", "attention_heads", "vocab_size", "ffn_size")
# Private scalars that change the model (OPT); others are transformers' own notes.
_PRIVATE = ("_remove_final_layer_norm",)
# Scalars that say who wrote the config, not what the model is.
_ABOUT = ("transformers_version", "torch_dtype", "dtype")
# Rates of dropout within layers; others are of heads that no plan trains.
_DROPOUTS = {
    "attention_dropout", "attention_probs_dropout_prob", "attn_pdrop", "dropout", "dropout_rate", "hidden_dropout",
    "hidden_dropout_prob", "resid_pdrop", "residual_dropout",
}  # fmt: skip
# Classes with another head than a plan's: classifiers, reward models, T5's encoder alone.
_OTHER_HEAD = re.compile(
    r"\w+(For(?!CausalLM|MaskedLM|PreTraining|ConditionalGeneration|ImageClassification)[A-Z]\w*|EncoderModel)"
)
_PROFILE = "gpufleet profile MODULE:FUNCTION counts any torch module; architecture fields would train a Llama instead"


@functools.cache
def _classes() -> dict[str, dict[str, Any]]:
    return json.loads(CONFIG_DEFAULTS.read_text(encoding="utf-8"))  # type: ignore[no-any-return]


def class_default(kind: str, name: str) -> Any:
    """Value that the class of a ``model_type`` gives a field which a configuration leaves out."""
    return _classes()[kind]["fields"][name]


def read_json(path: Path) -> Any:
    """Parse a JSON file; InvalidInputError where it cannot be read, or is not JSON."""
    try:
        return json.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInputError(unreadable(path, error), next_step=NEXT) from error
    except ValueError as error:  # also a number of thousands of digits
        raise InvalidInputError(f"{path} is not JSON: {error}", next_step=NEXT) from error


def model_from_config(data: Any, *, name: str, origin: str) -> ModelSpec:
    """Build the ModelSpec of a configuration; InvalidInputError where it is unknown or lacks a field."""
    try:
        return _model(data, name, origin)
    except (TypeError, AttributeError, ValueError, ArithmeticError) as error:  # a list, a text or NaN for a number
        raise InvalidInputError(f"{origin}: a field has a value of another kind: {error}", next_step=NEXT) from error


def _model(data: Any, name: str, origin: str) -> ModelSpec:
    if not isinstance(data, dict) or "model_type" not in data:
        kind = "an object without model_type" if isinstance(data, dict) else f"a JSON {type(data).__name__}"
        raise InvalidInputError(
            f"{origin} is not the config.json of a model: it holds {kind}",
            limit=f"model_type is one of {', '.join(FAMILIES)}",
            next_step=NEXT,
        )
    data, kind = with_nulls(data), str(data["model_type"])
    family = FAMILIES.get(kind)
    if family is None:
        raise _unknown(data, kind, origin)
    whole = _config(kind, data, origin)
    if data.get("add_cross_attention"):
        raise whole.wrong(
            f"add_cross_attention is {data['add_cross_attention']}",
            "a model of its own: false, or left out",
            "it is the decoder beside an encoder that the configuration does not describe",
            _PROFILE,
        )
    tower, text, ties = 0, data, family.ties
    if family.text:
        # Qwen's published configurations have the text's fields beside vision_config.
        text = data.get("text_config") or (data if kind.startswith("qwen") else {})
        family, c = FAMILIES[family.text], _config(family.text, text, origin)
        values = _read(c, family, required=())
        vision = FAMILIES[kind].vision
        tower = TOWERS[vision](_config(vision, data.get("vision_config") or {}, origin), values["hidden_size"])
        values["beside"] = values.get("beside", 0) + tower
    else:
        c = whole
        values = _read(c, family, required=_REQUIRED)
    is_tied = any({"whole": whole, "text": c}[part].get("tie_word_embeddings") for part in ties)
    values.setdefault("tied_embeddings", is_tied)
    config = _prune(data, kind) | values.pop("config", {})
    if family.architecture in ("decoder", "encoder"):
        # Sizes that are left to the class stand in the plan: another release of transformers builds the same then.
        written = {ours: c.spelling.get(theirs, theirs) for ours, theirs in _names(c, family).items()}
        shape = explicit_sizes(written, values)
        if text is not data:
            config["text_config"] = shape | config.get("text_config", {})
            shape = {}
        config = {**shape, "tie_word_embeddings": values["tied_embeddings"], **config}
    source = f"{origin} ({kind})"
    quantised, method = data.get("quantization_config"), ""
    if quantised:
        method = str(quantised.get("quant_method", "unknown")) if isinstance(quantised, Mapping) else "unknown"
        source += f", trained from weights that are no longer quantised ({method})"
    model = build_model(name=name, config=config, source=source, tower_parameters=tower, **values)
    named, note = data.get("architectures"), ""
    if isinstance(named, list) and named and _OTHER_HEAD.fullmatch(str(named[0])):
        auto = AUTO[family.architecture]
        note = f"{name} is a {named[0]}, and the plan is for transformers' {auto}, which has another head and loss"
    return replace(check_shape(model), quantised=method, head_note=note)


def _config(kind: str, data: Mapping[str, Any], origin: str) -> Config:
    """Fields of a configuration under its class's names; refuses a null that the class refuses, and two values."""
    known = _classes()[kind]
    given: dict[str, Any] = {}
    spelling: dict[str, str] = {}
    for name, value in data.items():
        own = known["aliases"].get(name, name)
        if own in given and given[own] != value:
            raise InvalidInputError(
                f"{origin}: {name} is {value}",
                limit=f"{given[own]}, the value of {spelling[own]}: both are names of one field of {kind}",
                next_step=NEXT,
            )
        default = known["fields"].get(own)
        if value is None and default is not None and own not in known["nullable"]:
            raise InvalidInputError(
                f"{origin}: {name} is None",
                limit=f"a value, or left out for transformers' default, {default}",
                why=f"the class of {kind} takes no null there, and the nodes would find it out after they are paid for",
                next_step=NEXT,
            )
        given[own], spelling[own] = value, name
    return Config(kind=kind, origin=origin, given=given, defaults=known["fields"], spelling=spelling)


def _names(c: Config, family: Family) -> dict[str, str]:
    """Names that the class has, by its aliases too; most models look for a head_dim that it need not have."""
    known, aliases = {*c.defaults, "head_dim"}, _classes()[c.kind]["aliases"]
    usual = {ours: aliases.get(theirs, theirs) for ours, theirs in USUAL.items()}
    return {ours: theirs for ours, theirs in {**usual, **family.names}.items() if theirs in known}


def _read(c: Config, family: Family, required: tuple[str, ...]) -> Values:
    """Fields of ModelSpec."""
    names = _names(c, family)
    sizes = {ours: theirs for ours, theirs in names.items() if ours not in SWITCHES}
    # A null of key-value heads is one a query head, whatever the class's default.
    values: Values = {
        ours: c.whole(theirs, least=0 if ours == "dense_layers" else 1, optional=ours == "kv_heads")
        for ours, theirs in sizes.items()
    }
    lacking = [names[need] for need in required if need in names and c.given.get(names[need]) is None]
    if family.ffn_multiple:
        values["ffn_size"] = values.get("ffn_size") or family.ffn_multiple * values["hidden_size"]
        lacking = [name for name in lacking if name != names.get("ffn_size")]
    if lacking:
        raise InvalidInputError(
            f"{c.origin} lacks {', '.join(lacking)}",
            limit=f"a {c.kind} configuration gives each as a whole number above 0",
            next_step=NEXT,
        )
    for path, wanted in family.fixed.items():
        name, _, inner = path.partition(".")
        value = c.given.get(name, None if inner else wanted)
        value = value.get(inner, wanted) if inner and isinstance(value, Mapping) else wanted if inner else value
        if value != wanted and (value or wanted):
            why = "another value makes another model, or none, and its parameters are not counted"
            raise c.wrong(f"{path} is {value!r}", f"{wanted!r}, or left out", why, _PROFILE)
    for name in ("layer_types", "no_rope_layers") if "attention_chunk_size" in c.defaults else ("layer_types",):
        of_layers = c.get(name)
        if name == "no_rope_layers" and not of_layers:  # Llama 4's published files have an empty list
            continue
        if isinstance(of_layers, list) and len(of_layers) != values["layers"] and {*of_layers} != {"full_attention"}:
            limit = f"one for each of the {values['layers']} layers"
            next_step = f"shorten it with {names['layers']}, or leave it out for the class's own"
            raise c.wrong(f"{name} has {len(of_layers)} entries", limit, next_step=next_step)
    pad = c.get("pad_token_id")
    if isinstance(pad, int) and 0 < values.get("vocab_size", 0) <= pad:
        limit = f"a row of the embedding: below vocab_size, {values['vocab_size']}"
        raise c.wrong(f"pad_token_id is {pad}", limit, next_step="set it to a token of the vocabulary, or to null")
    values |= {"architecture": family.architecture, "soft_cap": False, "logits_soft_cap": False}
    for ours, theirs in (("soft_cap", "attn_logit_softcapping"), ("logits_soft_cap", "final_logit_softcapping")):
        values[ours] = theirs in c.defaults and bool(c.get(theirs))
    values["dropout"] = any(c.get(rate) for rate in _DROPOUTS & c.defaults.keys())
    values |= family.facts
    values |= {switch: c.flag(names[switch]) for switch in SWITCHES if switch in names}
    if "attention_bias" in names:
        values["attention_bias"] = family.facts.get("attention_bias", "all") if values["attention_bias"] else "none"
    if "sliding_window" in c.defaults:
        values |= windows(c, values["layers"], family.window_pattern)
    for part in family.parts:
        values |= part(c, values)
    if not values.get("experts"):
        values["experts_per_token"] = 0
    if not (values.get("head_dim") or values.get("latent_attention")):
        c.check_heads(names["attention_heads"], names["hidden_size"])
    return values


def _prune(data: Mapping[str, Any], kind: str) -> Values:
    """Keep what builds the model: plan, stack file and the nodes' 16 KiB of user data hold it.

    Pulumi's configuration has no null. One that differs from the class's default is named in NULLS.
    """
    known, family = _classes()[kind]["fields"], FAMILIES.get(kind, Family())
    nested = {"text_config": family.text, "vision_config": family.vision}
    kept: Values = {}
    nulls = []
    for name, value in data.items():
        if name in _ABOUT or (name.startswith("_") and name not in _PRIVATE):
            continue
        if value is None:
            nulls += [name] if known.get(_classes()[kind]["aliases"].get(name, name)) is not None else []
        elif not isinstance(value, dict | list):
            kept[name] = value
        elif nested.get(name) and isinstance(value, dict):
            kept[name] = _prune(value, nested[name])
        elif name in known or name == "rope_scaling":
            kept[name] = _with_named_nulls(value)
    if set(kept.get("layer_types") or ()) == {"full_attention"} and "sliding_window_pattern" not in kept:
        del kept["layer_types"]
    return kept | ({NULLS: sorted(nulls)} if nulls else {})


def _with_named_nulls(value: Any) -> Any:
    """Name the nulls of objects within, too: a field that is left out may have another default."""
    if not isinstance(value, dict):
        return value
    nulls = sorted(name for name, inner in value.items() if inner is None)
    kept = {name: _with_named_nulls(inner) for name, inner in value.items() if inner is not None}
    return kept | ({NULLS: nulls} if nulls else {})


# --- what transformers makes of it ------------------------------------------------------------------------------------


def check_build(model: ModelSpec) -> ModelSpec:
    """Return the model of a configuration if transformers, where it is installed, builds it with as many parameters."""
    assert model.config is not None
    built = _built_parameters(model.config, model.architecture, has_tower=bool(model.tower_parameters))
    if built is not None and built[0] != model.parameters:
        raise InvalidInputError(
            f"{model.source}: {model.parameters:,} parameters are counted, and {built[1]} builds {built[0]:,}",
            why="a field of it changes the model in a way that is not counted",
            next_step=_PROFILE,
        )
    return model


def _built_parameters(config: Mapping[str, Any], architecture: str, *, has_tower: bool) -> tuple[int, str] | None:
    """Parameters that the installed transformers builds on the meta device, and its release; None without it."""
    if importlib.util.find_spec("torch") is None or importlib.util.find_spec("transformers") is None:
        return None
    import torch
    import transformers

    kind, release = str(config["model_type"]), f"transformers {transformers.__version__}"
    if kind not in transformers.CONFIG_MAPPING:
        return None
    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    auto = "AutoModelForImageTextToText" if has_tower else AUTO[architecture]
    try:
        settings = transformers.AutoConfig.for_model(**class_fields(config, transformers.CONFIG_MAPPING[kind]))
        with torch.device("meta"):
            module = getattr(transformers, auto).from_config(settings)
    except Exception as error:
        raise InvalidInputError(
            f"{release} does not build this {kind}: {type(error).__name__}: {(str(error).splitlines() or [''])[0]}",
            why="the nodes would find it out after they are paid for",
            next_step="compare the fields with the published config.json",
        ) from error
    return sum(parameter.numel() for parameter in module.parameters()), release


def _unknown(data: Mapping[str, Any], kind: str, origin: str) -> InvalidInputError:
    """Refusal of a model_type without a row, with its size where transformers knows it."""
    size, why = "", "every kind has its own field names, biases and arithmetic"
    config = {name: value for name, value in data.items() if name not in ("architectures", *_ABOUT)}
    try:
        built = _built_parameters(config, "decoder", has_tower=False)
    except InvalidInputError:
        built = None
    if built is not None:
        size = f": {built[0]:,} parameters, some {16 * built[0] / 2**30:,.0f} GiB of weights, gradients and moments"
    if kind in STATE_SPACE:
        why = "no run of layers that carry a state was measured, and attention's arithmetic is not theirs"
    return InvalidInputError(
        f"{origin}: model_type is {kind!r}{size}",
        limit=f"one of {', '.join(FAMILIES)}",
        why=why,
        next_step=_PROFILE,
    )
