"""The format: a codebook, blocks and their scales, storage."""

from statistics import NormalDist

import jax.numpy as jnp

import quant_numerics as qn


def nf3():
    """Return the format. Called once, when somebody asks for it by name."""
    # As NF4 is made (QLoRA, arXiv:2305.14314, section 3): quantiles at even distances on either
    # side of 0, one more above, with the largest magnitude made 1. The outermost quantile of
    # the normal distribution is infinite, so they stop before it.
    end = 1 - (1 / 15 + 1 / 16) / 2

    def quantiles(count):
        at = [0.5 + (end - 0.5) * i / count for i in range(1, count + 1)]
        return [NormalDist().inv_cdf(p) / NormalDist().inv_cdf(end) for p in at]

    below, above = quantiles(3), quantiles(4)
    return qn.QType(
        name="nf3",
        kind="codebook",
        codebook=(*(-x for x in reversed(below)), 0.0, *above),
        qmax=1.0,
        bits=3,
        storage_dtype=jnp.uint4,  # until it is packed
        block=64,
        scale_dtype=jnp.float16,
    )
