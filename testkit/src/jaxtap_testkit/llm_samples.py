"""Small decoders of the families in jaxtap_llm, and references."""

import argparse
import math

import jax
import numpy as np

from .llm_mixed_samples import REFERENCES

BASE = {
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "vocab_size": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e4,
}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 32}
LLAMA3 |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 32}
YARN |= {"beta_fast": 32.0, "beta_slow": 1.0}
KINDS = ["sliding_attention", "full_attention", "sliding_attention"]
GEMMA = {"head_dim": 32, "query_pre_attn_scalar": 16, "sliding_window": 4}
GEMMA4 = {"head_dim": 16, "global_head_dim": 32, "sliding_window": 4}
GEMMA4 |= {"final_logit_softcapping": 3.0}
QWEN35 = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8}
QWEN35 |= {"linear_value_head_dim": 16, "head_dim": 16}
QWEN35 |= {"layer_types": ["linear_attention", "linear_attention", "full_attention"] * 2}
QWEN35 |= {"num_hidden_layers": 6}
QWEN35 |= {"rope_parameters": {"partial_rotary_factor": 0.5, "rope_theta": 1e4}}
FAMILIES = {
    "llama": {"rope_scaling": LLAMA3},
    "mistral": {"sliding_window": 4, "head_dim": 32, "rope_scaling": YARN},
    "mixtral": {"num_local_experts": 6, "num_experts_per_tok": 2, "sliding_window": None},
    "phi3": {"sliding_window": 5},
    "smollm3": {"no_rope_layers": [1, 0, 1]},
    "gpt_oss": {"num_local_experts": 6, "num_experts_per_tok": 2, "swiglu_limit": 0.5}
    | {"head_dim": 16}
    | {"sliding_window": 4, "layer_types": KINDS, "rope_scaling": YARN | {"truncate": False}},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"head_dim": 32},
    "qwen3_moe": {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    | {"norm_topk_prob": True, "head_dim": 16},
    "gemma2": GEMMA | {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0},
    "gemma3_text": GEMMA | {"sliding_window_pattern": 3, "rope_local_base_freq": 100.0},
    "llama4_text": {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16}
    | {"num_hidden_layers": 4, "intermediate_size": 32, "intermediate_size_mlp": 96}
    | {"interleave_moe_layer_step": 2, "no_rope_layer_interval": 3, "attention_chunk_size": 5}
    | {"floor_scale": 4, "attn_scale": 0.3},
    "gemma4_text": GEMMA4
    | {"num_hidden_layers": 7, "num_kv_shared_layers": 3}
    | {"use_double_wide_mlp": True, "hidden_size_per_layer_input": 32}
    | {"vocab_size_per_layer_input": 256, "layer_types": [*KINDS[:2] * 3, KINDS[1]]},
    "gemma4_experts": GEMMA4
    | {"attention_k_eq_v": True, "num_global_key_value_heads": 1}
    | {"hidden_size_per_layer_input": 0, "layer_types": [*KINDS[:2], KINDS[1]]}
    | {"enable_moe_block": True, "num_experts": 6, "top_k_experts": 2}
    | {"moe_intermediate_size": 32, "model_type": "gemma4_text"},
    "qwen3_5_text": QWEN35,
    "qwen3_5_moe_text": QWEN35
    | {"num_experts": 6, "num_experts_per_tok": 2}
    | {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 64},
}


def fields_of(family):
    """Return the fields of a config.json."""
    return {"model_type": family, **BASE, **FAMILIES[family]}


def varied(params, seed=0):
    """Return parameters in which norms, biases and angles matter, too."""
    rng = np.random.default_rng(seed)

    def draw(path, x):
        if path[-1].key.endswith(("norm", "bias", "sinks", "scale", "decay")):
            return x + rng.normal(0, 0.2, x.shape).astype(np.float32)
        return x * (3 if path[-1].key == "qkv" else 1)

    return jax.tree_util.tree_map_with_path(draw, params)


def run_llm(*words):
    """Run ``jaxtap llm`` with words of its command line; its errors are raised."""
    from jaxtap_llm import cli

    parser = argparse.ArgumentParser(prog="jaxtap llm")
    cli.configure(parser)
    cli.run(parser.parse_args([*map(str, words)]))


def float64_logits(fields, tensors, tokens, cached=None, rows=lambda x: x):
    """Return one sequence's logits in float64, position by position.

    From position ``cached`` on keys and values are read from a cache of int8. Weights are
    multiplied with what ``rows`` returns for their inputs.
    """
    if fields["model_type"] in REFERENCES:
        return REFERENCES[fields["model_type"]](fields, tensors, cached, rows).logits(tokens)
    t = {name: np.asarray(x, np.float64) for name, x in tensors.items()}
    family, gemma = fields["model_type"], fields["model_type"].startswith("gemma")
    heads, groups = fields["num_attention_heads"], fields["num_key_value_heads"]
    size = fields.get("head_dim", fields["hidden_size"] // heads)
    scale = fields.get("query_pre_attn_scalar", size) ** -0.5

    def norm(name, x):
        w = t[f"{name}.weight"] + (1 if gemma else 0)
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + fields["rms_norm_eps"]) * w

    def capped(x, name):
        cap = fields.get(name)
        return x if not cap else cap * np.tanh(x / cap)

    def gate(x):
        if gemma:
            return x / 2 * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
        return x / (1 + np.exp(-x))

    scaling = fields.get("rope_scaling", {})

    def yarn(j, theta):
        """How far frequency j is stretched, from 0 to 1."""
        length = YARN["original_max_position_embeddings"]
        bounds = [
            size * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(theta))
            for turns in (YARN["beta_fast"], YARN["beta_slow"])
        ]
        if scaling.get("truncate") is not False:
            bounds = [math.floor(bounds[0]), math.ceil(bounds[1])]
        low, high = bounds
        low, high = max(low, 0), min(high, size - 1)
        return min(1.0, max(0.0, (j - low) / (high - low)))

    def angle(j, local):
        theta = fields["rope_local_base_freq"] if local else fields["rope_theta"]
        one = theta ** (-2 * j / size)
        if scaling.get("rope_type") == "yarn":
            return one * (1 - yarn(j, theta)) + one / scaling["factor"] * yarn(j, theta)
        if not scaling:
            return one
        wave, length = 2 * math.pi / one, LLAMA3["original_max_position_embeddings"]
        if wave < length / LLAMA3["high_freq_factor"]:
            return one
        if wave > length / LLAMA3["low_freq_factor"]:
            return one / LLAMA3["factor"]
        low, high = LLAMA3["low_freq_factor"], LLAMA3["high_freq_factor"]
        smooth = (length / wave - low) / (high - low)
        return (1 - smooth) * one / LLAMA3["factor"] + smooth * one

    def turned(x, at, local):
        if scaling.get("rope_type") == "yarn":
            x = x * (0.1 * math.log(scaling["factor"]) + 1)
        out = x.copy()
        for j in range(size // 2):
            c, s = math.cos(at * angle(j, local)), math.sin(at * angle(j, local))
            a, b = x[j], x[j + size // 2]
            out[j], out[j + size // 2] = a * c - b * s, b * c + a * s
        return out

    def rounded(rows):
        step = np.abs(rows).max(-1, keepdims=True) / 127
        return np.round(rows / step) * step

    def attention(i, x):
        at = f"model.layers.{i}.self_attn"
        every = {"gemma2": 2, "gemma3_text": fields.get("sliding_window_pattern"), "gpt_oss": 2}
        every = every.get(family)
        windowed = every is not None and (i + 1) % every != 0
        windowed = windowed or (
            family in ("mistral", "mixtral", "phi3") and fields["sliding_window"]
        )
        local = windowed and family == "gemma3_text"
        still = family == "smollm3" and not fields["no_rope_layers"][i]

        def project(name, count):
            if family == "phi3":
                first = {"q": 0, "k": heads, "v": heads + groups}[name] * size
                part = slice(first, first + count * size)
                return (rows(x) @ t[f"{at}.qkv_proj.weight"][part].T).reshape(len(x), count, size)
            y = rows(x) @ t[f"{at}.{name}_proj.weight"].T
            if f"{at}.{name}_proj.bias" in t:
                y = y + t[f"{at}.{name}_proj.bias"]
            y = y.reshape(len(x), count, size)
            if f"{at}.{name}_norm.weight" in t:
                y = norm(f"{at}.{name}_norm", y)
            return y

        q, k, v = project("q", heads), project("k", groups), project("v", groups)
        out = np.zeros((len(x), heads, size))
        for n in range(len(x)):
            first = max(0, n + 1 - fields["sliding_window"]) if windowed else 0
            for h in range(heads):
                g = h // (heads // groups)
                query = turned(q[n, h], n * (not still), local)
                places = [m * (not still) for m in range(first, n + 1)]
                keys = np.array([turned(k[first + m, g], p, local) for m, p in enumerate(places)])
                values = v[first : n + 1, g]
                if cached is not None and n >= cached:
                    keys, values = rounded(keys), rounded(values)
                scores = keys @ query * scale
                weights = np.exp(capped(scores, "attn_logit_softcapping"))
                sink = np.exp(t[f"{at}.sinks"][h]) if f"{at}.sinks" in t else 0
                out[n, h] = weights @ values / (weights.sum() + sink)
        y = rows(out.reshape(len(x), -1)) @ t[f"{at}.o_proj.weight"].T
        return y + t[f"{at}.o_proj.bias"] if f"{at}.o_proj.bias" in t else y

    def dense(at, x):
        x = rows(x)
        if family == "phi3":
            both = x @ t[f"{at}.gate_up_proj.weight"].T
            first, second = np.split(both, 2, axis=-1)
            return rows(gate(first) * second) @ t[f"{at}.down_proj.weight"].T
        if family == "mixtral":
            inner = gate(x @ t[f"{at}.w1.weight"].T) * (x @ t[f"{at}.w3.weight"].T)
            return rows(inner) @ t[f"{at}.w2.weight"].T
        inner = gate(x @ t[f"{at}.gate_proj.weight"].T) * (x @ t[f"{at}.up_proj.weight"].T)
        return rows(inner) @ t[f"{at}.down_proj.weight"].T

    def expert(at, e, x):
        """gpt-oss's: gates and values take turns, and are clipped."""
        both = rows(x) @ t[f"{at}.gate_up_proj"][e] + t[f"{at}.gate_up_proj_bias"][e]
        most = fields["swiglu_limit"]
        first, second = np.minimum(both[::2], most), np.clip(both[1::2], -most, most)
        inner = (second + 1) * first / (1 + np.exp(-1.702 * first))
        return rows(inner) @ t[f"{at}.down_proj"][e] + t[f"{at}.down_proj_bias"][e]

    def mlp(i, x):
        at = f"model.layers.{i}.mlp"
        if family == "gpt_oss":
            found = []
            for row in x:
                chances = t[f"{at}.router.weight"] @ row + t[f"{at}.router.bias"]
                best = np.argsort(-chances)[: fields["num_experts_per_tok"]]
                weights = np.exp(chances[best]) / np.exp(chances[best]).sum()
                each = zip(weights, best, strict=True)
                found.append(sum(w * expert(f"{at}.experts", e, row) for w, e in each))
            return np.array(found)
        if family == "mixtral":
            at = f"model.layers.{i}.block_sparse_moe"
        elif family != "qwen3_moe":
            return dense(at, x)
        rows = []
        for row in x:
            chances = np.exp(t[f"{at}.gate.weight"] @ row)
            best = np.argsort(-chances)[: fields["num_experts_per_tok"]]
            parts = [chances[e] * dense(f"{at}.experts.{e}", row) for e in best]
            rows.append(sum(parts) / chances[best].sum())
        return np.array(rows)

    x = t["model.embed_tokens.weight"][tokens]
    x = x * fields["hidden_size"] ** 0.5 if gemma else x
    for i in range(fields["num_hidden_layers"]):
        at = f"model.layers.{i}"
        y = attention(i, norm(f"{at}.input_layernorm", x))
        x = x + (norm(f"{at}.post_attention_layernorm", y) if gemma else y)
        before = "pre_feedforward_layernorm" if gemma else "post_attention_layernorm"
        y = mlp(i, norm(f"{at}.{before}", x))
        x = x + (norm(f"{at}.post_feedforward_layernorm", y) if gemma else y)
    table = t.get("lm_head.weight", t["model.embed_tokens.weight"])
    return capped(rows(norm("model.norm", x)) @ table.T, "final_logit_softcapping")
