"""Other people's formats: GGUF and compressed-tensors, read and written as trees of QArrays."""
