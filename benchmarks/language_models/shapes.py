"""The decoders that are measured: their config.json."""

SHAPES = {
    "213M": {
        "model_type": "llama",
        "hidden_size": 1024,
        "num_hidden_layers": 16,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "intermediate_size": 2816,
        "vocab_size": 32000,
        "rms_norm_eps": 1e-5,
    },
    "0.5B": {  # Qwen2.5-0.5B
        "model_type": "qwen2",
        "hidden_size": 896,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "intermediate_size": 4864,
        "vocab_size": 151936,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "tie_word_embeddings": True,
    },
    "experts": {  # Qwen3's, of which a token uses 4 of 32
        "model_type": "qwen3_moe",
        "hidden_size": 768,
        "num_hidden_layers": 8,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "moe_intermediate_size": 512,
        "num_experts": 32,
        "num_experts_per_tok": 4,
        "norm_topk_prob": True,
        "vocab_size": 32000,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
    },
}

QUICK = "-quick"
"""The end of the names of small shapes, with which everything runs in a few minutes."""
SHAPES |= {
    name + QUICK: fields | {"num_hidden_layers": 2, "vocab_size": 2048}
    for name, fields in SHAPES.items()
}
