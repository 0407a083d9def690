"""Convolutions of windows of one element with stored weights, in kernels and in XLA, in turn.

uv run --python 3.12 python benchmarks/pointwise.py [--rounds 9]

Prints a table in Markdown. *Speed* is in multiples of XLA's float32 convolution, *gain* in
multiples of the same quantized convolution without kernels.
"""

import argparse
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from paired import compared, in_turn

from provider_xla import PtqProvider, QuantizationRule

# Input, stride and outputs; NHWC. All but the last two are of EfficientNet-Lite0.
CASES = [
    ((1, 112, 112, 32), 1, 16),
    ((1, 112, 112, 16), 1, 96),
    ((1, 56, 56, 96), 1, 24),
    ((1, 56, 56, 24), 1, 144),
    ((1, 28, 28, 240), 1, 40),
    ((1, 14, 14, 80), 1, 480),
    ((1, 14, 14, 672), 1, 112),
    ((1, 7, 7, 1152), 1, 192),
    ((1, 7, 7, 320), 1, 1280),
    ((8, 56, 56, 24), 1, 144),
    ((8, 14, 14, 672), 1, 112),
    ((8, 7, 7, 1152), 1, 192),
    ((1, 56, 56, 256), 1, 64),
    ((1, 56, 56, 256), 2, 512),
]
FLOAT32 = "float32"


def sides(shape, stride, outputs, act_qtype):
    """Return calls of the compiled convolutions, by name, and the kernel that one is in."""
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=shape), jnp.float32)
    w = jnp.asarray(rng.normal(size=(1, 1, shape[-1], outputs)), jnp.float32)
    conv = functools.partial(
        lax.conv_general_dilated,
        window_strides=(stride, stride),
        padding="SAME",
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
    )

    def fn(w, x):
        return conv(x, w)

    found = {FLOAT32: functools.partial(jax.jit(fn).lower(w, x).compile(), w, x)}
    rule = QuantizationRule(weight_qtype="int8", act_qtype=act_qtype)
    plan = PtqProvider(rule).plan(fn, w, x)
    for name, prepack in (("kernels", True), ("XLA", False)):
        stored = plan.quantize(w, prepack=prepack)
        run = jax.jit(plan.apply(fn)).lower(stored, x).compile()
        found[name] = functools.partial(run, stored, x)
    return found, plan.ops[0].kernel or "XLA"


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    rounds = parser.parse_args().rounds
    head = "input", "stride", "outputs", "int8", "kernel", "float32, ms", "int8, ms", "in XLA, ms"
    head += "speed", "gain"
    print(f"| {' | '.join(head)} |\n|{' --- |' * len(head)}")
    for shape, stride, outputs in CASES:
        for act_qtype in (None, "int8"):
            found, kernel = sides(shape, stride, outputs, act_qtype)
            plain, ours, before = in_turn(found, rounds).values()
            what = "x".join(map(str, shape)), stride, outputs
            what += "both" if act_qtype else "weights", kernel.rpartition(".")[2]
            print(compared(what, plain, ours, before), flush=True)


if __name__ == "__main__":
    main()
