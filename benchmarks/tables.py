"""Weights of 4 bits with a table beside int4 in groups of 32, and beside XLA's bfloat16.

    python benchmarks/tables.py

Prints a table in Markdown. Times are CPU seconds of all threads, sides in turn; ratios are medians
of the ratios of a round.
"""

import itertools
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np
from paired import in_turn

import te_ffi_kernels as te

SIZE, COLD = 4096, 128 << 20
ROUNDS = {1: 41, 512: 9}
KINDS = {
    "int4, 32": ("int4", 32, jnp.float16),
    "mxfp4": ("e2m1", 32, jnp.float8_e8m0fnu),
    "nvfp4": ("e2m1", 16, jnp.float8_e4m3fn),
    "iq4_nl, 32": ("iq4_nl", 32, jnp.float16),
    "nf4, 64": ("nf4", 64, jnp.float32),
}
"""Table, rows that share a scale, and dtype of scales."""


def packed(table, group, dtype):
    """Return a random weight."""
    rng = np.random.default_rng(0)
    low = -8 if table == "int4" else 0
    places = jnp.asarray(rng.integers(low, low + 16, (SIZE, SIZE), np.int8))
    scale = jnp.asarray(rng.uniform(0.001, 0.01, (SIZE // group, SIZE)), jnp.float32).astype(dtype)
    more = {"column_scale": jnp.ones(SIZE)} if dtype == jnp.float8_e4m3fn else {}
    return te.pack_w4(places, scale, table=table, **more)


def call(fn, x, weight):
    """Return a call that takes as many copies in turn as are larger than any cache."""
    one = weight.nbytes
    copies = [jax.tree.map(lambda leaf: leaf.copy(), weight) for _ in range(-(-COLD // one))]
    compiled = jax.jit(fn).lower(x, weight).compile()
    turns = itertools.cycle(copies)
    return lambda: compiled(x, next(turns))


def ratio(times, own):
    """Return the median of the ratios of a round."""
    return f"{statistics.median(a / b for a, b in zip(times, own, strict=True)):.2f}"


def main():
    """Measure, and print."""
    weights = {name: packed(*kind) for name, kind in KINDS.items()}
    dense = jnp.asarray(np.random.default_rng(1).normal(size=(SIZE, SIZE)), jnp.bfloat16)
    print("| rows of bfloat16 | activations | weight | bits | ms | int4 / it | XLA bfloat16 / it |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for rows, rounds in ROUNDS.items():
        x = jnp.asarray(np.random.default_rng(2).normal(size=(rows, SIZE)), jnp.bfloat16)
        for op, kept in ((te.gemm_w4a16, "float"), (te.gemm_w4a8, "int8")):
            calls = {name: call(op, x, weight) for name, weight in weights.items()}
            if rows > 1:  # one row of bfloat16 takes XLA longer than many
                calls["XLA"] = call(jnp.matmul, x, dense)
            times = in_turn(calls, rounds, time.process_time)
            for name in KINDS:
                own, bits = times[name], 8 * weights[name].nbytes / SIZE**2
                beside = [
                    ratio(times[other], own) for other in ("int4, 32", "XLA") if other in times
                ]
                ms = f"{statistics.median(own) * 1e3:.3g}"
                cells = [str(rows), kept, name, f"{bits:.2f}", ms, *beside, ""][:7]
                print(f"| {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
