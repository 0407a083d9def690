"""Quantized checkpoints in folders of Hugging Face: `config.json` and safetensors files."""
