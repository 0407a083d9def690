"""Convolutions of small groups with stored weights beside XLA's float32 ones, sides in turn.

uv run --python 3.12 python benchmarks/depthwise.py [--rounds 9]

Prints a table in Markdown. "As XLA computes it" is the same without the shifted products of
``quant_numerics.ops.shifted``; *speed* is in multiples of float32, *gain* in multiples of that.
"""

import argparse
import functools
import statistics

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from paired import in_turn

import quant_numerics as qn
from quant_numerics.ops import shifted

# Input, window, stride, groups and outputs; NHWC.
CASES = [
    ((1, 112, 112, 32), 3, 1, 32, 32),
    ((1, 56, 56, 144), 3, 1, 144, 144),
    ((8, 56, 56, 144), 3, 1, 144, 144),
    ((1, 28, 28, 240), 5, 2, 240, 240),
    ((1, 14, 14, 576), 3, 1, 576, 576),
    ((1, 28, 28, 64), 7, 1, 64, 64),
    ((1, 28, 28, 32), 3, 1, 32, 128),
    ((1, 28, 28, 64), 3, 1, 16, 64),
]


def step(with_activations, options, x, w):
    if with_activations:
        x = qn.quantize(x, "int8", channel_axes=(0,))
    return qn.conv_general_dilated(x, w, **options)


def sides(shape, window, stride, groups, outputs, with_activations):
    """Return calls of the compiled convolutions, by name."""
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=shape), jnp.float32)
    size = window, window, shape[-1] // groups, outputs
    w = jnp.asarray(rng.normal(size=size), jnp.float32)
    q = qn.quantize(w, "int8", channel_axes=(3,))
    options = {
        "window_strides": (stride, stride),
        "padding": "SAME",
        "dimension_numbers": ("NHWC", "HWIO", "NHWC"),
        "feature_group_count": groups,
    }
    plain = jax.jit(functools.partial(lax.conv_general_dilated, **options)).lower(x, w).compile()
    found = {"float32": functools.partial(plain, x, w)}
    kept = shifted._MOST_PRODUCTS
    for name, most in (("int8", kept), ("as XLA computes it", 0)):
        shifted._MOST_PRODUCTS = most
        jax.clear_caches()  # traces of the other side
        run = functools.partial(step, with_activations, options)
        found[name] = functools.partial(jax.jit(run).lower(x, q).compile(), x, q)
    shifted._MOST_PRODUCTS = kept
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    rounds = parser.parse_args().rounds
    head = "input", "window", "stride", "groups", "outputs", "int8", "float32, ms", "int8, ms"
    head += "as XLA computes it, ms", "speed", "gain"
    print(f"| {' | '.join(head)} |\n|{' --- |' * len(head)}")
    for case in CASES:
        for with_activations in (False, True):
            plain, ours, before = in_turn(sides(*case, with_activations), rounds).values()
            shape, *others = case
            what = "x".join(map(str, shape)), *others, "both" if with_activations else "weights"
            ms = [f"{statistics.median(one) * 1e3:.3g}" for one in (plain, ours, before)]
            ratios = [
                f"{statistics.median(a / b for a, b in zip(one, ours, strict=True)):.1f}"
                for one in (plain, before)
            ]
            print(f"| {' | '.join(map(str, (*what, *ms, *ratios)))} |", flush=True)


if __name__ == "__main__":
    main()
