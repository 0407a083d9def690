"""Allocation: which parameter gets how many bits, so that the output of the model errs least."""

from ._allocate import allocate
from ._allocation import AllocatedWeight, Allocation, Uniform

__all__ = ["AllocatedWeight", "Allocation", "Uniform", "allocate"]
