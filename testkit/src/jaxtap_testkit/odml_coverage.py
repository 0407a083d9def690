"""What Qwix's coverage test converts: the same models, rules and sizes, exported one by one.

Of Qwix's ``integration_tests/odml_coverage_test.py`` (github.com/google/qwix, 2025): the layers,
and how many operations it expects in the file. Its variational autoencoder is two files.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import provider_odml as odml
from provider_odml_export.litert import read

from .odml_exports import DYNAMIC, W8A8, WEIGHTS, decibels


@dataclass(frozen=True)
class Case:
    """A model in one mode.

    Attributes:
        make: returns the function, its parameters and its input.
        rules: how it is quantized.
        options: of ``odml.qat``.
        expected: what Qwix's test expects of its file, by kind of operation; of some kinds.
    """

    make: Callable[[], tuple[Callable[..., Any], Any, Any]]
    rules: tuple[odml.OdmlRule, ...]
    options: dict[str, Any] = field(default_factory=dict)
    expected: dict[str, int] = field(default_factory=dict)


def _conv(x: jax.Array, features: int, stride: int = 1) -> jax.Array:
    return nn.Conv(features, (3, 3), (stride, stride))(x)


def cnn(x: jax.Array) -> jax.Array:
    for features in (32, 64):
        x = nn.avg_pool(nn.relu(_conv(x, features)), (2, 2), (2, 2))
    return nn.Dense(10)(nn.relu(nn.Dense(256)(x.reshape(len(x), -1))))


def transformer(ids: jax.Array) -> jax.Array:
    x = nn.Embed(100, 16)(ids)
    for _ in range(2):
        attended: Any = nn.MultiHeadAttention(4, qkv_features=8)(x)
        x += attended
        x += nn.Dense(16)(nn.relu(nn.Dense(32)(x)))
    return nn.Dense(100)(x.mean(1))


def norm_silu(x: jax.Array) -> jax.Array:
    return nn.silu(nn.GroupNorm(2)(x))


def residual(x: jax.Array) -> jax.Array:
    y = nn.relu(nn.Dense(10)(x))
    return x + nn.Dense(x.shape[-1])(jnp.concatenate([y, x], -1))


def unet(images: list[jax.Array]) -> jax.Array:
    x, kept = jnp.concatenate(images, -1), []
    for features in (4, 8, 16):
        kept.append(nn.relu(_conv(x, features)))
        x = nn.relu(_conv(kept[-1], features, 2))
    for features in (16, 8, 4):
        x = nn.relu(_conv(x, features))
        before = kept.pop()
        shape = (*before.shape[:-1], x.shape[-1])
        x = jnp.concatenate([jax.image.resize(x, shape, "bilinear"), before], -1)
    return _conv(x, 3)


def conv_norm_relu(x: jax.Array) -> jax.Array:
    return nn.relu6(nn.BatchNorm(use_running_average=True)(nn.Conv(8, (3, 1))(x)))


def repeat_negative(x: jax.Array) -> jax.Array:
    y = nn.Dense(2, use_bias=False)(x).repeat(3, -1)
    return -nn.Dense(5, use_bias=False)(y)


def coder(features: int, x: jax.Array) -> jax.Array:
    return _conv(x, features)


def _uniform(*shape: int, least: float = 0.0) -> np.ndarray:
    return np.random.default_rng(0).uniform(least, 1 + least, shape).astype(np.float32)


def _linen(fn: Callable[..., Any], *given: Any) -> tuple[Callable[..., Any], Any, Any]:
    module = type("Model", (nn.Module,), {"__call__": nn.compact(lambda _, x: fn(x))})()
    x = given[0] if len(given) == 1 else list(given)
    variables = jax.jit(module.init)(jax.random.key(0), x)
    # So that biases are not zeros.
    rng = np.random.default_rng(1)
    noisy = jax.tree.map(lambda p: p + rng.uniform(0, 1e-3, p.shape).astype("f"), variables)
    return module.apply, noisy, x


def _nnx() -> tuple[Callable[..., Any], Any, Any]:
    class Two(nnx.Module):
        def __init__(self, rngs: nnx.Rngs):
            self.first = nnx.Linear(16, 64, use_bias=False, rngs=rngs)
            self.second = nnx.Linear(64, 16, use_bias=False, rngs=rngs)

        def __call__(self, x: jax.Array) -> jax.Array:
            return self.second(nnx.relu(self.first(x)))

    graph, state = nnx.split(Two(nnx.Rngs(0)))
    return lambda state, x: nnx.merge(graph, state)(x), state, _uniform(1, 16)


IDS = np.random.default_rng(0).integers(0, 100, (1, 10)).astype(np.int32)
_CNN = functools.partial(_linen, cnn, _uniform(1, 28, 28, 1))
_TRANSFORMER = functools.partial(_linen, transformer, IDS)
_NORM = functools.partial(_linen, norm_silu, _uniform(1, 128))
_UNET = functools.partial(_linen, unet, *[_uniform(1, 128, 128, 3, least=-0.1)] * 2)
_IMAGE = _uniform(1, 100, 100, 3)
_HIDDEN = _uniform(1, 100, 100, 1)
_UNIT = {"fixed_range_for_inputs": (0, 1), "fixed_range_for_outputs": (0, 1)}


def _counts(quantize: int, dequantize: int, floats: int, integers: int) -> dict[str, int]:
    return {"quantize": quantize, "dequantize": dequantize, "float": floats, "integer": integers}


CASES = {
    "CNN, static": Case(_CNN, (W8A8,), {}, _counts(1, 1, 0, 7)),
    "Transformer, static": Case(
        _TRANSFORMER, (W8A8,), {}, {"quantize": 1, "dequantize": 2, "float": 2}
    ),
    "GroupNormSilu, static": Case(_NORM, (W8A8,), {}, _counts(2, 2, 1, 2)),
    "DenseConcatenateResidual, static": Case(
        functools.partial(_linen, residual, _uniform(2, 5)), (W8A8,), {}, _counts(1, 1, 0, 4)
    ),
    "UNet, static": Case(_UNET, (W8A8,), _UNIT, _counts(5, 1, 0, 17)),
    "ConvBnRelu, static": Case(
        functools.partial(_linen, conv_norm_relu, _uniform(1, 100, 1, 16)),
        *((W8A8,), {}, _counts(1, 1, 0, 1)),
    ),
    "RepeatNegative, static": Case(
        functools.partial(_linen, repeat_negative, _uniform(16, 10, least=-1)), (W8A8,)
    ),
    "GroupNormSilu, silu in float": Case(
        _NORM, (odml.OdmlRule(op_names=("logistic", "mul")), W8A8)
    ),
    "VAE, encoder": Case(functools.partial(_linen, functools.partial(coder, 1), _IMAGE), (W8A8,)),
    "VAE, decoder": Case(functools.partial(_linen, functools.partial(coder, 3), _HIDDEN), (W8A8,)),
    "Linears of NNX": Case(_nnx, (W8A8,)),
    "CNN, dynamic": Case(_CNN, (DYNAMIC,), {}, {"quantize": 0, "dequantize": 0}),
    "Transformer, dynamic": Case(_TRANSFORMER, (DYNAMIC,), {}, {"quantize": 0, "dequantize": 1}),
    "CNN, weights": Case(_CNN, (WEIGHTS,)),
    "UNet, weights": Case(_UNET, (WEIGHTS,)),
}
"""By name and mode. Qwix's names."""


@dataclass(frozen=True)
class Result:
    """What came of a case.

    Attributes:
        counts: operations of the file by kind, as Qwix counts them.
        lsb: the greatest difference of a place from JAX, in steps; None without places.
        trained: signal to noise of the output and the trained program's, in decibels.
        exact: the same of the float program's.
    """

    counts: dict[str, int]
    lsb: float | None
    trained: float
    exact: float


def result(case: Case) -> Result:
    """Export a case, and run the file by LiteRT's interpreter.

    Raises:
        OdmlError: it can't be exported.
    """
    fn, params, x = case.make()
    model = odml.qat(fn, case.rules, **case.options)
    stats = None
    if any(rule.is_static for rule in case.rules):
        stats = model.calibrate(params, [(x,)])
    art = model.export(params, stats, x)
    names = art.report.signatures[0].inputs
    given = dict(zip(names, jax.tree.leaves(x), strict=True))
    (found,) = art.run(**given).values()
    own = {"quant_stats": stats, "update_quant_stats": False}
    trained = jax.jit(functools.partial(model, **own))(params, x)
    found, trained, exact = (np.asarray(y, np.float64) for y in (found, trained, fn(params, x)))
    return Result(
        dict(_kinds(art.model)),
        max((site.lsb for site in art.report.sites), default=None),
        decibels(found, trained),
        decibels(found, exact),
    )


def _kinds(model: bytes) -> Iterator[tuple[str, int]]:
    """Yield how many operations of each kind a file has, as Qwix counts them."""
    kinds = []
    for graph, op in read(model).ops():
        if op.name in ("QUANTIZE", "DEQUANTIZE"):
            kinds.append(op.name.lower())
        else:
            places = [i for i in (*op.inputs, *op.outputs) if i >= 0]
            is_float = any(graph.tensors[i].dtype == "float32" for i in places)
            kinds.append("float" if is_float else "integer")
    for kind in ("quantize", "dequantize", "float", "integer"):
        yield kind, kinds.count(kind)
