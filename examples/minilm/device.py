"""Exports all-MiniLM-L6-v2 for LiteRT in several ways, and prints what each costs beside JAX.

uv run --group minilm python -m examples.minilm.device
"""

import argparse
import statistics
import time
import warnings

import jax
import numpy as np

import provider_odml as odml
from provider_odml_aeq import AeqBackend
from provider_odml_export.litert import Runner

from . import load, model
from .sentences import SENTENCES

LENGTH = 32
"""Tokens per sentence."""

REFINED = "int8, static, refined"
BLOCKS = "int4 in blocks of 32, dynamic range"
RULES = {
    "float": {},
    "int8, dynamic range": {"weight_qtype": "int8", "input_qtype": "int8"},
    "int8, static": {"weight_qtype": "int8", "output_qtype": "int8"},
    REFINED: {"weight_qtype": "int8", "output_qtype": "int8"},
    "int8 weights": {"weight_qtype": "int8"},
    BLOCKS: {"weight_qtype": "int4", "input_qtype": "int8", "tile_size": 32},
    "int4 weights": {"weight_qtype": "int4", "weight_calibration_method": "mse"},
}


def export(name, params, tokens, mask):
    """Returns the artifact of one mode. Static ranges are those of the same sentences."""
    # The table of words in 4 bits costs more than it saves.
    rules = [odml.OdmlRule(op_names=["take"], weight_qtype="int8")] if "int4" in name else []
    rules = [*rules, odml.OdmlRule(**RULES[name])]
    stats = None
    if rules[-1].is_static:
        quantized = odml.qat(model.encode, rules, strict=False)
        if name == REFINED:
            rules = odml.refine(quantized, params, [(tokens, mask)])
            quantized = odml.qat(model.encode, rules, strict=False)
        stats = quantized.calibrate(params, [(tokens, mask)])
    # What it costs is what is printed, so that no output is refused.
    backend = AeqBackend(min_sqnr=0.0) if name == BLOCKS else "converter"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", odml.OdmlWarning)  # see `note`
        return odml.export(
            model.encode, params, stats, rules, tokens, mask, strict=False, backend=backend
        )


def note(name, report):
    """Returns a line about ranges that keep too little, or none."""
    if not report.warnings:
        return []
    worst = min((s for s in report.sites if s.range_sqnr is not None), key=lambda s: s.range_sqnr)
    return [
        f"{name}: the ranges of {len(report.warnings)} tensors keep too little, the worst is "
        f"{worst.place} with {worst.range_sqnr:.1f} dB. Take the rules that odml.refine finds."
    ]


def main():
    """Prints the table."""
    parser = argparse.ArgumentParser(prog="python -m examples.minilm.device", description=__doc__)
    parser.add_argument("--rounds", type=int, default=20, help="of each latency; sides in turn")
    parser.add_argument("--sentences", type=int, default=len(SENTENCES), help="the first so many")
    parser.add_argument("--modes", nargs="*", choices=list(RULES), default=list(RULES))
    args = parser.parse_args()
    params = load.read_params()
    tokens, mask = load.read_tokenizer()(list(SENTENCES[: args.sentences]), LENGTH)
    on_device = jax.device_put(params)
    encode = jax.jit(model.encode)
    expected = np.asarray(encode(on_device, tokens, mask))
    runs = {"JAX, float": lambda: jax.block_until_ready(encode(on_device, tokens, mask))}
    sizes = {"JAX, float": sum(leaf.nbytes for leaf in jax.tree.leaves(params))}
    cosines = {"JAX, float": np.ones(1)}
    notes, refused = [], []
    for name in args.modes:
        try:
            made = export(name, params, tokens, mask)
        except odml.OdmlError as error:
            refused.append(f"| {name} | {str(error).splitlines()[0]} | | | | |")
            continue
        notes += note(name, made.report)
        runner = Runner(made.model)
        run = lambda runner=runner: runner.run("serving_default", tokens=tokens, mask=mask)  # noqa: E731
        runs[name], sizes[name] = run, len(made.model)
        (found,) = run().values()
        cosines[name] = (found * expected).sum(-1) / np.linalg.norm(found, axis=-1)
    seconds = {name: [] for name in runs}
    for _ in range(args.rounds):
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - start)
    print(
        "| | MB | cosine, least | mean | tokens/s | to JAX |\n| --- | --- | --- | --- | --- | --- |"
    )
    ours = statistics.median(seconds["JAX, float"])
    for name, times in seconds.items():
        time_of = statistics.median(times)
        least, mean = cosines[name].min(), cosines[name].mean()
        speed = f"{tokens.size / time_of:,.0f} | {ours / time_of:.2f}"
        print(f"| {name} | {sizes[name] / 1e6:.1f} | {least:.4f} | {mean:.4f} | {speed} |")
    print("\n".join([*refused, "", *notes]).rstrip())


if __name__ == "__main__":
    main()
