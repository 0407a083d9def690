"""Quantizes EfficientNet-Lite0 in several ways and prints what each costs.

uv run --group efficientnet python -m examples.efficientnet
"""

import argparse
import importlib.util
import json
import statistics
import subprocess
import sys
import time

import jax
import numpy as np

from provider_xla import PtqProvider

from . import load, model, photographs
from .rules import MIXED, VARIANTS

BATCHES = (1, 8)
OURS, PEERS = "ours", "peers"


def main():
    """Prints the classes of the photographs and the table, or what one process measured of it."""
    parser = argparse.ArgumentParser(prog="python -m examples.efficientnet", description=__doc__)
    parser.add_argument("--rounds", type=int, default=15, help="of each latency")
    parser.add_argument(
        "--plan", action="store_true", help="print what happens to each operation, and end"
    )
    parser.add_argument("--json", choices=(OURS, PEERS), help="print one process's rows as JSON")
    args = parser.parse_args()
    if args.plan:
        print(make_plan(load.read_params(), MIXED))
    elif args.json:
        print(json.dumps(measure(args.rounds, args.json)))
    else:
        print(classes(), table(measure_all(args.rounds)), sep="\n\n")


def classes():
    """Returns the first class of each photograph, and how sure the float network is of it."""
    logits = jax.jit(model.classify)(load.read_params(), photographs.read())
    sure = np.asarray(jax.nn.softmax(logits)).max(-1)
    found = zip(photographs.NAMES, np.asarray(logits).argmax(-1), sure, strict=True)
    return "\n".join(f"{name}: class {best} of ImageNet ({p:.0%})" for name, best, p in found)


def measure_all(rounds):
    """Returns the rows of two processes: ours, and the peers, whose threads would keep a processor
    from the others."""
    rows = measure(rounds, OURS)
    if importlib.util.find_spec("onnxruntime") and importlib.util.find_spec("onnx"):
        command = [sys.executable, "-m", __spec__.name, f"--json={PEERS}", f"--rounds={rounds}"]
        run = subprocess.run(command, stdout=subprocess.PIPE, text=True)
        if run.returncode:
            sys.exit(run.returncode)
        rows += json.loads(run.stdout)[1:]  # without float32, which it has timed for its ratios
    return rows


def measure(rounds, sides):
    """Returns a row per variant: name, bytes, likeness to float; by batch, times and their ratios.

    Variants are timed in turn, round by round, so that they see the same machine; each call after
    another of the same variant, which wakes its threads and lets those of the one before sleep.
    """
    params = load.read_params()
    classifiers = make_classifiers(params, sides)
    held_out = photographs.read(places=photographs.PLACES)
    float_name, (classify, _) = next(iter(classifiers.items()))
    expected = in_batches(classify, held_out)
    rows = {}
    for name, (classify, size) in classifiers.items():
        rows[name] = {"name": name, "bytes": size, "ms": {}, "cpu": {}, "speedup": {}}
        rows[name] |= likeness(in_batches(classify, held_out), expected)
    for batch in BATCHES:
        images = held_out[:batch]
        times = {name: [] for name in classifiers}
        cpu = {name: [] for name in classifiers}
        for _ in range(rounds):
            for name, (classify, _) in classifiers.items():
                classify(images)
                start, busy = time.perf_counter(), time.process_time()
                classify(images)
                times[name].append(time.perf_counter() - start)
                cpu[name].append(time.process_time() - busy)
        for name, seconds in times.items():
            pairs = zip(times[float_name], seconds, strict=True)
            rows[name]["ms"][batch] = statistics.median(seconds) * 1e3
            rows[name]["cpu"][batch] = min(cpu[name]) * 1e3
            rows[name]["speedup"][batch] = statistics.median(a / b for a, b in pairs)
    return list(rows.values())


def in_batches(classify, images):
    """Returns the logits of images, of as many at once as latency is measured with."""
    size = BATCHES[-1]
    return np.concatenate([classify(images[i : i + size]) for i in range(0, len(images), size)])


def likeness(logits, expected):
    """Returns how logits compare with those in float: cosines, equal classes, differences."""
    norms = np.linalg.norm(logits, axis=-1) * np.linalg.norm(expected, axis=-1)
    cosines = (logits * expected).sum(-1) / norms
    return {
        "min": float(cosines.min()),
        "mean": float(cosines.mean()),
        "same": f"{(logits.argmax(-1) == expected.argmax(-1)).sum()} of {len(expected)}",
        "difference": float(np.abs(logits - expected).max()),
    }


def make_classifiers(params, sides):
    """Returns ``classify(images)`` to NumPy and the bytes of its parameters, by variant.

    The first is float.
    """
    device = jax.device_put(params)
    classifiers = {"XLA, float32": (_bind(model.classify, device), _bytes(device))}
    if sides == PEERS:
        from . import onnx_peer

        made = onnx_peer.make_classifiers(params, photographs.calibrating())
        return classifiers | {f"onnxruntime, {name}": one for name, one in made.items()}
    for name, rules in VARIANTS.items():
        plan = make_plan(params, rules)
        run = plan.apply(model.classify, *ranges_of(plan, device, rules))
        if any(record.kernel for record in plan.ops):
            stored = plan.quantize(device)
            classifiers[f"{name}, with kernels"] = _bind(run, stored), _bytes(stored)
        stored = plan.quantize(device, prepack=False)
        classifiers[name] = _bind(run, stored), _bytes(stored)
    return classifiers


def ranges_of(plan, params, rules):
    """Returns the static ranges that rules ask for, as what they are an argument of takes them."""
    if not any(rule.act_static_scale for rule in rules):
        return ()
    return (plan.calibrate(params, [(photographs.calibrating(),)]),)  # a batch: extremes of all


def make_plan(params, rules):
    """Returns what rules do to the model."""
    images = jax.ShapeDtypeStruct((1, model.SIZE, model.SIZE, 3), "float32")
    return PtqProvider(rules).plan(model.classify, params, images)


def _bind(fn, params):
    fn = jax.jit(fn)
    return lambda images: np.asarray(fn(params, images))


def _bytes(params):
    return sum(leaf.on_device_size_in_bytes() for leaf in jax.tree.leaves(params))


def table(rows):
    """Returns rows as Markdown."""
    head = ["", "MB", "same class", "cosine, least", "mean", "greatest difference"]
    of_batch = "ms", "CPU ms, least", "times XLA float32"
    head += [f"batch {n}: {what}" for n in BATCHES for what in of_batch]
    lines = ["| " + " | ".join(head) + " |", "| --- " * len(head) + "|"]
    for row in rows:
        cells = [row["name"], f"{row['bytes'] / 1e6:.1f}", row["same"]]
        cells += [f"{row['min']:.3f}", f"{row['mean']:.3f}", f"{row['difference']:.2f}"]
        for n in row["ms"]:
            cells += [f"{row[what][n]:.1f}" for what in ("ms", "cpu", "speedup")]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
