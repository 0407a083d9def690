"""Quantizes all-MiniLM-L6-v2 in several ways and prints what each costs.

uv run --group minilm python -m examples.minilm
"""

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import time

import jax
import numpy as np

from provider_xla import PtqProvider

from . import load, model
from .rules import PASSES, ROTATED, VARIANTS
from .sentences import SENTENCES

LENGTH = 32
"""Tokens per sentence where latency is measured."""

BATCHES = (1, 32)
KERNELS = "te-ffi-kernels"
"""The plugin whose kernels provider-xla picks on CPU."""
WITH_KERNELS = " with kernels"
OURS, PEERS = "ours", "peers"


def main():
    """Prints the table, or what one process measured of it."""
    parser = argparse.ArgumentParser(prog="python -m examples.minilm", description=__doc__)
    parser.add_argument("--rounds", type=int, default=40, help="of each latency")
    parser.add_argument(
        "--plan", action="store_true", help="print what happens to each operation, and end"
    )
    parser.add_argument("--json", choices=(OURS, PEERS), help="print one process's rows as JSON")
    args = parser.parse_args()
    if args.plan:
        print(make_plan(load.read_params(), ROTATED))
    elif args.json:
        print(json.dumps(measure(args.rounds, args.json)))
    else:
        print(table(measure_all(args.rounds)))


def measure_all(rounds):
    """Returns the rows of all processes: ours with the kernels where they are installed, ours
    without, and the peers, whose threads would keep a processor from the others."""
    rows = measure(rounds, OURS)
    if any(WITH_KERNELS in row["name"] for row in rows):
        # The host reads it once, when the process begins.
        rows += measure_in_process(rounds, OURS, JAXTAP_DISABLE_PLUGINS=KERNELS)
    if importlib.util.find_spec("onnxruntime") and importlib.util.find_spec("onnx"):
        rows += measure_in_process(rounds, PEERS)
    return rows


def measure_in_process(rounds, sides, **environment):
    """Returns the rows of another process but for float32, which it has timed for its ratios."""
    command = [sys.executable, "-m", __spec__.name, f"--json={sides}", f"--rounds={rounds}"]
    run = subprocess.run(command, env=os.environ | environment, stdout=subprocess.PIPE, text=True)
    if run.returncode:
        sys.exit(run.returncode)
    return json.loads(run.stdout)[1:]


def measure(rounds, sides):
    """Returns a row per variant: name, bytes, cosines to float, seconds by batch, ratios to float.

    Variants are timed in turn, round by round, so that they see the same machine; each call after
    another of the same variant, which wakes its threads and lets those of the one before sleep.
    """
    params, tokenize = load.read_params(), load.read_tokenizer()
    encoders = make_encoders(params, sides)
    tokens, mask = tokenize(SENTENCES)
    float_name, (encode, _) = next(iter(encoders.items()))
    expected = encode(tokens, mask)
    rows = {}
    for name, (encode, size) in encoders.items():
        cosines = (encode(tokens, mask) * expected).sum(-1)
        rows[name] = {"name": name, "bytes": size, "ms": {}, "speedup": {}}
        rows[name] |= {"min": float(cosines.min()), "mean": float(cosines.mean())}
    full = " ".join(SENTENCES)
    for batch in BATCHES:
        tokens, mask = tokenize([full] * batch, LENGTH)
        times = {name: [] for name in encoders}
        for _ in range(rounds):
            for name, (encode, _) in encoders.items():
                encode(tokens, mask)
                start = time.perf_counter()
                encode(tokens, mask)
                times[name].append(time.perf_counter() - start)
        for name, seconds in times.items():
            pairs = zip(times[float_name], seconds, strict=True)
            rows[name]["ms"][batch] = statistics.median(seconds) * 1e3
            rows[name]["speedup"][batch] = statistics.median(a / b for a, b in pairs)
    return list(rows.values())


def make_encoders(params, sides):
    """Returns ``encode(tokens, mask)`` to NumPy and the bytes of its parameters, by variant.

    The first is float.
    """
    device = jax.device_put(params)
    encoders = {"XLA, float32": (_bind(model.encode, device), _bytes(device))}
    if sides == PEERS:
        from . import onnx_peer

        made = onnx_peer.make_encoders(params)
        return encoders | {f"onnxruntime, {name}": encoder for name, encoder in made.items()}
    for name, rules in VARIANTS.items():
        plan = make_plan(params, rules)
        stored = store(plan, device, name)
        how = WITH_KERNELS if any(record.kernel for record in plan.ops) else ""
        encoders[f"provider-xla{how}, {name}"] = (
            _bind(plan.apply(model.encode), stored),
            _bytes(stored),
        )
    return encoders


def make_plan(params, rules):
    """Returns what rules do to the model."""
    tokens = jax.ShapeDtypeStruct((1, LENGTH), "int32")
    mask = jax.ShapeDtypeStruct((1, LENGTH), "bool")
    return PtqProvider(rules).plan(model.encode, params, tokens, mask)


def store(plan, params, name):
    """Returns the parameters as a variant stores them."""
    if name not in PASSES:
        return plan.quantize(params)
    # A rotation looks at no data: one sentence tells which activation goes with a parameter.
    return plan.optimize(params, [load.read_tokenizer()(SENTENCES[:1])], PASSES[name]).params


def _bind(fn, params):
    fn = jax.jit(fn)
    return lambda tokens, mask: np.asarray(fn(params, tokens, mask))


def _bytes(params):
    return sum(leaf.on_device_size_in_bytes() for leaf in jax.tree.leaves(params))


def table(rows):
    """Returns rows as Markdown."""
    head = ["", "MB", "cosine, least", "mean"]
    head += [f"batch {n}: {what}" for n in BATCHES for what in ("ms", "times XLA float32")]
    lines = ["| " + " | ".join(head) + " |", "| --- " * len(head) + "|"]
    for row in rows:
        cells = [
            row["name"],
            f"{row['bytes'] / 1e6:.1f}",
            f"{row['min']:.4f}",
            f"{row['mean']:.4f}",
        ]
        for n in row["ms"]:
            cells += [f"{row['ms'][n]:.2f}", f"{row['speedup'][n]:.2f}"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
