"""What the ``config.json`` of a Hugging Face folder says, by family, checked, as a ``Config``."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from pathlib import Path
from typing import Any

from . import beside
from .config import Config, Delta, LlmError
from .families import FAMILIES, MOST, Family
from .kinds import Kind
from .ropes import Rope

NESTED = {
    "gemma3": "gemma3_text",
    "gemma4": "gemma4_text",
    "llama4": "llama4_text",
    "mistral3": "mistral",
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
}
"""Models of images and text, by model_type, and the family of what decodes text in them."""
AROUND_TEXT = (
    *("quantization_config", "compression_config", "dtype", "torch_dtype", "_name_or_path"),
    *("tie_word_embeddings", "bos_token_id", "eos_token_id", "pad_token_id"),
)
"""Fields that may be outside text_config, and hold for the text."""


def read_config(folder: str | os.PathLike[str], quantized: bool = False) -> Config:
    """Return the ``Config`` of a folder, whose tensors may be quantized.

    Raises:
        LlmError: config.json is missing, or is of another family or form.
    """
    return parse_config(read_fields(folder), beside.path_of(folder, beside.CONFIG), quantized)


def read_fields(folder: Any) -> dict[str, Any]:
    """Return what a folder's config.json has, or a file of llama.cpp instead.

    Raises:
        LlmError: there is none, or it is not JSON.
    """
    if not Path(folder).exists():
        raise LlmError(
            f"{folder} must be a folder of Hugging Face or a .gguf file, got nothing there."
        )
    found = beside.json_of(folder, beside.CONFIG)
    if not found:
        raise LlmError(f"{folder} must have a config.json, as Hugging Face's folders do.")
    return text_fields(found)


def text_fields(fields: Any) -> Any:
    """Return the fields of what decodes text, of a model that also sees images."""
    if not isinstance(fields, dict) or not isinstance(fields.get("text_config"), dict):
        return fields
    if fields.get("model_type") not in NESTED:
        return fields
    outside = {name: fields[name] for name in AROUND_TEXT if fields.get(name) is not None}
    return {"model_type": NESTED[fields["model_type"]]} | fields["text_config"] | outside


def parse_config(fields: Any, path: Any = "config.json", quantized: bool = False) -> Config:
    """Return the ``Config`` of the fields of a config.json, whose tensors may be quantized."""
    fields = text_fields(fields)
    if not isinstance(fields, dict):
        raise LlmError(f"{path} must be an object of fields, got a {type(fields).__name__}.")
    if fields.get("quantization_config") and not quantized:
        raise LlmError(
            f"{path}: quantization_config says that the tensors are quantized. Run generate on "
            "this folder as it is, or take that of the float model."
        )
    family: Any = fields.get("model_type")
    has_ropes = fields.get("rope_parameters") is not None
    if has_ropes and fields.get("rope_scaling"):
        raise LlmError(f"{path} must have rope_parameters or rope_scaling, got both.")
    about = FAMILIES.get(family) if isinstance(family, str) else None
    defaults = {} if about is None else dict(about.defaults)
    if has_ropes:  # null says nothing, and leaves gpt-oss its YaRN
        defaults = {name: value for name, value in defaults.items() if name != "rope_scaling"}
    # A null says that there is none of it.
    fields = {name: value for name, value in (defaults | fields).items() if value is not None}
    if about is None:
        raise LlmError(
            f"{path}: model_type must be one of {', '.join((*FAMILIES, *NESTED))}, got {family!r}. "
            "Only these families are written in jaxtap_llm/model.py."
        )
    _check_numbers(fields, path)
    if "num_local_experts" in fields:  # as transformers writes all families
        fields.setdefault("num_experts", fields["num_local_experts"])
    try:
        return _parse(about, family, fields, path)
    except KeyError as error:
        raise LlmError(f"{path} must have {error.args[0]}, as {family}'s files do.") from error
    except (AttributeError, TypeError, ValueError, ArithmeticError) as error:
        raise LlmError(f"{path} must be as {family}'s files are, got: {error}.") from error


COUNTS = {
    *("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "intermediate_size", "moe_intermediate_size"),
    *("num_experts", "num_local_experts", "num_experts_per_tok", "sliding_window_pattern"),
    *("no_rope_layer_interval", "intermediate_size_mlp", "interleave_moe_layer_step"),
    *("global_head_dim", "num_global_key_value_heads", "top_k_experts", "linear_conv_kernel_dim"),
    *("linear_key_head_dim", "linear_value_head_dim", "linear_num_key_heads"),
    *("linear_num_value_heads", "full_attention_interval", "shared_expert_intermediate_size"),
}
NUMBERS = {"rms_norm_eps", "rope_theta", "rope_local_base_freq", "query_pre_attn_scalar"}
NUMBERS |= {"swiglu_limit", "floor_scale", "attn_scale"}
CAPS = {"attn_logit_softcapping", "final_logit_softcapping"}
WHOLE_CAPS = {
    *("hidden_size_per_layer_input", "vocab_size_per_layer_input", "num_kv_shared_layers"),
    *("attention_chunk_size", "sliding_window"),
}


def _check_numbers(fields: Any, path: Any) -> None:
    """Check that sizes are whole numbers, and the others numbers, which may be 0 for caps."""
    for name in sorted(fields.keys() & (COUNTS | NUMBERS | CAPS | WHOLE_CAPS)):
        value, whole = fields[name], name in COUNTS | WHOLE_CAPS
        kinds, text = ((int,), "whole number") if whole else ((int, float), "number")
        fits = isinstance(value, kinds) and not isinstance(value, bool)
        may_be_0 = name in CAPS | WHOLE_CAPS
        if not fits or not 0 <= value < math.inf or (value == 0 and not may_be_0):
            what = "0 or more" if may_be_0 else "above 0"
            raise LlmError(f"{path}: {name} must be a {text}, {what}, got {value!r}.")
        if whole and value > MOST.get(name, 2**31 - 1):
            raise LlmError(
                f"{path}: {name} must be at most {MOST.get(name, 2**31 - 1)}, got {value}."
            )
    heads, groups = (fields.get(f"num_{one}_heads") for one in ("attention", "key_value"))
    if heads and groups and heads % groups:
        raise LlmError(
            f"{path}: num_attention_heads must be a multiple of num_key_value_heads, got {heads} "
            f"and {groups}."
        )
    for name in ("num_experts_per_tok", "top_k_experts"):
        count = fields.get("num_experts", fields.get("num_local_experts", math.inf))
        if fields.get(name, 0) > count:
            raise LlmError(f"{path}: {name} must be at most num_experts.")


def _check_forms(about: Family, family: str, fields: Any, path: Any) -> None:
    """Check that the file asks for nothing that ``model`` does not compute."""
    ropes = fields.get("rope_parameters") or {}
    for one in (fields, ropes, *ropes.values()):
        proportional = isinstance(one, dict) and one.get("rope_type") == "proportional"
        if isinstance(one, dict) and about.share is None and not proportional:
            share = one.get("partial_rotary_factor", 1)
            if share != 1:
                raise LlmError(
                    f"{path}: partial_rotary_factor must be 1 for {family}, got {share}."
                )
    bidirectional = fields.get("use_bidirectional_attention")
    # Of images, which are not read, whatever sees them.
    if bidirectional and not (family == "gemma4_text" and bidirectional == "vision"):
        raise LlmError(f"{path}: use_bidirectional_attention must be false for {family}.")
    for name, wanted in about.required.items():
        found = fields.get(name, wanted)
        if found not in (wanted, type(wanted)()) if isinstance(wanted, list) else found != wanted:
            raise LlmError(
                f"{path}: {name} must be {json.dumps(wanted)} for {family}, got "
                f"{json.dumps(found)}."
            )


def _parse(about: Family, family: str, fields: Any, path: Any) -> Config:
    """Return the config of a family, of fields whose numbers are checked."""
    _check_forms(about, family, fields, path)
    gemma = family.startswith("gemma")
    heads, width = fields["num_attention_heads"], fields["hidden_size"]
    size = fields.get("head_dim") or width // heads
    windows = _windows(about, family, fields, path)
    ropes, rope_of = _ropes(about, family, fields, path, windows)
    _check_activation(family, fields, path)
    if fields.get("mlp_bias") or (not about.biased and fields.get("attention_bias")):
        raise LlmError(f"{path}: attention_bias and mlp_bias must be false for {family}.")
    experts = fields["num_experts"] if about.experts else 0
    config = Config(
        family=family,
        vocabulary=fields["vocab_size"],
        width=width,
        inner=fields[about.inner],
        heads=heads,
        kv_heads=fields.get("num_key_value_heads") or heads,
        head_size=size,
        windows=windows,
        ropes=ropes,
        rope_of=rope_of,
        scale=(fields.get("query_pre_attn_scalar", size) if gemma else size) ** -0.5,
        epsilon=fields.get("rms_norm_eps", 1e-6),
        tied=fields.get("tie_word_embeddings", False),
        biased=about.biased,
        head_norms=about.head_norms,
        softcap=(fields.get("attn_logit_softcapping") or 0.0) if gemma else 0.0,
        final_softcap=(fields.get("final_logit_softcapping") or 0.0) if gemma else 0.0,
        experts=experts,
        experts_per_token=fields["num_experts_per_tok"] if experts else 0,
        normalize_experts=family != "qwen3_moe" or fields.get("norm_topk_prob", False),
        sinks=family == "gpt_oss",
        limit=fields["swiglu_limit"] if family == "gpt_oss" else 0.0,
        gemma=gemma,
        shifted=about.shifted,
        layout=about.experts or "each",
    )
    more = {
        "llama4_text": _llama4,
        "gemma4_text": _gemma4,
        "qwen3_5_text": _qwen3_5,
        "qwen3_5_moe_text": _qwen3_5,
    }
    if family in more:
        config = dataclasses.replace(config, **more[family](fields, path, config))
    for one in {config.head_size, *(kind.head_size for kind in config.kinds)}:
        if one % 2 or any(len(rope.frequencies(one)) == 0 for rope in config.ropes):
            raise LlmError(f"{path}: head_dim must be even, for rotary positions, got {one}.")
    return config


def _check_activation(family: str, fields: Any, path: Any) -> None:
    wanted = "gelu_pytorch_tanh" if family.startswith("gemma") else "silu"
    found = fields.get("hidden_activation") or fields.get("hidden_act") or wanted
    if found != wanted:
        raise LlmError(f"{path}: hidden_act must be {wanted} for {family}, got {found}.")


def _llama4(fields: Any, path: Any, config: Config) -> dict[str, Any]:
    """Return what else a decoder of Llama 4 has."""
    step = fields["interleave_moe_layer_step"]
    sparse = fields.get("moe_layers")
    sparse = list(range(step - 1, config.layers, step)) if sparse is None else sparse
    if not set(sparse) <= set(range(config.layers)):
        raise LlmError(f"{path}: moe_layers must be of the {config.layers} layers, got {sparse}.")
    alike = {"kv_heads": config.kv_heads, "head_size": config.head_size}
    experts = Kind(config.inner, **alike, experts=config.experts, shared_inner=config.inner)
    dense = Kind(fields["intermediate_size_mlp"], **alike)
    kinds = tuple(experts if i in sparse else dense for i in range(config.layers))
    tempers = fields.get("attn_temperature_tuning")
    return _kinds(kinds) | {
        "chunked": True,
        "interleaved": True,
        "unit_norms": bool(fields.get("use_qk_norm")),
        "sigmoid_router": True,
        "tempering": (float(fields["floor_scale"]), float(fields["attn_scale"]))
        if tempers
        else None,
    }


def _gemma4(fields: Any, path: Any, config: Config) -> dict[str, Any]:
    """Return what else a decoder of Gemma 4 has."""
    shared, layers = fields.get("num_kv_shared_layers", 0), config.layers
    is_local = [window > 0 for window in config.windows]
    own = layers - shared
    if own < 0 or not set(is_local[own:]) <= set(is_local[:own]):
        raise LlmError(
            f"{path}: num_kv_shared_layers must leave a layer of each kind that has keys, got "
            f"{shared} of {layers}."
        )
    wide, experts = fields.get("use_double_wide_mlp"), fields.get("enable_moe_block")
    equal = bool(fields.get("attention_k_eq_v"))
    whole = {"head_dim": fields["global_head_dim"]}
    if equal and "num_global_key_value_heads" in fields:
        whole["num_key_value_heads"] = fields["num_global_key_value_heads"]
    given = {int(name): one for name, one in fields.get("per_layer_config", {}).items()}
    kinds = []
    for i, local in enumerate(is_local):
        own_fields = given.get(i, {}) if given else {} if local else whole
        unknown = own_fields.keys() - {"head_dim", "num_key_value_heads"}
        if unknown:
            raise LlmError(
                f"{path}: per_layer_config must have head_dim and num_key_value_heads alone, got "
                f"{sorted(unknown)[0]}."
            )
        _check_numbers({"num_attention_heads": config.heads} | own_fields, path)
        dense = fields["intermediate_size"] * (2 if wide and i >= own else 1)
        kinds.append(
            Kind(
                fields["moe_intermediate_size"] if experts else dense,
                own_fields.get("num_key_value_heads", config.kv_heads),
                own_fields.get("head_dim", config.head_size),
                experts=fields["num_experts"] if experts else 0,
                shared_inner=dense if experts else 0,
                local=local,
                keeps=i < own,
                has_values=local or not equal,
            )
        )
    ple, rows = fields["hidden_size_per_layer_input"], fields["vocab_size_per_layer_input"]
    if ple and rows < config.vocabulary:
        raise LlmError(
            f"{path}: vocab_size_per_layer_input must be {config.vocabulary} or more, as the "
            f"vocabulary is, got {rows}."
        )
    return _kinds(tuple(kinds)) | {
        "scale": 1.0,
        "experts_per_token": fields["top_k_experts"] if experts else 0,
        "parallel": bool(experts),
        "layout": "turned" if experts else "each",
        "value_norms": True,
        "layer_scales": True,
        "layer_input": ple,
        "layer_vocabulary": rows if ple else 0,
    }


def _qwen3_5(fields: Any, path: Any, config: Config) -> dict[str, Any]:
    """Return what else a decoder of Qwen 3.5 has."""
    delta = Delta(
        fields["linear_num_key_heads"],
        fields["linear_num_value_heads"],
        fields["linear_key_head_dim"],
        fields["linear_value_head_dim"],
        fields["linear_conv_kernel_dim"],
    )
    if delta.values % delta.keys or delta.taps < 2:
        raise LlmError(
            f"{path}: linear_num_value_heads must be a multiple of linear_num_key_heads, and "
            f"linear_conv_kernel_dim 2 or more, got {delta.values}, {delta.keys} and {delta.taps}."
        )
    every = fields["full_attention_interval"]
    found = fields.get("layer_types") or [
        "full_attention" if (i + 1) % every == 0 else LINEAR for i in range(config.layers)
    ]
    shared = fields["shared_expert_intermediate_size"] if config.experts else 0
    made = [config.inner, config.kv_heads, config.head_size, config.experts, shared]
    kinds = (Kind(*made, mixer="delta" if one == LINEAR else "attention") for one in found)
    more = {"delta": delta, "gated": True, "gated_shared": bool(shared)}
    return _kinds(tuple(kinds)) | more


def _kinds(kinds: tuple[Kind, ...]) -> dict[str, Any]:
    """Return the fields for layers of some kinds: the kinds themselves only where they differ."""
    if len(set(kinds)) > 1:
        return {"kinds": kinds, "experts": max(kind.experts for kind in kinds)}
    return vars(kinds[0])


def _ropes(
    about: Family, family: str, fields: Any, path: Any, windows: tuple[int, ...]
) -> tuple[tuple[Rope, ...], tuple[int, ...]]:
    """Return rotary positions, and which of them each layer has."""
    rope, local = _of_layers(about, family, fields, path)
    others = [local is not None and window > 0 for window in windows]
    if about.stands:
        turns = _turning(fields, len(windows))
        if len(turns) != len(windows):
            raise LlmError(f"{path}: no_rope_layers must be of {len(windows)} layers.")
        local, others = Rope(1e4, math.inf), [not one for one in turns]
    return (rope,) if local is None else (rope, local), tuple(map(int, others))


def _of_layers(about: Family, family: str, fields: Any, path: Any) -> tuple[Rope, Rope | None]:
    """Return the rotary positions of the global layers, and of the local ones or None."""
    given = fields.get("rope_parameters") or {}
    by_layer = "full_attention" in given
    chosen = given["full_attention"] if by_layer else given or fields.get("rope_scaling") or {}
    if family == "gemma4_text" and not by_layer:
        raise LlmError(f"{path}: rope_parameters must have full_attention, and sliding_attention.")
    chosen = {name: value for name, value in chosen.items() if value is not None}
    theta = _base(chosen, "rope_theta", fields.get("rope_theta") or 1e4, path)
    kind = chosen.get("rope_type", chosen.get("type", "default"))
    local, share, small = None, 1.0, {}
    if about.share is not None:
        share = chosen.get("partial_rotary_factor", fields.get("partial_rotary_factor"))
        share = about.share if share is None else share
    if kind == "proportional":
        share = chosen.get("partial_rotary_factor", 1.0)
    if not isinstance(share, int | float) or not 0 < share <= 1:
        raise LlmError(
            f"{path}: partial_rotary_factor must be above 0, and at most 1, got {share!r}."
        )
    if about.local_ropes:
        small = given.get("sliding_attention", {}) if by_layer else fields
        local = Rope(_base(small, "rope_theta" if by_layer else "rope_local_base_freq", 1e4, path))
    if small.get("rope_type", "default") != "default":
        raise LlmError(
            f"{path}: rope_type of sliding_attention must be default, got {small['rope_type']}."
        )
    if kind == "default":
        return Rope(theta, share=share), local

    def number(name: str) -> Any:
        value = chosen[name]
        if not _is_above_0(value):
            raise LlmError(f"{path}: {name} of {kind} must be a number above 0, got {value!r}.")
        return value

    if kind == "proportional":
        factor = number("factor") if "factor" in chosen else 1.0
        return Rope(theta, factor, share=share, proportional=True), local
    if kind in LONGROPE:
        return _longrope(family, fields, path, chosen, Rope(theta, share=share)), local
    if share != 1:
        raise LlmError(f"{path}: rope_type must be default or longrope for {family}, got {kind}.")
    if kind == "linear":
        return Rope(theta, number("factor")), local
    if kind == "llama3":
        low, high = number("low_freq_factor"), number("high_freq_factor")
        if low >= high:
            raise LlmError(
                f"{path}: low_freq_factor must be below high_freq_factor, got {low} and {high}."
            )
        bounds = low, high, number("original_max_position_embeddings")
        return Rope(theta, number("factor"), bounds), local
    if kind == "yarn" and not {"mscale", "mscale_all_dim"} & chosen.keys():
        names = "original_max_position_embeddings", "max_position_embeddings"
        lengths = [one[name] for one in (chosen, fields) for name in names if name in one]
        if not lengths:
            raise LlmError(f"{path}: yarn needs {names[0]}.")
        factor, length = number("factor"), lengths[0]
        fast, slow = (number(name) if name in chosen else default
                      for name, default in (("beta_fast", 32), ("beta_slow", 1)))  # fmt: skip
        if "attention_factor" in chosen:
            scale = number("attention_factor")
        else:
            scale = 0.1 * math.log(max(factor, 1)) + 1
        yarn = fast, slow, length, bool(chosen.get("truncate", True))
        return Rope(theta, factor, yarn=yarn, scale=scale), local
    raise LlmError(
        f"{path}: rope_type must be default, linear, llama3, yarn (without mscale), longrope or "
        f"proportional, got {kind}. Positions would be wrong without it."
    )


def _base(chosen: Any, name: str, default: float, path: Any) -> float:
    """Return what powers of turn positions: a field with a number above 0."""
    found = chosen.get(name)
    found = default if found is None else found
    if not _is_above_0(found):
        raise LlmError(f"{path}: {name} must be a number above 0, got {found!r}.")
    return float(found)


LONGROPE = ("longrope", "su")
"""What files call LongRoPE: the second before it was published."""


def _longrope(family: str, fields: Any, path: Any, chosen: Any, rope: Rope) -> Rope:
    """Return rotary positions with LongRoPE's factors.

    Args:
        family: of the model.
        fields: of the file, with sizes and lengths.
        path: of the file.
        chosen: what it says of these positions.
        rope: without factors.
    """
    size = fields.get("head_dim") or fields["hidden_size"] // fields["num_attention_heads"]
    pairs, factors = len(rope.frequencies(size)), []
    for name in ("short_factor", "long_factor"):
        found = chosen[name]
        if not isinstance(found, list) or len(found) != pairs or not all(map(_is_above_0, found)):
            raise LlmError(
                f"{path}: {name} of longrope must be a list of {pairs} numbers above 0, one for "
                "each pair of a head that turns."
            )
        factors.append(tuple(map(float, found)))
    for name in ("short_mscale", "long_mscale"):
        if name in chosen:
            raise LlmError(f"{path}: longrope must have no {name}: {family} has attention_factor.")
    name = "original_max_position_embeddings"
    length = chosen.get(name, fields.get(name, 4096 if family == "phi3" else None))
    factor = chosen.get("factor")
    if factor is None and _is_above_0(length):
        factor = fields["max_position_embeddings"] / length
    for one, value, least in ((name, length, 1), ("factor", factor, 0)):
        if not _is_above_0(value) or value <= least:
            raise LlmError(
                f"{path}: {one} of longrope must be a number above {least}, got {value!r}."
            )
    scale = chosen.get("attention_factor")
    if scale is None:  # as the paper has it
        scale = math.sqrt(1 + math.log(factor) / math.log(length)) if factor > 1 else 1.0
    if not _is_above_0(scale):
        raise LlmError(f"{path}: attention_factor must be a number above 0, got {scale!r}.")
    return dataclasses.replace(
        rope, longrope=(factors[0], factors[1], int(length)), scale=float(scale)
    )


def _is_above_0(value: Any) -> bool:
    """Return whether a field is a number above 0."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and 0 < value < math.inf


LINEAR = "linear_attention"


def _turning(fields: Any, layers: int) -> list[Any]:
    """Return for each layer whether its queries and keys turn: one of every so many does not."""
    every = fields.get("no_rope_layer_interval", 4)
    return fields.get("no_rope_layers") or [(i + 1) % every for i in range(layers)]


def _windows(about: Family, family: str, fields: Any, path: Any) -> tuple[int, ...]:
    """Return the window of each layer; 0 for none."""
    layers, name = fields["num_hidden_layers"], about.window
    window = (fields.get(name) or 0) if name else 0
    kinds = fields.get("layer_types")
    if kinds is None:
        local = _local(about, family, fields, path, window)
    else:
        unknown = sorted(set(kinds) - {"full_attention", about.layer_type})
        if unknown or len(kinds) != layers:
            found = ", ".join([str(len(kinds)), *unknown])
            raise LlmError(
                f"{path}: layer_types must have full_attention or {about.layer_type} for each of "
                f"{layers} layers, got {found}."
            )
        local = [bool(name) and kind == about.layer_type for kind in kinds]
    if family == "gemma4_text":
        local[-1] = False  # whatever the file says
    if any(local) and not window:
        raise LlmError(
            f"{path} must have {name or 'sliding_window'}, for the layers that have one."
        )
    return tuple(window if one else 0 for one in local)


def _local(about: Family, family: str, fields: Any, path: Any, window: int) -> list[bool]:
    """Return which layers have a window, where a file does not name them one by one."""
    layers = range(fields["num_hidden_layers"])
    if about.windows == "all":
        # One that no position is behind is none, as Phi-3.5's.
        return [0 < window < fields.get("max_position_embeddings", math.inf) for _ in layers]
    if about.windows == "turning":
        return [bool(one) and window > 0 for one in _turning(fields, len(layers))]
    if isinstance(about.windows, int):
        every = fields.get("sliding_window_pattern", about.windows)
        every = every if family == "gemma3_text" else about.windows
        return [(i + 1) % every != 0 for i in layers]
    if fields.get("use_sliding_window") and "max_window_layers" not in fields:
        raise LlmError(f"{path}: use_sliding_window of {family} needs layer_types.")
    first = fields.get("max_window_layers", 0)
    return [bool(fields.get("use_sliding_window")) and i >= first for i in layers]
