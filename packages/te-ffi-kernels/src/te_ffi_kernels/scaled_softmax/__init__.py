"""Softmax of scaled logits, as Transformer Engine's targets."""
