"""What differs between families in files of llama.cpp: names, orders of heads, and what is said."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from .config import Config
from .ropes import Rope

NAMES = {
    "attention_norm": ["attn_norm"],
    "qkv": ["attn_q", "attn_k", "attn_v"],
    "q_norm": ["attn_q_norm"],
    "k_norm": ["attn_k_norm"],
    "out": ["attn_output"],
    "sinks": ["attn_sinks"],
    "attention_post_norm": ["post_attention_norm"],
    "mlp_norm": ["ffn_norm"],
    "mlp_post_norm": ["post_ffw_norm"],
    "router": ["ffn_gate_inp"],
    "gate_up": ["ffn_gate", "ffn_up"],
    "down": ["ffn_down"],
    "shared_gate_up": ["ffn_gate_shexp", "ffn_up_shexp"],
    "shared_down": ["ffn_down_shexp"],
    "shared_router": ["ffn_gate_inp_shexp"],
    "input_gate": ["inp_gate"],
    "input_out": ["proj"],
    "input_post_norm": ["post_norm"],
    "layer_scale": ["layer_output_scale"],
}
OF_EXPERTS = {
    "gate_up": ["ffn_gate_exps", "ffn_up_exps"],
    "down": ["ffn_down_exps"],
}
# Gemma 4's MLP is beside the experts: it has the names of a dense one.
BESIDE = {
    "gate_up": ["ffn_gate_up_exps"],
    "down": ["ffn_down_exps"],
    "shared_gate_up": ["ffn_gate", "ffn_up"],
    "shared_down": ["ffn_down"],
    "shared_post_norm": ["post_ffw_norm_1"],
    "experts_norm": ["pre_ffw_norm_2"],
    "experts_post_norm": ["post_ffw_norm_2"],
    "router_scale": ["ffn_gate_inp"],
    "expert_scale": ["ffn_down_exps"],
}
OF_DELTA = {
    "delta_in": ["attn_qkv", "attn_gate"],
    "delta_gates": ["ssm_beta", "ssm_alpha"],
    "delta_conv": ["ssm_conv1d"],
    "delta_norm": ["ssm_norm"],
    "delta_bias": ["ssm_dt"],
    "delta_decay": ["ssm_a"],
    "out": ["ssm_out"],
}
AROUND = {
    "embed": ["token_embd"],
    "norm": ["output_norm"],
    "head": ["output"],
    "input_embed": ["per_layer_token_embd"],
    "input_project": ["per_layer_model_proj"],
    "input_norm": ["per_layer_proj_norm"],
}
ENDS = {"router_scale": ".scale", "expert_scale": ".scale", "delta_decay": ""}
"""Ends of names of tensors, where they are neither weights nor biases."""
AFTER_ATTENTION = ("gpt_oss", "qwen3_5_text", "qwen3_5_moe_text")
"""Families whose norm before the MLP has the name of one behind attention."""


def names_of(config: Config, name: str) -> list[str]:
    """Return the names of the tensors of a parameter, behind those of its layer."""
    end = ENDS.get(name, ".bias" if name.endswith("bias") else ".weight")
    return [f"{one}{end}" for one in _stems(config, name)]


def _stems(config: Config, name: str) -> list[str]:
    """Return the names of the tensors of a parameter, without their ends."""
    if name in AROUND:
        return AROUND[name]
    names = dict(NAMES)
    if config.experts:
        names |= OF_EXPERTS
    if config.parallel:
        names |= BESIDE
    if config.mixer == "delta":
        names |= OF_DELTA
    if config.family == "phi3":
        names |= {"qkv": ["attn_qkv"], "gate_up": ["ffn_up"]}
    if config.family in AFTER_ATTENTION:
        names["mlp_norm"] = ["post_attention_norm"]
    if name not in names:
        name = name.removesuffix("_bias")
    found = names[name]
    return found[: len(config.projected_heads)] if name == "qkv" else found


def columns(config: Config, name: str, width: int) -> list[int]:
    """Return how many columns of a parameter each of its tensors has."""
    count = len(names_of(config, name))
    if name.startswith("qkv") and count > 1:
        return [n * config.head_size for n in config.projected_heads]
    if name == "delta_in":
        assert config.delta is not None
        return [config.delta.width, width - config.delta.width]
    return [width // count] * count


def takes_turns(config: Config, name: str) -> bool:
    """Return whether gates and values of a parameter take turns, as gpt-oss's."""
    return bool(config.limit) and name.startswith("gate_up")


def split(config: Config, name: str, array: Any) -> Iterator[tuple[str, Any]]:
    """Yield the tensors of a parameter: names, and arrays ``[..., in, out]``."""
    names = names_of(config, name)
    if takes_turns(config, name):
        parts = [array[..., ::2], array[..., 1::2]]
    else:
        ends = np.cumsum(columns(config, name, array.shape[-1]))[:-1].tolist()
        parts = np.split(array, ends, axis=-1)
    for part, one in zip(names, parts, strict=True):
        yield part, one[:, 0] if name == "shared_router" else one


def reordered(config: Config, name: str, array: Any) -> Any:
    """Return a parameter with the heads of values as llama.cpp has them: those of a key apart."""
    if name == "delta_decay":
        array = -np.exp(array)
    if name == "delta_conv":
        array = array[:, 0].T  # as the others, [taps, numbers]
    rows = row_order(config, name)
    if rows is not None:
        # The second factor of an adapter has no inputs of the layer's.
        return array[rows] if array.shape[-2] == len(rows) else array
    order = column_order(config, name, array.shape[-1])
    return array if order is None else array[..., order]


def column_order(config: Config, name: str, width: int) -> Any:
    """Return where llama.cpp takes each column of a parameter from; None for their order here."""
    d = config.delta
    if d is None or config.mixer != "delta":
        return None
    size, first = d.value_size, 0
    if name in ("delta_in", "delta_conv"):
        first = 2 * d.keys * d.key_size
    elif name in ("delta_gates", "delta_bias", "delta_decay"):
        size = 1
    else:
        return None
    parts, step = [np.arange(first)], d.values * size
    parts += [start + _order(config, size) for start in range(first, width, step)]
    return np.concatenate(parts)


def row_order(config: Config, name: str) -> Any:
    """Return where llama.cpp takes each input of a parameter from; None for their order here."""
    if config.delta is None or config.mixer != "delta" or name != "out":
        return None
    return _order(config, config.delta.value_size)


def reordered_inputs(config: Config, name: str, array: Any) -> Any:
    """Return a kernel, or the first factor of its adapter, with its inputs in that order."""
    order = row_order(config, name)
    return array if order is None else array[order]


def _order(config: Config, size: int) -> Any:
    """Return where each number of the heads of values is taken from."""
    d = config.delta
    assert d is not None
    heads = np.arange(d.values).reshape(d.keys, -1).T.ravel()
    return (heads[:, None] * size + np.arange(size)).ravel()


def yarn(rope: Rope) -> dict[str, Any]:
    """Return what a file says of YaRN."""
    assert rope.yarn is not None
    fast, slow, length, _ = rope.yarn
    return {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": float(rope.factor),
        "rope.scaling.original_context_length": int(length),
        "rope.scaling.yarn_beta_fast": float(fast),
        "rope.scaling.yarn_beta_slow": float(slow),
    }


def longrope(rope: Rope) -> dict[str, Any]:
    """Return what a file says of LongRoPE, whose factors are tensors."""
    assert rope.longrope is not None
    return {
        "rope.scaling.type": "longrope",
        "rope.scaling.original_context_length": rope.longrope[2],
        "rope.scaling.attn_factor": float(rope.scale),
    }


def problems(config: Config) -> Iterator[str]:
    """Yield what llama.cpp does not read from a file of a family, and computes in another way."""
    first, family = config.ropes[0], config.family
    if first.yarn is not None:
        if not math.isclose(first.scale, 0.1 * math.log(first.factor) + 1):
            yield f"attention_factor of yarn must be left out for GGUF, got {first.scale}"
        # gpt-oss says otherwise, and llama.cpp takes whole bounds for it all the same.
        if not first.yarn[3] and family != "gpt_oss":
            yield "truncate of yarn must be true for GGUF, got false"
    if first.longrope is not None and family not in ("llama", "mistral", "mixtral", "phi3"):
        yield f"rope_type must not be longrope for GGUF of {family}"
    if family == "gemma3_text" and any(x.theta != 1e4 or x.factor != 1 for x in config.ropes[1:]):
        yield "rope_local_base_freq must be 10000 for GGUF"
    if family == "smollm3" and config.rope_of != tuple(_every(config, 4)):
        yield "no_rope_layers must be each fourth layer for GGUF"
    if family == "phi3" and config.heads * config.head_size != config.width:
        yield f"head_dim must be hidden_size by heads for GGUF, got {config.head_size}"
    if family == "gpt_oss" and (config.limit != 7 or config.tied):
        yield f"swiglu_limit must be 7, and no head tied, for GGUF, got {config.limit:g}"
    if family == "llama4_text":
        yield from _problems_of_llama4(config)
    if config.delta is not None:
        if config.delta.key_size != config.delta.value_size:
            yield "linear_key_head_dim and linear_value_head_dim must be equal for GGUF"
        every = _interval(config)
        if [kind.mixer == "attention" for kind in config.kinds] != _every(config, every):
            yield "layer_types must have full_attention at equal distances for GGUF"
    if family == "gemma4_text":
        for local in (True, False):
            kinds = {(k.kv_heads, k.head_size) for k in config.kinds if k.local == local}
            if len(kinds) > 1:
                yield "per_layer_config must be equal for all layers of a kind for GGUF"
        # llama.cpp takes the last two layers that have keys, the first of them with a window.
        own = sum(kind.keeps for kind in config.kinds)
        if 0 < own < config.layers and [k.local for k in config.kinds[own - 2 : own]] != [1, 0]:
            yield "num_kv_shared_layers must follow a layer with a window and one without for GGUF"


def _problems_of_llama4(config: Config) -> Iterator[str]:
    if config.rope_of != tuple(_every(config, 4)):
        yield "no_rope_layers must be each fourth layer for GGUF"
    if {window for window in config.windows if window} != {8192}:
        yield f"attention_chunk_size must be 8192 for GGUF, got {max(config.windows)}"
    if config.tempering != (8192.0, 0.1):
        yield f"floor_scale and attn_scale must be 8192 and 0.1 for GGUF, got {config.tempering}"
    if config.unit_norms == (config.experts == 128):
        yield "use_qk_norm must be false for 128 experts, and true for others, for GGUF"
    experts = [bool(config.view(i).experts) for i in range(config.layers)]
    if not any(experts):
        yield "moe_layers must have a layer for GGUF, got none"
    elif experts != _every(config, experts.index(True) + 1):
        yield "moe_layers must be at equal distances for GGUF"


def _every(config: Config, step: int) -> list[bool]:
    """Return whether each layer is one of every so many."""
    return [(i + 1) % step == 0 for i in range(config.layers)]


def _interval(config: Config) -> int:
    mixers = [config.view(i).mixer for i in range(config.layers)]
    return mixers.index("attention") + 1 if "attention" in mixers else config.layers + 1


def metadata(config: Config) -> dict[str, Any]:
    """Return what a file of a family says of a model beside what all say."""
    if config.family == "phi3":
        return {"rope.dimension_count": 2 * len(config.ropes[0].frequencies(config.head_size))}
    if config.family == "llama4_text":
        dense = [config.view(i) for i in range(config.layers) if not config.view(i).experts]
        experts = [i for i in range(config.layers) if config.view(i).experts]
        found = {
            "interleave_moe_layer_step": experts[0] + 1,
            "expert_feed_forward_length": config.view(experts[0]).inner,
        }
        return found | ({"feed_forward_length": dense[0].inner} if dense else {})
    if config.delta is not None:
        d, pairs = config.delta, len(config.ropes[0].frequencies(config.head_size))
        found = {
            "rope.dimension_count": 2 * pairs,
            # How many pairs turn by time, height and width, which are one position in a text.
            "rope.dimension_sections": np.array([*((pairs + 2 - i) // 3 for i in range(3)), 0],
                                                np.int32),
            "ssm.conv_kernel": d.taps,
            "ssm.state_size": d.key_size,
            "ssm.group_count": d.keys,
            "ssm.time_step_rank": d.values,
            "ssm.inner_size": d.values * d.value_size,
            "full_attention_interval": _interval(config),
        }  # fmt: skip
        shared = max((config.view(i).shared_inner for i in range(config.layers)), default=0)
        return found | ({"expert_shared_feed_forward_length": shared} if shared else {})
    return _of_gemma4(config) if config.family == "gemma4_text" else {}


def _of_gemma4(config: Config) -> dict[str, Any]:
    views = [config.view(i) for i in range(config.layers)]
    local = next((one for one in views if one.local), views[0])
    whole = next(one for one in views if not one.local)
    widths = [one.shared_inner or one.inner for one in views]
    found = {
        "attention.shared_kv_layers": sum(not one.keeps for one in views),
        "attention.sliding_window_pattern": [one.local for one in views],
        "attention.sliding_window": max(config.windows),
        "attention.key_length": whole.head_size,
        "attention.value_length": whole.head_size,
        "attention.key_length_swa": local.head_size,
        "attention.value_length_swa": local.head_size,
        "attention.head_count_kv": np.array([one.kv_heads for one in views], np.int32),
        "feed_forward_length": np.array(widths, np.int32),
        "embedding_length_per_layer_input": config.layer_input,
        "rope.dimension_count": whole.head_size,
        "rope.dimension_count_swa": local.head_size,
        "rope.freq_base": float(config.ropes[0].theta),
        "rope.freq_base_swa": float(config.ropes[1].theta),
    }
    return found | ({"expert_feed_forward_length": views[0].inner} if config.experts else {})
