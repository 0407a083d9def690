"""Allocation: which parameter gets how many bits, so that the output of the model errs least."""
