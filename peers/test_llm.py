"""The decoders of jaxtap_llm beside google-tunix's models and llama.cpp, with the same weights.

tunix reads the folders by its own loaders; llama.cpp the files of llama_cpp_peer.py in float32.
"""

import functools
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))

import llama_cpp_peer
import onnxruntime_peer

from jaxtap_llm import checkpoint, model
from jaxtap_llm.fields import parse_config

VOCABULARY = 300
BASE = {
    "hidden_size": 64,
    "num_hidden_layers": 7,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "vocab_size": VOCABULARY,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
EXPERTS |= {"norm_topk_prob": True, "head_dim": 16}
GEMMA = {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 4}
GEMMA2 = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "rope_theta": 1e4}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 32}
LLAMA3 |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
LINEAR = {"rope_type": "linear", "factor": 8.0}
YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 32}
LOCAL = {"num_local_experts": 6, "num_experts_per_tok": 2, "head_dim": 16}
LLAMA4 = LOCAL | {"intermediate_size": 64, "intermediate_size_mlp": 96}
LLAMA4 |= {"interleave_moe_layer_step": 2}
KINDS = ["sliding_attention", "sliding_attention", "full_attention"] * 2 + ["full_attention"]
GEMMA4 = {"head_dim": 16, "global_head_dim": 32, "sliding_window": 4, "layer_types": KINDS}
GEMMA4 |= {"final_logit_softcapping": 30.0}
SHARED = {"num_kv_shared_layers": 2, "use_double_wide_mlp": True}
SHARED |= {"layer_types": [*KINDS[:4], *KINDS[2:4], KINDS[2]]}
SHARED |= {"hidden_size_per_layer_input": 32, "vocab_size_per_layer_input": VOCABULARY}
BESIDE = {"attention_k_eq_v": True, "num_global_key_value_heads": 1, "enable_moe_block": True}
BESIDE |= {"num_experts": 6, "top_k_experts": 2, "moe_intermediate_size": 32}
BESIDE |= {"hidden_size_per_layer_input": 0}
QWEN35 = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "num_hidden_layers": 8}
QWEN35 |= {"linear_key_head_dim": 16, "linear_value_head_dim": 16, "head_dim": 16}
QWEN35 |= {"rope_parameters": {"partial_rotary_factor": 0.5, "rope_theta": 1e4}}
QWEN35_EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
QWEN35_EXPERTS |= {"shared_expert_intermediate_size": 64}


def drawn(fields):
    """A config and parameters in which norms and biases matter, and logits are spread."""
    config = parse_config(BASE | fields)
    rng = np.random.default_rng(1)

    def draw(path, x):
        name = path[-1].key
        if name.endswith(("norm", "bias", "sinks", "scale", "decay")):
            return x + rng.normal(0, 0.1, x.shape).astype(np.float32)
        return x * (40 if name == "embed" and not config.gemma else 1)

    return config, jax.tree_util.tree_map_with_path(draw, checkpoint.init(config))


def tunix_model(kind, folder):
    """tunix's model of a kind, read from a folder by its own loader."""
    common = {"num_layers": 7, "embed_dim": 64, "hidden_dim": 96, "num_heads": 4, "head_dim": 16}
    common |= {"num_kv_heads": 2}
    llama = common | {"vocab_size": VOCABULARY, "rope_theta": 1_000_000, "norm_eps": 1e-6}
    gemma = common | {"num_embed": VOCABULARY, "sliding_window_size": 4}
    if kind.startswith("llama"):
        from tunix.models.llama3 import model as made
        from tunix.models.llama3 import params

        config = made.ModelConfig(**llama, weight_tying=kind.endswith("tied"))
    elif kind == "qwen2":
        from tunix.models.qwen2 import model as made
        from tunix.models.qwen2 import params

        config = made.ModelConfig(**llama, use_tied_embedding=True)
    elif kind.startswith("qwen3"):
        from tunix.models.qwen3 import model as made
        from tunix.models.qwen3 import params

        experts = {"num_experts": 8, "num_experts_per_tok": 2, "hidden_dim": 64}
        config = made.ModelConfig(**llama | (experts if kind == "qwen3 experts" else {}))
    elif kind == "gemma2":
        from tunix.models.gemma import model as made
        from tunix.models.gemma import params_safetensors as params

        local, whole = made.AttentionType.LOCAL_SLIDING, made.AttentionType.GLOBAL
        caps = {"final_logit_softcap": 30.0, "attn_logits_soft_cap": 50.0}
        norms = {"use_post_attn_norm": True, "use_post_ffw_norm": True}
        pattern = [local, whole] * 3 + [local]
        config = made.ModelConfig(**gemma, **caps, **norms, attention_types=pattern)
    else:
        from tunix.models.gemma3 import model as made
        from tunix.models.gemma3 import params_safetensors as params

        bases = {"global_base_frequency": 1_000_000, "global_scale_factor": 8.0}
        config = made.ModelConfig(**gemma, **bases, param_dtype=jnp.float32)
    return params.create_model_from_safe_tensors(str(folder), config, dtype=jnp.float32)


@pytest.mark.filterwarnings("ignore")  # of tunix and what it imports
@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("llama", {"model_type": "llama"}),
        ("llama, tied", {"model_type": "llama", "tie_word_embeddings": True}),
        ("qwen2", {"model_type": "qwen2", "tie_word_embeddings": True}),
        ("qwen3", {"model_type": "qwen3", "head_dim": 16}),
        ("qwen3 experts", {"model_type": "qwen3_moe", **EXPERTS}),
        ("gemma2", {"model_type": "gemma2", **GEMMA, **GEMMA2}),
        ("gemma3", {"model_type": "gemma3_text", **GEMMA, "rope_scaling": LINEAR}),
    ],
)
def test_logits_are_tunixs(kind, fields, tmp_path):
    config, params = drawn(fields)
    checkpoint.write(tmp_path, BASE | fields, config, params)
    tokens = np.random.default_rng(2).integers(0, VOCABULARY, (2, 12))
    found = jax.jit(functools.partial(model.logits, config))(params, tokens)
    positions = jnp.broadcast_to(jnp.arange(12), (2, 12))
    mask = jnp.broadcast_to(jnp.tril(jnp.ones((12, 12), bool)), (2, 12, 12))
    theirs = tunix_model(kind, tmp_path)(jnp.asarray(tokens), positions, None, mask)[0]
    assert np.std(theirs) > 0.1
    np.testing.assert_allclose(found, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("fields", "near"),
    [
        ({"model_type": "llama", "rope_scaling": LLAMA3}, 1e-4),
        ({"model_type": "llama", "rope_scaling": LINEAR}, 1e-4),
        ({"model_type": "qwen2", "tie_word_embeddings": True}, 1e-4),
        ({"model_type": "qwen3", "head_dim": 32}, 1e-4),
        ({"model_type": "qwen3_moe", **EXPERTS}, 1e-4),
        # Its gelu is a table in float16.
        ({"model_type": "gemma2", **GEMMA, **GEMMA2}, 1e-3),
        ({"model_type": "gemma3_text", **GEMMA}, 1e-3),
        ({"model_type": "llama", "rope_scaling": YARN}, 1e-4),
        ({"model_type": "mixtral", **LOCAL, "sliding_window": None}, 1e-4),
        ({"model_type": "phi3", "sliding_window": None}, 1e-4),
        ({"model_type": "smollm3", "tie_word_embeddings": True}, 1e-4),
        ({"model_type": "gpt_oss", **LOCAL, "sliding_window": 4, "rope_scaling": YARN}, 1e-4),
        ({"model_type": "llama4_text", **LLAMA4}, 1e-4),
        ({"model_type": "gemma4_text", **GEMMA4, **SHARED}, 2e-3),
        ({"model_type": "gemma4_text", **GEMMA4, **BESIDE}, 2e-3),
        ({"model_type": "qwen3_5_text", **QWEN35}, 1e-4),
        ({"model_type": "qwen3_5_moe_text", **QWEN35, **QWEN35_EXPERTS}, 1e-4),
    ],
    ids=lambda value: value["model_type"] if isinstance(value, dict) else "",
)
def test_log_probabilities_are_llama_cpps(fields, near, tmp_path):
    config, params = drawn(fields)
    llama_cpp_peer.write_gguf(tmp_path / "model.gguf", config, params)
    theirs = llama_cpp_peer.Llama(tmp_path / "model.gguf", cache="F32")
    rng = np.random.default_rng(3)
    for length in (1, 9, 40):
        tokens = rng.integers(131, VOCABULARY, (1, length))
        found = jax.nn.log_softmax(model.logits(config, params, tokens)[0, -1])
        expected = theirs.log_probabilities(tokens[0], VOCABULARY)
        assert np.isfinite(expected).all()
        np.testing.assert_allclose(found, expected, atol=near)
        # Those that are nearer than the tolerance have no order.
        assert found[np.argmax(expected)] >= found.max() - 2 * near


@pytest.mark.parametrize("fields", [{"model_type": "llama"}, {"model_type": "qwen2"}])
def test_logits_are_onnxruntimes(fields):
    """Those of weights that are exactly what its 4 bits stand for; its table is float16."""
    config, params = drawn(fields)

    def rounded(kernel):
        values, scale = onnxruntime_peer.quantized(kernel)
        values = values.reshape(-1, onnxruntime_peer.BLOCK // 2)
        pairs = np.stack([values & 15, values >> 4], axis=-1).reshape(len(values), -1)
        whole = (pairs - 8.0) * scale[:, None]
        return whole.reshape(kernel.shape[::-1]).T.astype(np.float32)

    near = params | {"embed": params["embed"].astype(np.float16).astype(np.float32)}
    near["head"] = rounded(params["head"])
    near["layers"] = dict(params["layers"])
    for name in ("qkv", "out", "gate_up", "down"):
        near["layers"][name] = np.stack([rounded(kernel) for kernel in params["layers"][name]])
    theirs = onnxruntime_peer.OnnxDecoder(config, params, positions=32, accuracy=1)
    tokens = np.random.default_rng(4).integers(0, VOCABULARY, (2, 12))
    logits = jax.jit(functools.partial(model.logits, config))(near, tokens)
    for start, end in ((0, 9), (9, 10), (10, 11)):
        found = theirs.run(tokens[:, start:end], start, "head.out")[:, 0]
        np.testing.assert_allclose(found, logits[:, end - 1], atol=1e-4 * np.std(logits))
    with pytest.raises(ValueError, match="Llama or Qwen 2"):
        onnxruntime_peer.make_model(*drawn({"model_type": "gemma3_text", **GEMMA}), 32)
