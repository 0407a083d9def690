"""A vision transformer with stored weights, beside float32 in XLA, in turn.

uv run --python 3.12 python benchmarks/vit.py [--rounds 9] [--layers 6] [--width 384]

Prints a table in Markdown. *Speed* is in multiples of the float program's.
"""

import argparse
import functools

import jax
import jax.numpy as jnp
import numpy as np
from paired import in_turn

from provider_xla import PtqProvider, QuantizationRule

HEADS, PATCH, SIZE = 6, 16, 224
BOTH = {"weight_qtype": "int8", "act_qtype": "int8"}
IN_4 = {"weight_qtype": "int4", "act_qtype": "int8", "tile_size": 32}
STATIC = BOTH | {"act_static_scale": True}
FUSED = QuantizationRule(kernel="fused")


def model(params, images):
    """Return the mean token of a pre-norm transformer of patches."""
    n, side = len(images), SIZE // PATCH
    x = images.reshape(n, side, PATCH, side, PATCH, 3).swapaxes(2, 3)
    x = x.reshape(n, side * side, -1) @ params["patches"] + params["places"]
    for p in params["layers"]:
        q, k, v = jnp.split(jax.nn.standardize(x) @ p["qkv"], 3, axis=-1)
        q, k, v = (a.reshape(*a.shape[:-1], HEADS, -1) for a in (q, k, v))
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / np.sqrt(q.shape[-1]).astype(np.float32)
        seen = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v)
        x = x + seen.reshape(x.shape) @ p["out"]
        x = x + jax.nn.gelu(jax.nn.standardize(x) @ p["up"]) @ p["down"]
    return jnp.mean(jax.nn.standardize(x), axis=1)


def made(width, layers):
    rng = np.random.default_rng(0)

    def draw(*shape):
        return jnp.asarray(rng.normal(size=shape) / np.sqrt(shape[0]), jnp.float32)

    sizes = {"qkv": (width, 3 * width), "out": (width, width)}
    sizes |= {"up": (width, 4 * width), "down": (4 * width, width)}
    params = {
        "patches": draw(PATCH * PATCH * 3, width),
        "places": draw((SIZE // PATCH) ** 2, width),
        "layers": [{name: draw(*shape) for name, shape in sizes.items()} for _ in range(layers)],
    }
    return params, jnp.asarray(rng.normal(size=(1, SIZE, SIZE, 3)), jnp.float32)


RULES = {
    "int8 both": [QuantizationRule(**BOTH)],
    "int8 both, and the matmuls of activations": [QuantizationRule(**BOTH, weights_only=False)],
    "int8 both, fused": [QuantizationRule(**BOTH), FUSED],
    "int4 and int8": [QuantizationRule(**IN_4)],
    "int4 and int8, and the matmuls of activations": [QuantizationRule(**IN_4, weights_only=False)],
    "int4 and int8, fused": [QuantizationRule(**IN_4), FUSED],
    "int8 both, static ranges": [QuantizationRule(**STATIC)],
    "int8 both, static ranges, in XLA": [QuantizationRule(**STATIC)],
}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=384)
    args = parser.parse_args()
    params, images = made(args.width, args.layers)
    exact = jax.jit(model).lower(params, images).compile()
    sides, plain = {"float32": functools.partial(exact, params, images)}, exact(params, images)
    errors, kernels = {"float32": 0.0}, {"float32": 0}
    for name, rules in RULES.items():
        plan = PtqProvider(rules).plan(model, params, images, kernels="in XLA" not in name)
        ranges = (plan.calibrate(params, [(images,)]),) if "static" in name else ()
        stored = plan.quantize(params)
        run = jax.jit(plan.apply(model, *ranges)).lower(stored, images).compile()
        sides[name] = functools.partial(run, stored, images)
        errors[name] = float(jnp.linalg.norm(run(stored, images) - plain) / jnp.linalg.norm(plain))
        kernels[name] = sum("gem" in (op.kernel or "") for op in plan.ops)
    times = in_turn(sides, args.rounds)
    print("| rule | matmuls in kernels | ms | speed | error |\n| --- | --- | --- | --- | --- |")
    for name, seconds in times.items():
        ratio = np.median(np.asarray(times["float32"]) / np.asarray(seconds))
        ms = 1e3 * np.median(seconds)
        print(f"| {name} | {kernels[name]} | {ms:.1f} | {ratio:.2f} | {errors[name]:.3f} |")


if __name__ == "__main__":
    main()
