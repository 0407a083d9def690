"""An array proxy of codes and scales that knows nothing of quantization."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from hijax_trace import ArrayProxy, Part, TraceEngine
from interception_core import Interceptor


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Coded(ArrayProxy):
    """An array proxy of int8 values and scales, per channel or tile.

    Each axis of ``scale`` has the size of the values' axis, 1, or a divisor of it (tiles).
    """

    codes: jax.Array
    scale: jax.Array

    @property
    def shape(self):
        return self.codes.shape

    @property
    def dtype(self):
        return self.scale.dtype

    def restore(self):
        scale = self.scale
        for axis, (n, groups) in enumerate(zip(self.shape, scale.shape, strict=True)):
            scale = scale if groups in (1, n) else jnp.repeat(scale, n // groups, axis)
        return self.codes.astype(self.dtype) * scale

    def parts(self):
        return {"codes": Part(self.codes, True), "scale": Part(self.scale, zero=1)}

    def astype(self, dtype):
        return dataclasses.replace(self, scale=self.scale.astype(dtype))


def decoded(proxy):
    """Return the array that a Coded stands for, computed in NumPy: one product for each element."""
    scale = np.asarray(proxy.scale)
    for axis, (n, groups) in enumerate(zip(proxy.shape, scale.shape, strict=True)):
        scale = np.repeat(scale, n // groups, axis)
    return jnp.asarray(np.asarray(proxy.codes).astype(scale.dtype) * scale)


def coded(*shape, seed=0, axes=(0,), groups=None):
    """Return a Coded with scales along ``axes``, or in groups."""
    rng = np.random.default_rng(seed)
    groups = groups or [n if a in axes else 1 for a, n in enumerate(shape)]
    return Coded(
        jnp.asarray(rng.integers(-127, 128, shape), jnp.int8),
        jnp.asarray(rng.uniform(0.01, 0.02, groups), jnp.float32),
    )


def followed(fn, proxy):
    """Return the proxy of ``fn(proxy)``, or why there is none."""
    found = []

    def look(call, x, **params):
        held = call.proxy(x)
        found.append(call.why_no_proxy(x) if held is None else held)
        return NotImplemented

    tapped = TraceEngine().wrap(lambda w: jax.lax.sin(fn(w)), Interceptor({"primitive:sin": look}))
    tapped(proxy)
    return found[0]
