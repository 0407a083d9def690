"""The KV cache by rule: updated and contracted state, carried quantized."""
