"""Convolutions with packed weights."""
