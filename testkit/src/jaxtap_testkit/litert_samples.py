"""Programs for tests of LiteRT, and their integer results."""

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from provider_odml_export.litert import Program

RANGES = {"i2": (-2, 1), "i4": (-8, 7), "i8": (-128, 127), "i16": (-32768, 32767)}
NHWC = ("NHWC", "HWIO", "NHWC")


def fake_quant(x, scale, zero_point=None, dtype="i8", narrow=False, axis=None):
    """The composite that the converter makes integers of."""
    attributes = {"scale": np.float32(scale).reshape(-1), "dtype": dtype, "narrow_range": narrow}
    if zero_point is not None:
        attributes["zero_point"] = np.int64([zero_point])
    shape = [1] * x.ndim
    if axis is not None:
        attributes["quantization_dimension"] = axis
        shape[axis] = -1
    low, high = RANGES[dtype]
    step, zero = np.float32(scale).reshape(shape), np.float32(zero_point or 0)

    @functools.partial(jax.lax.composite, name="quant.fake_quant")
    def quantize(x, **_):
        codes = jnp.clip(jnp.round(x / step) + zero, low + narrow, high)
        return (codes - zero) * step

    return quantize(x, **attributes)


def program(fn, *args, name="main"):
    """Return a function as a program with inputs a0, a1, ..."""
    exported = jax.export.export(jax.jit(fn, keep_unused=True))(*args)
    inputs = tuple(f"a{i}" for i in range(len(exported.in_avals)))
    outputs = tuple(f"o{i}" for i in range(len(exported.out_avals)))
    return Program(name, exported.mlir_module_serialized, inputs, outputs)


@dataclass(frozen=True)
class Layer:
    """One operation on integers, and its expected result.

    Attributes:
        kind: "FULLY_CONNECTED", "CONV_2D" or "DEPTHWISE_CONV_2D".
        act: the type of its input and output, "i8" or "i16".
        weight: that of its weights, one scale per channel.
    """

    kind: str
    act: str = "i8"
    weight: str = "i8"
    in_scale: float = 0.02
    in_zero: int = 3
    out_scale: float = 0.03
    out_zero: int = -7

    @classmethod
    def make(cls, kind, act="i8", weight="i8"):
        """A layer with scales that suit the type."""
        if act == "i8":
            return cls(kind, act, weight)
        return cls(kind, act, weight, 2e-4, 0, 4e-4, 0)

    @property
    def kernel(self):
        shapes = {
            "FULLY_CONNECTED": (24, 16),
            "CONV_2D": (3, 3, 8, 16),
            "DEPTHWISE_CONV_2D": (3, 3, 1, 8),
        }
        shape = shapes[self.kind]
        return _draw(1, shape) / np.sqrt(np.float32(np.prod(shape[:-1])))

    @property
    def bias(self):
        return _draw(2, self.kernel.shape[-1:])

    @property
    def kernel_scale(self):
        axes = tuple(range(self.kernel.ndim - 1))
        return (np.abs(self.kernel).max(axes) / np.float32(RANGES[self.weight][1])).astype("f4")

    @property
    def kernel_codes(self):
        high = RANGES[self.weight][1]
        return np.clip(np.rint(self.kernel / self.kernel_scale), -high, high).astype(np.float64)

    def inputs(self):
        """Floats that its input's codes stand for, and the codes."""
        x = _draw(3, (32, 24) if self.kind == "FULLY_CONNECTED" else (2, 6, 6, 8))
        codes = np.clip(np.rint(x / self.in_scale) + self.in_zero, *RANGES[self.act])
        kind = {"i8": np.int8, "i16": np.int16}[self.act]
        return np.float32((codes - self.in_zero) * self.in_scale), codes.astype(kind)

    def __call__(self, x):
        x = fake_quant(x, self.in_scale, self.in_zero, self.act)
        kernel = jnp.asarray(self.kernel)
        w = fake_quant(
            kernel, self.kernel_scale, dtype=self.weight, narrow=True, axis=kernel.ndim - 1
        )
        if self.kind == "FULLY_CONNECTED":
            y = x @ w
        else:
            groups = x.shape[-1] if self.kind == "DEPTHWISE_CONV_2D" else 1
            y = jax.lax.conv_general_dilated(
                x, w, (1, 1), "SAME", dimension_numbers=NHWC, feature_group_count=groups
            )
        y = y + jnp.broadcast_to(jnp.asarray(self.bias), y.shape)
        return fake_quant(y, self.out_scale, self.out_zero, self.act)

    def exact(self, codes):
        """The output's codes: exact sums, rounded once."""
        x, w = codes.astype(np.float64) - self.in_zero, self.kernel_codes
        if self.kind == "FULLY_CONNECTED":
            sums = x @ w
        else:
            height, width = x.shape[1:3]
            padded, sums = np.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0))), 0.0
            for i in range(3):
                for j in range(3):
                    part = padded[:, i : i + height, j : j + width]
                    one = w[i, j]
                    sums = sums + (part * one[0] if self.kind[0] == "D" else part @ one)
        step = np.float64(np.float32(self.in_scale)) * self.kernel_scale.astype(np.float64)
        sums = sums + np.rint(self.bias / step)
        y = np.rint(sums * step / np.float64(np.float32(self.out_scale))) + self.out_zero
        return np.clip(y, *RANGES[self.act])


def _draw(seed, shape):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)
