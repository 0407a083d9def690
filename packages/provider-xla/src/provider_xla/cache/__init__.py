"""The KV cache by rule: state that a program updates and contracts with, carried quantized."""
