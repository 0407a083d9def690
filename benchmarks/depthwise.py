"""Convolutions of small groups in int8 beside XLA's float32 ones, sides in turn.

uv run --python 3.12 python benchmarks/depthwise.py [--rounds 9]

Prints a table in Markdown: with weights in int8, with both sides, and both gradients of training in
int8 both ways. "As XLA computes it" is the same without the products of
``quant_numerics.ops.cpu_conv``; *speed* is in multiples of float32, *gain* in multiples of that.
"""

import argparse
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from paired import compared, in_turn

import quant_numerics as qn
from jaxtap_testkit.qarray_samples import train_conv
from quant_numerics.ops import cpu_conv

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


WEIGHTS, BOTH, GRADIENTS = "weights", "both", "gradients"


def forward(x, w, options, kind):
    if kind == BOTH:
        x = qn.quantize(x, "int8", channel_axes=(0,))
    return qn.conv_general_dilated(x, w, **options)


def gradients(x, w, conv):
    y, back = jax.vjp(conv, x, w)
    return back(y)


def sides(shape, window, stride, groups, outputs, kind):
    """Return calls of the compiled convolutions, by name."""
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=shape), jnp.float32)
    size = window, window, shape[-1] // groups, outputs
    w = jnp.asarray(rng.normal(size=size), jnp.float32)
    options = {
        "window_strides": (stride, stride),
        "padding": "SAME",
        "dimension_numbers": ("NHWC", "HWIO", "NHWC"),
        "feature_group_count": groups,
    }
    plain = functools.partial(lax.conv_general_dilated, **options)
    if kind == GRADIENTS:
        how, back = qn.HowToQuantize("int8"), qn.Backward("int8")
        given = {"lhs_how": how, "rhs_how": how, "backward": (back, back)}
        conv = functools.partial(train_conv, **options, **given)
        plain, run = (functools.partial(gradients, conv=one) for one in (plain, conv))
        held = w
    else:
        run = functools.partial(forward, options=options, kind=kind)
        held = qn.quantize(w, "int8", channel_axes=(3,))
    found = {"float32": functools.partial(jax.jit(plain).lower(x, w).compile(), x, w)}
    kept = cpu_conv._MOST_PRODUCTS
    for name, most in (("int8", kept), ("as XLA computes it", 0)):
        cpu_conv._MOST_PRODUCTS = most
        jax.clear_caches()  # traces of the other side
        found[name] = functools.partial(jax.jit(run).lower(x, held).compile(), x, held)
    cpu_conv._MOST_PRODUCTS = kept
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    rounds = parser.parse_args().rounds
    head = "input", "window", "stride", "groups", "outputs", "int8", "float32, ms", "int8, ms"
    head += "as XLA computes it, ms", "speed", "gain"
    print(f"| {' | '.join(head)} |\n|{' --- |' * len(head)}")
    for case in CASES:
        for kind in (WEIGHTS, BOTH, GRADIENTS):
            plain, ours, before = in_turn(sides(*case, kind), rounds).values()
            shape, *others = case
            what = "x".join(map(str, shape)), *others, kind
            print(compared(what, plain, ours, before), flush=True)


if __name__ == "__main__":
    main()
