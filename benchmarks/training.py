"""A training step in int8 both ways beside float32, by width and batch, sides in turn.

uv run --python 3.12 python benchmarks/training.py [--rounds 9]

Prints a table in Markdown: a three-layer MLP with its value and gradient. "As XLA lays it out" is
int8 without the transposes of ``quant_numerics.ops.cpu_dot``, and *gain* what these make faster;
*speed* is that of int8 in multiples of float32. Medians of ratios of one round.
"""

import argparse
import functools
import statistics

import jax
import jax.numpy as jnp
import numpy as np
from paired import in_turn

import provider_xla as xla
from quant_numerics.ops import cpu_dot

RULE = xla.QtRule(weight_qtype="int8", act_qtype="int8", bwd_qtype="int8")
CASES = [(256, 64), (256, 256), (512, 64), (512, 256), (512, 1024), (1024, 64), (1024, 256)]
CASES += [(1024, 1024), (2048, 256)]


def model(params, x):
    for w in params:
        x = jnp.tanh(x @ w)
    return x


def loss(params, x):
    return jnp.mean(model(params, x) ** 2)


def compiled(fn, params, x):
    step = jax.jit(jax.value_and_grad(fn)).lower(params, x).compile()
    return functools.partial(step, params, x)


def sides(params, x):
    """Return the compiled step of each side, by name."""
    found = {"float32": compiled(loss, params, x)}
    kept = cpu_dot._LEAST_PRODUCTS
    for name, least in (("int8", kept), ("as XLA lays it out", float("inf"))):
        cpu_dot._LEAST_PRODUCTS = least
        jax.clear_caches()  # traces of the other side
        found[name] = compiled(xla.QtProvider(RULE).apply(loss), params, x)
    cpu_dot._LEAST_PRODUCTS = kept
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    rounds = parser.parse_args().rounds
    head = "width", "batch", "float32, ms", "int8, ms", "as XLA lays it out, ms", "speed", "gain"
    print(f"| {' | '.join(head)} |\n|{' --- |' * len(head)}")
    for width, batch in CASES:
        rng = np.random.default_rng(0)
        params = [
            jnp.asarray(rng.normal(size=(width, width)) / width**0.5, jnp.float32) for _ in range(3)
        ]
        x = jnp.asarray(rng.normal(size=(batch, width)), jnp.float32)
        times = in_turn(sides(params, x), rounds)
        ms = [f"{statistics.median(found) * 1e3:.3g}" for found in times.values()]
        plain, ours, before = times.values()
        speed = statistics.median(a / b for a, b in zip(plain, ours, strict=True))
        gain = statistics.median(a / b for a, b in zip(before, ours, strict=True))
        print(f"| {width} | {batch} | {' | '.join(ms)} | {speed:.2f} | {gain:.2f} |", flush=True)


if __name__ == "__main__":
    main()
