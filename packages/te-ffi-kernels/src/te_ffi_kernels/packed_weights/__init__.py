"""Matmuls with weights packed in 8 and 4 bits."""
