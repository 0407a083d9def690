"""Convolutions with stored weights, in kernels and in XLA, layer by layer and as whole networks.

uv run --python 3.12 python benchmarks/convolutions.py [--rounds 9] [--cpu]
    [--networks | --transposed | --weights]

Prints a table in Markdown. *Speed* is in multiples of XLA's float32, *gain* in multiples of the
same quantized operation without kernels. Sides run in turn.
"""

import argparse
import functools
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from paired import compared, in_turn

from provider_xla import PtqProvider, QuantizationRule

# Side of the image, input channels, outputs, side of the window, stride, groups.
LAYERS = [
    (224, 3, 64, 7, 2, 1),  # ResNet-50
    (56, 64, 64, 3, 1, 1),
    (56, 64, 256, 1, 1, 1),
    (56, 256, 64, 1, 1, 1),
    (56, 128, 128, 3, 2, 1),
    (28, 128, 128, 3, 1, 1),
    (14, 256, 256, 3, 1, 1),
    (14, 1024, 256, 1, 1, 1),
    (7, 512, 512, 3, 1, 1),
    (224, 3, 32, 3, 2, 1),  # MobileNetV2 and EfficientNet-Lite0
    (112, 32, 32, 3, 1, 32),
    (112, 32, 16, 1, 1, 1),
    (112, 16, 96, 1, 1, 1),
    (112, 96, 96, 3, 2, 96),
    (56, 24, 144, 1, 1, 1),
    (56, 144, 144, 3, 1, 144),
    (56, 144, 24, 1, 1, 1),
    (28, 240, 240, 5, 1, 240),
    (14, 80, 480, 1, 1, 1),
    (14, 672, 672, 5, 1, 672),
    (14, 672, 112, 1, 1, 1),
    (7, 1152, 1152, 3, 1, 1152),
    (7, 1152, 192, 1, 1, 1),
    (7, 320, 1280, 1, 1, 1),
]
# Side of the input, its channels, outputs, side of the window, step: of U-Nets and decoders.
TRANSPOSED = [
    (14, 512, 256, 2, 2),
    (28, 256, 128, 2, 2),
    (56, 128, 64, 2, 2),
    (28, 256, 128, 3, 2),
    (56, 128, 64, 3, 2),
    (14, 512, 256, 4, 2),
    (56, 64, 64, 4, 2),
    (16, 256, 256, 8, 4),
]
RULES = {
    "int8": {"weight_qtype": "int8", "act_qtype": "int8"},
    "int4": {"weight_qtype": "int4", "act_qtype": "int8"},
}
# Float activations: layers are the depthwise ones.
OF_WEIGHTS = {"int8": {"weight_qtype": "int8"}, "int4": {"weight_qtype": "int4"}}
FLOAT32 = "float32"


def conv(w, x, stride=1, groups=1):
    return lax.conv_general_dilated(
        x,
        w,
        (stride, stride),
        "SAME",
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
        feature_group_count=groups,
    )


def layer(images, size, channels, outputs, window, stride, groups):
    """Return a convolution, its weight and its input."""
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(images, size, size, channels)), jnp.float32)
    w = rng.normal(size=(window, window, channels // groups, outputs))
    return lambda w, x: conv(w, x, stride, groups), jnp.asarray(w, jnp.float32), x


def transposed(images, size, channels, outputs, window, step):
    """Return a transposed convolution, its weight and its input."""
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(images, size, size, channels)), jnp.float32)
    w = jnp.asarray(rng.normal(size=(window, window, channels, outputs)), jnp.float32)
    numbers = ("NHWC", "HWIO", "NHWC")
    steps = (step, step)
    return lambda w, x: lax.conv_transpose(x, w, steps, "SAME", dimension_numbers=numbers), w, x


class Weights:
    """Weights of a network, drawn as it is run for the first time, then given by number."""

    def __init__(self):
        self.drawn, self.given = [], None
        self._rng = np.random.default_rng(0)

    def __call__(self, x, outputs, window=1, stride=1, groups=1):
        """Return a convolution of x and its bias."""
        if self.given is None:
            shape = (window, window, x.shape[-1] // groups, outputs)
            w = self._rng.normal(size=shape) * np.sqrt(2 / np.prod(shape[:3]))
            self.drawn.append((np.float32(w), np.zeros(outputs, np.float32)))
            w, b = self.drawn[-1]
        else:
            w, b = next(self.given)
        return conv(w, x, stride, groups) + b


def resnet_50(conv, x):
    """He et al. 2015, arXiv:1512.03385, with batch norms folded."""
    x = jax.nn.relu(conv(x, 64, 7, 2))
    x = lax.reduce_window(x, -jnp.inf, lax.max, (1, 3, 3, 1), (1, 2, 2, 1), "SAME")
    for stage, blocks in enumerate((3, 4, 6, 3)):
        width = 64 * 2**stage
        for block in range(blocks):
            stride = 2 if stage and not block else 1
            y = jax.nn.relu(conv(x, width))
            y = jax.nn.relu(conv(y, width, 3, stride))
            y = conv(y, 4 * width)
            x = jax.nn.relu(y + (conv(x, 4 * width, 1, stride) if not block else x))
    return conv(x.mean((1, 2), keepdims=True), 1000)


def mobilenet_v2(conv, x):
    """Sandler et al. 2018, arXiv:1801.04381, with batch norms folded."""
    x = jax.nn.relu6(conv(x, 32, 3, 2))
    stages = ((1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2))
    stages += ((6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1))
    for expand, outputs, blocks, first in stages:
        for block in range(blocks):
            stride, y = first if not block else 1, x
            if expand > 1:
                y = jax.nn.relu6(conv(y, expand * x.shape[-1]))
            y = jax.nn.relu6(conv(y, y.shape[-1], 3, stride, y.shape[-1]))
            y = conv(y, outputs)
            x = x + y if y.shape == x.shape else y
    x = jax.nn.relu6(conv(x, 1280))
    return conv(x.mean((1, 2), keepdims=True), 1000)


def network(model, images):
    """Return a network, its weights and its input."""
    x = jnp.asarray(np.random.default_rng(1).normal(size=(images, 224, 224, 3)), jnp.float32)
    weights = Weights()
    jax.eval_shape(lambda x: model(weights, x), x)

    def fn(params, x):
        weights.given = iter(params)
        return model(weights, x)

    return fn, jax.device_put(weights.drawn), x


def sides(fn, params, x, rule):
    """Return calls of the compiled programs, by name, and the kernels that one runs."""
    found = {FLOAT32: functools.partial(jax.jit(fn).lower(params, x).compile(), params, x)}
    plan = PtqProvider(QuantizationRule(**rule)).plan(fn, params, x)
    for name, prepack in (("kernels", True), ("XLA", False)):
        stored = plan.quantize(params, prepack=prepack)
        run = jax.jit(plan.apply(fn)).lower(stored, x).compile()
        found[name] = functools.partial(run, stored, x)
    return found, sorted({(one.kernel or "XLA").rpartition(".")[2] for one in plan.ops})


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--networks", action="store_true", help="whole networks")
    which.add_argument("--transposed", action="store_true", help="transposed convolutions")
    which.add_argument("--weights", action="store_true", help="depthwise, of float activations")
    parser.add_argument("--cpu", action="store_true", help="CPU seconds instead of those by clock")
    options = parser.parse_args()
    clock = time.process_time if options.cpu else time.perf_counter
    named, make, head = LAYERS, layer, ["input", "outputs", "window", "stride", "groups"]
    rules = OF_WEIGHTS if options.weights else RULES
    if options.networks:
        named, make, head = (resnet_50, mobilenet_v2), network, ["network"]
    elif options.transposed:
        named, make, head = TRANSPOSED, transposed, ["input", "outputs", "window", "step"]
    elif options.weights:
        named = [one for one in LAYERS if one[-1] > 1]
    head += ["batch", "weights", "kernel", "float32, ms", "int8, ms", "in XLA, ms", "speed", "gain"]
    print(f"| {' | '.join(head)} |\n|{' --- |' * len(head)}")
    for one in named:
        for images in (1, 8):
            for name, rule in rules.items():
                made = make(one, images) if options.networks else make(images, *one)
                found, kernels = sides(*made, rule)
                plain, ours, before = in_turn(found, options.rounds, clock).values()
                what = [one.__name__] if options.networks else [f"{one[0]}x{one[0]}x{one[1]}"]
                what += [] if options.networks else one[2:]
                print(compared((*what, images, name, ", ".join(kernels)), plain, ours, before),
                      flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
