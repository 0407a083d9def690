"""The first execution of programs for GPUs, with the kernels' warm-up and without it.

    python benchmarks/cuda_first.py OUT.json

Each program runs in a fresh process, which compiles it and times its first and second execution.
Without a warm-up, handlers have no stage `initialize`, so that kernels are loaded while they are
called. With two GPUs or more, a sum over GPUs by NCCL is under way when the kernels are called.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

PROGRAMS = ("softmax", "norm", "gemm_v2", "gemm_w8a16", "attention")
FOLDER = Path(__file__).resolve().parent


def program(name):
    """Return a function and its operand."""
    import cuda_ops as ops
    import jax
    import jax.numpy as jnp

    import te_ffi_kernels as te

    x = ops.normal(256, 256, dtype=jnp.bfloat16)
    if name == "softmax":
        return te.softmax, x
    if name == "norm":
        return lambda x: ops.norm(x, x[0], "layernorm")[0], x
    if name == "gemm_v2":
        none = jnp.zeros((0,))
        return lambda x: ops.matmul(x, none, x, none, none, 0), x
    if name == "gemm_w8a16":
        weight = ops.packed(256, 256, 8)
        return lambda x: te.gemm_w8a16(x[:4], weight), x
    heads = lambda x: x.reshape(2, 32, 4, 256)  # noqa: E731
    return jax.jit(lambda x: ops.attend(heads(x), heads(x), heads(x))), x


def without_warm_ups():
    """Take the stage `initialize` from all handlers that are registered from now on."""
    import dataclasses

    from te_ffi_kernels_cuda13 import _ffi

    registrations = _ffi.registrations

    def without():
        return {
            name: dataclasses.replace(
                target,
                stages={at: stage for at, stage in target.stages.items() if at != "initialize"},
            )
            for name, target in registrations().items()
        }

    _ffi.registrations = without


def over_gpus(run):
    """Return a program that adds up over all GPUs, and then runs on each."""
    import jax

    mesh = jax.make_mesh((jax.device_count(),), ("x",))
    spec = jax.sharding.PartitionSpec()

    def on_each(x):
        return run(jax.lax.psum(x, "x") / jax.device_count())

    return jax.shard_map(on_each, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)


def once(name, warms):
    """Return seconds of compiling a program, and of its first and second execution."""
    import jax

    if not warms:
        without_warm_ups()
    run, x = program(name)
    if jax.device_count() > 1 and jax.default_backend() != "cpu":
        run = over_gpus(run)
    jax.block_until_ready(x)
    times, start = {}, time.perf_counter()
    compiled = jax.jit(run).lower(x).compile()
    times["compile"] = time.perf_counter() - start
    for which in ("first", "second"):
        start = time.perf_counter()
        jax.block_until_ready(compiled(x))
        times[which] = time.perf_counter() - start
    return times | {"gpus": jax.device_count()}


def measure(programs, path):
    """Writes what each program takes, each in a fresh process, after each."""
    found = []
    for name in programs:
        for warms in (True, False):
            command = [sys.executable, __file__, "--once", name, *([] if warms else ["--cold"])]
            env = os.environ | {"CUDA_MODULE_LOADING": "LAZY"}
            done = subprocess.run(
                command, cwd=FOLDER.parent, env=env, capture_output=True, text=True
            )
            if done.returncode != 0:
                sys.exit(f"{' '.join(command)}:\n{done.stderr[-4000:]}")
            found.append({"case": name, "warms": warms} | json.loads(done.stdout.splitlines()[-1]))
            print(found[-1], file=sys.stderr)
            path.write_text(json.dumps({"results": found}, indent=1))


def main():
    """Does what the command line says."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", nargs="?")
    parser.add_argument("--once", choices=PROGRAMS, help="in this process, to the output")
    parser.add_argument("--cold", action="store_true", help="without the warm-up")
    parser.add_argument("--tiny", action="store_true", help="one program, for a rehearsal")
    args = parser.parse_args()
    if args.once:
        print(json.dumps(once(args.once, not args.cold)))
        return
    measure(PROGRAMS[: 1 if args.tiny else None], Path(args.out))


if __name__ == "__main__":
    main()
