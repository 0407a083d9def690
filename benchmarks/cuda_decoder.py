"""A decoder end to end on a GPU: XLA in bfloat16 beside plans in int8 and int4.

    PYTHONPATH=. python benchmarks/cuda_decoder.py OUT.json

Parameters are random. A plan is made for one token, so that weights are packed for decoding, and
prompts run with the same weights. With --tiny, sizes are those of a rehearsal.
"""

import argparse
import functools
import json
import statistics
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
from language_models.shapes import SHAPES

from jaxtap_llm import checkpoint, model
from jaxtap_llm.bench import Timed
from jaxtap_llm.fields import parse_config
from jaxtap_llm.generate import Generator
from jaxtap_llm.rules import FORMATS, rules_for
from provider_xla import PtqProvider

KINDS = (None, "int8", "int4")
TINY = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "vocab_size": 300,
}


def made(config, kind):
    """Return a generator, the bytes of its parameters, and the kernels that decode."""
    platform = "cpu" if jax.default_backend() == "cpu" else "cuda"
    params = jax.tree.map(lambda x: jnp.asarray(x, jnp.bfloat16), checkpoint.init(config))
    plan, kernels = None, []
    if kind is not None:
        fn, token = functools.partial(model.logits, config), jnp.zeros((1, 1), jnp.int32)
        plan = PtqProvider(rules_for(config, FORMATS[kind])).plan(fn, params, token)
        params = plan.convert(plan.quantize(params), platform)
        chosen = {op.kernels[platform].kernel for op in plan.ops if platform in op.kernels}
        kernels = sorted(chosen - {None})
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    return Generator(config, params, plan, jnp.bfloat16), size, kernels


def measure(shape, prompt, steps, rounds, write):
    """Writes tokens a second of a prompt and of decoding, sides one after the other, after each."""
    config, found = parse_config(shape), []
    for kind in KINDS:
        generator, size, kernels = made(config, kind)
        timed = Timed(generator)
        times = {"prefill": [], "decode": []}
        for _ in range(rounds + 1):  # the first one compiles
            times["prefill"].append(prompt / timed.prefill(prompt))
            times["decode"].append(1 / timed.decode(prompt, steps))
        medians = {name: statistics.median(rates[1:]) for name, rates in times.items()}
        found.append({"case": kind or "XLA bfloat16", "bytes": size, "kernels": kernels} | medians)
        print(found[-1], file=sys.stderr)
        write(found)


def main():
    """Does what the command line says."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--shape", choices=SHAPES, default="213M")
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    shape = SHAPES[args.shape] | (TINY if args.tiny else {})
    sizes = (8, 4, 1) if args.tiny else (512, 64, 5)

    def write(results):
        found = {"shape": "tiny" if args.tiny else args.shape, "results": results}
        args.out.write_text(json.dumps(found, indent=1))

    measure(shape, *sizes, write)


if __name__ == "__main__":
    main()
