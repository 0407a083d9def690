"""``jaxtap demo-odml``: a small model trained for the device, exported, and run in LiteRT."""

from __future__ import annotations

import argparse
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax import lax

from interception_core import demo_kit
from provider_odml import qat
from provider_odml.features import INT8

from .litert import Runner

EPOCHS = {"float": 10, "QAT": 4}
RATES = {"float": 3e-3, "QAT": 5e-4}
SHAPES = {
    "conv1": (3, 3, 1, 12),
    "conv2": (3, 3, 12, 24),
    "dense": (4 * 4 * 24, 48),
    "head": (48, 10),
}
Params = dict[str, dict[str, jax.Array]]


def init(key: jax.Array) -> Params:
    """Return the first parameters."""
    draw, zeros = jax.nn.initializers.he_normal(), jax.nn.initializers.zeros
    keys = jax.random.split(key, len(SHAPES))
    return {
        name: {"kernel": draw(k, shape), "bias": zeros(k, shape[-1:])}
        for k, (name, shape) in zip(keys, SHAPES.items(), strict=True)
    }


def apply(params: Params, image: jax.Array) -> jax.Array:
    """Return logits, f32[n, 10], of images, f32[n, 8, 8, 1]."""
    x, layout = image, ("NHWC", "HWIO", "NHWC")
    for name, stride in (("conv1", 1), ("conv2", 2)):
        with jax.named_scope(name):
            kernel, bias = params[name]["kernel"], params[name]["bias"]
            x = lax.conv_general_dilated(x, kernel, [stride] * 2, "SAME", dimension_numbers=layout)
            x = jax.nn.relu(x + bias)
    x = x.reshape(x.shape[0], -1)
    with jax.named_scope("dense"):
        x = jax.nn.relu(x @ params["dense"]["kernel"] + params["dense"]["bias"])
    with jax.named_scope("head"):
        return x @ params["head"]["kernel"] + params["head"]["bias"]


def run(args: argparse.Namespace) -> int:
    """Run the demo. Return 0.

    Raises:
        JaxtapError: a library that the demo needs is missing, or there is nowhere to write to.
    """
    demo_kit.ready(args, "provider-odml-export[demo]")
    digits = demo_kit.Digits.load(args.seed, (8, 8, 1))
    images = digits.test_images

    def train(fn: Any, params: Params, kind: str) -> Params:
        options = {"epochs": EPOCHS[kind], "rate": RATES[kind], "seed": args.seed}
        with demo_kit.progress(EPOCHS[kind], f"training, {kind}") as advance:
            return demo_kit.train(fn, params, digits, advance=advance, **options)

    floats = train(apply, init(jax.random.key(args.seed)), "float")
    quantized = qat(apply, INT8, engine=args.engine)
    stats = quantized.init(floats, images)
    params = train(partial(quantized, quant_stats=stats), floats, "QAT")
    art = quantized.export(params, stats, images)
    with tempfile.TemporaryDirectory() as folder:
        file = art.save(Path(folder) / "digits.tflite").read_bytes()
    evaluate = partial(quantized, quant_stats=stats, update_quant_stats=False)
    nbytes = sum(x.nbytes for x in jax.tree.leaves(params))
    (device,) = Runner(file).run("serving_default", image=images).values()
    logits = {
        "JAX, float": (nbytes, jax.jit(apply)(floats, images)),
        "JAX, QAT": (nbytes, jax.jit(evaluate)(params, images)),
        "LiteRT": (len(file), device),
    }
    trained = np.asarray(logits["JAX, QAT"][1]).argmax(-1)
    outcomes: list[dict[str, Any]] = []
    for where, (size, values) in logits.items():
        found = np.asarray(values).argmax(-1)
        accuracy, agreement = np.mean(found == digits.test_labels), np.mean(found == trained)
        outcomes.append({"where": where, "nbytes": size, "accuracy": float(accuracy),
                         "agreement": float(agreement)})  # fmt: skip
    print(f"\nconvolutional model on {len(images)} test images\n")
    demo_kit.print_table(
        ["where", "bytes", "accuracy", "same digit as with QAT"],
        [
            [o["where"], f"{o['nbytes']:,}", f"{o['accuracy']:.2%}", f"{o['agreement']:.2%}"]
            for o in outcomes
        ],
    )
    print(f"\nthe .tflite, tensor by tensor beside JAX\n\n{art.report}")
    demo_kit.write_json(
        args.json,
        {"test_images": len(images), "outcomes": outcomes, "report": art.report.as_json()},
    )
    return 0
