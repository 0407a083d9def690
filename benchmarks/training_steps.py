"""A training step in int8 both ways beside float32, by width and batch, sides in turn.

uv run --python 3.12 python benchmarks/training_steps.py [--rounds 9] [--repeat 1] [--cpu]

Prints a table in Markdown of value and gradient: an MLP of three layers, and a transformer block of
four heads on sequences of 64. Sides are float32; int8, its gradients rounded to nearest; and int8
rounded at random (noise for each number). Both of these as training does it and in XLA alone; the
latter draws its bits as ``jax.random`` does; and Qwix in int8, if it is installed (``--group
peers``). *Speed* is in multiples of float32. Medians of ratios of one round.
"""

import argparse
import dataclasses
import functools
import statistics
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen
from paired import in_turn

import provider_xla as xla
from quant_numerics.contraction import cotangent
from quant_numerics.formats import encoding
from quant_numerics.ops import cpu_dot

try:
    import qwix
except ImportError:
    qwix = None

RULE = xla.QtRule(weight_qtype="int8", act_qtype="int8", bwd_qtype="int8")
RANDOM = dataclasses.replace(
    RULE, bwd_stochastic_rounding="uniform", channelwise_noise_axes=(0, -1)
)
CASES = [("MLP", 256, 64), ("MLP", 256, 256), ("MLP", 512, 64), ("MLP", 512, 256)]
CASES += [("MLP", 512, 1024), ("MLP", 1024, 64), ("MLP", 1024, 256), ("MLP", 1024, 1024)]
CASES += [("MLP", 2048, 64), ("MLP", 2048, 256)]
CASES += [("transformer", 256, 256), ("transformer", 512, 256), ("transformer", 1024, 256)]
LENGTH, HEADS = 64, 4


def mlp(matmuls, x):
    for matmul in matmuls:
        x = jnp.tanh(matmul(x))
    return x


def block(matmuls, x):
    """A transformer block, on rows of `LENGTH` tokens."""
    qkv, out, up, down = matmuls
    batch, width = x.shape[0] // LENGTH, x.shape[1]
    heads = (batch, LENGTH, HEADS, width // HEADS)
    q, k, v = (part.reshape(heads) for part in jnp.split(qkv(x), 3, 1))
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / heads[-1] ** 0.5
    found = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v)
    x = x + out(found.reshape(x.shape))
    return x + down(jax.nn.gelu(up(x)))


MODELS = {"MLP": mlp, "transformer": block}


def made(kind, width, batch):
    """Return a loss, its parameters and the input."""
    rng = np.random.default_rng(0)
    shapes = [(width, width)] * 3
    if kind == "transformer":
        shapes = [(width, 3 * width), (width, width), (width, 4 * width), (4 * width, width)]
    params = [
        jnp.asarray(rng.normal(size=shape) / shape[0] ** 0.5, jnp.float32) for shape in shapes
    ]
    x = jnp.asarray(rng.normal(size=(batch, width)), jnp.float32)

    def loss(params, x):
        matmuls = [functools.partial(jnp.matmul, b=w) for w in params]
        return jnp.mean(MODELS[kind](matmuls, x) ** 2)

    return loss, params, x


def of_qwix(kind, params, x):
    """Return Qwix's step of the same, rounded to nearest."""

    class Net(linen.Module):
        @linen.compact
        def __call__(self, x):
            dense = functools.partial(linen.Dense, use_bias=False)
            layers = [dense(w.shape[1], name=f"dense_{i}") for i, w in enumerate(params)]
            return jnp.mean(MODELS[kind](layers, x) ** 2)

    fields = dict.fromkeys(("weight_qtype", "act_qtype", "bwd_qtype"), "int8")
    provider = qwix.QtProvider([qwix.QtRule(module_path="dense.*", **fields)])
    fn = qwix.quantize_model(Net(), provider).apply
    given = {"params": {f"dense_{i}": {"kernel": w} for i, w in enumerate(params)}}
    step = jax.jit(jax.value_and_grad(fn)).lower(given, x).compile()
    return functools.partial(step, given, x)


def sides(loss, params, x):
    """Return the compiled step of each side, by name."""
    kept = cotangent._LEAST_SIZE, encoding.random_bits
    least_dot = cpu_dot._KERNEL_PRODUCTS
    found = {}
    for name, rule, least, bits in (
        ("float32", None, *kept),
        ("int8", RULE, *kept),
        ("int8 in XLA", RULE, float("inf"), kept[1]),
        ("random", RANDOM, *kept),
        ("random in XLA", RANDOM, float("inf"), jax.random.bits),
    ):
        cotangent._LEAST_SIZE, encoding.random_bits = least, bits
        cpu_dot._KERNEL_PRODUCTS = least_dot if least == kept[0] else least
        jax.clear_caches()  # traces of the other sides
        fn = loss if rule is None else xla.QtProvider(rule).apply(loss)
        given = {} if rule is not RANDOM else {"quant_key": jax.random.key(0)}
        step = jax.jit(jax.value_and_grad(fn)).lower(params, x, **given).compile()
        found[name] = functools.partial(step, params, x, **given)
    cotangent._LEAST_SIZE, encoding.random_bits = kept
    cpu_dot._KERNEL_PRODUCTS = least_dot
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--repeat", type=int, default=1, help="calls of a side at its turn")
    parser.add_argument("--cpu", action="store_true", help="CPU seconds instead of those by clock")
    options = parser.parse_args()
    clock = time.process_time if options.cpu else time.perf_counter
    head = ["model", "width", "batch"]
    for number, (kind, width, batch) in enumerate(CASES):
        case = made(kind, width, batch)
        calls = sides(*case)
        if qwix is not None:
            try:
                calls["Qwix"] = of_qwix(kind, *case[1:])
            except AssertionError as error:  # it takes an input of a weight's shape for a weight
                print(f"Qwix, {kind} {width}, {batch}: {error}", file=sys.stderr)
        times = in_turn(calls, options.rounds, clock, options.repeat)
        if not number:
            head += [f"{name}, ms" for name in times] + ["speed", "speed, random"]
            head += ["times Qwix"] if qwix else []
            print(f"| {' | '.join(head)} |\n|{' --- |' * len(head)}")
        ms = [f"{statistics.median(found) * 1e3:.3g}" for found in times.values()]
        ms += ["fails"] if qwix is not None and "Qwix" not in times else []
        speeds = []
        others = [("float32", "int8"), ("float32", "random"), ("Qwix", "int8")]
        for other, side in others:
            if other not in times:
                continue
            ratios = (a / b for a, b in zip(times[other], times[side], strict=True))
            speeds.append(f"{statistics.median(ratios):.2f}")
        print(f"| {' | '.join(map(str, (kind, width, batch, *ms, *speeds)))} |", flush=True)


if __name__ == "__main__":
    main()
