"""A training step in int8 both ways beside float32, by width and batch, sides in turn.

uv run --python 3.12 python benchmarks/training_steps.py [--rounds 9] [--cpu]

Prints a table in Markdown of value and gradient: an MLP of three layers, and a transformer block of
four heads on sequences of 64. Sides are float32; int8, its gradients rounded to nearest; and int8
rounded at random (noise for each number). Both of these as training does it and in XLA alone; the
latter draws its bits as ``jax.random`` does. *Speed* is in multiples of float32. Medians of ratios
of one round.
"""

import argparse
import dataclasses
import functools
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np
from paired import in_turn

import provider_xla as xla
from quant_numerics.contraction import in_kernel
from quant_numerics.formats import rounding

RULE = xla.QtRule(weight_qtype="int8", act_qtype="int8", bwd_qtype="int8")
RANDOM = dataclasses.replace(
    RULE, bwd_stochastic_rounding="uniform", channelwise_noise_axes=(0, -1)
)
CASES = [("MLP", 256, 64), ("MLP", 256, 256), ("MLP", 512, 64), ("MLP", 512, 256)]
CASES += [("MLP", 512, 1024), ("MLP", 1024, 64), ("MLP", 1024, 256), ("MLP", 1024, 1024)]
CASES += [("MLP", 2048, 64), ("MLP", 2048, 256)]
CASES += [("transformer", 256, 256), ("transformer", 512, 256), ("transformer", 1024, 256)]
LENGTH, HEADS = 64, 4


def mlp(params, x):
    for w in params:
        x = jnp.tanh(x @ w)
    return x


def block(params, x):
    """A transformer block, on rows of `LENGTH` tokens."""
    wqkv, wo, up, down = params
    batch, width = x.shape[0] // LENGTH, x.shape[1]
    heads = (batch, LENGTH, HEADS, width // HEADS)
    q, k, v = (part.reshape(heads) for part in jnp.split(x @ wqkv, 3, 1))
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / heads[-1] ** 0.5
    found = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v)
    x = x + found.reshape(x.shape) @ wo
    return x + jax.nn.gelu(x @ up) @ down


def made(kind, width, batch):
    """Return a loss, its parameters and the input."""
    rng = np.random.default_rng(0)
    shapes = [(width, width)] * 3
    if kind == "transformer":
        shapes = [(width, 3 * width), (width, width), (width, 4 * width), (4 * width, width)]
    params = [
        jnp.asarray(rng.normal(size=shape) / shape[0] ** 0.5, jnp.float32) for shape in shapes
    ]
    model = block if kind == "transformer" else mlp
    x = jnp.asarray(rng.normal(size=(batch, width)), jnp.float32)
    return lambda params, x: jnp.mean(model(params, x) ** 2), params, x


def sides(loss, params, x):
    """Return the compiled step of each side, by name."""
    kept = in_kernel._LEAST_SIZE, rounding.random_bits
    found = {}
    for name, rule, least, bits in (
        ("float32", None, *kept),
        ("int8", RULE, *kept),
        ("int8 in XLA", RULE, float("inf"), kept[1]),
        ("random", RANDOM, *kept),
        ("random in XLA", RANDOM, float("inf"), jax.random.bits),
    ):
        in_kernel._LEAST_SIZE, rounding.random_bits = least, bits
        jax.clear_caches()  # traces of the other sides
        fn = loss if rule is None else xla.QtProvider(rule).apply(loss)
        given = {} if rule is not RANDOM else {"quant_key": jax.random.key(0)}
        step = jax.jit(jax.value_and_grad(fn)).lower(params, x, **given).compile()
        found[name] = functools.partial(step, params, x, **given)
    in_kernel._LEAST_SIZE, rounding.random_bits = kept
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--cpu", action="store_true", help="CPU seconds instead of those by clock")
    options = parser.parse_args()
    clock = time.process_time if options.cpu else time.perf_counter
    head = ["model", "width", "batch"]
    for number, (kind, width, batch) in enumerate(CASES):
        times = in_turn(sides(*made(kind, width, batch)), options.rounds, clock)
        if not number:
            head += [f"{name}, ms" for name in times] + ["speed", "speed, random"]
            print(f"| {' | '.join(head)} |\n|{' --- |' * len(head)}")
        ms = [f"{statistics.median(found) * 1e3:.3g}" for found in times.values()]
        speeds = []
        for side in ("int8", "random"):
            ratios = (a / b for a, b in zip(times["float32"], times[side], strict=True))
            speeds.append(f"{statistics.median(ratios):.2f}")
        print(f"| {' | '.join(map(str, (kind, width, batch, *ms, *speeds)))} |", flush=True)


if __name__ == "__main__":
    main()
