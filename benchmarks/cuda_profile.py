"""Where a GPU's time goes: kernels by their time, of decoding, prompts and training steps.

    PYTHONPATH=. python benchmarks/cuda_profile.py OUT.json

Prints the longest kernels of each program, and how much of its time no kernel ran. What is measured
is written after each program. With --tiny, sizes are those of a rehearsal.
"""

import argparse
import collections
import glob
import json
import sys
import tempfile
import time
from pathlib import Path

import cuda_decoder
import cuda_training
import jax
import jax.numpy as jnp
from jax.profiler import ProfileData
from training_steps import made

TRAINED = None, "float8, one scale", "int8, a scale for each channel"
LONGEST = 20


def kernels_of(folder):
    """Return (nanoseconds, launches) of the kernels in a trace, by name."""
    times, launches = collections.Counter(), collections.Counter()
    for path in glob.glob(f"{folder}/**/*.xplane.pb", recursive=True):
        for plane in ProfileData.from_file(path).planes:
            for line in plane.lines if "GPU" in plane.name else ():
                for event in line.events if line.name.startswith("Stream") else ():
                    times[event.name] += event.duration_ns
                    launches[event.name] += 1
    return times, launches


def profiled(name, run, calls):
    """Return what a program takes in microseconds a call, and its kernels, the longest first."""
    jax.block_until_ready(run())
    start = time.perf_counter()
    for _ in range(calls):
        out = run()
    jax.block_until_ready(out)
    wall = (time.perf_counter() - start) / calls * 1e6
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            jax.block_until_ready([run() for _ in range(calls)])
        times, launches = kernels_of(folder)
    rows = [
        {"kernel": kernel, "us": ns / calls / 1e3, "launches": launches[kernel] / calls}
        for kernel, ns in times.most_common()
    ]
    busy = sum(row["us"] for row in rows)
    count = sum(row["launches"] for row in rows)
    print(f"{name}: {wall:.0f} us, of which kernels {busy:.0f} us in {count:.0f} launches")
    for row in rows[:LONGEST]:
        print(f"{row['us']:10.1f} us {row['launches']:8.1f} x {row['kernel'][:90]}", flush=True)
    return {"case": name, "us": wall, "busy": busy, "kernels": rows}


def decoding(tiny):
    """Yield programs of the decoder: (name, what runs it, calls)."""
    shape = cuda_decoder.SHAPES["213M"] | (cuda_decoder.TINY if tiny else {})
    config, (length, steps) = cuda_decoder.parse_config(shape), (8, 4) if tiny else (512, 64)
    for kind in cuda_decoder.KINDS:
        timed = cuda_decoder.Timed(cuda_decoder.made(config, kind)[0])
        for name, run in (
            (f"{steps} tokens", lambda timed=timed: timed.decode(length, steps)),
            (f"a prompt of {length}", lambda timed=timed: timed.prefill(length)),
        ):
            run()  # compiles
            yield f"{name}, {kind or 'XLA bfloat16'}", run, 2


def training(tiny):
    """Yield training steps, as ``decoding`` has programs."""
    loss, params, x = jax.tree.map(
        lambda leaf: leaf.astype(jnp.bfloat16) if hasattr(leaf, "dtype") else leaf,
        made("MLP", *((64, 64) if tiny else (4096, 8192))),
    )
    for name in TRAINED:
        rule = None if name is None else cuda_training.RULES[name]
        step = cuda_training.compiled(name or "bfloat16", rule, loss, params, x)
        yield f"training, {name or 'bfloat16'}", step, 3


def main():
    """Does what the command line says."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    results = []
    for programs in (decoding, training):
        for program in programs(args.tiny):
            results.append(profiled(*program))
            found = {"jax": jax.__version__, "results": results}
            args.out.write_text(json.dumps(found, indent=1))
    print(f"{len(results)} programs", file=sys.stderr)


if __name__ == "__main__":
    main()
