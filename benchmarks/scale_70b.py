"""Llama 3 70B on 64 and 256 devices, abstractly: memory and collectives of compiled programs.

    uv run python benchmarks/scale_70b.py            # writes docs/benchmarks/scale_70b.md
    uv run python benchmarks/scale_70b.py --print --meshes 8 --programs decode --formats float int8

Parameters are shapes alone, devices are threads of the CPU that never run. Each program is planned,
lowered and compiled in a process, for a mesh of `data` x `model`. In training, kernels are cut
along both: a layer's are gathered over `data` when it runs (FSDP), and its columns or rows are
computed on `model` (tensor parallelism). In decoding all devices share columns or rows.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tabulate import tabulate

PAGE = Path(__file__).parents[1] / "docs" / "benchmarks" / "scale_70b.md"
FORMATS: dict[str, dict[str, Any]] = {
    "float": {},
    "int8": {"weight_qtype": "int8"},
    "w8a8": {"weight_qtype": "int8", "act_qtype": "int8"},
    "int4": {"weight_qtype": "int4", "tile_size": 128, "scale_dtype": "bfloat16"},
    "fp8": {"weight_qtype": "float8_e4m3fn", "act_qtype": "float8_e4m3fn"},
}
BACKWARD: dict[str, dict[str, Any]] = {"fp8": {"bwd_qtype": "float8_e5m2"}}
"""How training quantizes gradients; those of other formats are float, at the quantized values."""
PROGRAMS = ("decode", "qlora", "qat")
MESHES = (8, 16)
POSITIONS, TOKENS, RANK = 8192, 2048, 16


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The sizes of a decoder."""

    layers: int = 80
    width: int = 8192
    inner: int = 28672
    heads: int = 64
    kv_heads: int = 8
    head: int = 128
    vocabulary: int = 128256


def make_params(sizes: Sizes, of: Callable[..., Any], across: Any, along: Any) -> Any:
    """Return the parameters.

    Args:
        sizes: of the decoder.
        of: called as ``of(shape, *spec)`` for each.
        across: the mesh axes of the width.
        along: those of heads, of the inner width and of the vocabulary.
    """
    n, d, f = sizes.layers, sizes.width, sizes.inner
    q, kv = sizes.heads * sizes.head, sizes.kv_heads * sizes.head
    columns, rows = (None, across, along), (None, along, across)
    return {
        "embed": of((sizes.vocabulary, d), along, across),
        "layers": {
            "attention_norm": of((n, d)),
            "mlp_norm": of((n, d)),
            "q": of((n, d, q), *columns),
            "k": of((n, d, kv), *columns),
            "v": of((n, d, kv), *columns),
            "out": of((n, q, d), *rows),
            "gate": of((n, d, f), *columns),
            "up": of((n, d, f), *columns),
            "down": of((n, f, d), *rows),
        },
        "norm": of((d,)),
        "head": of((d, sizes.vocabulary), across, along),
    }


def model(
    sizes: Sizes,
    params: Any,
    tokens: Any,
    cache: Any = None,
    position: Any = None,
    rows: Any = None,
    columns: Any = None,
) -> Any:
    """Return logits, and the cache with the tokens' keys and values.

    Args:
        sizes: of the decoder.
        params: see ``make_params``.
        tokens: int32 ``[batch, length]``.
        cache: keys and values, ``[layers, batch, positions, kv_heads, head]``; None in training.
        position: int32, of the first token.
        rows: the sharding of ``[batch, length, width]``; None to leave it to the compiler.
        columns: that of ``[batch, length, heads * head]``, or None.
    """
    import jax
    import jax.numpy as jnp
    from jax import lax
    from jax.sharding import NamedSharding, PartitionSpec

    def norm(scale: Any, x: Any) -> Any:
        wide = x.astype(jnp.float32)
        wide = wide * lax.rsqrt(jnp.square(wide).mean(-1, keepdims=True) + 1e-5)
        return (wide * scale.astype(jnp.float32)).astype(x.dtype)

    def turned(x: Any) -> Any:
        places = (0 if position is None else position) + jnp.arange(x.shape[1])
        steps = 500000.0 ** (-jnp.arange(sizes.head // 2) * 2 / sizes.head)
        angles = places[:, None, None] * steps
        left, right = jnp.split(x.astype(jnp.float32), 2, axis=-1)
        cos, sin = jnp.cos(angles), jnp.sin(angles)
        found = [left * cos - right * sin, right * cos + left * sin]
        return jnp.concatenate(found, axis=-1).astype(x.dtype)

    def gathered(path: Any, x: Any) -> Any:
        # A layer's kernels are gathered over `data` where they are used, and not kept so.
        if rows is None or x.ndim < 2:
            return x
        names = ("model", None) if path[-1].key in ("out", "down") else (None, "model")
        return lax.with_sharding_constraint(x, NamedSharding(rows.mesh, PartitionSpec(*names)))

    def by_columns(x: Any) -> Any:
        # What heads are computed from and give moves between devices, so that weights do not.
        return x if columns is None else lax.with_sharding_constraint(x, columns)

    def by_heads(x: Any) -> Any:
        if columns is None:
            return x
        fits = x.shape[2] % columns.mesh.shape["model"] == 0
        spec = PartitionSpec("data", None, "model" if fits else None)
        return lax.with_sharding_constraint(x, NamedSharding(columns.mesh, spec))

    def layer(x: Any, given: Any) -> Any:
        p, kept = given
        p = jax.tree_util.tree_map_with_path(gathered, p)
        y = norm(p["attention_norm"], x)
        with jax.named_scope("attention"):
            q, k, v = (
                by_heads(by_columns(y @ p[name]).reshape(*x.shape[:2], n, sizes.head))
                for name, n in (("q", sizes.heads), ("k", sizes.kv_heads), ("v", sizes.kv_heads))
            )
            q, k, mask = turned(q), turned(k), None
            if kept is not None:
                at = (0, position, 0, 0)
                k, v = (lax.dynamic_update_slice(kept[i], new, at) for i, new in ((0, k), (1, v)))
                kept = k, v
                mask = (jnp.arange(k.shape[1]) <= position)[None, None, None]
            mixed = jax.nn.dot_product_attention(q, k, v, mask=mask, is_causal=mask is None)
            mixed = by_heads(mixed)
            x = x + by_columns(mixed.reshape(*x.shape[:2], -1)) @ p["out"]
        y = norm(p["mlp_norm"], x)
        with jax.named_scope("mlp"):
            x = x + (jax.nn.silu(y @ p["gate"]) * (y @ p["up"])) @ p["down"]
        return x if rows is None else lax.with_sharding_constraint(x, rows), kept

    step = layer if cache is not None else jax.checkpoint(layer)
    x, cache = lax.scan(step, params["embed"][tokens], (params["layers"], cache))
    with jax.named_scope("head"):
        head = params["head"]
        if rows is not None:
            columns = NamedSharding(rows.mesh, PartitionSpec(None, "model"))
            head = lax.with_sharding_constraint(head, columns)
        return norm(params["norm"], x) @ head, cache


def lowered(program: str, name: str, side: int, sizes: Sizes, seconds: dict[str, float]) -> Any:
    """Return a program, lowered, and put the seconds of planning and tracing into a dict."""
    import jax
    import jax.numpy as jnp
    import optax
    from jax.sharding import AxisType, NamedSharding, PartitionSpec

    import provider_xla as xla

    mesh = jax.make_mesh((side, side), ("data", "model"), (AxisType.Auto,) * 2)

    def of(shape: tuple[int, ...], *spec: Any, dtype: Any = jnp.bfloat16) -> Any:
        sharding = NamedSharding(mesh, PartitionSpec(*spec))
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    def whole(tree: Any) -> Any:
        return jax.tree.map(lambda x: of(x.shape, dtype=x.dtype), tree)

    axes = (None, ("data", "model")) if program == "decode" else ("data", "model")
    params = make_params(sizes, of, *axes)
    rule = dict(FORMATS[name])
    if program == "decode" and "tile_size" in rule:
        # A device's rows are whole tiles; otherwise scales would be gathered.
        rule["tile_size"] = math.gcd(rule["tile_size"], sizes.inner // side**2)
    start = time.perf_counter()
    if program == "decode":
        batch = 8 * side
        heads = sizes.kv_heads % side == 0
        place = ("data", None, "model") if heads else ("data", "model", None)
        shape = sizes.layers, batch, POSITIONS, sizes.kv_heads, sizes.head
        cache = (of(shape, None, *place), of(shape, None, *place))
        given = of((batch, 1), dtype=jnp.int32), cache, of((), dtype=jnp.int32)

        def decode(params: Any, tokens: Any, cache: Any, position: Any) -> Any:
            columns = NamedSharding(mesh, PartitionSpec(None, None, ("data", "model")))
            return model(sizes, params, tokens, cache, position, columns=columns)

        run, stored = decode, params
        if rule:
            provider = xla.PtqProvider(xla.QuantizationRule(**rule, weights_only=True))
            plan = provider.plan(decode, params, *given, kernels=False)
            run, stored = plan.apply(decode), plan.quantized_types(params)
        seconds["plan"] = time.perf_counter() - start
        return jax.jit(run, donate_argnums=2).trace(stored, *given).lower()

    tokens = of((side, TOKENS), "data", dtype=jnp.int32)
    rows = NamedSharding(mesh, PartitionSpec("data"))

    def loss(params: Any, tokens: Any) -> Any:
        logits, _ = model(sizes, params, tokens, rows=rows)
        found = optax.softmax_cross_entropy_with_integer_labels(
            logits[:, :-1].astype(jnp.float32), tokens[:, 1:]
        )
        return found.mean()

    if program == "qat":
        # bfloat16 weights, gradients, and one momentum of each.
        backward = BACKWARD.get(name, {"bwd_original_residuals": False})
        rules = xla.QtRule(**rule, **backward, weights_only=True)
        run = xla.QtProvider(rules).apply(loss) if rule else loss
        optimizer = optax.sgd(1e-4, momentum=0.9)
        momentum = jax.tree.map(lambda x: x, params)
        state = (optax.TraceState(momentum), optax.EmptyState())

        def step(params: Any, state: Any, tokens: Any) -> Any:
            value, grads = jax.value_and_grad(run)(params, tokens)
            updates, state = optimizer.update(grads, state)
            return optax.apply_updates(params, updates), state, value

        seconds["plan"] = time.perf_counter() - start
        return jax.jit(step, donate_argnums=(0, 1)).trace(params, state, tokens).lower()

    rules = xla.LoraRule(**rule, rank=RANK, weights_only=True)
    plan = xla.PtqProvider(rules).plan(loss, params, tokens, kernels=False)
    run, stored = plan.apply(loss), plan.quantized_types(params)
    adapters = whole(jax.eval_shape(plan.init_adapters, jax.random.key(0)))
    optimizer = optax.adam(1e-4)
    state = whole(jax.eval_shape(optimizer.init, adapters))

    def tune(adapters: Any, state: Any, stored: Any, tokens: Any) -> Any:
        value, grads = jax.value_and_grad(lambda adapters: run(stored, tokens, adapters=adapters))(
            adapters
        )
        updates, state = optimizer.update(grads, state)
        return optax.apply_updates(adapters, updates), state, value

    seconds["plan"] = time.perf_counter() - start
    return jax.jit(tune, donate_argnums=(0, 1)).trace(adapters, state, stored, tokens).lower()


def measure(program: str, name: str, side: int, sizes: Sizes) -> dict[str, Any]:
    """Return what is known of a compiled program."""
    from jaxtap_testkit.collectives import collectives

    seconds: dict[str, float] = {}
    start = time.perf_counter()
    found = lowered(program, name, side, sizes, seconds)
    seconds["trace, lower"] = time.perf_counter() - start - seconds["plan"]
    with tempfile.TemporaryDirectory() as folder:
        # After the partitioner, before the CPU's passes, which widen bfloat16 to float32.
        options = {"xla_dump_to": folder, "xla_dump_hlo_pass_re": "spmd-partition.*"}
        start = time.perf_counter()
        compiled = found.compile(options)
        seconds["compile"] = time.perf_counter() - start
        dumped = Path(folder).glob("*after_spmd-partitioning*.txt")
        text = max(dumped, key=lambda path: path.stat().st_size).read_text()
    memory = compiled.memory_analysis()
    return {
        "arguments": memory.argument_size_in_bytes,
        "temporary": memory.temp_size_in_bytes,
        "collectives": [[*key, size] for key, size in sorted(collectives(text).items())],
        "seconds": seconds,
        "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def in_process(program: str, name: str, side: int, layers: int) -> dict[str, Any]:
    """Measure in a process that has as many devices as the mesh."""
    flag = f"--xla_force_host_platform_device_count={side * side}"
    given = [program, name, str(side), str(layers)]
    done = subprocess.run(
        [sys.executable, __file__, "--one", *given],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "XLA_FLAGS": flag, "JAX_PLATFORMS": "cpu"},
    )
    return json.loads(done.stdout.splitlines()[-1])


def table(found: dict[str, dict[str, Any]]) -> str:
    """Return a table of the formats of one program on one mesh."""
    rows = []
    for name, one in found.items():
        moved = [f"{kind} {dtype} {size / 2**20:,.1f}" for kind, dtype, size in one["collectives"]
                 if size >= 2**20 / 20]  # fmt: skip
        took = one["seconds"]
        rows.append(
            [
                name,
                f"{one['arguments'] / 2**30:.2f}",
                f"{one['temporary'] / 2**30:.2f}",
                "; ".join(moved),
                " / ".join(f"{took[step]:.1f}" for step in ("plan", "trace, lower", "compile")),
                f"{one['peak'] / 2**30:.1f}",
            ]
        )
    headers = ["format", "arguments, GiB", "temporary, GiB", "collectives, MiB",
               "plan / lower / compile, s", "this process, GiB"]  # fmt: skip
    return tabulate(rows, headers, tablefmt="pipe", disable_numparse=True)


def main() -> None:
    """Measure each program in a process, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--meshes", type=int, nargs="+", default=MESHES)
    parser.add_argument("--programs", nargs="+", default=PROGRAMS, choices=PROGRAMS)
    parser.add_argument("--formats", nargs="+", default=list(FORMATS), choices=FORMATS)
    parser.add_argument("--layers", type=int, default=Sizes().layers)
    parser.add_argument("--print", action="store_true", help="print, and write no page")
    parser.add_argument("--one", nargs=4, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        program, name, side, layers = given.one
        sizes = Sizes(layers=int(layers))
        print(json.dumps(measure(program, name, int(side), sizes)))
        return
    parts = []
    for side in given.meshes:
        for program in given.programs:
            found = {name: in_process(program, name, side, given.layers) for name in given.formats}
            parts.append(f"### {program}, {side} x {side} devices\n\n{table(found)}\n")
            print(parts[-1], flush=True)
    if not given.print:
        PAGE.write_text(
            "# Llama 3 70B on 64 and 256 devices\n\nMade by `benchmarks/scale_70b.py`; "
            "[scale.md](../scale.md) says what it means.\n\n" + "\n".join(parts),
            "utf-8",
        )


if __name__ == "__main__":
    main()
