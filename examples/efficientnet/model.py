"""EfficientNet-Lite0, written plainly: functions over a tree of parameters.

Inverted bottlenecks of 1x1, depthwise and 1x1 convolutions with ReLU6 (Tan and Le 2019,
arXiv:1905.11946, without squeeze and excitation, as its authors publish the Lite variants).
Activations are NHWC, kernels HWIO.
"""

import jax
from jax import lax

SIZE = 224
"""Height and width of an image."""

STRIDES = (1, 2, 1, 2, 1, 2, 1, 1, 1, 1, 1, 2, 1, 1, 1, 1)
"""Of each block's depthwise convolution."""

EPSILON = 1e-3
"""Of the batch norms."""


def classify(params, images, strides=STRIDES):
    """Returns the logits of images, ``[batch, classes]``.

    Args:
        params: the tree that ``load.arrange`` returns, with batch norms or with these folded.
        images: ``[batch, height, width, 3]``, from -1 to 1.
        strides: one for each block.
    """
    with jax.named_scope("stem"):
        x = relu6(conv(params["stem"], images, 2))
    for i, (p, stride) in enumerate(zip(params["blocks"], strides, strict=True)):
        with jax.named_scope(f"block_{i}"):
            x = block(p, x, stride)
    with jax.named_scope("head"):
        x = relu6(conv(params["head"], x))
    with jax.named_scope("classifier"):
        return x.mean((1, 2)) @ params["classifier"]["kernel"] + params["classifier"]["bias"]


def block(p, x, stride):
    """Returns ``[batch, height / stride, width / stride, outputs]``, added to ``x`` if it fits."""
    y = x
    if "expand" in p:
        with jax.named_scope("expand"):
            y = relu6(conv(p["expand"], y))
    with jax.named_scope("depthwise"):
        y = relu6(conv(p["depthwise"], y, stride))
    with jax.named_scope("project"):
        y = conv(p["project"], y)
    return x + y if y.shape == x.shape else y


def conv(p, x, stride=1):
    """Returns a convolution with ``SAME`` padding, and its batch norm or bias."""
    kernel = p["kernel"]
    y = lax.conv_general_dilated(
        x,
        kernel,
        (stride, stride),
        "SAME",
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
        feature_group_count=x.shape[-1] // kernel.shape[2],
    )
    return norm(p["norm"], y) if "norm" in p else y + p["bias"]


def norm(p, x):
    """Returns a batch norm with the statistics of training."""
    scale = p["scale"] * lax.rsqrt(p["variance"] + EPSILON)
    return (x - p["mean"]) * scale + p["bias"]


def relu6(x):
    return jax.nn.relu6(x)
