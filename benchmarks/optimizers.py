"""Adam with moments of 8 bits beside optax's: losses, bytes and CPU time of a step, as Markdown.

uv run --python 3.12 python benchmarks/optimizers.py [losses] [steps]
"""

from __future__ import annotations

import functools
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from tabulate import tabulate

import quant_optim as qo

ROOT = Path(__file__).resolve().parent.parent
SEEDS, STEPS, BATCH, TOKENS = 4, 400, 16, 64
WIDTH, HEADS, LAYERS = 128, 4, 2
SIDES = {"optax.adamw": optax.adamw, "adamw_8bit": qo.adamw_8bit}
ROUNDS = 15


def text() -> np.ndarray:
    """Return the bytes of the documentation."""
    pages = sorted((ROOT / "docs").glob("*.md"))
    return np.frombuffer("".join(page.read_text() for page in pages).encode(), np.uint8)


def parameters(key: jax.Array) -> dict[str, Any]:
    """Return the parameters of a transformer over bytes."""
    keys = iter(jax.random.split(key, 5 * LAYERS + 3))

    def matrix(n: int, m: int) -> jax.Array:
        return jax.random.normal(next(keys), (n, m)) * n**-0.5

    layer = lambda: {  # noqa: E731
        "qkv": matrix(WIDTH, 3 * WIDTH),
        "out": matrix(WIDTH, WIDTH),
        "up": matrix(WIDTH, 4 * WIDTH),
        "down": matrix(4 * WIDTH, WIDTH),
        "norms": jnp.ones((2, WIDTH)),
    }
    tables = {"bytes": matrix(256, WIDTH), "places": matrix(TOKENS, WIDTH)}
    return {**tables, "layers": [layer() for _ in range(LAYERS)], "head": matrix(WIDTH, 256)}


def loss(params: Any, tokens: jax.Array) -> jax.Array:
    """Return the mean loss of the next byte, in nats."""
    norm = lambda x, scale: x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6) * scale  # noqa: E731
    x = params["bytes"][tokens[:, :-1]] * WIDTH**0.5 + params["places"][: tokens.shape[1] - 1]
    for layer in params["layers"]:
        qkv = norm(x, layer["norms"][0]) @ layer["qkv"]
        parts = jnp.moveaxis(qkv.reshape(*qkv.shape[:2], 3, HEADS, -1), 2, 0)
        mixed = jax.nn.dot_product_attention(*parts, is_causal=True)
        x = x + mixed.reshape(x.shape) @ layer["out"]
        x = x + jax.nn.gelu(norm(x, layer["norms"][1]) @ layer["up"]) @ layer["down"]
    logits = norm(x, 1.0) @ params["head"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


def losses() -> None:
    """Print what a transformer of 0.5 million parameters reaches."""
    data = jnp.asarray(text(), jnp.int32)
    held, data = data[-(1 << 14) :].reshape(-1, TOKENS), data[: -(1 << 14)]

    def train(optimizer: optax.GradientTransformation, seed: jax.Array) -> jax.Array:
        params = parameters(jax.random.key(seed))

        def step(carry: Any, number: jax.Array) -> tuple[Any, None]:
            params, state = carry
            key = jax.random.fold_in(jax.random.key(seed + 1000), number)
            starts = jax.random.randint(key, (BATCH,), 0, len(data) - TOKENS)
            rows = data[starts[:, None] + jnp.arange(TOKENS)]
            updates, state = optimizer.update(jax.grad(loss)(params, rows), state, params)
            return (optax.apply_updates(params, updates), state), None

        carry = params, optimizer.init(params)
        (params, _), _ = jax.lax.scan(step, carry, jnp.arange(STEPS))
        return loss(params, held)

    rows = []
    for name, make in SIDES.items():
        run = jax.jit(functools.partial(train, make(2e-3, weight_decay=0.01)))
        found = [float(run(jnp.int32(seed))) for seed in range(SEEDS)]
        rows.append([name, *found, statistics.mean(found), statistics.stdev(found)])
    seeds = [f"seed {i}" for i in range(SEEDS)]
    print(tabulate(rows, ["", *seeds, "mean", "deviation"], "pipe", floatfmt=".4f"))


def steps() -> None:
    """Print bytes of the state, and CPU time of a step of the optimizer alone."""
    params = {"w": jnp.ones((4096, 4096))}
    gradients = jax.tree.map(lambda x: jax.random.normal(jax.random.key(0), x.shape), params)
    ready: dict[str, Any] = {}
    for name, make in SIDES.items():
        optimizer = make(1e-3)

        def step(params: Any, state: Any, optimizer: Any = optimizer) -> Any:
            updates, state = optimizer.update(gradients, state, params)
            return optax.apply_updates(params, updates), state

        run = jax.jit(step, donate_argnums=(0, 1))
        ready[name] = run, *run(jax.tree.map(jnp.copy, params), optimizer.init(params))
    times: dict[str, list[float]] = {name: [] for name in SIDES}
    for _ in range(ROUNDS):
        for name, (run, *carry) in ready.items():
            start = time.process_time()
            ready[name] = run, *jax.block_until_ready(run(*carry))
            times[name].append(time.process_time() - start)
    count = params["w"].size
    rows = [
        [
            name,
            sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(ready[name][2])) / count,
            statistics.median(times[name]) / count * 1e9,
        ]
        for name in SIDES
    ]
    headers = ["", "bytes of state a parameter", "CPU ns a parameter"]
    print(tabulate(rows, headers, "pipe", floatfmt=("", ".2f", ".2f")))


if __name__ == "__main__":
    for part in sys.argv[1:] or ["losses", "steps"]:
        {"losses": losses, "steps": steps}[part]()
        print()
