"""Other projects' formats: GGUF and compressed-tensors as trees of QArrays."""
