"""Training steps on a GPU: bfloat16 beside float8 and int8, forward and backward, in XLA.

    PYTHONPATH=. python benchmarks/cuda_training.py OUT.json

A step is a value and the gradient of all parameters, of the models that ``training_steps.py`` has
for CPUs. Sides take turns. What is measured is written after each model. With --tiny, sizes are
those of a rehearsal.
"""

import argparse
import concurrent.futures
import dataclasses
import functools
import json
import statistics
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
from training_steps import made

import provider_xla as xla
import quant_numerics as qn

FLOAT8 = xla.QtRule(
    weight_qtype="float8_e4m3fn", act_qtype="float8_e4m3fn", bwd_qtype="float8_e5m2"
)
RULES = {
    "float8, a scale for each channel": FLOAT8,
    "float8, one scale": dataclasses.replace(FLOAT8, disable_channelwise_axes=True),
    "float8, delayed scaling": dataclasses.replace(
        FLOAT8,
        act_static_scale=True,
        weight_static_scale=True,
        bwd_static_scale=True,
        static_average=qn.AmaxHistory(length=16),
    ),
    "int8, a scale for each channel": xla.QtRule(
        weight_qtype="int8", act_qtype="int8", bwd_qtype="int8"
    ),
}
STEPS = 10
"""In a round; a history of largest magnitudes knows all ranges after as many."""


def compiled(name, rule, loss, params, x):
    """Return a step, and say how long it was compiled."""
    start, fn = time.perf_counter(), loss
    if rule is not None:
        provider = xla.QtProvider(rule)
        fn = provider.apply(loss)
        if rule.act_static_scale:
            fn = provider.apply(loss, provider.init_statistics(loss, params, x))
    step = functools.partial(jax.jit(jax.value_and_grad(fn)), params, x)
    jax.block_until_ready(step())
    print(f"{name}: compiled in {time.perf_counter() - start:.1f} s", file=sys.stderr, flush=True)
    return step


def norm(tree):
    leaves = [leaf.astype(jnp.float32) for leaf in jax.tree.leaves(tree)]
    return float(jnp.sqrt(sum((leaf**2).sum() for leaf in leaves)))


def measured(kind, width, tokens, rounds):
    """Yield, for each side, its seconds and how far its gradient is from that of bfloat16."""
    loss, params, x = jax.tree.map(
        lambda leaf: leaf.astype(jnp.bfloat16) if hasattr(leaf, "dtype") else leaf,
        made(kind, width, tokens),
    )
    rules = {"bfloat16": None, **RULES}
    with concurrent.futures.ThreadPoolExecutor(len(rules)) as threads:
        found = threads.map(lambda one: compiled(*one, loss, params, x), rules.items())
        steps = dict(zip(rules, found, strict=True))
    times = {name: [] for name in steps}
    gradients = {}
    for _ in range(rounds + 1):  # the first one isn't counted
        for name, step in steps.items():
            start = time.perf_counter()
            for _ in range(STEPS):
                _, gradients[name] = step()
            jax.block_until_ready(gradients[name])
            times[name].append((time.perf_counter() - start) / STEPS)
    of_float = gradients["bfloat16"]
    for name, found in times.items():
        ratios = [a / b for a, b in zip(times["bfloat16"][1:], found[1:], strict=True)]
        away = jax.tree.map(lambda a, b: a.astype(jnp.float32) - b, gradients[name], of_float)
        yield {
            "model": kind,
            "width": width,
            "tokens": tokens,
            "case": name,
            "seconds": statistics.median(found[1:]),
            "speed": statistics.median(ratios),
            "error": norm(away) / norm(of_float),
        }


def main():
    """Does what the command line says."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    width, tokens, rounds = (64, 64, 2) if args.tiny else (4096, 8192, 5)
    results = []
    for kind in ("MLP", "transformer"):
        for found in measured(kind, width, tokens, rounds):
            print(found, file=sys.stderr, flush=True)
            results.append(found)
        args.out.write_text(json.dumps({"jax": jax.__version__, "results": results}, indent=1))


if __name__ == "__main__":
    main()
