"""Tracing and lowering a quantized program of many layers, compared with the float program.

    uv run python benchmarks/tracing_ratio.py [LAYERS]

Prints a table: microseconds of CPU time for each layer, by what is between its two matmuls. Both
programs are traced and lowered in turn, with caches warm; the best of four rounds counts. The
last column calls a jitted matmul in float, which shows what JAX itself takes for a call.
"""

from __future__ import annotations

import gc
import operator
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from growth import RULE, WIDTH, unrolled
from tabulate import tabulate

import provider_xla as xla

ROUNDS = 4
BETWEEN: dict[str, Callable[[jax.Array], jax.Array]] = {
    "ReLU": jax.nn.relu,
    "GELU": jax.nn.gelu,
    "softmax": jax.nn.softmax,
    "tanh": jnp.tanh,
    "nothing": lambda x: x,
}
_jitted = jax.jit(jnp.matmul)


def program(act: Any, matmul: Any = operator.matmul, grad: bool = False) -> Callable[..., Any]:
    """Return a program of layers, or its gradient with respect to the input."""

    def model(params: Any, x: jax.Array) -> jax.Array:
        for i, layer in enumerate(params["layers"]):
            with jax.named_scope(f"layer_{i}"):
                x = x + matmul(act(matmul(x, layer["up"])), layer["down"])
        return x

    return gradient(model) if grad else model


def gradient(model: Callable[..., Any]) -> Callable[..., Any]:
    """Return the gradient with respect to the input."""
    return lambda params, x: jax.grad(lambda x: model(params, x).sum())(x)


def best(sides: list[tuple[Callable[..., Any], tuple]]) -> list[list[float]]:
    """Return the seconds of tracing and of lowering each program."""
    found = [[float("inf")] * 2 for _ in sides]
    for _ in range(ROUNDS):
        for times, (fn, args) in zip(found, sides, strict=True):
            jitted = jax.jit(lambda *args, fn=fn: fn(*args))  # not traced before
            gc.collect()
            start = time.process_time()
            traced = jitted.trace(*args)
            middle = time.process_time()
            traced.lower()
            times[0] = min(times[0], middle - start)
            times[1] = min(times[1], time.process_time() - middle)
    return found


def main() -> None:
    """Print the table."""
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 200
    (_, params), x = unrolled(count), jnp.ones((4, WIDTH))
    rows = []
    for name, act in BETWEEN.items():
        for grad in (False, True):
            model = program(act)
            plan = xla.PtqProvider(RULE).plan(model, params, x)
            stored = jax.block_until_ready(plan.quantize(params))
            ours = gradient(plan.apply(model)) if grad else plan.apply(model)
            floats, calls = program(act, grad=grad), program(act, _jitted, grad)
            sides = [(floats, (params, x)), (ours, (stored, x)), (calls, (params, x))]
            (a, b), (c, d), (e, f) = [[t / count * 1e6 for t in side] for side in best(sides)]
            cells = [a, c, c / a, e / a, b, d, d / b, f / b]
            rows.append([name + ", gradient" * grad, *cells])
    headers = ["between", "trace float", "int8", "ratio", "call", "lower float", "int8", "ratio"]
    formats = ("", ".0f", ".0f", ".2f", ".2f", ".0f", ".0f", ".2f", ".2f")
    print(tabulate(rows, [*headers, "call"], "pipe", floatfmt=formats))


if __name__ == "__main__":
    main()
