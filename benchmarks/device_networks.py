"""CNNs as people train them, in Flax, with the widths and depths of their papers."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

SIDE = 96
"""Of images, in pixels: verification replays each file in JAX."""


def normed(x, act=lambda x: x):
    """Return what a BatchNorm with running averages makes, which the device folds."""
    return act(nn.BatchNorm(use_running_average=True)(x))


def conv(x, features, size=1, stride=1, **options):
    shape = (size, size), (stride, stride)
    return nn.Conv(features, *shape, use_bias=False, **options)(x)


def depthwise(x, size, stride=1):
    return conv(x, x.shape[-1], size, stride, feature_group_count=x.shape[-1])


def mobilenet_v2(x):
    """Sandler et al. 2018, arXiv:1801.04381, table 2."""
    x = normed(conv(x, 32, 3, 2), nn.relu6)
    stages = ((1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1),
              (6, 160, 3, 2), (6, 320, 1, 1))  # fmt: skip
    for expansion, features, count, first in stages:
        for i in range(count):
            stride, y = first if i == 0 else 1, x
            if expansion > 1:
                y = normed(conv(y, expansion * x.shape[-1]), nn.relu6)
            y = normed(conv(normed(depthwise(y, 3, stride), nn.relu6), features))
            x = x + y if stride == 1 and x.shape[-1] == features else y
    return nn.Dense(1000)(normed(conv(x, 1280), nn.relu6).mean((1, 2)))


def mobilenet_v3(x):
    """Howard et al. 2019, arXiv:1905.02244, table 2: small."""
    x = normed(conv(x, 16, 3, 2), nn.hard_swish)
    for size, inner, features, squeezes, act, stride in (
        *((3, 16, 16, True, nn.relu, 2), (3, 72, 24, False, nn.relu, 2)),
        *((3, 88, 24, False, nn.relu, 1), (5, 96, 40, True, nn.hard_swish, 2)),
        *[(5, 240, 40, True, nn.hard_swish, 1)] * 2,
        *((5, 120, 48, True, nn.hard_swish, 1), (5, 144, 48, True, nn.hard_swish, 1)),
        (5, 288, 96, True, nn.hard_swish, 2),
        *[(5, 576, 96, True, nn.hard_swish, 1)] * 2,
    ):
        y = normed(depthwise(normed(conv(x, inner), act), size, stride), act)
        if squeezes:
            z = nn.relu(nn.Conv(max(8, inner // 4), (1, 1))(y.mean((1, 2), keepdims=True)))
            y = y * nn.hard_sigmoid(nn.Conv(inner, (1, 1))(z))
        y = normed(conv(y, features))
        x = x + y if stride == 1 and x.shape[-1] == features else y
    x = normed(conv(x, 576), nn.hard_swish).mean((1, 2))
    return nn.Dense(1000)(nn.hard_swish(nn.Dense(1024)(x)))


def resnet(x):
    """He et al. 2015, arXiv:1512.03385, table 1: ResNet-18."""
    x = nn.max_pool(normed(conv(x, 64, 7, 2), nn.relu), (3, 3), (2, 2), padding="SAME")
    for stage, features in enumerate((64, 128, 256, 512)):
        for i in range(2):
            stride = 2 if stage and i == 0 else 1
            y = normed(conv(normed(conv(x, features, 3, stride), nn.relu), features, 3))
            x = nn.relu((normed(conv(x, features, 1, stride)) if stride == 2 else x) + y)
    return nn.Dense(1000)(x.mean((1, 2)))


def unet(x):
    """Ronneberger et al. 2015, arXiv:1505.04597, of half the width, with padding."""
    kept = []
    for features in (32, 64, 128, 256):
        x = normed(conv(normed(conv(x, features, 3), nn.relu), features, 3), nn.relu)
        kept.append(x)
        x = nn.max_pool(x, (2, 2), (2, 2))
    x = normed(conv(x, 512, 3), nn.relu)
    for before in reversed(kept):
        features = before.shape[-1]
        up = nn.ConvTranspose(features, (2, 2), (2, 2))(x)
        x = normed(conv(jnp.concatenate([before, up], -1), features, 3), nn.relu)
    return nn.Conv(2, (1, 1))(x)


def lstm(x):
    """An LSTM over the rows of an image."""
    rows = x.mean(-1)[:, ::4]
    return nn.Dense(10)(nn.RNN(nn.OptimizedLSTMCell(128))(rows)[:, -1])


NETWORKS = {one.__name__: one for one in (mobilenet_v2, mobilenet_v3, resnet, unet, lstm)}


def _trained(rng, path, leaf):
    """Return a parameter as training leaves it: averages that are not 0 and 1."""
    name = jax.tree_util.keystr(path)
    if "'var'" in name:
        return jnp.asarray(rng.uniform(0.3, 2, leaf.shape), jnp.float32)
    if "'mean'" in name or "'bias'" in name:
        return jnp.asarray(0.1 * rng.normal(size=leaf.shape), jnp.float32)
    return leaf


def drawn(name, image):
    """Return a network's function and drawn parameters, for images of a shape."""
    net = NETWORKS[name]
    module = type(name, (nn.Module,), {"__call__": nn.compact(lambda _, x: net(x))})()
    variables = jax.jit(module.init)(jax.random.key(0), image)
    trained = functools.partial(_trained, np.random.default_rng(0))
    return module.apply, jax.tree_util.tree_map_with_path(trained, variables)
