"""Exports EfficientNet-Lite0 for LiteRT in several ways, and prints what each costs beside JAX.

uv run --group efficientnet python -m examples.efficientnet.device
"""

import argparse
import statistics
import time

import jax
import numpy as np

import provider_odml as odml
from provider_odml_export.litert import Runner

from . import load, model, photographs
from .__main__ import likeness

STATIC = "int8, static"
RULES = {
    "float": {},
    "int8 weights": {"weight_qtype": "int8"},
    STATIC: {"weight_qtype": "int8", "output_qtype": "int8"},
}
NAMES = (*photographs.NAMES[:4], *photographs.OTHERS)
"""What static ranges are calibrated with: half of what is classified, and other images."""


def export(name, params, images, calibrating):
    """Returns the artifact of one mode, for images of the batch of ``images``."""
    rules = [odml.OdmlRule(**RULES[name])]
    stats = None
    if rules[-1].is_static:
        batches = [(calibrating[i : i + 4],) for i in range(0, len(calibrating), 4)]
        stats = odml.qat(model.classify, rules).calibrate(params, batches)
    return odml.export(model.classify, params, stats, rules, images)


def main():
    """Prints the table."""
    parser = argparse.ArgumentParser(
        prog="python -m examples.efficientnet.device", description=__doc__
    )
    parser.add_argument("--rounds", type=int, default=10, help="of each latency; sides in turn")
    parser.add_argument("--modes", nargs="*", choices=list(RULES), default=list(RULES))
    args = parser.parse_args()
    params, images = load.read_params(), photographs.read(places=photographs.PLACES)
    calibrating = photographs.read(NAMES)
    on_device = jax.device_put(params)
    classify = jax.jit(model.classify)
    expected = np.concatenate([classify(on_device, one[None]) for one in images])
    runs = {"JAX, float": lambda x: np.asarray(classify(on_device, x))}
    rows = {"JAX, float": [f"{sum(leaf.nbytes for leaf in jax.tree.leaves(params)) / 1e6:.1f}", ""]}
    for name in args.modes:
        made = export(name, params, images[:1], calibrating)
        runner = Runner(made.model)
        runs[name] = lambda x, runner=runner: next(
            iter(runner.run("serving_default", images=x).values())
        )
        floats = sum(site.is_float for site in made.report.sites)
        sites = f"{len(made.report.sites) - floats} of {len(made.report.sites)}"
        rows[name] = [f"{len(made.model) / 1e6:.1f}", sites if made.report.sites else ""]
    seconds = {name: [] for name in runs}
    for _ in range(args.rounds):
        for name, run in runs.items():
            start = time.perf_counter()
            run(images[:1])
            seconds[name].append(time.perf_counter() - start)
    head = ["", "MB", "tensors in integers", "same class", "cosine, least", "mean", "difference"]
    head += ["ms", "times JAX"]
    print("| " + " | ".join(head) + " |\n" + "| --- " * len(head) + "|")
    ours = statistics.median(seconds["JAX, float"])
    for name, run in runs.items():
        like = likeness(np.concatenate([run(one[None]) for one in images]), expected)
        time_of = statistics.median(seconds[name])
        cells = [name, *rows[name], like["same"], f"{like['min']:.3f}", f"{like['mean']:.3f}"]
        cells += [f"{like['difference']:.2f}", f"{time_of * 1e3:.1f}", f"{ours / time_of:.1f}"]
        print("| " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
