"""How the cost of each step grows with the layers of a program and the number of parameters.

    uv run python benchmarks/growth.py page          # writes docs/benchmarks/growth.md
    uv run python benchmarks/growth.py unrolled 10 100 1000
    uv run python benchmarks/growth.py scanned 10 100 1000 --profile plan
    uv run python benchmarks/growth.py parameters 10 100 1000 10000 --without compile report

Prints a table of CPU seconds of this process by step, and of the peak of its memory; each size runs
in a separate process. Beside the times are those of the float program where there is one, and
the exponent of the growth since the size before: 1 is linear, 2 quadratic. For the page, finished
sizes are kept in build/growth.json, and are not measured again: delete it to start again. Draw the
chart with tools/bench_charts.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import json
import math
import pstats
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from language_models.page import MARK, machine
from tabulate import tabulate

import provider_xla as xla

STEPS = (
    "plan", "print", "quantize", "trace", "trace float", "lower", "lower float", "compile",
    "compile float", "save", "load", "report", "page",
)  # fmt: skip
WIDTH = 32
ROOT = Path(__file__).parents[1]
PAGE, KEPT = ROOT / "docs/benchmarks/growth.md", ROOT / "build/growth.json"
# Reports time the program and write a page of each operation: they have other benchmarks.
MEASURED = {
    "unrolled": ([10, 100, 1000], ["report", "page"]),
    "scanned": ([10, 100, 1000], ["report", "page"]),
    "parameters": ([10, 100, 1000, 10000], ["compile", "report", "page"]),
}
RULE = xla.QuantizationRule(weight_qtype="int8", act_qtype="int8")


def unrolled(count: int) -> tuple[Callable[..., Any], Any]:
    """Return a program of that many layers, each with two weights, and its parameters."""

    def model(params: Any, x: jax.Array) -> jax.Array:
        for i, layer in enumerate(params["layers"]):
            with jax.named_scope(f"layer_{i}"):
                x = x + jax.nn.relu(x @ layer["up"]) @ layer["down"]
        return x

    return model, {"layers": [_layer(i) for i in range(count)]}


def scanned(count: int) -> tuple[Callable[..., Any], Any]:
    """Return the same with the layers in a scan."""

    def model(params: Any, x: jax.Array) -> jax.Array:
        def step(x: jax.Array, layer: Any) -> tuple[jax.Array, None]:
            return x + jax.nn.relu(x @ layer["up"]) @ layer["down"], None

        return jax.lax.scan(step, x, params)[0]

    layers = [_layer(i) for i in range(count)]
    return model, jax.tree.map(lambda *xs: jnp.stack(xs), *layers)


def parameters(count: int) -> tuple[Callable[..., Any], Any]:
    """Return a program of ten layers beside many parameters of which it needs the sum alone."""
    model, params = unrolled(10)

    def with_others(params: Any, x: jax.Array) -> jax.Array:
        return model(params["model"], x) + sum(params["others"].values())

    others = {f"p{i}": jnp.float32(i) for i in range(max(count - 20, 0))}
    return with_others, {"model": params, "others": others}


def _layer(seed: int) -> dict[str, jax.Array]:
    rng = np.random.default_rng(seed)
    w = rng.standard_normal((2, WIDTH, WIDTH)).astype(np.float32) / WIDTH
    return {"up": jnp.asarray(w[0]), "down": jnp.asarray(w[1])}


CASES = {"unrolled": unrolled, "scanned": scanned, "parameters": parameters}


def steps(case: str, count: int, folder: Path) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yield the steps by name; each runs once, in this order."""
    model, params = CASES[case](count)
    x = jnp.ones((4, WIDTH))
    made: dict[str, Any] = {}

    def step(name: str, fn: Callable[[], Any]) -> tuple[str, Callable[[], Any]]:
        def run() -> None:
            made[name] = fn()

        return name, run

    provider = xla.PtqProvider(RULE)
    yield step("plan", lambda: provider.plan(model, params, x))
    plan = made["plan"]
    yield step("print", lambda: str(plan))
    yield step("quantize", lambda: jax.block_until_ready(plan.quantize(params)))
    stored = made["quantize"]
    jitted = jax.jit(plan.apply(model))
    floats = jax.jit(model)
    yield step("trace", lambda: jitted.trace(stored, x))
    yield step("trace float", lambda: floats.trace(params, x))
    yield step("lower", lambda: made["trace"].lower())
    yield step("lower float", lambda: made["trace float"].lower())
    yield step("compile", lambda: made["lower"].compile())
    yield step("compile float", lambda: made["lower float"].compile())
    path = folder / "model.safetensors"
    yield step("save", lambda: xla.save(path, stored, plan))
    yield step("load", lambda: xla.load(path, plan=plan))
    yield step("report", lambda: plan.report(params, x, time=False))
    yield step("page", lambda: made["report"].save_html(folder / "page.html"))


def measure(case: str, count: int, without: list[str], profile: str | None) -> dict[str, float]:
    """Return the CPU seconds of each step, and the peak of memory in MiB."""
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, run in steps(case, count, Path(folder)):
            if name.split()[0] in without:
                continue
            gc.collect()  # garbage of the step before
            profiler = cProfile.Profile() if name == profile else None
            start = time.process_time()
            if profiler is not None:
                profiler.runcall(run)
                pstats.Stats(profiler, stream=sys.stderr).sort_stats("cumtime").print_stats(45)
            else:
                run()
            found[name] = time.process_time() - start
    found["peak MiB"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return found


def in_process(case: str, count: int, without: list[str]) -> dict[str, float]:
    """Measure in a separate process."""
    args = [case, str(count), "--one", "--without", *without]
    command = [sys.executable, __file__, *args]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def table(case: str, found: dict[int, dict[str, float]], form: str = "simple") -> str:
    """Return the measurements as text."""
    counts = list(found)
    headers, rows = [case], []
    for before, count in zip([None, *counts], counts, strict=False):
        headers += [f"{count:,}"] + ["growth"] * (before is not None)
    for name in (*STEPS, "peak MiB"):
        if all(name not in one for one in found.values()):
            continue
        row = [name]
        for before, count in zip([None, *counts], counts, strict=False):
            value = found[count][name]
            row.append(f"{value:.0f}" if name == "peak MiB" else f"{value:.3f}")
            if before is not None:
                grown = value / max(found[before][name], 1e-9)
                row.append(f"{math.log(max(grown, 1e-9)) / math.log(count / before):.2f}")
        rows.append(row)
    return tabulate(rows, headers, form, disable_numparse=True)


def write_page() -> None:
    """Measure what the page shows, and write it below its mark."""
    kept = json.loads(KEPT.read_text("utf-8")) if KEPT.exists() else {}
    for case, (counts, without) in MEASURED.items():
        for count in counts:
            if f"{case} {count}" not in kept:
                kept[f"{case} {count}"] = in_process(case, count, without)
                KEPT.parent.mkdir(exist_ok=True)
                KEPT.write_text(json.dumps(kept), "utf-8")
                print(f"{case} {count}: {sum(kept[f'{case} {count}'].values()):.0f}", flush=True)
    lines = [MARK, "", machine(("jax", "jaxlib", "provider-xla"))]
    for case, (counts, _) in MEASURED.items():
        found = {count: kept[f"{case} {count}"] for count in counts}
        lines += ["", table(case, found, "pipe")]
    head = PAGE.read_text("utf-8").partition(MARK)[0]
    PAGE.write_text(head + "\n".join(lines) + "\n", "utf-8")


def main() -> None:
    """Measure each size in a process."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("case", choices=[*CASES, "page"])
    parser.add_argument("counts", type=int, nargs="*")
    parser.add_argument("--without", nargs="*", default=[], choices=STEPS)
    parser.add_argument("--profile", choices=STEPS)
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.case == "page":
        write_page()
    elif given.one or given.profile:
        print(json.dumps(measure(given.case, given.counts[0], given.without, given.profile)))
    else:
        found = {n: in_process(given.case, n, given.without) for n in given.counts}
        print(table(given.case, found))


if __name__ == "__main__":
    main()
