"""What the metadata of a file of llama.cpp says of a model, as fields of a ``config.json``.

A file says less than a folder: much is fixed for an architecture. So what was read is written again
(``gguf.metadata``), and each key of the file must say the same, or one that nothing depends on.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from .config import Config, LlmError
from .families import MOST
from .ropes import Rope

_LLAMA3 = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
"""Llama 3's positions but for the factor and the trained length."""
_HARMLESS = (
    *("vocab_size", "tensor_data_layout", "rope.scaling.finetuned", "context_length"),
    *("attention.causal", "expert_weights_norm"),
)
"""Keys of an architecture that what is computed does not depend on, or that are asked here."""
_FIXED: Mapping[str, tuple[Any, ...]] = {
    "rope.scaling.type": ("none",),
    "rope.scaling.factor": (0, 1),
    "attention.causal": (True,),
    "expert_weights_norm": (True,),
    "expert_weights_scale": (0, 1),
    "expert_shared_count": (0, 1),
    "attention.sliding_window": (0,),
    "nextn_predict_layers": (0,),
    "attention.shared_kv_layers": (0,),
}
"""Values that keys may have although nothing is written for them."""
_STILL = 1e6
"""Frequencies that are divided by more stand still: llama.cpp's files have 1e30."""


def shown(found: Any) -> str:
    """Return the value of a key for an error: the beginning of a long one."""
    found = found.tolist() if isinstance(found, np.generic | np.ndarray) else found
    return "nothing" if found is None else reprlib.repr(found)


class Keys:
    """The keys of an architecture in a file.

    Args:
        metadata: all keys of the file.
        where: the file, for errors.
        shapes: of its tensors, by name.
        tensor: returns a float tensor by its name.

    Raises:
        LlmError: the file has an adapter.
    """

    def __init__(
        self,
        metadata: Mapping[str, Any],
        where: str,
        shapes: Mapping[str, tuple[int, ...]],
        tensor: Callable[[str], np.ndarray],
    ) -> None:
        if metadata.get("general.type") == "adapter":
            raise LlmError(f"{where} must have a model, got an adapter. Take its model's file.")
        self.architecture = metadata.get("general.architecture")
        self.where, self.shapes, self.tensor = where, shapes, tensor
        start = f"{self.architecture}."
        self.own = {key.removeprefix(start): value for key, value in metadata.items()
                    if key.startswith(start)}  # fmt: skip

    def error(self, key: str, wanted: str, found: Any) -> LlmError:
        """Return an error that names a key."""
        start = f"{self.where}: {self.architecture}.{key}"
        return LlmError(f"{start} must be {wanted}, got {shown(found)}.")

    def whole(
        self, key: str, default: int | None = None, least: int = 0, most: int = 2**31 - 1
    ) -> int:
        """Return a whole number within bounds."""
        found = self.own.get(key, default)
        is_whole = isinstance(found, int | np.integer) and not isinstance(found, bool)
        if not is_whole or not least <= found <= most:
            raise self.error(key, f"a whole number from {least} to {most}", found)
        return int(found)

    def text(self, key: str, default: str) -> str:
        """Return a text."""
        found = self.own.get(key, default)
        if not isinstance(found, str):
            raise self.error(key, "text", found)
        return found

    def number(self, key: str, default: float | None = None) -> float:
        """Return a number."""
        found = self.own.get(key, default)
        is_number = isinstance(found, int | float | np.number) and not isinstance(found, bool)
        if not is_number or not math.isfinite(found):
            raise self.error(key, "a number", found)
        # As it was written: 0.1 is a float32 that is not 0.1.
        return float(str(found))

    def base(self, key: str, default: float) -> float:
        """Return what powers of turn positions: a number above 0."""
        found = self.number(key, default)
        if found <= 0:
            raise self.error(key, "a number above 0", found)
        return found

    def each(self, key: str, layers: int, default: int | None = None) -> list[int]:
        """Return a whole number for each layer, of which a file may say one."""
        found = self.own.get(key, default)
        values = np.asarray(found).tolist() if np.ndim(found) else [found] * layers
        is_whole = all(isinstance(one, int | np.integer) and one >= 0 for one in values)
        if len(values) != layers or not is_whole:
            raise self.error(key, f"a whole number for each of {layers} layers", found)
        return [int(one) for one in values]


def fields_of(keys: Keys) -> dict[str, Any]:
    """Return the fields of a config.json.

    Raises:
        LlmError: the file is of another architecture, or lacks a key. Names it.
    """
    found = _READERS.get(keys.architecture) if isinstance(keys.architecture, str) else None
    if found is None:
        raise LlmError(
            f"{keys.where}: general.architecture must be one of {', '.join(_READERS)}, got "
            f"{shown(keys.architecture)}. Only these families are written in jaxtap_llm/model.py."
        )
    family, more = found
    fields = {"model_type": family} | _common(keys)
    return fields | more(keys, fields)


def check(keys: Keys, config: Config, written: Mapping[str, Any]) -> None:
    """Check that a file says nothing that a config does not.

    Args:
        keys: of the file.
        config: that was read from it.
        written: what a file of this config says, by key of the architecture.

    Raises:
        LlmError: names a key that says something else.
    """
    for key, found in keys.own.items():
        wanted: Any = written.get(key)
        if key in written and _is_same(found, wanted):
            continue
        if key in _FIXED and np.ndim(found) == 0 and found in _FIXED[key]:
            continue
        if key in _HARMLESS and key not in _FIXED:
            continue
        if key in written:
            raise keys.error(key, f"{shown(wanted)} for {config.family}", found)
        raise LlmError(
            f"{keys.where}: {keys.architecture}.{key} is unknown, got {shown(found)}: what it says "
            f"can't be honoured for {config.family}."
        )


def _is_same(found: Any, wanted: Any) -> bool:
    """Return whether two values of a key say the same; one may be a number for all layers."""
    ours, theirs = np.asarray(wanted), np.asarray(found)
    if ours.dtype.kind not in "biuf" or theirs.dtype.kind not in "biuf":
        return ours.shape == theirs.shape and bool((ours == theirs).all())
    if not theirs.size or (ours.ndim == theirs.ndim and ours.shape != theirs.shape):
        return False
    return np.allclose(theirs, ours, rtol=1e-5, atol=0)


def _common(keys: Keys) -> dict[str, Any]:
    """Return the fields that all families have."""
    # Bounded before they are counted through: config.json's bounds.
    layers, heads = (
        keys.whole(key, least=1, most=MOST[field])
        for key, field in (
            ("block_count", "num_hidden_layers"),
            ("attention.head_count", "num_attention_heads"),
        )
    )
    width = keys.whole("embedding_length")
    size = keys.whole("attention.key_length", width // heads, least=1, most=MOST["head_dim"])
    groups = keys.each("attention.head_count_kv", layers, heads)
    table = keys.shapes.get("token_embd.weight")
    if table is None or len(table) != 2:
        raise LlmError(f"{keys.where} must have a matrix token_embd.weight, got {table}.")
    fields = {
        "vocab_size": table[0],
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": groups[0],
        "head_dim": size,
        "intermediate_size": max(keys.each("feed_forward_length", layers, 0)),
        "rms_norm_eps": keys.number("attention.layer_norm_rms_epsilon"),
        "rope_theta": keys.base("rope.freq_base", 1e4),
        "max_position_embeddings": keys.whole("context_length"),
        "tie_word_embeddings": "output.weight" not in keys.shapes,
    }
    scaling = _scaling(keys, size, fields["rope_theta"])
    return fields | ({"rope_scaling": scaling} if scaling else {})


def _scaling(keys: Keys, size: int, theta: float) -> dict[str, Any]:
    """Return what stretches positions; empty for nothing."""
    kind, length = keys.text("rope.scaling.type", "none"), "original_max_position_embeddings"
    trained = "rope.scaling.original_context_length"
    if kind == "linear":
        return {"rope_type": "linear", "factor": keys.number("rope.scaling.factor")}
    if kind == "yarn":
        return {
            "rope_type": "yarn",
            "factor": keys.number("rope.scaling.factor"),
            length: keys.whole(trained),
            "beta_fast": keys.number("rope.scaling.yarn_beta_fast", 32.0),
            "beta_slow": keys.number("rope.scaling.yarn_beta_slow", 1.0),
        }
    if "rope_factors_long.weight" in keys.shapes:
        factors = {f"{one}_factor": keys.tensor(f"rope_factors_{one}.weight").tolist()
                   for one in ("short", "long")}  # fmt: skip
        scale = keys.number("rope.scaling.attn_factor", 1.0)
        known = {length: keys.whole(trained), "attention_factor": scale, "factor": 1.0}
        return {"rope_type": "longrope"} | factors | known
    if kind not in ("none", "longrope"):
        raise keys.error("rope.scaling.type", "none, linear, yarn or longrope", kind)
    if "rope_freqs.weight" not in keys.shapes or keys.architecture == "gemma4":
        return {}
    return _divided(keys, keys.tensor("rope_freqs.weight"), size, theta)


def _divided(keys: Keys, factors: np.ndarray, size: int, theta: float) -> dict[str, Any]:
    """Return what divides frequencies by these factors: Llama 3's rule, or LongRoPE's lists."""
    plain = Rope(theta).frequencies(size)
    lengths = {keys.whole("rope.scaling.original_context_length", 8192, least=1), 8192}
    for length in lengths:
        rope = Rope(theta, float(factors.max()), (1.0, 4.0, length))
        turns = rope.frequencies(size)
        if turns.shape == factors.shape and np.allclose(plain / turns, factors, rtol=1e-5):
            return _LLAMA3 | {
                "factor": rope.factor, "original_max_position_embeddings": length
            }  # fmt: skip
    each = factors.astype(np.float64).tolist()
    return {
        "rope_type": "longrope",
        "short_factor": each,
        "long_factor": each,
        "original_max_position_embeddings": keys.whole("context_length"),
        "attention_factor": 1.0,
        "factor": 1.0,
    }


def _experts(keys: Keys) -> dict[str, Any]:
    return {
        "num_experts": keys.whole("expert_count"),
        "num_experts_per_tok": keys.whole("expert_used_count"),
    }


def _llama(keys: Keys, fields: dict[str, Any]) -> dict[str, Any]:
    """Llama and Mistral are one architecture, and so is Mixtral, which has experts."""
    if not keys.whole("expert_count", 0):
        return {}
    inner = keys.whole("expert_feed_forward_length", fields["intermediate_size"])
    found = _experts(keys)
    return {
        "model_type": "mixtral",
        "intermediate_size": inner,
        "num_local_experts": found.pop("num_experts"),
        "sliding_window": None,
    } | found


def _qwen3_moe(keys: Keys, fields: dict[str, Any]) -> dict[str, Any]:
    inner = keys.whole("expert_feed_forward_length")
    return _experts(keys) | {"moe_intermediate_size": inner, "norm_topk_prob": True}


def _gemma(largest: int) -> Callable[[Keys, dict[str, Any]], dict[str, Any]]:
    """Return the reader of Gemma 2 or 3, whose largest model has so many layers."""

    def read(keys: Keys, fields: dict[str, Any]) -> dict[str, Any]:
        share = fields["hidden_size"] // fields["num_attention_heads"]
        is_largest = fields["num_hidden_layers"] == largest
        caps = ("attn_logit_softcapping", "final_logit_softcapping")
        return {
            "query_pre_attn_scalar": share if is_largest else fields["head_dim"],
            "sliding_window": keys.whole("attention.sliding_window"),
        } | {name: keys.number(name) if name in keys.own else None for name in caps}

    return read


def _gemma2(keys: Keys, fields: dict[str, Any]) -> dict[str, Any]:
    # llama.cpp's own numbers, where a file says nothing.
    caps = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
    return _gemma(46)(keys, fields) | {name: keys.number(name, cap) for name, cap in caps.items()}


def _gemma3(keys: Keys, fields: dict[str, Any]) -> dict[str, Any]:
    return _gemma(62)(keys, fields) | {
        "rope_theta": keys.base("rope.freq_base", 1e6),
        "rope_local_base_freq": keys.base("rope.freq_base_swa", 1e4),
    }


def _phi3(keys: Keys, fields: dict[str, Any]) -> dict[str, Any]:
    turning = keys.whole("rope.dimension_count", fields["head_dim"])
    return {
        "partial_rotary_factor": turning / fields["head_dim"],
        "sliding_window": keys.whole("attention.sliding_window", 0) or None,
    }


def _gpt_oss(keys: Keys, fields: dict[str, Any]) -> dict[str, Any]:
    found = _experts(keys)
    found["num_local_experts"] = found.pop("num_experts")
    inner = keys.whole("expert_feed_forward_length")
    window = keys.whole("attention.sliding_window")
    scaling = fields.get("rope_scaling")
    # llama.cpp takes whole bounds, and the published models say otherwise.
    yarn = {"rope_scaling": scaling | {"truncate": False}} if scaling else {}
    if not yarn:
        raise keys.error("rope.scaling.type", "yarn", keys.own.get("rope.scaling.type"))
    return found | {"intermediate_size": inner, "sliding_window": window} | yarn


def _llama4(keys: Keys, fields: dict[str, Any]) -> dict[str, Any]:
    found = _experts(keys)
    count = found.pop("num_experts")
    return found | {
        "num_local_experts": count,
        "intermediate_size": keys.whole("expert_feed_forward_length"),
        "intermediate_size_mlp": fields["intermediate_size"] or 1,
        "interleave_moe_layer_step": keys.whole("interleave_moe_layer_step"),
        "use_qk_norm": count != 128,
    }


def _gemma4(keys: Keys, fields: dict[str, Any]) -> dict[str, Any]:
    layers, shapes = fields["num_hidden_layers"], keys.shapes
    local: Any = keys.own.get("attention.sliding_window_pattern")
    if np.ndim(local) != 1 or len(local) != layers:
        raise keys.error(
            "attention.sliding_window_pattern", f"a bool for each of {layers} layers", local
        )
    local = [bool(one) for one in local]
    if local[-1]:
        raise keys.error("attention.sliding_window_pattern", "false for the last layer", local)
    groups = keys.each("attention.head_count_kv", layers)
    widths = keys.each("feed_forward_length", layers)
    shared = keys.whole("attention.shared_kv_layers", 0)
    whole = local.index(False)
    first = local.index(True) if True in local else whole
    has_values = f"blk.{whole}.attn_v.weight" in shapes
    global_size = keys.whole("attention.key_length")
    size = keys.whole("attention.key_length_swa", global_size)
    kinds = ("sliding_attention", "full_attention")
    found = {
        "head_dim": size,
        "global_head_dim": global_size,
        "num_key_value_heads": groups[first],
        "num_global_key_value_heads": groups[whole],
        "attention_k_eq_v": not has_values,
        "layer_types": [kinds[not one] for one in local],
        "sliding_window": keys.whole("attention.sliding_window"),
        "num_kv_shared_layers": shared,
        "intermediate_size": widths[0],
        "use_double_wide_mlp": widths[-1] == 2 * widths[0],
        "hidden_size_per_layer_input": keys.whole("embedding_length_per_layer_input", 0),
        "vocab_size_per_layer_input": shapes.get("per_layer_token_embd.weight", (0,))[0],
        "final_logit_softcapping": keys.number("final_logit_softcapping", 0.0),
        "rope_parameters": {
            "sliding_attention": {
                "rope_type": "default",
                "rope_theta": keys.base("rope.freq_base_swa", 1e4),
            },
            "full_attention": _proportional(keys, global_size, fields["rope_theta"]),
        },
    }
    if keys.whole("expert_count", 0):
        experts = _experts(keys)
        found |= {
            "enable_moe_block": True,
            "num_experts": experts["num_experts"],
            "top_k_experts": experts["num_experts_per_tok"],
            "moe_intermediate_size": keys.whole("expert_feed_forward_length"),
        }
    return found


def _proportional(keys: Keys, size: int, theta: float) -> dict[str, Any]:
    """Return Gemma 4's positions of layers without windows: pairs that turn, and still ones."""
    if "rope_freqs.weight" not in keys.shapes:
        return {"rope_type": "default", "rope_theta": theta}
    factors = keys.tensor("rope_freqs.weight")
    turning = factors[factors < _STILL]
    first = float(turning[0]) if len(turning) else 1.0
    is_so = len(factors) == size // 2 and len(turning) and (factors[: len(turning)] < _STILL).all()
    if not is_so or not np.allclose(turning, first):
        raise LlmError(
            f"{keys.where}: rope_freqs.weight must have one number for the first of {size // 2} "
            f"pairs, and {_STILL:g} or more for the others."
        )
    share = {"partial_rotary_factor": len(turning) / len(factors)}
    return {"rope_type": "proportional", "rope_theta": theta, "factor": first} | share


def _qwen3_5(keys: Keys, fields: dict[str, Any]) -> dict[str, Any]:
    size, values = keys.whole("ssm.state_size"), keys.whole("ssm.time_step_rank")
    inner = keys.whole("ssm.inner_size")
    if not values or inner % values:
        raise keys.error("ssm.inner_size", f"a multiple of {values}, ssm.time_step_rank", inner)
    turning = keys.whole("rope.dimension_count")
    found = {
        "linear_conv_kernel_dim": keys.whole("ssm.conv_kernel"),
        "linear_key_head_dim": size,
        "linear_value_head_dim": inner // values,
        "linear_num_key_heads": keys.whole("ssm.group_count"),
        "linear_num_value_heads": values,
        "full_attention_interval": keys.whole("full_attention_interval"),
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": fields["rope_theta"],
            "partial_rotary_factor": turning / fields["head_dim"],
        },
    }
    if not keys.whole("expert_count", 0):
        return found
    return found | _experts(keys) | {
        "moe_intermediate_size": keys.whole("expert_feed_forward_length"),
        "shared_expert_intermediate_size": keys.whole("expert_shared_feed_forward_length"),
    }  # fmt: skip


def _nothing(keys: Keys, fields: dict[str, Any]) -> dict[str, Any]:
    return {}


_READERS: Mapping[str, tuple[str, Callable[[Keys, dict[str, Any]], dict[str, Any]]]] = {
    "llama": ("llama", _llama),
    "qwen2": ("qwen2", _nothing),
    "qwen3": ("qwen3", _nothing),
    "qwen3moe": ("qwen3_moe", _qwen3_moe),
    "gemma2": ("gemma2", _gemma2),
    "gemma3": ("gemma3_text", _gemma3),
    "phi3": ("phi3", _phi3),
    "smollm3": ("smollm3", _nothing),
    "gpt-oss": ("gpt_oss", _gpt_oss),
    "llama4": ("llama4_text", _llama4),
    "gemma4": ("gemma4_text", _gemma4),
    "qwen35": ("qwen3_5_text", _qwen3_5),
    "qwen35moe": ("qwen3_5_moe_text", _qwen3_5),
}
"""By what llama.cpp calls an architecture: the family, and what reads its own keys."""
