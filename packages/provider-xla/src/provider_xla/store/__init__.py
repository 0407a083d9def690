"""Saving and loading quantized parameters, through safetensors and orbax-checkpoint."""
